"""Merges all schemas that apply to a value into one: references resolved, `allOf` merged, malformed keywords left out.

The result is JSON Schema of 2020-12 without `allOf`, identifiers and OpenAPI's `nullable`. A reference that leads back
to itself stays, alone, as `$ref` to one of `Merger.definitions`; and so do all references where too much would be
repeated.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import LossReport, excerpt
from toolbus.parts.models.dialects.schemas.parts import Part, Parts, References, inferred
from toolbus.parts.models.dialects.schemas.words import Words
from toolbus.protocol.json_schema import CHECKS, LISTS, MAPS, SINGLE, TYPES, is_number, of_type

_MAX_EXPANDED = 1000  # schemas that are written below a reference
_MAX_CHARACTERS = 64 * 1024  # of merged schemas, after which no reference is followed
_MAX_LEVELS = 40  # below which no reference is followed
_HOLDERS = MAPS | SINGLE | LISTS
_LEFT_OUT = frozenset(
    (
        *("allOf", "$defs", "definitions", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("additionalItems", "nullable"),  # read with `items` and `type`
    )
)
_PLAIN = {keyword: check for keyword, check in CHECKS.items() if keyword not in _LEFT_OUT and keyword != "$ref"}
_FLAGS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_SHARED = frozenset(("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"))
_NEAREST = frozenset(("title", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def _names(first: list[str], second: list[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"), min),
    **dict.fromkeys(("required", "propertyOrdering"), _names),
    "description": lambda first, second: first if second in first else f"{first}\n{second}",
    "enum": lambda first, second: [value for value in first if value in second] or first,
    "uniqueItems": lambda first, second: first or second,
}
"""Keyword → its value if two parts have one."""


class Merger:
    """Merges one tool's schema.

    Attributes:
        definitions: the schemas of the remaining references, by name.
    """

    def __init__(self, report: LossReport) -> None:
        self.definitions: dict[str, Any] = {}
        self._report = report
        self._parts = _Parts(report)

    def root(self, root: dict[str, Any]) -> dict[str, Any]:
        """Returns the merged root, and fills the definitions."""
        merged = self._merge([Part(root)])
        assert isinstance(merged, dict)  # a plain root has no part that forbids it
        while self._parts.pending:
            name, target, reference = self._parts.pending.pop()
            self.definitions[name] = self._merge([Part(target, References().and_then(reference))])
        return merged

    def _merge(self, parts: list[Part]) -> dict[str, Any] | bool:
        """Returns all parts as one schema; False if no value can satisfy them."""
        flat: list[Part] | None = parts
        if len(parts) > 1 or "$ref" in parts[0].schema or "allOf" in parts[0].schema:
            flat = self._parts.flat(parts)
        if flat is None:
            return False
        self._parts.level += 1
        self._parts.expanded += bool(flat[0].references.newest)
        merged: dict[str, Any] = {}
        inner: dict[str, Any] = {}
        nullable, holders = False, 0
        for part in flat:
            for keyword, value in part.schema.items():
                check = _PLAIN.get(keyword)
                if check is not None and keyword not in merged and check(value):
                    merged[keyword] = value  # nearly always
                elif keyword in _LEFT_OUT:
                    continue
                elif keyword in _HOLDERS:
                    merged.setdefault(keyword)  # its place
                    holders += 1
                    self._collect(part, keyword, value, inner)
                elif keyword != "$ref":
                    self._value(part, keyword, value, merged)
                elif keyword in part.done:
                    merged[keyword] = value
            if "nullable" in part.schema and part.schema["nullable"] is True:
                nullable = True
        if nullable:
            _allow_null(merged)
        for keyword, children in inner.items():
            merged[keyword] = self._written(keyword, children)
        missing = _HOLDERS & (merged.keys() - inner.keys())  # no schema was found in them
        if holders > len(inner) or missing - {"items"}:  # which two keywords may have become
            for keyword in missing:
                del merged[keyword]
        self._parts.level -= 1
        return self._report.generated(merged, self._report.path(flat[0].schema))

    # -- keywords without schemas --------------------------------------------------------------------------------------

    def _value(self, part: Part, keyword: str, value: Any, merged: dict[str, Any]) -> None:
        """Adds a keyword of a part."""
        if keyword in _FLAGS and isinstance(value, bool):  # of draft 4
            value = part.schema.get(_FLAGS[keyword]) if value else None
            if not is_number(value):
                return
        check = CHECKS.get(keyword)
        if check is not None and not check(value):
            self._report.drop(part.schema, keyword, value, f"a valid value of {keyword}")
        elif keyword not in merged:
            merged[keyword] = value
        elif keyword == "type":
            if common := _common_types(merged[keyword], value):
                merged[keyword] = common[0] if len(common) == 1 else common
            else:
                self._report.lose(part.schema, keyword, "it contradicts what else applies here, so it was dropped")
        elif keyword in _COMBINED:
            merged[keyword] = _COMBINED[keyword](merged[keyword], value)
        elif keyword not in _NEAREST and merged[keyword] != value:
            self._report.lose(part.schema, keyword, f"only one is possible, {excerpt(value)} was dropped")

    # -- schemas inside ------------------------------------------------------------------------------------------------

    def _collect(self, part: Part, keyword: str, value: Any, inner: dict[str, Any]) -> None:
        """Collects the schemas in a keyword of a part: children are merged with those of other parts later."""
        if keyword == "items" and isinstance(value, list):
            # Drafts up to 7 list the first items here, and `additionalItems` applies to the rest.
            self._collect(part, "prefixItems", value, inner)
            rest = part.schema.get("additionalItems", {})
            if "additionalItems" in part.schema and self._is_schema(part, "additionalItems", rest):
                inner.setdefault("items", []).append((rest, part))
        elif keyword in MAPS:
            if self._is(part, keyword, value, isinstance(value, dict), "an object of schemas"):
                named = inner.setdefault(keyword, {})
                for name, child in value.items():
                    if self._is_schema(part, keyword, child):
                        named.setdefault(name, []).append((child, part))
        elif keyword in inner and keyword not in _SHARED:
            self._report.lose(part.schema, keyword, f"only one is possible, {excerpt(value)} was dropped")
        elif keyword in LISTS:
            if not self._is(part, keyword, value, isinstance(value, list) and bool(value), "a list of schemas"):
                return
            children = [[(child, part)] for child in value if self._is_schema(part, keyword, child)]
            if children:
                inner[keyword] = children
        elif self._is_schema(part, keyword, value):
            inner.setdefault(keyword, []).append((value, part))

    def _is_schema(self, part: Part, keyword: str, value: Any) -> bool:
        return self._is(part, keyword, value, isinstance(value, dict | bool), "a schema")

    def _is(self, part: Part, keyword: str, value: Any, valid: bool, what: str) -> bool:
        if not valid:
            self._report.drop(part.schema, keyword, value, what)
        return valid

    def _written(self, keyword: str, children: Any) -> Any:
        """Returns the value of a keyword that holds schemas."""
        if keyword in MAPS:
            return {name: self._child(each) for name, each in children.items()}
        if keyword in LISTS:
            return [self._child(each) for each in children]
        return self._child(children)

    def _child(self, children: list[tuple[Any, Part]]) -> dict[str, Any] | bool:
        """Returns the combination of all schemas that apply to one value."""
        if len(children) == 1:
            value, owner = children[0]
            return self._merge([Part(value, owner.references)]) if isinstance(value, dict) else bool(value)
        parts = [Part(value, owner.references) for value, owner in children if isinstance(value, dict)]
        if any(value is False for value, _ in children):
            return False
        return self._merge(parts) if parts else True


class _Parts(Parts):
    """Follows references, but not those that lead back to themselves, and none when too much has been written.

    Attributes:
        pending: the definitions that are not written yet: name, schema, reference.
        level: how deep the current schema is nested.
        expanded: how many schemas have been written below a reference.
        characters: how many these and other merged schemas have.
    """

    def __init__(self, report: LossReport) -> None:
        super().__init__(report)
        self.pending: list[tuple[str, dict[str, Any], str]] = []
        self.level = 0
        self.expanded = 0
        self.characters = 0
        self._names: dict[int, str] = {}  # of definitions, by the identity of their schema

    def ends(self, reference: str, part: Part) -> bool:
        is_enough = self.expanded > _MAX_EXPANDED or self.characters > _MAX_CHARACTERS
        return is_enough or self.level > _MAX_LEVELS or super().ends(reference, part)

    def spend(self, characters: int) -> None:
        self.characters += characters  # nothing is too large: references stay from here on

    def cut(self, reference: str, target: dict[str, Any], part: Part) -> Part:
        """Returns a reference to a definition, which is written later."""
        name = self._names.get(id(target))
        if name is None:
            own = _NOT_IN_A_NAME.sub("_", reference.rsplit("/", 1)[-1].lstrip("#")) or "root"
            taken = set(self._names.values())
            others = (f"{own}_{number}" for number in itertools.count(2))
            name = next(each for each in itertools.chain((own,), others) if each not in taken)
            self._names[id(target)] = name
            self.pending.append((name, target, reference))
        stub = self._report.generated({"$ref": f"#/$defs/{name}"}, self._report.path(part.schema))
        return Part(stub, part.references, frozenset(("$ref",)))


def _common_types(first: str | list[str], second: str | list[str]) -> list[str]:
    """Returns the types that are allowed by both."""
    allowed = [{first} if isinstance(first, str) else set(first), {second} if isinstance(second, str) else set(second)]
    for one, other in (allowed, allowed[::-1]):
        if "number" in one and "integer" in other and "number" not in other:
            one.add("integer")
    return [kind for kind in TYPES if kind in allowed[0] & allowed[1]]


def _allow_null(merged: dict[str, Any]) -> None:
    """Adds null to a schema as OpenAPI's ``nullable`` means it."""
    types = merged.get("type")
    if types is not None and "null" not in types:
        merged["type"] = [*([types] if isinstance(types, str) else types), "null"]
    if "enum" in merged and None not in merged["enum"]:
        merged["enum"] = [*merged["enum"], None]


