"""Schemas written anew for providers with a small vocabulary: one type each, alternatives as anyOf, no references.

Such a provider refuses a request for one keyword that it does not know, for a keyword beside anyOf, for one that
belongs to another type, for a required name without a property, for an array without items.
"""

from __future__ import annotations

from typing import Any

from toolbus.dialects.schemas.grammar import TYPES, of_type
from toolbus.dialects.schemas.keywords import Keywords
from toolbus.dialects.schemas.losses import Inexpressible, LossReport, escaped, shown
from toolbus.dialects.schemas.parts import ANY_TYPE, Part, Parts, TooLarge, inferred, types_of

# How deep schemas may be nested; where one becomes too large with its references written out, less is tried.
_LEVELS = (30, 8, 4)
_VALUE_LEVELS = 16  # of a default or an example
_CHARACTERS_EACH = 40  # at least, of a schema that is written
_FOLLOWED = frozenset(("$ref", "allOf"))
_REPLACED = frozenset(
    (
        *("$ref", "$defs", "definitions", "allOf", "oneOf", "const", "prefixItems"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_IN_WORDS = frozenset(("required", "title", "description"))
_ANYTHING = "it says nothing about its type, so it is offered as a choice of all"
_TEXT = {"type": "string"}


def rewrite(root: dict[str, Any], keywords: frozenset[str], report: LossReport) -> dict[str, Any]:
    """Returns a schema in the given keywords.

    Args:
        root: a plain object schema.

    Raises:
        Inexpressible: it is too large with its references written out.
    """
    before = len(report.losses)
    for levels in _LEVELS:
        try:
            written = _Rewriting(keywords, report, levels).schema([Part(root)], 0)
        except TooLarge:
            report.keep_first(before)
            continue
        if written is None or written.get("type") != "object":
            raise Inexpressible("the root of its schema allows no object: give it properties that can be satisfied")
        written.setdefault("properties", {})
        return written
    raise Inexpressible("its schema has more than 512 KiB with its references written out: use fewer or smaller ones")


class _Rewriting:
    """Writes one schema, a level at a time."""

    def __init__(self, keywords: frozenset[str], report: LossReport, levels: int) -> None:
        self._known = keywords | _REPLACED
        self._report = report
        self._levels = levels
        self._parts = Parts(report)
        self._keywords = Keywords(report)

    def schema(
        self, parts: list[Part], level: int, *, nullable: bool = False, branch: bool = False
    ) -> dict[str, Any] | None:
        """Returns what all parts say as one schema, None where nothing can satisfy them.

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
                    written = self._choice(flat, part, keyword, branches, level, nullable)
                    return self._with_values(flat, written, branch)
                if branches is not None:
                    self._report.lose(part.schema, keyword, f"schemas deeper than {self._levels} levels were dropped")
        return self._with_values(flat, self._typed([*flat, *notes], level, nullable), branch)

    def _report_unknown(self, part: Part) -> None:
        for keyword, value in part.schema.items():
            if keyword not in self._known:
                self._report.lose(part.schema, keyword, f"the provider does not know it, {shown(value)} was dropped")

    # -- alternatives --------------------------------------------------------------------------------------------------

    def _branches(self, part: Part, keyword: str, notes: list[Part]) -> list[Part] | None:
        """Returns alternatives that have to be written, None where there are none.

        Those that only say which names have to be there are put into words: writing them would repeat the whole object.
        """
        listed = self._parts.schemas(part, keyword)
        if not listed:
            return None
        if True in listed:
            self._report.lose(part.schema, keyword, "one of its schemas allows anything, so it was dropped")
            return None
        branches = [one for one in listed if isinstance(one, Part)]
        names = [one.schema.get("required") for one in branches if _IN_WORDS.issuperset(one.schema)]
        sets = [", ".join(map(str, one)) for one in names if isinstance(one, list) and one]
        if branches and len(sets) == len(branches):
            text = f"Give {'exactly' if keyword == 'oneOf' else 'at least'} one of: {'; '.join(sets)}."
            self._report.lose(part.schema, keyword, f"which properties go together is said in the description: {text}")
            notes.append(Part({"description": text}))
            return None
        return branches

    def _choice(
        self, flat: list[Part], part: Part, keyword: str, branches: list[Part], level: int, nullable: bool
    ) -> dict[str, Any] | None:
        """Returns alternatives, each with everything that holds beside them."""
        base = [
            Part(one.schema, one.references, one.taken | _FOLLOWED | ({keyword} if one is part else set()))
            for one in flat
        ]
        allowed = _widened(types_of(base, self._report))
        kinds = [self._kinds(branch) for branch in branches]
        possible = [(branch, kind) for branch, kind in zip(branches, kinds, strict=True) if kind & allowed]
        with_null = nullable or any(kind == {"null"} for _, kind in possible)
        outs: list[dict[str, Any]] = []
        for branch, kind in possible:
            if kind == {"null"}:
                continue
            written = self.schema([*base, branch], level + 1, nullable=with_null, branch=True)
            for out in () if written is None else written.get("anyOf", [written]):
                if out not in outs:
                    outs.append(out)
        if len(outs) > 1 and keyword == "oneOf":
            self._report.lose(part.schema, keyword, "oneOf became anyOf: that only one may apply is not said")
        if not outs:
            return {"type": "null"} if with_null else None
        return outs[0] if len(outs) == 1 else {"anyOf": outs}

    def _kinds(self, branch: Part) -> frozenset[str]:
        flat = self._parts.flat([branch])
        return frozenset() if flat is None else _widened(types_of(flat, self._report))

    def _with_values(self, flat: list[Part], written: dict[str, Any] | None, branch: bool) -> dict[str, Any] | None:
        """Reports defaults and examples that no alternative could take. Branches are looked at as a whole."""
        outs = [] if written is None else written.get("anyOf", [written])
        for part in [] if branch else flat:
            for keyword in ("default", "example"):
                if keyword in part.schema and not any(keyword in out for out in outs):
                    why = f"{shown(part.schema[keyword])} is of another type or nested too deep, so it was dropped"
                    self._report.lose(part.schema, keyword, why)
        return written

    # -- types ---------------------------------------------------------------------------------------------------------

    def _typed(self, flat: list[Part], level: int, nullable: bool) -> dict[str, Any]:
        """Returns a schema of one type, or an alternative for each type."""
        allowed = types_of(flat, self._report)
        if allowed == ANY_TYPE:
            nullable = nullable or any(part.get("nullable") is True for part in flat)
            if kind := inferred(flat):
                allowed = frozenset((kind,))
            else:
                self._report.lose(flat[0].schema, "type", _ANYTHING)
                allowed -= {"null"}
        nullable = nullable or "null" in allowed
        kinds = [kind for kind in TYPES if kind in allowed and kind != "null"]
        if not kinds:
            return self._keywords.write("null", flat)
        inner = level + (len(kinds) > 1)
        outs = [self._of_kind(kind, flat, inner, nullable) for kind in kinds]
        return outs[0] if len(outs) == 1 else {"anyOf": outs}

    def _of_kind(self, kind: str, flat: list[Part], level: int, nullable: bool) -> dict[str, Any]:
        self._parts.spend(_CHARACTERS_EACH)
        written = self._keywords.write(kind, flat)
        if nullable:
            written["nullable"] = True
        for keyword in ("default", "example"):
            for part in flat:
                value = part.get(keyword)
                fits = of_type(value, kind) or (value is None and nullable)
                if keyword in part.schema and fits and _levels(value) <= _VALUE_LEVELS:
                    written.setdefault(keyword, value)
        if kind == "array":
            written["items"] = self._items(flat, level)
        elif kind == "object":
            self._object(flat, level, written)
        return written

    def _items(self, flat: list[Part], level: int) -> dict[str, Any]:
        """Returns the one schema for all members of an array."""
        listed: list[Part] = []
        together: list[Part] = []
        for part in flat:
            items = part.get("items")
            if isinstance(items, dict):
                together.append(Part(items, part.references))
            elif items is not None and not isinstance(items, bool | list):
                self._report.lose(part.schema, "items", f"{shown(items)} is no schema and was dropped")
            keyword = "items" if isinstance(items, list) else "prefixItems"
            members = [one for one in self._parts.schemas(part, keyword) if isinstance(one, Part)]
            if members:
                why = "which member has which schema is not said: all of them may have any"
                self._report.lose(part.schema, keyword, why)
            listed += members
        if level >= self._levels:
            if [part.schema for part in together] != [_TEXT] or listed:
                why = f"schemas deeper than {self._levels} levels were dropped"
                self._report.lose(flat[0].schema, "items", why)
            return dict(_TEXT)
        groups = [[part] for part in listed] + ([together] if together else [])
        outs: list[dict[str, Any]] = []
        for group in groups or [[self._any_member(flat[0])]]:
            written = self.schema(group, level + 1)
            for out in () if written is None else written.get("anyOf", [written]):
                if out not in outs:
                    outs.append(out)
        if not outs:
            self._report.lose(flat[0].schema, "items", "no member can satisfy it; it was replaced by texts")
            return dict(_TEXT)
        return outs[0] if len(outs) == 1 else {"anyOf": outs}

    def _any_member(self, part: Part) -> Part:
        """Returns what stands for any member. Arrays would need members of their own, without an end."""
        self._report.lose(part.schema, "items", "it says nothing about the members, which may be all but arrays")
        made = self._report.made({"type": ["string", "number", "boolean", "object"]}, self._report.path(part.schema))
        return Part(made)

    def _object(self, flat: list[Part], level: int, written: dict[str, Any]) -> None:
        """Adds the properties of an object, and which of them have to be there."""
        found: dict[str, list[Part]] = {}
        for part in flat:
            for name, inner in self._properties(part):
                found.setdefault(name, []).append(inner)
        properties: dict[str, Any] = {}
        if found and level >= self._levels:
            self._report.lose(flat[0].schema, "properties", f"schemas deeper than {self._levels} levels were dropped")
            found = {}
        for name, parts in found.items():
            inner_schema = self.schema(parts, level + 1)
            if inner_schema is None:
                self._report.lose(flat[0].schema, "properties", f"nothing can satisfy {shown(name)}, it was left out")
            else:
                properties[name] = inner_schema
        if properties:
            written["properties"] = properties
        for keyword in ("required", "propertyOrdering"):
            names: dict[str, None] = {}
            for part in flat:
                for name in self._keywords.checked(part, keyword) or ():
                    if name in properties:
                        names[name] = None
                    else:
                        self._report.lose(part.schema, keyword, f"{shown(name)} is none of the properties")
            if names:
                written[keyword] = list(names)

    def _properties(self, part: Part) -> list[tuple[str, Part]]:
        properties = part.get("properties")
        if properties is None:
            return []
        if not isinstance(properties, dict):
            self._report.lose(part.schema, "properties", f"{shown(properties)} is no object of schemas")
            return []
        found = []
        for name, inner in properties.items():
            if isinstance(inner, dict):
                found.append((name, Part(inner, part.references)))
            elif inner is True:
                path = f"{self._report.path(part.schema)}/properties/{escaped(name)}"
                found.append((name, Part(self._report.made({}, path), part.references)))
            else:
                self._report.lose(part.schema, "properties", f"{shown(name)}: {shown(inner)} allows nothing, left out")
        return found


def _widened(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


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
