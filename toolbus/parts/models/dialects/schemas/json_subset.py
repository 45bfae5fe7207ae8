"""Writes schemas for providers that read some keywords of JSON Schema; the others are stated in words.

That is Gemini's `parametersJsonSchema`. Its documentation lists the keywords under `GenerationConfig` for
`responseJsonSchema`, its counterpart: `oneOf` is read as `anyOf`, an enum holds texts and numbers, nothing stands
beside `$ref`, and a schema may refer to itself only from properties that are not required. Other keywords are ignored.

Servers that turn schemas into grammars refuse a request for other keywords (llguidance, outlines: `not`, `uniqueItems`,
`dependentRequired`, a `oneOf` whose alternatives overlap, an unknown format).
"""

from __future__ import annotations

import math
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import LossReport, excerpt
from toolbus.parts.models.dialects.schemas.merged import Merger, implied_type
from toolbus.parts.models.dialects.schemas.parts import Part, inferred
from toolbus.parts.models.dialects.schemas.words import Words
from toolbus.protocol.json_schema import of_type

_COPIED = frozenset(
    ("type", "title", "description", "minItems", "maxItems", "minimum", "maximum", "required", "propertyOrdering")
)
_IN_GRAMMARS = frozenset(("minLength", "maxLength", "pattern", "const", "enum"))
_GRAMMAR_FORMATS = frozenset(("date-time", "date", "time", "email", "uri", "uuid"))
_LISTS = frozenset(("anyOf", "oneOf", "prefixItems"))
_FORMATS = frozenset(("date-time", "date", "time", "duration", "enum", "int32", "int64", "float", "double"))
_ABOUT = frozenset(("title", "description"))
_OUTSIDE = _ABOUT | {"enum", "oneOf", "required"}  # keywords beside alternatives of one type each
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def json_subset(root: dict[str, Any], report: LossReport, *, grammar: bool = False) -> dict[str, Any]:
    """Returns the schema of a plain root in the keywords that Gemini reads.

    Args:
        grammar: whether to write those that engines of grammars have in common instead.
    """
    merger = Merger(report)
    merged = merger.root(root)
    writing = _Writing(report, Words(report, merger.definitions), grammar)
    schema = writing.schema(merged, report.tool)
    if merger.definitions:
        schema["$defs"] = {name: writing.schema(each, name) for name, each in merger.definitions.items()}
    return schema


