"""Finds schemas that OpenAI can enforce (`strict: true`), and rewrites schemas so that it can.

Strict mode takes a part of JSON Schema: every object lists all its properties as required and forbids others. A schema
that is written so qualifies unchanged. Where a program asks for it, optional properties become nullable instead, and a
null that only means "omitted" is removed again from the model's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import LossReport, excerpt
from toolbus.parts.models.dialects.schemas.words import rule_in_words

# https://platform.openai.com/docs/guides/structured-outputs: 5,000 properties, 10 levels, 1,000 values of enums and
# 120,000 characters. These are the earlier limits, which Azure still documents.
_MAX_PROPERTIES = 100
_MAX_LEVELS = 5
_MAX_VALUES = 500
_MAX_CHARACTERS = 15_000
_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"))
_KEYWORDS = frozenset(
    (
        *("type", "title", "description", "properties", "required", "additionalProperties", "items", "enum", "const"),
        *("anyOf", "$ref", "$defs", "definitions", "pattern", "format", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
# Not accepted by strict mode; the description states them instead.
_STATED = ("default", "minLength", "maxLength")
_NULL = {"type": "null"}
_DEFINITIONS = ("$defs", "definitions")
_MAX_REFERENCES = 8  # that are followed for one question


@dataclass(frozen=True, slots=True)
class StrictSchema:
    """A schema that strict mode takes.

    Attributes:
        schema: as a request declares it.
        added_nulls: names of the properties that became nullable, by the identity of their object in `schema`.
    """

    schema: dict[str, Any]
    added_nulls: dict[int, frozenset[str]] = field(default_factory=dict)

    def without_added_nulls(self, arguments: Any) -> Any:
        """Returns arguments without the nulls of omitted properties; the given ones are not changed."""
        return self._value(arguments, [self.schema]) if self.added_nulls else arguments

    def _value(self, value: Any, schemas: list[dict[str, Any]]) -> Any:
        if isinstance(value, list):
            items = [each["items"] for one in schemas for each in self._choices(one) if "items" in each]
            return [self._value(each, items) for each in value] if items else value
        if not isinstance(value, dict):
            return value
        objects = [each for one in schemas for each in self._choices(one) if "properties" in each]
        if len(objects) > 1:  # the model writes all properties, so these tell which alternative it chose
            objects = [each for each in objects if each["properties"].keys() == value.keys()]
        return {
            name: self._value(each, [one["properties"][name] for one in objects if name in one["properties"]])
            for name, each in value.items()
            if each is not None or not objects or not all(name in self.added_nulls.get(id(one), ()) for one in objects)
        }

    def _choices(self, schema: dict[str, Any], level: int = 0) -> Iterator[dict[str, Any]]:
        """Yields the schemas without alternatives and references of which one describes a value."""
        for one in _resolved(schema, self.schema):
            if "anyOf" not in one:
                yield one
            elif level < _MAX_REFERENCES:
                for branch in one["anyOf"]:
                    yield from self._choices(branch, level + 1)


def strict_schema(schema: dict[str, Any]) -> StrictSchema | None:
    """Returns a schema that strict mode accepts unchanged; None for any other one.

    Args:
        schema: as the sanitizer wrote it.
    """
    if schema.get("additionalProperties") is not False:  # the most frequent reason
        return None
    schema = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
    schema.setdefault("required", [])  # "'required' is required to be supplied", also without properties
    return StrictSchema(schema) if _qualifies(schema) else None


def rewritten_schema(schema: dict[str, Any], report: LossReport) -> StrictSchema | None:
    """Returns a schema rewritten for strict mode; None if no such schema describes the same calls.

    Optional properties become nullable, and objects that say nothing of other properties forbid them.

    Args:
        report: of that schema; gets the losses of the rewriting.
    """
    before = len(report.losses)
    rewriter = _Rewriter(schema, report)
    rewritten = rewriter.schema(schema)
    rewritten.pop("$schema", None)
    rewritten.setdefault("required", [])
    if rewriter.possible and _qualifies(rewritten):
        return StrictSchema(rewritten, rewriter.added)
    report.keep_first(before)
    return None


class _Rewriter:
    """Writes the optional properties of a schema as nullable ones."""

    def __init__(self, root: dict[str, Any], report: LossReport) -> None:
        self._root = root
        self._report = report
        self.added: dict[int, frozenset[str]] = {}
        self.possible = True  # until something would mean other calls

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        written = {keyword: value for keyword, value in schema.items() if keyword not in _STATED}
        notes = [rule_in_words(key, schema[key]) for key in _STATED if key in schema]
        for keyword in (key for key in _STATED if key in schema):
            why = f"strict mode does not take it, so the description states {excerpt(schema[keyword])}"
            self._report.lose(schema, keyword, why)
        if notes:
            written["description"] = "\n".join([*filter(None, [schema.get("description")]), *notes])
        for keyword in _DEFINITIONS:
            if isinstance(definitions := schema.get(keyword), dict):
                written[keyword] = {name: self._inner(each) for name, each in definitions.items()}
        if isinstance(schema.get("items"), dict):
            written["items"] = self.schema(schema["items"])
        if isinstance(schema.get("anyOf"), list):
            written["anyOf"] = [self._inner(each) for each in schema["anyOf"]]
        if isinstance(schema.get("properties"), dict):
            self._object(schema, written)
        return written

    def _inner(self, value: Any) -> Any:
        return self.schema(value) if isinstance(value, dict) else value

    def _object(self, schema: dict[str, Any], written: dict[str, Any]) -> None:
        required = schema.get("required", ())
        if any(name not in schema["properties"] for name in required):
            self.possible = False
        added = set()
        properties = {}
        for name, value in schema["properties"].items():
            inner = self._inner(value)
            if name not in required and isinstance(value, dict):
                if not _allows_null(value, self._root):
                    inner = _nullable(inner)
                    added.add(name)
                elif value.get("default") is not None:
                    self.possible = False  # null and nothing are two different calls
            properties[name] = inner
        written["properties"] = properties
        written["required"] = list(properties)
        written.setdefault("additionalProperties", False)
        if added:
            self.added[id(written)] = frozenset(added)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema that also takes null, which one of its keywords may take already."""
    if "const" in schema or "properties" in schema or not schema.keys() & {"type", "anyOf"}:
        return {"anyOf": [schema, _NULL]}
    nullable = dict(schema)
    if "anyOf" in schema:
        nullable["anyOf"] = _with(schema["anyOf"], _NULL)
    if "type" in schema:
        nullable["type"] = _with(schema["type"] if isinstance(schema["type"], list) else [schema["type"]], "null")
    if "enum" in schema:
        nullable["enum"] = _with(schema["enum"], None)
    return nullable


