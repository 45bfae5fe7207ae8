"""Tells what a provider would refuse a whole request for: rules that its documents or its error texts state.

Each rule is a function of a tool as it left the process; `refusals` runs those of a dialect. What only changes how well
a model calls a tool is no matter here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema_rs

from tests.support.wire_capture import Sent, SentTool

Json = dict[str, Any]
Rule = Callable[[SentTool], Iterator[str]]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "any_of")
_SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else", "contentSchema"),
)
TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
# OpenAI, "Structured outputs": what strict schemas may use.
STRICT_KEYWORDS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs"),
        *("description", "title", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "minItems", "maxItems", "definitions"),
    )
)
STRICT_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"))
# What llguidance 1.9, outlines-core 0.2 and lm-format-enforcer 0.11 compile.
GRAMMAR_KEYWORDS = STRICT_KEYWORDS - {"multipleOf", "exclusiveMinimum", "exclusiveMaximum"} | {
    *("minLength", "maxLength", "prefixItems", "propertyOrdering")
}
GRAMMAR_FORMATS = frozenset(("date-time", "time", "date", "email", "uri", "uuid"))
STRICT_LEVELS, STRICT_PROPERTIES, STRICT_VALUES = 10, 5000, 1000
# google.genai.types.Schema: the fields of a schema in a function declaration, as JSON of both spellings.
GEMINI_FIELDS = frozenset(
    (
        *("type", "format", "title", "description", "nullable", "enum", "default", "example", "anyof", "properties"),
        *("required", "propertyordering", "minproperties", "maxproperties", "items", "minitems", "maxitems"),
        *("minlength", "maxlength", "pattern", "minimum", "maximum"),
    )
)
# Gemini API, GenerationConfig.responseJsonSchema, of which `parametersJsonSchema` is the counterpart.
GEMINI_JSON_KEYWORDS = frozenset(
    (
        *("$id", "$defs", "$ref", "$anchor", "type", "format", "title", "description", "enum", "items", "prefixItems"),
        *("minItems", "maxItems", "minimum", "maximum", "anyOf", "oneOf", "properties", "additionalProperties"),
        *("required", "propertyOrdering"),
    )
)
GEMINI_FORMATS = {"string": {"enum", "date-time"}, "integer": {"int32", "int64"}, "number": {"float", "double"}}


def schemas(schema: Any, place: str = "", level: int = 1) -> Iterator[tuple[str, Json, int]]:
    """Yields a schema and all inside it, with their places and how deep in arguments they are."""
    if not isinstance(schema, dict):
        return
    yield place, schema, level
    for keyword in _MAPS:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            for name, each in inner.items():
                yield from schemas(each, f"{place}/{keyword}/{name}", level + (keyword == "properties"))
    for keyword in _LISTS:
        for index, each in enumerate(schema.get(keyword) or ()):
            yield from schemas(each, f"{place}/{keyword}/{index}", level)
    for keyword in _SINGLE:
        yield from schemas(schema.get(keyword), f"{place}/{keyword}", level + (keyword == "items"))


def refusals(dialect: str, sent: Sent) -> list[str]:
    """Returns what a provider would refuse in the tools that left the process, with the reason."""
    found = [f"{tool.name}: {why}" for tool in sent.tools for rule in RULES[dialect] for why in rule(tool)]
    names = [tool.name for tool in sent.tools]
    return found + [f"{name}: another tool has the same name" for name in {*names} if names.count(name) > 1]


def _named(pattern: str) -> Rule:
    def rule(tool: SentTool) -> Iterator[str]:
        if not re.fullmatch(pattern, tool.name, re.ASCII):
            yield f"its name does not match {pattern}"

    return rule


def _object_root(tool: SentTool) -> Iterator[str]:
    if tool.schema is not None and tool.schema.get("type") != "object":
        yield f"the root has the type {tool.schema.get('type')!r}, not object"


def _plain_root(tool: SentTool) -> Iterator[str]:
    """Both OpenAI and Anthropic name these in their errors; OpenAI also enum and not."""
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "not", "$ref"):
        if keyword in (tool.schema or {}):
            yield f"the root has {keyword}"


def _valid(tool: SentTool) -> Iterator[str]:
    """A schema has to be one of draft 2020-12, whatever it says of itself."""
    schema = {key: value for key, value in (tool.schema or {}).items() if key != "$schema"}
    try:
        jsonschema_rs.Draft202012Validator(schema)
    except ValueError as error:
        yield f"no schema of draft 2020-12: {str(error).splitlines()[0]}"
    named = str((tool.schema or {}).get("$schema", "2020-12"))
    if "2020-12" not in named and "draft-07" not in named:
        yield f"it says that it is a schema of {named}"


def _array_items(tool: SentTool) -> Iterator[str]:
    """OpenAI: «array schema missing items»."""
    for place, schema, _ in schemas(tool.schema):
        if _has_type(schema, "array") and "items" not in schema:
            yield f"{place}: an array without items"


def _object_properties(tool: SentTool) -> Iterator[str]:
    """OpenAI: «object schema missing properties», of the root. Elsewhere grammars then admit nothing but `{}`."""
    for place, schema, _ in schemas(tool.schema):
        if place == "" and _has_type(schema, "object") and "properties" not in schema:
            yield f"{place}: an object without properties"
        if place and schema.get("properties") == {} and schema.get("additionalProperties") is not False:
            yield f"{place}: an open object whose properties are empty"


def _portable_patterns(tool: SentTool) -> Iterator[str]:
    """What llama.cpp turns into a grammar must be anchored, without groups of other kinds and classes by name."""
    for place, schema, _ in schemas(tool.schema):
        patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        patterns += [*schema.get("patternProperties", ())]
        for pattern in patterns:
            if re.search(r"\(\?(?!:)|\\[pP]\{|\\[bBkAZz]|\\[1-9]|[*+?}]\+", pattern):
                yield f"{place}: the pattern {pattern} is not portable"
        if patterns and "pattern" in schema and not (patterns[0].startswith("^") and patterns[0].endswith("$")):
            yield f"{place}: the pattern {patterns[0]} is not anchored at both ends"


def _strict(tool: SentTool) -> Iterator[str]:
    """OpenAI's structured outputs, where a declaration says that it is strict."""
    function = tool.declaration.get("function", tool.declaration)
    if function.get("strict") is not True:
        return
    properties = values = 0
    for place, schema, level in schemas(tool.schema):
        if unknown := schema.keys() - STRICT_KEYWORDS:
            yield f"{place}: strict, with {', '.join(sorted(unknown))}"
        if _has_type(schema, "object"):
            if schema.get("additionalProperties") is not False:
                yield f"{place}: strict, and an object that is not closed"
            if set(schema.get("required") or ()) != set(schema.get("properties") or ()):
                yield f"{place}: strict, and not all properties are required"
        if not schema.keys() & {"type", "anyOf", "$ref", "enum", "const"}:
            yield f"{place}: strict, and anything is allowed"
        if schema.get("format", "date") not in STRICT_FORMATS:
            yield f"{place}: strict, with the format {schema['format']}"
        if "$ref" in schema and schema.keys() - {"$ref", "description", "title"}:
            yield f"{place}: strict, with keywords beside a reference"
        if level > STRICT_LEVELS:
            yield f"{place}: strict, and deeper than {STRICT_LEVELS} levels"
        properties += len(schema.get("properties") or ())
        values += len(schema.get("enum") or ())
    if properties > STRICT_PROPERTIES or values > STRICT_VALUES:
        yield f"strict, with {properties} properties and {values} values"


