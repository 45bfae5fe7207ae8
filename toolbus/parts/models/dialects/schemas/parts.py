"""Collects all schemas that apply to one value, with references and allOf followed.

A part is a schema as it stands in the tool's declaration, so that a loss can be reported with its place; nothing is
merged here. `rewrite` merges parts into one schema again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import LossReport, excerpt
from toolbus.protocol.json_schema import TYPES, is_type, of_type

_MAX_CHARACTERS = 512 * 1024  # of schemas with references expanded: twice the bus's limit for one schema
_MAX_NEWEST = 32  # references that a place holds in a set of its own
_INFERRED = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties", "minProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
ANY_TYPE = frozenset(TYPES) - {"integer"}
_SCHEMAS_INSIDE = ("properties", "items", "anyOf", "oneOf", "allOf", "prefixItems", "$defs", "definitions")


class TooLarge(Exception):
    """A schema becomes too large when its references are expanded."""


@dataclass(frozen=True, slots=True)
class References:
    """The references that were followed to a place; all but the newest are shared with the places on the way.

    One set for each place would take the square of a chain's length: half a gigabyte for a schema of 180 kB.
    """

    newest: frozenset[str] = frozenset()
    before: References | None = None

    def __contains__(self, reference: str) -> bool:
        place: References | None = self
        while place is not None:
            if reference in place.newest:
                return True
            place = place.before
        return False

    def and_then(self, reference: str) -> References:
        """Returns these references with one more."""
        if len(self.newest) < _MAX_NEWEST:
            return References(self.newest | {reference}, self.before)
        return References(frozenset((reference,)), self)


_NONE_FOLLOWED = References()


@dataclass(frozen=True, slots=True)
class Part:
    """A schema that applies to a value.

    Attributes:
        schema: as it stands.
        references: those that were followed from the root to it.
        done: keywords that are already converted.
    """

    schema: dict[str, Any]
    references: References = _NONE_FOLLOWED
    done: frozenset[str] = frozenset()

    def get(self, keyword: str) -> Any:
        """Returns the value of a keyword; None if it is missing."""
        return None if keyword in self.done else self.schema.get(keyword)


class Parts:
    """Finds all parts that apply to a value, within a size limit for the whole schema."""

    def __init__(self, report: LossReport) -> None:
        self._report = report
        self._written = 0  # characters so far
        self._sizes: dict[int, int] = {}  # characters of a schema without its inner schemas, by identity

    def flat(self, parts: list[Part]) -> list[Part] | None:
        """Returns parts with their references and allOf followed; None if no value can satisfy them.

        Raises:
            TooLarge: the whole schema has become too large.
        """
        flat: list[Part] = []
        seen: set[int] = set()
        pending = list(reversed(parts))
        while pending:
            part = pending.pop()
            if id(part.schema) in seen:
                continue
            seen.add(id(part.schema))
            self.spend(self._size(part.schema))
            flat.append(part)
            targets = self._targets(part)
            if targets is None:
                return None
            pending += reversed(targets)
        return flat

    def schemas(self, part: Part, keyword: str) -> list[Part | bool]:
        """Returns the schemas in a list of schemas; invalid entries are reported."""
        values = part.get(keyword)
        if values is None:
            return []
        if not isinstance(values, list) or not values:
            self._report.drop(part.schema, keyword, values, "a list of schemas")
            return []
        schemas: list[Part | bool] = []
        for value in values:
            if isinstance(value, dict):
                schemas.append(Part(value, part.references))
            elif isinstance(value, bool):
                schemas.append(value)
            else:
                self._report.drop(part.schema, keyword, value, "a schema")
        return schemas

    def _targets(self, part: Part) -> list[Part] | None:
        """Returns the parts that a part's reference and allOf lead to."""
        targets: list[Part] = []
        for schema in self.schemas(part, "allOf"):
            if schema is False:
                return None
            if isinstance(schema, Part):
                targets.append(schema)
        reference = part.get("$ref")
        if reference is None:
            return targets
        target = self._report.target(reference) if isinstance(reference, str) else None
        if target is False:
            return None
        if target is None:
            self._report.drop_reference(part.schema, reference)
        elif isinstance(target, dict) and self.ends(reference, part):
            targets.append(self.cut(reference, target, part))
        elif isinstance(target, dict):
            targets.insert(0, Part(target, part.references.and_then(reference)))
        return targets

    def ends(self, reference: str, part: Part) -> bool:
        """Tells whether a part's reference is not followed any more; a subclass may follow fewer."""
        return reference in part.references

    def cut(self, reference: str, target: dict[str, Any], part: Part) -> Part:
        """Returns the replacement of a reference that is not followed: only its type, which is a loss."""
        why = f"{excerpt(reference)} refers back to itself: below this level only the type is kept"
        self._report.lose(part.schema, "$ref", why)
        kind = target.get("type")
        stub = {"type": kind} if is_type(kind) else {"type": "object"} if "properties" in target else {}
        return Part(self._report.generated(stub, self._report.path(part.schema)), part.references)

    def spend(self, characters: int) -> None:
        """Counts characters of the converted schema.

        Raises:
            TooLarge: the whole schema has become too large.
        """
        self._written += characters
        if self._written > _MAX_CHARACTERS:
            raise TooLarge

    def _size(self, schema: dict[str, Any]) -> int:
        size = self._sizes.get(id(schema))
        if size is None:
            own = {key: value for key, value in schema.items() if key not in _SCHEMAS_INSIDE}
            properties = schema.get("properties")
            names = sum(map(len, (*schema, *(properties if isinstance(properties, dict) else ()))))
            size = self._sizes[id(schema)] = len(json.dumps(own, ensure_ascii=False)) + names + 20
        return size