def _with(values: list[Any], value: Any) -> list[Any]:
    return values if value in values else [*values, value]


def _allows_null(schema: dict[str, Any], root: dict[str, Any], level: int = 0) -> bool:
    if level > _MAX_REFERENCES:
        return False
    for one in _resolved(schema, root):
        types = one.get("type", "null")
        branches = [each for each in one.get("anyOf", ()) if isinstance(each, dict)]
        if "anyOf" in one and not any(_allows_null(each, root, level + 1) for each in branches):
            return False
        if "null" not in ([types] if isinstance(types, str) else types) or None not in one.get("enum", [None]):
            return False
        if one.get("const") is not None:
            return False
    return True


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schema at the end of a chain of references, if there is one."""
    for _ in range(_MAX_REFERENCES):
        if "$ref" not in schema:
            yield schema
            return
        kind, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
        target = root.get(kind, {}).get(name) if kind in _DEFINITIONS else None
        if not isinstance(target, dict):
            return
        schema = target


@dataclass(slots=True)
class _Measures:
    """What strict mode limits, counted over one schema."""

    properties: int = 0
    values: int = 0
    characters: int = 0


def _qualifies(root: dict[str, Any]) -> bool:
    measures = _Measures()
    return (
        _fits(root, root, 1, measures)
        and measures.properties <= _MAX_PROPERTIES
        and measures.values <= _MAX_VALUES
        and measures.characters <= _MAX_CHARACTERS
    )


def _fits(schema: Any, root: dict[str, Any], level: int, measures: _Measures) -> bool:
    """Tells whether strict mode takes a schema.

    Args:
        level: of objects in objects.
    """
    if not isinstance(schema, dict) or not schema.keys() <= _KEYWORDS or level > _MAX_LEVELS:
        return False
    if "$ref" in schema:
        return len(schema) == 1 and any(True for _ in _resolved(schema, root))
    for keyword in _DEFINITIONS:
        measures.characters += sum(map(len, schema.get(keyword, ())))
        if not all(_fits(each, root, level, measures) for each in schema.get(keyword, {}).values()):
            return False
    if "anyOf" in schema:
        return all(_fits(each, root, level, measures) for each in schema["anyOf"])
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not types or schema.get("format", "date") not in _FORMATS:
        return False
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    measures.values += len(values)
    measures.characters += sum(len(value) for value in values if isinstance(value, str))
    if any(isinstance(value, dict | list) for value in values):
        return False
    if "array" in types and not _fits(schema.get("items"), root, level, measures):
        return False
    return "object" not in types or _fits_object(schema, root, level, measures)


def _fits_object(schema: dict[str, Any], root: dict[str, Any], level: int, measures: _Measures) -> bool:
    properties = schema.get("properties", {})
    measures.properties += len(properties)
    measures.characters += sum(map(len, properties))
    return (
        schema.get("additionalProperties") is False
        and set(schema.get("required", ())) == properties.keys()
        and all(_fits(each, root, level + 1, measures) for each in properties.values())
    )