def _anthropic_names(tool: SentTool) -> Iterator[str]:
    for place, schema, _ in schemas(tool.schema):
        for name in schema.get("properties") or ():
            if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name, re.ASCII):
                yield f"{place}: the property {name!r} breaks the rule for names"


def _references(tool: SentTool) -> Iterator[str]:
    """Every reference leads somewhere in the schema that was sent."""
    targets = {f"#{place}" for place, _, _ in schemas(tool.schema)}
    anchors = {f"#{schema['$anchor']}" for _, schema, _ in schemas(tool.schema) if "$anchor" in schema}
    for place, schema, _ in schemas(tool.schema):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in targets | anchors | {"#"}:
            yield f"{place}: {reference} leads nowhere"


def _gemini(tool: SentTool) -> Iterator[str]:
    if tool.declaration.keys() & {"parametersJsonSchema", "parameters_json_schema"}:
        yield from _gemini_json(tool)
    elif tool.schema is not None:
        yield from _gemini_fields(tool)


def _gemini_fields(tool: SentTool) -> Iterator[str]:
    for place, schema, _ in schemas(tool.schema):
        fields = {key.replace("_", "").lower() for key in schema}
        if unknown := fields - GEMINI_FIELDS:
            yield f"{place}: Gemini does not know {', '.join(sorted(unknown))}"
        kind = str(schema.get("type", "")).lower()
        if "anyof" in fields and fields - {"anyof", "nullable", "description", "title", "default"}:
            yield f"{place}: something beside anyOf"
        if "anyof" not in fields and kind not in TYPES - {"null"}:
            yield f"{place}: the type {schema.get('type')!r}"
        if kind == "array" and "items" not in schema:
            yield f"{place}: an array without items"
        if not all(isinstance(value, str) and value for value in schema.get("enum") or ()):
            yield f"{place}: a value of an enum that is not text, or empty"
        if "enum" in schema and kind != "string":
            yield f"{place}: an enum of type {kind}"
        if "format" in schema and schema["format"] not in GEMINI_FORMATS.get(kind, ()):
            yield f"{place}: the format {schema['format']} of a {kind}"
        if missing := set(schema.get("required") or ()) - set(schema.get("properties") or ()):
            yield f"{place}: required, and no property: {', '.join(sorted(missing))}"
        if kind == "object" and place == "" and not schema.get("properties"):
            yield "an object without properties"


