"""Rewrites schemas for providers that know few keywords: one type each, alternatives as anyOf, no references.

Such a provider refuses a request for one keyword that it does not know, for a keyword beside anyOf, for a keyword of
another type, for a required name without a property, for an array without items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import Inexpressible, LossReport, escaped, excerpt
from toolbus.parts.models.dialects.schemas.parts import (
    ANY_TYPE,
    Part,
    Parts,
    TooLarge,
    inferred,
    types_of,
    values_of,
    widened,
)
from toolbus.protocol.json_schema import CHECKS, TYPES, is_number, of_type
from toolbus.protocol.patterns import PatternRule, Unreadable, in_words

# A rule without a keyword there goes into the description, which the model reads, too.

_FORMATS = {"string": ("date-time", "enum"), "integer": ("int32", "int64"), "number": ("float", "double")}
_MAX_VALUES = 20  # of an enum, in a description
_BOUNDS = {
    "string": (("minLength", max), ("maxLength", min)),
    "array": (("minItems", max), ("maxItems", min)),
    "object": (("minProperties", max), ("maxProperties", min)),
}


class Keywords:
    """Writes the keywords of one type that do not hold schemas.

    Args:
        patterns: writes the values of `pattern`.
    """

    def __init__(self, report: LossReport, patterns: PatternRule) -> None:
        self._report = report
        self._patterns = patterns

    def write(self, kind: str, parts: list[Part]) -> dict[str, Any]:
        """Returns a schema of one type with the merged keywords of the parts."""
        schema: dict[str, Any] = {"type": kind}
        descriptions = [text for part in parts if (text := self.checked(part, "description"))]
        titles = [text for part in parts if (text := self.checked(part, "title"))]
        if titles:
            schema["title"] = titles[0]  # the nearest; titles of referenced definitions are names of types
        notes = [*self._values(kind, parts, schema), *self._format(kind, parts, schema)]
        for keyword, choose in _BOUNDS.get(kind, ()):
            bounds = [int(value) for part in parts if (value := self.checked(part, keyword)) is not None]
            if bounds:
                schema[keyword] = choose(bounds)
        if kind in ("integer", "number"):
            notes += self._numbers(kind, parts, schema)
        if kind == "string":
            notes += self._pattern(parts, schema)
        if texts := list(dict.fromkeys([*descriptions, *notes])):
            schema["description"] = "\n".join(texts)
        return schema

    def checked(self, part: Part, keyword: str) -> Any:
        """Returns the value of a keyword; None if it is missing. An invalid value is reported."""
        if keyword not in part.schema or keyword in part.done:
            return None
        value = part.schema[keyword]
        if not CHECKS[keyword](value):
            self._report.drop(part.schema, keyword, value, f"a valid value of {keyword}")
            return None
        return value

    def _values(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        lists = [(part, values) for part in parts if (values := values_of(part)) is not None]
        for part in parts:
            if "enum" not in part.done and "enum" in part.schema and not CHECKS["enum"](part.schema["enum"]):
                self._report.lose(part.schema, "enum", f"{excerpt(part.schema['enum'])} is not a list of values")
        if not lists:
            return
        part, first = lists[0]
        rest = [values for _, values in lists[1:]]
        allowed = [value for value in first if of_type(value, kind) and all(value in values for values in rest)]
        strings = list(dict.fromkeys(value for value in allowed if isinstance(value, str) and value))
        keyword = "const" if "const" in part.schema else "enum"
        if kind == "string" and strings and len(strings) == len(set(map(str, allowed))):
            schema["enum"] = strings
        elif kind == "boolean" and True in allowed and False in allowed:
            return
        elif allowed:
            texts = [json.dumps(value, ensure_ascii=False) for value in allowed[:_MAX_VALUES]]
            more = ", …" if len(allowed) > _MAX_VALUES else ""
            why = "an enum may hold only texts that are not empty; the values are listed in the description"
            self._report.lose(part.schema, keyword, f"{excerpt(allowed)} was dropped: {why}")
            yield f"Allowed values: {', '.join(texts)}{more}."
        else:
            self._report.lose(part.schema, keyword, f"{excerpt(first)} leaves no {kind} and was dropped")

    def _format(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        for part in parts:
            name = self.checked(part, "format")
            if name is None or kind not in _FORMATS:
                continue
            if name in _FORMATS[kind] and (name != "enum" or "enum" in schema):
                schema.setdefault("format", name)
            elif kind == "string" or name not in sum(_FORMATS.values(), ()):
                self._report.lose(part.schema, "format", f"the provider has no format {excerpt(name)} for a {kind}")
                yield f"Format: {name}."

    def _pattern(self, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        for part in parts:
            pattern = self.checked(part, "pattern")
            if pattern is None:
                continue
            try:
                written = self._patterns(pattern)
                if schema.setdefault("pattern", written) == written:
                    continue
                why = "only one pattern is possible"
            except Unreadable as error:
                why = str(error)
            dropped = f"{excerpt(pattern)} was dropped and is stated in the description: {why}"
            self._report.lose(part.schema, "pattern", dropped)
            yield in_words(pattern)

    def _numbers(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        yield from self._bound(kind, parts, schema, "minimum", "exclusiveMinimum")
        yield from self._bound(kind, parts, schema, "maximum", "exclusiveMaximum")
        for part in parts:
            step = self.checked(part, "multipleOf")
            if step is not None and not (kind == "integer" and step == 1):
                self._report.lose(part.schema, "multipleOf", f"{step} was dropped and is stated in the description")
                yield f"A multiple of {step}."

    def _bound(
        self, kind: str, parts: list[Part], schema: dict[str, Any], keyword: str, exclusive: str
    ) -> Iterable[str]:
        choose = max if keyword == "minimum" else min
        bounds: list[int | float] = []
        for part in parts:
            if (inclusive := self.checked(part, keyword)) is not None:
                bounds.append(inclusive)
            edge = part.schema.get(exclusive)
            if edge is True:
                edge = inclusive  # draft 4 has a flag beside the bound
            if edge is None or edge is False:
                continue
            if not is_number(edge):
                self._report.drop(part.schema, exclusive, edge, "a number")
            elif kind == "integer":
                bounds.append(math.floor(edge) + 1 if keyword == "minimum" else math.ceil(edge) - 1)
            else:
                bounds.append(edge)
                word = "More" if keyword == "minimum" else "Less"
                why = f"{edge} became {keyword}, which includes it; the description states that it is excluded"
                self._report.lose(part.schema, exclusive, why)
                yield f"{word} than {edge}."
        if bounds:
            schema[keyword] = choose(bounds)


# How deep schemas may be nested; if one becomes too large with its references expanded, the next depth is tried.
_LEVELS = (30, 8, 4)
_VALUE_LEVELS = 16  # of a default or an example
_MIN_CHARACTERS = 40  # of one converted schema, for the size limit
_FOLLOWED = frozenset(("$ref", "allOf"))
_REPLACED = frozenset(
    (
        *("$ref", "$defs", "definitions", "allOf", "oneOf", "const", "prefixItems"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_ONLY_REQUIRED = frozenset(("required", "title", "description"))
_ANY_TYPE_OFFERED = "it does not name a type, so it is offered as a choice of all types"
_TEXT = {"type": "string"}


def rewrite(
    root: dict[str, Any], report: LossReport, *, keywords: frozenset[str], patterns: PatternRule
) -> dict[str, Any]:
    """Returns a plain object schema, written anew in few keywords.

    Args:
        keywords: those that the provider knows.
        patterns: writes the values of `pattern`.

    Raises:
        Inexpressible: it is too large with its references expanded.
    """
    before = len(report.losses)
    for levels in _LEVELS:
        try:
            schema = _Rewriting(keywords | _REPLACED, patterns, report, levels).schema([Part(root)], 0)
        except TooLarge:
            report.keep_first(before)
            continue
        if schema is None or schema.get("type") != "object":
            raise Inexpressible("the root of its schema allows no object: give it properties that can be satisfied")
        schema.setdefault("properties", {})
        return schema
    raise Inexpressible("its schema exceeds 512 KiB with its references expanded: use fewer or smaller references")


class _Rewriting:
    """Rewrites one schema, a level at a time.

    Args:
        known: the keywords that are written, or read to write others.
    """

    def __init__(self, known: frozenset[str], patterns: PatternRule, report: LossReport, levels: int) -> None:
        self._known = known
        self._report = report
        self._levels = levels
        self._parts = Parts(report)
        self._keywords = Keywords(report, patterns)

    def schema(
        self, parts: list[Part], level: int, *, nullable: bool = False, branch: bool = False
    ) -> dict[str, Any] | None:
        """Returns all parts as one schema; None if no value can satisfy them.

        Args:
            nullable: whether null is allowed beside it.
            branch: whether this is one of several alternatives.
        """
        flat = self._parts.flat(parts)
        if flat is None:
            return None
        for part in flat:
            self._report_unknown(part)
        notes: list[Part] = []
        for part in flat:
            for keyword in ("anyOf", "oneOf"):
                branches = self._branches(part, keyword, notes)
                if branches == []:
                    return None
                if branches is not None and level < self._levels:
                    choice = self._choice(flat, part, keyword, branches, level, nullable)
                    return self._report_values(flat, choice, branch)
                if branches is not None:
                    self._report.lose(part.schema, keyword, f"schemas deeper than {self._levels} levels were dropped")
        return self._report_values(flat, self._typed([*flat, *notes], level, nullable), branch)

    def _report_unknown(self, part: Part) -> None:
        for keyword, value in part.schema.items():
            if keyword in self._known or (keyword == "additionalItems" and isinstance(value, dict)):
                continue  # `_items` writes it
            lost = value if keyword == "patternProperties" and isinstance(value, dict) else [value]
            for each in lost:
                self._report.lose(part.schema, keyword, f"the provider does not know it, {excerpt(each)} was dropped")

    # -- alternatives --------------------------------------------------------------------------------------------------

    def _branches(self, part: Part, keyword: str, notes: list[Part]) -> list[Part] | None:
        """Returns the alternatives to be written; None without any.

        Alternatives that only list required names become a description: writing them would repeat the whole object.
        """
        listed = self._parts.schemas(part, keyword)
        if not listed:
            return None
        if True in listed:
            self._report.lose(part.schema, keyword, "one of its schemas allows anything, so it was dropped")
            return None
        branches = [one for one in listed if isinstance(one, Part)]
        names = [one.schema.get("required") for one in branches if _ONLY_REQUIRED.issuperset(one.schema)]
        sets = [", ".join(map(str, one)) for one in names if isinstance(one, list) and one]
        if branches and len(sets) == len(branches):
            text = f"Give {'exactly' if keyword == 'oneOf' else 'at least'} one of: {'; '.join(sets)}."
            self._report.lose(
                part.schema, keyword, f"which properties go together is stated in the description: {text}"
            )
            notes.append(Part({"description": text}))
            return None
        return branches

    def _choice(
        self, flat: list[Part], part: Part, keyword: str, branches: list[Part], level: int, nullable: bool
    ) -> dict[str, Any] | None:
        """Returns alternatives, each merged with the keywords that stand beside them."""
        base = [
            Part(one.schema, one.references, one.done | _FOLLOWED | ({keyword} if one is part else set()))
            for one in flat
        ]
        allowed = widened(types_of(base, self._report))
        flats = [self._parts.flat([branch]) for branch in branches]
        kinds = [frozenset() if each is None else widened(types_of(each, self._report)) for each in flats]
        possible = [(branch, kind) for branch, kind in zip(branches, kinds, strict=True) if kind & allowed]
        with_null = nullable or any(kind == {"null"} for _, kind in possible)
        choices: list[dict[str, Any]] = []
        for branch, kind in possible:
            if kind != {"null"}:
                _add_choices(choices, self.schema([*base, branch], level + 1, nullable=with_null, branch=True))
        if len(choices) > 1 and keyword == "oneOf":
            self._report.lose(part.schema, keyword, "oneOf became anyOf: that only one may apply is lost")
        if not choices:
            return {"type": "null"} if with_null else None
        return _any_of(choices)

    def _report_values(self, flat: list[Part], schema: dict[str, Any] | None, branch: bool) -> dict[str, Any] | None:
        """Returns the schema; reports defaults and examples that no alternative took. Branches are checked together."""
        choices = [] if schema is None else schema.get("anyOf", [schema])
        for part in [] if branch else flat:
            for keyword in ("default", "example"):
                if keyword in part.schema and not any(keyword in choice for choice in choices):
                    why = f"{excerpt(part.schema[keyword])} is of another type or nested too deep, so it was dropped"
                    self._report.lose(part.schema, keyword, why)
        return schema

    # -- types ---------------------------------------------------------------------------------------------------------

    def _typed(self, flat: list[Part], level: int, nullable: bool) -> dict[str, Any]:
        """Returns a schema of one type, or an alternative for each type."""
        allowed = types_of(flat, self._report)
        if allowed == ANY_TYPE:
            nullable = nullable or any(part.get("nullable") is True for part in flat)
            if kind := inferred(flat):
                allowed = frozenset((kind,))
            else:
                self._report.lose(flat[0].schema, "type", _ANY_TYPE_OFFERED)
                allowed -= {"null"}
        nullable = nullable or "null" in allowed
        kinds = [kind for kind in TYPES if kind in allowed and kind != "null"]
        if not kinds:
            return self._keywords.write("null", flat)
        inner = level + (len(kinds) > 1)
        return _any_of([self._of_kind(kind, flat, inner, nullable) for kind in kinds])

    def _of_kind(self, kind: str, flat: list[Part], level: int, nullable: bool) -> dict[str, Any]:
        self._parts.spend(_MIN_CHARACTERS)
        schema = self._keywords.write(kind, flat)
        if nullable:
            schema["nullable"] = True
        for keyword in ("default", "example"):
            for part in flat:
                value = part.get(keyword)
                fits = of_type(value, kind) or (value is None and nullable)
                if keyword in part.schema and fits and _levels(value) <= _VALUE_LEVELS:
                    schema.setdefault(keyword, value)
        if kind == "array":
            schema["items"] = self._items(flat, level)
        elif kind == "object":
            self._object(flat, level, schema)
        return schema

    def _items(self, flat: list[Part], level: int) -> dict[str, Any]:
        """Returns the one schema for all items of an array."""
        listed: list[Part] = []
        common: list[Part] = []
        for part in flat:
            items = part.get("items")
            if isinstance(items, dict):
                common.append(Part(items, part.references))
            elif items is not None and not isinstance(items, bool | list):
                self._report.drop(part.schema, "items", items, "a schema")
            keyword = "items" if isinstance(items, list) else "prefixItems"
            rest = part.get("additionalItems")
            if isinstance(items, list) and isinstance(rest, dict):
                common.append(Part(rest, part.references))
            prefix = [one for one in self._parts.schemas(part, keyword) if isinstance(one, Part)]
            if prefix:
                why = "which item has which schema is lost: every item may have any of them"
                self._report.lose(part.schema, keyword, why)
            listed += prefix
        if level >= self._levels:
            if [part.schema for part in common] != [_TEXT] or listed:
                why = f"schemas deeper than {self._levels} levels were dropped"
                self._report.lose(flat[0].schema, "items", why)
            return dict(_TEXT)
        groups = [[part] for part in listed] + ([common] if common else [])
        choices: list[dict[str, Any]] = []
        for group in groups or [[self._any_item(flat[0])]]:
            _add_choices(choices, self.schema(group, level + 1))
        if not choices:
            self._report.lose(flat[0].schema, "items", "no item can satisfy it; it was replaced by texts")
            return dict(_TEXT)
        return _any_of(choices)

    def _any_item(self, part: Part) -> Part:
        """Returns a schema for any item except arrays, which would need items of their own without end."""
        self._report.lose(part.schema, "items", "it does not restrict the items, which may be anything but arrays")
        types = ["string", "number", "boolean", "object"]
        return Part(self._report.generated({"type": types}, self._report.path(part.schema)))

    def _object(self, flat: list[Part], level: int, schema: dict[str, Any]) -> None:
        """Adds the properties of an object, and which of them are required."""
        parts_by_name: dict[str, list[Part]] = {}
        for part in flat:
            for name, inner in self._properties(part):
                parts_by_name.setdefault(name, []).append(inner)
        properties: dict[str, Any] = {}
        if parts_by_name and level >= self._levels:
            self._report.lose(flat[0].schema, "properties", f"schemas deeper than {self._levels} levels were dropped")
            parts_by_name = {}
        for name, parts in parts_by_name.items():
            inner_schema = self.schema(parts, level + 1)
            if inner_schema is None:
                why = f"no value can satisfy {excerpt(name)}, it was left out"
                self._report.lose(flat[0].schema, "properties", why)
            else:
                properties[name] = inner_schema
        if properties:
            schema["properties"] = properties
        for keyword in ("required", "propertyOrdering"):
            names: dict[str, None] = {}
            for part in flat:
                for name in self._keywords.checked(part, keyword) or ():
                    if name in properties:
                        names[name] = None
                    else:
                        self._report.lose(part.schema, keyword, f"{excerpt(name)} is not one of the properties")
            if names:
                schema[keyword] = list(names)

    def _properties(self, part: Part) -> list[tuple[str, Part]]:
        properties = part.get("properties")
        if properties is None:
            return []
        if not isinstance(properties, dict):
            self._report.lose(part.schema, "properties", f"{excerpt(properties)} is not an object of schemas")
            return []
        named: list[tuple[str, Part]] = []
        for name, inner in properties.items():
            if isinstance(inner, dict):
                named.append((name, Part(inner, part.references)))
            elif inner is True:
                path = f"{self._report.path(part.schema)}/properties/{escaped(name)}"
                named.append((name, Part(self._report.generated({}, path), part.references)))
            else:
                self._report.lose(
                    part.schema, "properties", f"{excerpt(name)}: {excerpt(inner)} allows nothing, left out"
                )
        return named


def _add_choices(choices: list[dict[str, Any]], schema: dict[str, Any] | None) -> None:
    """Adds a schema, or each of its alternatives, without duplicates; None adds nothing."""
    for choice in () if schema is None else schema.get("anyOf", [schema]):
        if choice not in choices:
            choices.append(choice)


def _any_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _levels(value: Any) -> int:
    levels = 0
    row = [value]
    while row:
        levels += 1
        row = [
            item
            for one in row
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return levels
