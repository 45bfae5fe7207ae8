"""Finds the defaults that a schema declares, and fills them in where arguments leave a property out.

Defaults are found through `properties`, `items`, `additionalProperties`, `allOf` and references inside the schema; not
inside `anyOf` and the like, since which branch applies would be a guess. A default that does not fit its own schema
is ignored, and a default that was filled in gets no defaults itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from toolbus.protocol.json_schema import Path, of_type, pointed_at, pointer, show

_HOLDING = frozenset(("properties", "items", "additionalProperties", "allOf", "$ref"))  # by which others are found
_ELSEWHERE = frozenset(("allOf", "$ref", "$id", "id"))  # what makes a value subject to more than one schema, or a name
MAX_FILLED = 1_000  # of one call: arguments that lack more are passed on as they are


class TooMuch(ValueError):
    """With the defaults, arguments would be too large, or there are too many."""


@dataclass(slots=True, eq=False)
class Defaults:
    """The defaults of the properties of an object, and those of what an object or array holds.

    Attributes:
        values: the JSON text of each property's default.
        members: the same with the name, as a member of an object.
        together: what those that calls lack make together, by their names; of who fills them in.
        inner: the defaults inside a property's value.
        items: of the items of an array.
        others: of the values of properties that the schema does not name.
        named: the properties that it names.
    """

    values: dict[str, str] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)
    together: dict[tuple[str, ...], Any] = field(default_factory=dict)
    inner: dict[str, Defaults] = field(default_factory=dict)
    items: Defaults | None = None
    others: Defaults | None = None
    named: set[str] = field(default_factory=set)

    def lacks(self, value: Any) -> bool:
        """Tells whether a value leaves out a property with a default, at any level."""
        if isinstance(value, dict) and not self.values.keys() <= value.keys():
            return True
        return self.lacks_below(value)

    def lacks_below(self, value: Any) -> bool:
        """Tells the same of what a value holds."""
        if not self.inner and self.items is None and self.others is None:
            return False
        return any(part.lacks(each) for part, _, each in self._below(value))

    def missing(self, arguments: dict[str, Any]) -> list[str]:
        """Returns the properties that arguments leave out, and that have a default."""
        return [name for name in self.values if name not in arguments]

    def fill(self, value: Any, room: int) -> list[Path]:
        """Fills in what a value leaves out, and returns where.

        Args:
            room: how many characters the defaults may have together.

        Raises:
            TooMuch: they have more, or there are more than `MAX_FILLED`.
        """
        filled: list[Path] = []
        waiting: list[tuple[Defaults, Path, Any]] = [(self, (), value)]
        for defaults, path, part in waiting:
            # First what it holds, so that what is filled in is not looked at.
            waiting.extend((inner, (*path, key), each) for inner, key, each in list(defaults._below(part)))
            for name in defaults.missing(part) if isinstance(part, dict) else ():
                room -= len(defaults.members[name]) + 1
                if room < 0 or len(filled) >= MAX_FILLED:
                    raise TooMuch
                part[name] = json.loads(defaults.values[name])
                filled.append((*path, name))
        return filled

    def _below(self, value: Any) -> Iterator[tuple[Defaults, str | int, Any]]:
        """Yields what is known of the parts of a value, with their keys."""
        if isinstance(value, dict):
            for name, part in self.inner.items():
                if name in value:
                    yield part, name, value[name]
            if self.others is not None:
                for name, each in value.items():
                    if name not in self.named:
                        yield self.others, name, each
        elif isinstance(value, list) and self.items is not None:
            for index, each in enumerate(value):
                yield self.items, index, each


def defaults_of(schema: dict[str, Any]) -> tuple[Defaults | None, list[str]]:
    """Returns the defaults that a schema declares, None if it has none; and a warning for each that does not fit.

    The schema has been measured: it is expanded here as it is checked.
    """
    finder = _Finder(schema)
    root = finder.find(schema, ())
    finder.finish()
    return (root if finder.is_useful(root) else None), finder.warnings


class _Finder:
    """Finds the defaults of one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._defaults: dict[int, Defaults] = {}  # by the identity of the schema
        self._waiting: list[tuple[Defaults, dict[str, Any], Path]] = []  # to be looked into
        self._nothing = Defaults()  # of all schemas that hold no other
        self._useful: set[int] = set()  # ids of those that have a default, themselves or further down
        self.warnings: list[str] = []

    def find(self, schema: dict[str, Any], place: Path) -> Defaults:
        """Returns the defaults of one schema, empty where it has none."""
        if _HOLDING.isdisjoint(schema):
            return self._nothing
        defaults = self._defaults.get(id(schema))
        if defaults is None:
            defaults = self._defaults[id(schema)] = Defaults()
            self._waiting.append((defaults, schema, place))
        return defaults

    def finish(self) -> None:
        """Looks into all schemas that were found, and drops those that lead to no default."""
        for defaults, schema, place in self._waiting:  # it grows meanwhile
            for part, below in self._in_place(schema, place):
                self._add(defaults, part, below)
        self._prune()

    def _in_place(self, schema: Any, place: Path) -> Iterator[tuple[dict[str, Any], Path]]:
        """Yields a schema and those that apply to the same value in any case."""
        if isinstance(schema, dict) and _ELSEWHERE.isdisjoint(schema):  # as most: nothing else applies
            yield schema, place
            return
        todo, seen = [(schema, place)], set[int]()
        while todo:
            each, here = todo.pop()
            if not isinstance(each, dict) or id(each) in seen:
                continue  # one that many references lead to says the same each time
            if each is not self._root and ("$id" in each or "id" in each):
                continue  # a name of its own: its references are read against that
            seen.add(id(each))
            yield each, here
            following = []
            reference = each.get("$ref")
            if isinstance(reference, str):
                following.append(self._target(reference))
            parts = each.get("allOf")
            following += [
                (part, (*here, "allOf", index)) for index, part in enumerate(parts if isinstance(parts, list) else ())
            ]
            todo += reversed(following)

    def _target(self, reference: str) -> tuple[Any, Path]:
        if not reference.startswith("#/"):
            return (self._root if reference == "#" else None), ()
        return pointed_at(self._root, reference[1:])

    def _add(self, defaults: Defaults, schema: dict[str, Any], place: Path) -> None:
        properties = schema.get("properties")
        for name, part in properties.items() if isinstance(properties, dict) else ():
            defaults.named.add(name)
            if not isinstance(part, dict):
                continue
            here = (*place, "properties", name)
            text = self._default(part, here)
            if text is not None:
                defaults.values.setdefault(name, text)
                defaults.members.setdefault(name, f"{json.dumps(name)}:{text}")
            defaults.inner.setdefault(name, self.find(part, here))
        items, others = schema.get("items"), schema.get("additionalProperties")
        if isinstance(items, dict) and "prefixItems" not in schema:
            defaults.items = defaults.items or self.find(items, (*place, "items"))
        if isinstance(others, dict) and "patternProperties" not in schema:
            defaults.others = defaults.others or self.find(others, (*place, "additionalProperties"))

    def _default(self, schema: dict[str, Any], place: Path) -> str | None:
        if "default" not in schema and _ELSEWHERE.isdisjoint(schema):
            return None
        for part, below in self._in_place(schema, place):
            if "default" not in part:
                continue
            default = part["default"]
            if all(_fits(each, default) for each, _ in self._in_place(schema, place)):
                return json.dumps(default, separators=(",", ":"))  # ASCII: as many characters as bytes
            if default is not None:  # which people write for "none"
                self.warnings.append(
                    f"schema at {pointer((*below, 'default'))}: {show(default)} does not fit its own schema, so it is "
                    "not filled in: correct it"
                )
            return None
        return None

    def _prune(self) -> None:
        parents: dict[int, list[Defaults]] = {}
        for each in self._defaults.values():
            for part in (*each.inner.values(), each.items, each.others):
                if part is not None:
                    parents.setdefault(id(part), []).append(each)
        waiting = [each for each in self._defaults.values() if each.values]
        self._useful = {id(each) for each in waiting}
        for each in waiting:
            fresh = [parent for parent in parents.get(id(each), ()) if id(parent) not in self._useful]
            self._useful.update(map(id, fresh))
            waiting.extend(fresh)
        for each in self._defaults.values():
            each.inner = {name: part for name, part in each.inner.items() if self.is_useful(part)}
            each.items = each.items if self.is_useful(each.items) else None
            each.others = each.others if self.is_useful(each.others) else None

    def is_useful(self, defaults: Defaults | None) -> bool:
        """Tells whether there is a default here or further down."""
        return defaults is not None and id(defaults) in self._useful


def _fits(schema: dict[str, Any], value: Any) -> bool:
    """Tells whether a default fits its schema, as far as its type and its values say."""
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if types and not any(of_type(value, kind) for kind in types if isinstance(kind, str)):
        return False
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and not any(
            _fits(branch, value) if isinstance(branch, dict) else branch for branch in branches
        ):
            return False
    return True