def _gemini_json(tool: SentTool) -> Iterator[str]:
    for place, schema, _ in schemas(tool.schema):
        if unknown := schema.keys() - GEMINI_JSON_KEYWORDS:
            yield f"{place}: Gemini's JSON Schema does not know {', '.join(sorted(unknown))}"
        if "$ref" in schema and any(not key.startswith("$") for key in schema):
            yield f"{place}: keywords beside a reference"
        if any(
            not isinstance(value, str | int | float) or isinstance(value, bool) for value in schema.get("enum") or ()
        ):
            yield f"{place}: a value of an enum that is neither text nor number"


def _ollama(tool: SentTool) -> Iterator[str]:
    """The server reads properties into fields: a list or a text as type, texts as descriptions, no boolean schemas."""
    root = tool.schema or {}
    if root.get("type") != "object":
        yield f"the root has the type {root.get('type')!r}"
    for name, each in (root.get("properties") or {}).items():
        if not isinstance(each, dict):
            yield f"{name}: {each!r} is not an object"
        elif not isinstance(each.get("description", ""), str) or not isinstance(each.get("type", ""), str | list):
            yield f"{name}: a description or type that is not text"
    if not all(isinstance(name, str) for name in root.get("required") or ()):
        yield "required holds something that is not a name"


def _has_type(schema: Json, kind: str) -> bool:
    types = schema.get("type")
    return types == kind or (isinstance(types, list) and kind in types)


def _grammar(tool: SentTool) -> Iterator[str]:
    """What llguidance and outlines refuse a request for."""
    for place, schema, _ in schemas(tool.schema):
        if unknown := schema.keys() - GRAMMAR_KEYWORDS:
            yield f"{place}: {', '.join(sorted(unknown))}"
        if schema.get("format", "date") not in GRAMMAR_FORMATS:
            yield f"{place}: the format {schema['format']}"


_OPENAI: Sequence[Rule] = (
    *(_named(r"[a-zA-Z0-9_-]{1,64}"), _object_root, _plain_root, _valid, _array_items, _object_properties),
    *(_references, _portable_patterns, _strict),
)
RULES: dict[str, Sequence[Rule]] = {
    **dict.fromkeys(
        (
            *("openai", "openai-responses", "openai-realtime", "grok", "glm-realtime", "qwen-realtime"),
            "stepfun-realtime",
        ),
        _OPENAI,
    ),
    "openai-grammar": (*_OPENAI, _grammar),
    "anthropic": (
        *(_named(r"[a-zA-Z0-9_-]{1,64}"), _object_root, _plain_root, _valid, _references),
        _anthropic_names,
    ),
    **dict.fromkeys(("gemini", "gemini-live"), (_named(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}"), _gemini)),
    "ollama": (_named(r"[a-zA-Z0-9_-]{1,64}"), _ollama),
    "mcp": (_named(r"[a-zA-Z0-9_.-]{1,128}"), _object_root, _references),
}