def implied_type(schema: dict[str, Any]) -> Any:
    """Returns the types that a schema without types implies by its keywords or values; may be empty."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return types_of_values(values) if values else inferred([Part(schema)])


def types_of_values(values: Any) -> Any:
    """Returns the types of values: one, or a list."""
    kinds = [kind for kind in TYPES if any(of_type(value, kind) for value in values)]
    if "number" in kinds and all(of_type(value, "integer") for value in values if of_type(value, "number")):
        kinds.remove("number")
    elif "integer" in kinds:
        kinds.remove("integer")
    return kinds[0] if len(kinds) == 1 else kinds


# Writes schemas for providers that keep few fields of a property, and drop all others without an error.
#
# That is Ollama: of a property its official client sends ``type``, ``items``, ``description`` and ``enum`` (`ollama`
# 0.6, `Tool.Function.Parameters.Property`), and of the parameters ``type``, ``properties``, ``required``, ``items``
# and ``$defs``. Its server also keeps ``anyOf`` and ``properties`` of a property (`api.ToolProperty`), which do not
# reach it through that client. Both pass on ``items`` and ``$defs`` unchanged, so these have whole schemas. All else
# is stated in words.

_OF_ROOT = frozenset(("type", "properties", "required"))
_OF_PROPERTY = frozenset(("type", "items", "enum"))
_OF_VALUES = frozenset(("const", "enum", "type"))  # of an alternative that is nothing but a list of values
_ABOUT = frozenset(("title", "description", "default", "examples", "example", "deprecated"))


def flat_properties(root: dict[str, Any], report: LossReport) -> dict[str, Any]:
    """Returns the schema of a plain root, whose properties have few fields each.

    What concerns the root itself stands in its ``description``, for the description of the tool: no client sends it.
    """
    merger = Merger(report)
    merged = merger.root(root)
    words = Words(report, merger.definitions)
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for name, value in merged["properties"].items():
        if value is False:
            report.lose(merged, "properties", f"{excerpt(name)}: false allows nothing, it was left out")
        else:
            schema["properties"][name] = _property(name, {} if value is True else value, words, report)
    if required := merged.get("required"):
        schema["required"] = required
    if merger.definitions and any(_refers(each.get("items")) for each in schema["properties"].values()):
        schema["$defs"] = merger.definitions
    if description := words.describe(merged, _OF_ROOT, report.tool):
        schema["description"] = description
    return schema


def _refers(value: Any) -> bool:
    """Tells whether a schema refers to a definition, at any depth."""
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, dict) and ("$ref" in value or any(map(_refers, value.values())))


def _property(name: str, schema: dict[str, Any], words: Words, report: LossReport) -> dict[str, Any]:
    if "anyOf" in schema or "oneOf" in schema:
        schema = _chosen(schema, report)
    written: dict[str, Any] = {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = schema.get("type") or implied_type(schema)
    if types:
        written["type"] = types
    if "items" in schema and "prefixItems" not in schema:
        written["items"] = schema["items"]
    if values is not None:
        written["enum"] = values
    known = _OF_PROPERTY | {"const"} if "const" in schema else _OF_PROPERTY
    if "prefixItems" in schema:
        known -= {"items"}
    if description := words.describe(schema, known, name):
        written["description"] = description
    return written


def _chosen(schema: dict[str, Any], report: LossReport) -> dict[str, Any]:
    """Returns a schema whose alternatives are written with the available fields, as far as possible."""
    keyword = "anyOf" if "anyOf" in schema else "oneOf"
    base = {key: value for key, value in schema.items() if key != keyword}
    branches = [{} if branch is True else branch for branch in schema[keyword] if branch is not False]
    others = [branch for branch in branches if branch.get("type") != "null"]
    nullable = len(others) < len(branches)
    if len(others) == 1 and base.keys() & others[0].keys() <= _ABOUT:
        base = _united(others[0], base)
    elif others and not base.keys() - _ABOUT and all(_values(each) and each.keys() <= _OF_VALUES for each in others):
        base["enum"] = list(dict.fromkeys(value for branch in others for value in _values(branch)))
        base["type"] = types_of_values(base["enum"])
    else:
        types = {kind for branch in others for kind in _types_of(branch)}
        if "type" not in base and all(map(_types_of, others)):
            base["type"] = [kind for kind in TYPES if kind in types]
        arrays = [branch for branch in others if "array" in (_types_of(branch) or TYPES)]
        if len(arrays) == 1 and "prefixItems" not in arrays[0] and "items" in arrays[0]:
            base.setdefault("items", arrays[0]["items"])
        if any(branch.keys() - {"type"} for branch in others) or "type" not in base:
            base[keyword] = others if nullable and "type" in base and len(others) > 1 else schema[keyword]
    if nullable:
        _allow_null_here(base)
    if isinstance(base.get("type"), list) and len(base["type"]) == 1:
        base["type"] = base["type"][0]
    return report.generated(base, report.path(schema))


def _allow_null_here(base: dict[str, Any]) -> None:
    if "const" in base:
        base["enum"] = [base.pop("const")]
    if "type" in base and "null" not in base["type"]:
        base["type"] = [*_listed(base["type"]), "null"]
    if None not in base.get("enum", [None]):
        base["enum"] = [*base["enum"], None]


def _united(branch: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns the only alternative together with the keywords beside it, which take precedence."""
    united = {**branch, **base}
    texts = dict.fromkeys(each["description"] for each in (base, branch) if "description" in each)
    if texts:
        united["description"] = "\n".join(texts)
    return united


def _types_of(branch: dict[str, Any]) -> list[str]:
    """Returns the types of an alternative; may be empty."""
    return _listed(branch.get("type") or types_of_values(_values(branch)))


def _values(branch: dict[str, Any]) -> list[Any]:
    return [branch["const"]] if "const" in branch else branch.get("enum", [])


def _listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else types