def types_of(parts: list[Part], report: LossReport) -> frozenset[str]:
    """Returns the types that all parts allow; all types if no part names one."""
    allowed = widened(TYPES)
    for part in parts:
        own = _types(part, report)
        if not allowed & own:
            for keyword in ("type", *(key for key, kind in _INFERRED.items() if kind not in allowed)):
                if keyword in part.schema:
                    why = "its type contradicts what else applies here, so it was dropped"
                    report.lose(part.schema, keyword, why)
        else:
            allowed &= own
    return allowed - {"integer"} if "number" in allowed else allowed


def inferred(parts: list[Part]) -> str:
    """Returns the type that the keywords imply if no part names one; "" if they imply none."""
    kinds = [_INFERRED[keyword] for part in parts for keyword in part.schema if keyword in _INFERRED]
    return kinds[0] if kinds else ""


def values_of(part: Part) -> list[Any] | None:
    """Returns the values that a part allows; None if it does not list them."""
    if "const" in part.schema:
        return [part.schema["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) and values else None


def _types(part: Part, report: LossReport) -> frozenset[str]:
    kind, types = part.get("type"), widened(TYPES)
    if kind is not None and is_type(kind):
        types = widened([kind] if isinstance(kind, str) else kind)
    elif kind is not None:
        report.drop(part.schema, "type", kind, "a type of JSON Schema")
    nullable = part.get("nullable") is True
    values = values_of(part)
    if values is not None:
        value_types = {name for name in types for value in values if of_type(value, name)}
        if all(of_type(value, "integer") for value in values if of_type(value, "number")):
            value_types -= {"number"} if "integer" in value_types else set()
        if not value_types and not nullable:
            report.lose(part.schema, "enum", f"no value of {excerpt(values)} is of the type {excerpt(kind)}")
        types = frozenset(value_types) or types
    return types | {"null"} if nullable else types


def widened(types: Collection[str]) -> frozenset[str]:
    """Returns types with integer where number is among them."""
    return frozenset(types) | ({"integer"} if "number" in types else set())