class _Writing:
    def __init__(self, report: LossReport, words: Words, grammar: bool) -> None:
        self._report = report
        self._words = words
        self._grammar = grammar
        self._copied = _COPIED | _IN_GRAMMARS if grammar else _COPIED
        self._formats = _GRAMMAR_FORMATS if grammar else _FORMATS

    def schema(self, schema: Any, name: str = "") -> dict[str, Any]:
        """Returns a schema in the keywords that the provider reads."""
        if not isinstance(schema, dict):
            return {}
        if "$ref" in schema:
            for keyword in (keyword for keyword in schema if keyword != "$ref"):
                why = f"nothing may stand beside $ref, {excerpt(schema[keyword])} was dropped"
                self._report.lose(schema, keyword, why)
            return {"$ref": schema["$ref"]}
        written: dict[str, Any] = {}
        stated: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in self._copied:
                written.setdefault(keyword, value)
            elif keyword == "properties":
                written[keyword] = self._properties(schema, value)
            elif keyword in _LISTS:
                self._list(schema, keyword, value, written, stated)
            elif keyword == "items":
                self._items(schema, value, written)
            elif keyword == "additionalProperties" and "patternProperties" not in schema:
                written[keyword] = self.schema(value) if isinstance(value, dict) else value
            elif not self._value(schema, keyword, value, written):
                stated[keyword] = value
        if "required" in written:
            _split_required(written, stated, may_refer=self._grammar)
        if not written.keys() & {"type", "anyOf", "oneOf"} and (kind := implied_type(schema)):
            written["type"] = kind
        if stated:
            if "description" in schema:
                stated["description"] = schema["description"]
            self._report.generated(stated, self._report.path(schema))
            has_fields = frozenset(("properties",)) if "properties" in schema else frozenset()
            if text := self._words.describe(stated, has_fields | {"title"}, name):
                written["description"] = text
        return _of_one_type(written)

    def _properties(self, schema: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
        written = {}
        for name, value in properties.items():
            if value is False:
                self._report.lose(schema, "properties", f"{excerpt(name)}: false allows nothing, it was left out")
            else:
                written[name] = self.schema(value, name)
        return written

    def _list(
        self, schema: dict[str, Any], keyword: str, value: list[Any], written: dict[str, Any], stated: dict[str, Any]
    ) -> None:
        if keyword != "prefixItems" and all(
            isinstance(each, dict) and each.keys() - _ABOUT == {"required"} for each in value
        ):
            stated[keyword] = value  # which properties go together: a sentence says it
            return
        if keyword != "prefixItems":
            value = [each for each in value if each is not False] or [{}]
        if keyword == "oneOf" and self._grammar:
            if "anyOf" in schema:
                stated[keyword] = value
                return
            self._report.lose(schema, keyword, "it became anyOf: that only one of them may hold is lost")
            keyword = "anyOf"
        written[keyword] = [self.schema(each) for each in value]

    def _items(self, schema: dict[str, Any], value: Any, written: dict[str, Any]) -> None:
        if value is False and "prefixItems" in schema:
            written["maxItems"] = min(len(schema["prefixItems"]), schema.get("maxItems", math.inf))
        elif value is False:
            written["maxItems"] = 0
        else:
            written["items"] = self.schema(value)

    def _value(self, schema: dict[str, Any], keyword: str, value: Any, written: dict[str, Any]) -> bool:
        """Writes a keyword without schemas in another form. Tells whether nothing more needs to be stated."""
        if keyword == "const" and _is_plain(value):
            written["enum"] = [value]
        elif keyword == "enum" and all(map(_is_plain, value)):
            written["enum"] = value
        elif keyword == "enum" and "anyOf" not in schema and all(_is_plain(each) or each is None for each in value):
            rest = [each for each in value if each is not None]  # an enum may hold no null
            written["anyOf"] = [*([{"enum": rest}] if rest else []), {"type": "null"}]
        elif keyword == "format" and value in self._formats:
            written[keyword] = value
        elif keyword in _EXCLUSIVE:
            return _write_bound(schema, _EXCLUSIVE[keyword], value, written)
        else:
            return False
        return True


def _split_required(written: dict[str, Any], stated: dict[str, Any], *, may_refer: bool) -> None:
    """Moves required names that the provider refuses into words: those of no property, and those that refer back."""
    required, properties = written["required"], written.get("properties", {})
    writable = [name for name in required if name in properties and (may_refer or not _refers(properties[name]))]
    if len(writable) < len(required):
        written["required"] = writable
        stated["required"] = [name for name in required if name not in writable]


def _write_bound(schema: dict[str, Any], bound: str, value: float, written: dict[str, Any]) -> bool:
    """Writes a bound that is itself excluded as one that is not. Tells whether it says the same."""
    whole = schema.get("type") == "integer"
    if whole:
        value = math.floor(value) + 1 if bound == "minimum" else math.ceil(value) - 1
    nearest = max if bound == "minimum" else min
    written[bound] = nearest(value, schema.get(bound, value), written.get(bound, value))
    return whole


def _of_one_type(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with at most one type beside null: more of them become alternatives."""
    types = schema.get("type")
    if not isinstance(types, list) or len([kind for kind in types if kind != "null"]) < 2 or "anyOf" in schema:
        return schema
    outside = {key: value for key, value in schema.items() if key in _OUTSIDE}
    inside = {key: value for key, value in schema.items() if key not in outside and key != "type"}
    branches = []
    for kind in types:
        own = {
            key: value
            for key, value in inside.items()
            if (implied := inferred([Part({key: value})])) == kind or (implied == "number" and kind == "integer")
        }
        branches.append({"type": kind, **own})
    return {**outside, "anyOf": branches}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (of_type(value, "number") and not isinstance(value, bool))


def _refers(schema: Any) -> bool:
    """Tells whether a schema that is written refers to a definition, other than from its properties."""
    if not isinstance(schema, dict):
        return False
    inner = [schema.get("items"), schema.get("additionalProperties")]
    for keyword in _LISTS:
        inner += schema.get(keyword, ())
    return "$ref" in schema or any(map(_refers, inner))
