"""Repairs arguments that break a schema where it is plain what was meant, and fills in defaults.

Only the errors of the validator are repaired, in five ways: null for an argument that may not be null means that it is
absent; a text that is exactly an integer, number or boolean of JSON is that value where the schema expects or lists
one; JSON text of an object or array is read where the schema expects one; an object whose only member has the name of
its property or definition, and one of the values listed there, is that value; a missing property gets the default that
its schema declares. Repaired arguments are checked again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jsonschema_rs

from toolbus.bus.catalog.schema import CHOICES, MAYBE_WHOLE, ArgumentChecker, load_arguments, path_text
from toolbus.bus.catalog.schema_defaults import Defaults
from toolbus.common.text import escape_surrogates, shorten
from toolbus.protocol.json_schema import Path

MAX_REPAIRS = 100  # of one call: a model's slip, not an attempt to keep the bus busy
MAX_ROUNDS = 4  # JSON text may hold JSON text
MAX_TOGETHER = 16  # sets of properties that calls of a tool lack, for which the defaults are written once
MAX_PATH = 128  # characters of a path in a record

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,307})")  # as many digits as arguments may have
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,307})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?")
_BOOLEANS = {"true": True, "false": False}
_OPENS = {"object": "{", "array": "["}
_BY_FIRST = {'"': "string", "t": "boolean", "f": "boolean", "n": "null", "{": "object", "[": "array"}
_WHITE_SPACE = " \t\n\r"
_VALUES = (jsonschema_rs.ValidationErrorKind.Enum, jsonschema_rs.ValidationErrorKind.Constant)
_TYPE = jsonschema_rs.ValidationErrorKind.Type


class Repair(NamedTuple):
    """One repair of arguments; it holds none of their values."""

    path: str
    before: str  # the type of the former value, or "absent"
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} to {self.after}"

    def described(self) -> dict[str, str]:
        """Returns it as a JSON object."""
        return {"path": self.path, "from": self.before, "to": self.after}


ABSENT = "absent"
WHOLE_TEXT = Repair("arguments", "string", "object")


class RepairedArguments(str):
    """The JSON text of repaired arguments.

    A text like any other on its way to the plugin, so that calls which need no repair carry nothing for those that do.

    Attributes:
        original: the text as it came, without keys that only a host may set.
        repairs: the repairs of it, in order.
        notes: what parts of the bus did with the call, for its record.
    """

    __slots__ = ("notes", "original", "repairs")

    original: str
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, text: str, original: str, repairs: Iterable[Repair], notes: tuple[str, ...] = ()) -> RepairedArguments:
        """Returns a text with its history."""
        repaired = cls(text)
        repaired.original, repaired.repairs, repaired.notes = original, tuple(repairs), notes
        return repaired


def repairs_of(text: str) -> tuple[Repair, ...]:
    """Returns the repairs of the arguments of a call."""
    return text.repairs if isinstance(text, RepairedArguments) else ()


def notes_of(text: str) -> tuple[str, ...]:
    """Returns what parts of the bus noted on a call."""
    return text.notes if isinstance(text, RepairedArguments) else ()


def noted(text: str, *notes: str) -> RepairedArguments:
    """Returns the arguments of a call with more notes for its record."""
    return RepairedArguments.of(text, original_of(text), repairs_of(text), (*notes_of(text), *notes))


def original_of(text: str) -> str:
    """Returns the arguments of a call as they came."""
    return text.original if isinstance(text, RepairedArguments) else text


class Fix(NamedTuple):
    """A value, and the place of the one that it replaces; `_NOTHING` removes that one."""

    path: tuple[str | int, ...]
    value: Any


_NOTHING = object()


def repair(checker: ArgumentChecker, text: str, arguments: dict[str, Any], room: int) -> str | None:
    """Returns the text of arguments that fit a schema; None if repairs do not help.

    Args:
        text: of the arguments, as they came.
        arguments: the same, parsed; they lack a default or break the schema.
        room: how many characters may be added to them.
    """
    if checker.defaults is not None:  # first, since most of these calls lack defaults
        filled = _with_defaults(checker, checker.defaults, text, arguments, room)
        if filled is not None:
            return filled
        if checker.is_valid(arguments):
            return text
    for with_defaults in (True, False) if checker.defaults is not None else (False,):
        try:
            value = load_arguments(text)  # exactly: numbers are written again
            repairs = _repaired(checker, value, room, with_defaults=with_defaults)
            if repairs:
                return written(checker, value, text, repairs, room)
        except ValueError:  # too large, too deep
            continue
    return None


def read_object(text: str) -> dict[str, Any] | None:
    """Returns the object that a JSON text holds; None if it is anything else."""
    value = _read_json(text, "object")
    return value if isinstance(value, dict) else None


def filled(
    checker: ArgumentChecker, defaults: Defaults, text: str, arguments: dict[str, Any], room: int
) -> RepairedArguments | None:
    """Returns arguments with those of their own properties that they lack; the rest of the text stays as it is.

    Returns:
        None: they lack none, or a default further down, or with the defaults they are invalid or too large.
    """
    missing = tuple(defaults.missing(arguments))
    if (together := defaults.together.get(missing)) is None:
        if len(defaults.together) >= MAX_TOGETHER:
            defaults.together.clear()
        together = defaults.together[missing] = (
            ",".join([defaults.members[name] for name in missing]),
            {name: json.loads(defaults.values[name]) for name in missing},
            tuple([Repair(_shown((name,)), ABSENT, _type_of_text(defaults.values[name])) for name in missing]),
        )
    members, values, repairs = together
    if not members or len(members) > room or defaults.lacks_below(arguments):
        return None
    if not checker.is_valid({**arguments, **values}):
        return None
    inner = text.strip(_WHITE_SPACE)[:-1].rstrip(_WHITE_SPACE) or "{"
    return RepairedArguments.of(f"{inner},{members}}}" if arguments else f"{inner}{members}}}", text, repairs)


def _with_defaults(
    checker: ArgumentChecker, defaults: Defaults, text: str, arguments: dict[str, Any], room: int
) -> str | None:
    """Returns arguments with the defaults that they lack; None if with them they are invalid or too large."""
    if not defaults.lacks_below(arguments):  # most of the time
        return filled(checker, defaults, text, arguments, room)
    try:
        value = load_arguments(text)
        return written(checker, value, text, [_filled(value, path) for path in defaults.fill(value, room)], room)
    except ValueError:
        return None


def _repaired(checker: ArgumentChecker, value: Any, room: int, *, with_defaults: bool) -> list[Repair]:
    """Repairs arguments in place, and returns the repairs; none if they do not help."""
    repairs: list[Repair] = []
    for _ in range(MAX_ROUNDS):
        if with_defaults and checker.defaults is not None:
            repairs += [_filled(value, path) for path in checker.defaults.fill(value, room)]
        errors = checker.errors(value, MAX_REPAIRS)
        if errors is None:
            return []
        if not errors:
            return repairs
        fixes = {fix.path: fix for error in errors for fix in _fixes(error, value) or ()}
        for path in [path for path in fixes if any(path[:length] in fixes for length in range(len(path)))]:
            del fixes[path]  # another fix replaces the value around it
        if not fixes or len(repairs) + len(fixes) > MAX_REPAIRS:
            return []
        repairs += [apply(fix, value) for fix in fixes.values()]
    return []


def written(checker: ArgumentChecker, value: Any, original: str, repairs: list[Repair], room: int) -> str | None:
    """Returns repaired arguments as text, checked as what they are now; None if they break the schema or the limit."""
    text = escape_surrogates(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    if len(text.encode()) > len(original.encode()) + room:  # numbers are written again: 1e15 has 18 characters then
        return None
    return RepairedArguments.of(text, original, repairs) if checker.is_valid(load_arguments(text)) else None


def _fixes(error: jsonschema_rs.ValidationError, value: Any) -> list[Fix] | None:
    """Returns how to fix one fault; None if it cannot be fixed."""
    path = tuple(error.instance_path)
    try:
        part = _at(value, path)
    except (KeyError, IndexError, TypeError):
        return None
    kind = error.kind
    if part is None and path and isinstance(path[-1], str) and isinstance(kind, (_TYPE, *CHOICES, *_VALUES)):
        return [Fix(path, _NOTHING)]
    if isinstance(kind, _TYPE):
        read = _read(part, kind.types)
        return None if read is _NOTHING else [Fix(path, read)]
    if isinstance(kind, _VALUES) and path:  # all arguments together are never one listed value
        read = _read_listed(part, kind, error.schema_path[-2:-1])
        return None if read is _NOTHING else [Fix(path, read)]
    if not isinstance(kind, CHOICES):
        return None
    ways = []
    for branch in kind.context:
        fixes = [_fixes(each, value) for each in branch]
        if fixes and None not in fixes:
            ways.append([fix for each in fixes if each is not None for fix in each])
    # Two branches that need different repairs leave open which one was meant.
    return ways[0] if ways and all(_same(way, ways[0]) for way in ways) else None


def _same(one: list[Fix], other: list[Fix]) -> bool:
    return [(fix.path, type(fix.value), fix.value) for fix in one] == [
        (fix.path, type(fix.value), fix.value) for fix in other
    ]


def _read(part: Any, types: Iterable[str]) -> Any:
    """Returns the value that a text stands for in one of some types; `_NOTHING` where it stands for none of them."""
    if not isinstance(part, str):
        return _NOTHING
    values = [value for kind in types if kind in _READERS and (value := _READERS[kind](part)) is not _NOTHING]
    # An integer goes before a number: 5 is both.
    return min(values, key=lambda value: isinstance(value, float), default=_NOTHING)


def _read_listed(part: Any, kind: Any, name: list[str | int]) -> Any:
    """Returns the listed value that is meant by a text, or by an object with it as the only member; else `_NOTHING`.

    Args:
        name: of the property or definition that lists the values. Some clients of models make an object with a member
            of that name of each choice behind a reference.
    """
    listed = kind.options if isinstance(kind, jsonschema_rs.ValidationErrorKind.Enum) else [kind.expected_value]
    if type(part) is dict and list(part) == name:
        (inner,) = part.values()
        return inner if any(type(each) is type(inner) and each == inner for each in listed) else _NOTHING
    meant = [each for each in listed if type(each) in (int, float, bool) and json.dumps(each) == part]
    return meant[0] if len(meant) == 1 else _NOTHING


def _number(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text) if _NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else _NOTHING


def _read_json(text: str, kind: str) -> Any:
    if not text.lstrip(_WHITE_SPACE).startswith(_OPENS[kind]):
        return _NOTHING
    try:
        return load_arguments(text)
    except ValueError:
        return _NOTHING


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": lambda text: int(text) if _INTEGER.fullmatch(text) else _NOTHING,
    "number": _number,
    "boolean": lambda text: _BOOLEANS.get(text, _NOTHING),
    "object": lambda text: _read_json(text, "object"),
    "array": lambda text: _read_json(text, "array"),
}


def apply(fix: Fix, value: Any) -> Repair:
    """Replaces a part of arguments in place, and returns the repair."""
    container, key = _at(value, fix.path[:-1]), fix.path[-1]
    before = _type_of(container[key])
    if fix.value is _NOTHING:
        del container[key]
        return Repair(_shown(fix.path), before, ABSENT)
    container[key] = fix.value
    return Repair(_shown(fix.path), before, _type_of(fix.value))


def _filled(value: Any, path: Path) -> Repair:
    return Repair(_shown(path), ABSENT, _type_of(_at(value, path)))


def _at(value: Any, path: Iterable[str | int]) -> Any:
    for key in path:
        value = value[key]
    return value


def _shown(path: Iterable[str | int]) -> str:
    return shorten(path_text(path), MAX_PATH)


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _type_of_text(text: str) -> str:
    """Returns the type of a value of JSON by its first character."""
    return _BY_FIRST.get(text[0]) or ("integer" if _INTEGER.fullmatch(text) else "number")


# A handler that gets it does not: `range(3.0)` raises, and a Go or Rust program cannot read 3.0 into an int. The
# validator tells which numbers are meant: one that stays valid as a fraction is not an integer of the schema.

MAX_WHOLE = 2**53  # up to here each whole number is a float of its own


def with_whole_numbers(checker: ArgumentChecker, text: str, limit: int) -> str:
    """Returns the text of arguments with its whole numbers written as such where the schema asks for integers.

    Args:
        text: of arguments that fit; it may have been repaired.
        limit: how many bytes arguments may have.
    """
    if not checker.has_integers or MAYBE_WHOLE not in text:
        return text
    value = load_arguments(text)
    places = list(_whole(value, ()))
    if not places or len(places) > MAX_REPAIRS:
        return text
    fractions = load_arguments(text)
    for path, number in places:
        apply(Fix(path, number + 0.5 if abs(number) < MAX_WHOLE / 4 else 0.5), fractions)
    integers = {path for error in checker.errors(fractions, 2 * MAX_REPAIRS) or () for path in _integer_places(error)}
    repairs = [apply(Fix(path, int(number)), value) for path, number in places if path in integers]
    if not repairs:
        return text
    before = original_of(text)
    room = limit - len(before.encode())
    return written(checker, value, before, [*repairs_of(text), *repairs], room) or text


def _whole(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    if type(value) is float:
        if value.is_integer() and abs(value) <= MAX_WHOLE:
            yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _whole(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _whole(each, (*path, index))


def _integer_places(error: jsonschema_rs.ValidationError) -> Iterator[Path]:
    """Yields the places where a schema expects an integer and got a fraction."""
    kind = error.kind
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type) and "integer" in kind.types:
        yield tuple(error.instance_path)
    elif isinstance(kind, CHOICES):
        for branch in kind.context:
            for each in branch:
                yield from _integer_places(each)
