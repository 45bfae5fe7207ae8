"""Compares values of the wire with those that a scenario expects, and fills remembered values into its messages.

The placeholders are explained in README.md beside this file. Nothing here knows gRPC: both players use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

Bindings = dict[str, Any]


class Mismatch(AssertionError):
    """A value is not what a scenario expects; the text names the path.

    Args:
        rule: the rule that it breaks; "" for the rules of the scenario.
    """

    def __init__(self, text: str, rule: str = "") -> None:
        super().__init__(text)
        self.rule = rule


class Missed(Mismatch):
    """A limit of time or number was missed, which another try may keep."""


def fill(value: Any, bindings: Bindings) -> Any:
    """Replaces {"$ref": name} by the value of that name, and {"$next": name} by a text that counts upwards."""
    if isinstance(value, dict):
        if set(value) == {"$ref"}:
            return bindings[value["$ref"]]
        if set(value) == {"$next"}:
            bindings[value["$next"]] = counted = str(int(bindings.get(value["$next"], 0)) + 1)
            return counted
        return {key: fill(item, bindings) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, bindings) for item in value]
    return value


def check(expected: Any, actual: Any, bindings: Bindings, path: str = "$") -> None:
    """Checks one value; {"$bind": name} stores it under that name.

    Raises:
        Mismatch: naming the path, the expected and the actual value.
    """
    if isinstance(expected, dict):
        if any(key.startswith("$") for key in expected):
            _check_placeholder(expected, actual, bindings, path)
            return
        if not isinstance(actual, dict):
            raise Mismatch(f"{path}: expected an object, got {_shown(actual)}")
        for key, item in expected.items():
            if item == {"$absent": True}:
                if key in actual:
                    raise Mismatch(f"{path}.{key}: expected nothing, got {_shown(actual[key])}")
            elif key not in actual:
                raise Mismatch(f"{path}.{key}: expected {_shown(item)}, but it is absent from {_shown(actual)}")
            else:
                check(item, actual[key], bindings, f"{path}.{key}")
    elif isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            raise Mismatch(f"{path}: expected a list of {len(expected)}, got {_shown(actual)}")
        for index, item in enumerate(expected):
            check(item, actual[index], bindings, f"{path}[{index}]")
    elif expected != actual or isinstance(expected, bool) != isinstance(actual, bool):
        raise Mismatch(f"{path}: expected {_shown(expected)}, got {_shown(actual)}")


def matches(expected: Any, actual: Any, bindings: Bindings) -> bool:
    """Tells whether a value fits, and binds only if it does."""
    tried = dict(bindings)
    try:
        check(expected, actual, tried)
    except Mismatch:
        return False
    bindings.update(tried)
    return True


def _check_placeholder(expected: dict[str, Any], actual: Any, bindings: Bindings, path: str) -> None:
    if len(expected) != 1:
        raise ValueError(f"the scenario is wrong at {path}: one placeholder an object, not {sorted(expected)}")
    ((kind, rule),) = expected.items()
    match kind:
        case "$any":
            fits = True
        case "$bind":
            bindings[rule] = actual
            fits = True
        case "$ref":
            fits = actual == bindings[rule]
        case "$contains":
            words = [rule] if isinstance(rule, str) else rule
            fits = isinstance(actual, str) and all(word in actual for word in words)
        case "$filled":
            fits = bool(actual) is rule
        case "$json":
            fits = _fits_parsed(actual, lambda parsed: _same(rule, parsed))
        case "$parsed":
            fits = _fits_parsed(actual, lambda parsed: matches(rule, parsed, bindings))
        case "$one_of":
            fits = any(matches(each, actual, bindings) for each in rule)
        case "$has":
            fits = isinstance(actual, list) and _has(rule, actual, bindings)
        case "$at_least":
            fits = float(actual) >= rule
        case "$at_most":
            fits = float(actual) <= rule
        case _:
            raise ValueError(f"the scenario is wrong at {path}: unknown placeholder {kind!r}")
    if not fits:
        raise Mismatch(f"{path}: expected {_shown(expected)}, got {_shown(actual)}")


def _fits_parsed(text: Any, fits: Callable[[Any], bool]) -> bool:
    """Tells whether a value is JSON text whose value fits."""
    try:
        return isinstance(text, str) and fits(json.loads(text))
    except ValueError:
        return False


def _same(rule: Any, actual: Any) -> bool:
    """Tells whether two values are the same JSON: true is not 1, and 1.0 is."""
    if isinstance(rule, dict) and isinstance(actual, dict):
        return rule.keys() == actual.keys() and all(_same(rule[key], actual[key]) for key in rule)
    if isinstance(rule, list) and isinstance(actual, list):
        return len(rule) == len(actual) and all(_same(one, other) for one, other in zip(rule, actual, strict=True))
    return bool(rule == actual) and isinstance(rule, bool) == isinstance(actual, bool)


def _has(expected: list[Any], actual: list[Any], bindings: Bindings) -> bool:
    """Tells whether every expected item fits an actual item of its own, in any order."""
    rest = list(actual)
    for each in expected:
        index = next((index for index, item in enumerate(rest) if matches(each, item, bindings)), None)
        if index is None:
            return False
        del rest[index]
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else text[:397] + "..."


# A sender may put its items into frames as it likes, so both players compare items, never frames.

Item = tuple[str, Any]

# The order in which the fields of a frame are read, on either side.
FIELDS = ("attach", "attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain")
SHOWN_ITEMS = 5
REPEATED = frozenset({"events", "calls", "progress", "results", "cancels"})


def mapped(message: Message) -> dict[str, Any]:
    """Returns a message in the JSON mapping, with the names of the proto and all defaults."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def items_of(frame: Message) -> list[Item]:
    """Returns the items of a frame, in reading order."""
    shown = mapped(frame)
    return [
        (field, item)
        for field in FIELDS
        if field in shown
        for item in (shown[field] if field in REPEATED else [shown[field]])
    ]


class Expectation:
    """Items that must come, and items that may come meanwhile.

    Args:
        in_order: whether those that must come have to come in this order.

    Attributes:
        missing: those that must come and have not come yet.
    """

    def __init__(self, frame: dict[str, Any], *, in_order: bool = False) -> None:
        self.missing = _listed(frame)
        self._in_order = in_order
        self._optional = _listed(frame.get("optional", {}))

    def __repr__(self) -> str:
        shown = [f"{field} {item}" for field, item in self.missing[:SHOWN_ITEMS]]
        more = len(self.missing) - len(shown)
        return "; ".join((*shown, f"and {more} more") if more else shown)

    def take(self, field: str, item: Any, bindings: Bindings) -> None:
        """Takes an item that came.

        Raises:
            Mismatch: it is not an expected one.
        """
        for expected in (self.missing, self._optional):
            reach = 1 if self._in_order and expected is self.missing else len(expected)
            for index, (kind, pattern) in enumerate(expected[:reach]):
                if kind == field and matches(pattern, item, bindings):
                    del expected[index]
                    return
        near = [pattern for kind, pattern in self.missing if kind == field]
        if len(near) == 1:
            check(near[0], item, dict(bindings), field)
        raise Mismatch(f"came: {field} {item}; expected: {self}")


def _listed(frame: dict[str, Any]) -> list[Item]:
    return [
        (field, item)
        for field, value in frame.items()
        if field in FIELDS
        for item in (value if isinstance(value, list) else [value])
    ]
