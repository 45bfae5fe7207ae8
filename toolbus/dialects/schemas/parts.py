"""Schemas taken apart: everything that applies to one value, with references and allOf followed.

A part is a schema as it stands in the tool's declaration, so that a loss can be reported with its place; nothing is
merged here. How parts become one schema again is `schema_rewrite`'s business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from toolbus.dialects.schemas.grammar import TYPES, is_type, of_type
from toolbus.dialects.schemas.losses import LossReport, shown

_MAX_CHARACTERS = 512 * 1024  # of schemas with references written out: twice what the bus takes for one schema
_INFERRED = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties", "minProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
ANY_TYPE = frozenset(TYPES) - {"integer"}
_SCHEMAS_INSIDE = ("properties", "items", "anyOf", "oneOf", "allOf", "prefixItems", "$defs", "definitions")


class TooLarge(Exception):
    """A schema grows beyond all bounds where its references are written out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A schema that applies to a value.

    Attributes:
        schema: as it stands.
        references: those that were followed on the way to it, from the root.
        taken: keywords of it that have been dealt with.
    """

    schema: dict[str, Any]
    references: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()

    def get(self, keyword: str) -> Any:
        """Returns the value of a keyword, None where there is none."""
        return None if keyword in self.taken else self.schema.get(keyword)


class Parts:
    """Finds all parts that apply to a value, within a bound for the whole schema."""

    def __init__(self, report: LossReport) -> None:
        self._report = report
        self._written = 0  # characters so far
        self._weights: dict[int, int] = {}  # characters of a schema without those in it, by identity

    def flat(self, parts: list[Part]) -> list[Part] | None:
        """Returns parts with their references and allOf followed; None where nothing can satisfy them.

        Raises:
            TooLarge: the whole schema has become too large.
        """
        found: list[Part] = []
        seen: set[int] = set()
        waiting = list(reversed(parts))
        while waiting:
            part = waiting.pop()
            if id(part.schema) in seen:
                continue  # says the same again
            seen.add(id(part.schema))
            self.spend(self._weight(part.schema))
            found.append(part)
            behind = self._behind(part)
            if behind is None:
                return None
            waiting += reversed(behind)
        return found

    def schemas(self, part: Part, keyword: str) -> list[Part | bool]:
        """Returns the schemas in a list of them; what is none is reported."""
        values = part.get(keyword)
        if values is None:
            return []
        if not isinstance(values, list) or not values:
            self._report.lose(part.schema, keyword, f"{shown(values)} is no list of schemas and was dropped")
            return []
        found: list[Part | bool] = []
        for value in values:
            if isinstance(value, dict):
                found.append(Part(value, part.references))
            elif isinstance(value, bool):
                found.append(value)
            else:
                self._report.lose(part.schema, keyword, f"{shown(value)} is no schema and was dropped")
        return found

    def _behind(self, part: Part) -> list[Part] | None:
        """Returns the parts that a part's reference and allOf lead to."""
        behind: list[Part] = []
        for schema in self.schemas(part, "allOf"):
            if schema is False:
                return None
            if isinstance(schema, Part):
                behind.append(schema)
        reference = part.get("$ref")
        if reference is None:
            return behind
        target = self._report.target(reference) if isinstance(reference, str) else None
        if target is False:
            return None
        if target is None:
            self._report.lose(part.schema, "$ref", f"{shown(reference)} points to no schema in here and was dropped")
        elif isinstance(target, dict) and reference in part.references:
            why = f"{shown(reference)} refers back to itself: below this level only the type is kept"
            self._report.lose(part.schema, "$ref", why)
            behind.append(self._stub(target, part))
        elif isinstance(target, dict):
            behind.insert(0, Part(target, part.references | {reference}))
        return behind

    def _stub(self, target: dict[str, Any], part: Part) -> Part:
        """Returns what is kept of a schema where its reference to itself is cut."""
        kind = target.get("type")
        kept = {"type": kind} if is_type(kind) else {"type": "object"} if "properties" in target else {}
        return Part(self._report.made(kept, self._report.path(part.schema)), part.references)

    def spend(self, characters: int) -> None:
        """Counts what is written.

        Raises:
            TooLarge: the whole schema has become too large.
        """
        self._written += characters
        if self._written > _MAX_CHARACTERS:
            raise TooLarge

    def _weight(self, schema: dict[str, Any]) -> int:
        weight = self._weights.get(id(schema))
        if weight is None:
            own = {key: value for key, value in schema.items() if key not in _SCHEMAS_INSIDE}
            names = sum(len(key) for key in (*schema, *_keys(schema.get("properties"))))
            weight = self._weights[id(schema)] = len(json.dumps(own, ensure_ascii=False)) + names + 20
        return weight


def types_of(parts: list[Part], report: LossReport) -> frozenset[str]:
    """Returns the types that all parts allow; all of them where no part says anything."""
    allowed = _widened(TYPES)
    for part in parts:
        own = _types(part, report)
        if not allowed & own:
            report.lose(part.schema, "type", "it contradicts what else applies here, so it was dropped")
        else:
            allowed &= own
    return allowed - {"integer"} if "number" in allowed else allowed


def inferred(parts: list[Part]) -> str:
    """Returns the type that keywords are about where nobody named one, "" where they do not say."""
    kinds = [_INFERRED[keyword] for part in parts for keyword in part.schema if keyword in _INFERRED]
    return kinds[0] if kinds else ""


def values_of(part: Part) -> list[Any] | None:
    """Returns the values that a part allows, None where it does not list them."""
    if "const" in part.schema:
        return [part.schema["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) and values else None


def _types(part: Part, report: LossReport) -> frozenset[str]:
    kind, types = part.get("type"), _widened(TYPES)
    if kind is not None and is_type(kind):
        types = _widened([kind] if isinstance(kind, str) else kind)
    elif kind is not None:
        report.lose(part.schema, "type", f"{shown(kind)} is no type of JSON Schema and was dropped")
    nullable = part.get("nullable") is True
    values = values_of(part)
    if values is not None:
        found = {name for name in types for value in values if of_type(value, name)}
        if all(of_type(value, "integer") for value in values if of_type(value, "number")):
            found -= {"number"} if "integer" in found else set()
        if not found and not nullable:
            report.lose(part.schema, "enum", f"none of {shown(values)} is of the type {shown(kind)}")
        types = frozenset(found) or types
    return types | {"null"} if nullable else types


def _widened(types: Any) -> frozenset[str]:
    return frozenset(types) | ({"integer"} if "number" in types else set())


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []
