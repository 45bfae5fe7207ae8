from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs

from tests.support.providers import genai_types, ollama
from toolbus.parts.models.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    ANY_SCHEMAS,
    GEMINI_JSON_SCHEMAS,
    GEMINI_SCHEMAS,
    OLLAMA_SCHEMAS,
    OPENAI_SCHEMAS,
    Loss,
    SchemaRules,
    convert,
)

Json = dict[str, Any]


ALL = {
    "openai": OPENAI_SCHEMAS,
    "anthropic": ANTHROPIC_SCHEMAS,
    "gemini": GEMINI_SCHEMAS,
    "gemini json": GEMINI_JSON_SCHEMAS,
    "ollama": OLLAMA_SCHEMAS,
    "any": ANY_SCHEMAS,
}


NOT_AT_ROOT = {"anyOf", "oneOf", "allOf", "enum", "not", "const", "$ref"}


ONLY_FOR = {
    "string": {"enum", "format", "pattern", "minLength", "maxLength"},
    "integer": {"minimum", "maximum", "format"},
    "number": {"minimum", "maximum", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "propertyOrdering", "minProperties", "maxProperties"},
}


ANYTHING = {
    "type": ["string", "number", "boolean", "object", "array", "null"],
    "additionalProperties": True,
    "items": {},
}


DRAFT = "https://json-schema.org/draft/2020-12/schema"


META = jsonschema_rs.Draft202012Validator({"$ref": DRAFT})


JSON_SUBSET = {
    *("$id", "$defs", "$ref", "$anchor", "type", "format", "title", "description", "enum", "items", "prefixItems"),
    *("minItems", "maxItems", "minimum", "maximum", "anyOf", "oneOf", "properties", "additionalProperties", "required"),
    "propertyOrdering",
}


FOR_ALL = {"type", "title", "description", "nullable", "default", "example"}


def gemini(**properties: Any) -> tuple[Json, list[Loss]]:
    """Converts properties for Gemini."""
    schema, losses = convert({"type": "object", "properties": properties}, GEMINI_SCHEMAS, "t")
    hold_gemini(schema)
    return schema["properties"], losses


def hold(schema: Json, rules: SchemaRules) -> None:
    """Checks a converted schema against the rules of its provider."""
    json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    assert schema["type"] == "object"
    if rules is GEMINI_SCHEMAS:
        hold_gemini(schema)
    elif rules is not ANY_SCHEMAS:
        assert not NOT_AT_ROOT & schema.keys()
        assert isinstance(schema["properties"], dict)
        META.validate(schema)  # as OpenAI does
    if rules is OLLAMA_SCHEMAS:
        hold_ollama(schema)
    if rules is GEMINI_JSON_SCHEMAS:
        hold_gemini_json(schema, schema.get("$defs", {}))
    if rules is ANTHROPIC_SCHEMAS:
        assert all(re.fullmatch("[a-zA-Z0-9_.-]{1,64}", name) for name in schema["properties"])


def hold_ollama(schema: Json) -> None:
    """Checks that the official client sends a whole schema, but for what goes into the tool's description."""
    parameters = {keyword: value for keyword, value in schema.items() if keyword != "description"}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    request = ollama._types.ChatRequest(model="m", messages=[], tools=[ollama.Tool.model_validate(tool)])
    assert request.model_dump(exclude_none=True)["tools"] == [tool]


def hold_gemini_json(schema: Json, definitions: Json) -> None:
    """Checks what the Gemini API says about `responseJsonSchema`."""
    if "$ref" in schema:
        assert schema == {"$ref": schema["$ref"]}
        assert schema["$ref"].removeprefix("#/$defs/") in definitions
        return
    assert schema.keys() <= JSON_SUBSET
    assert all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in schema.get("enum", ()))
    assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
    assert all("$ref" not in schema["properties"][name] for name in schema.get("required", ()))
    inner = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    inner += [schema[keyword] for keyword in ("items", "additionalProperties") if isinstance(schema.get(keyword), dict)]
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        inner += schema.get(keyword, ())
    for each in inner:
        hold_gemini_json(each, definitions)


def hold_gemini(schema: Json) -> None:
    """Checks what Gemini refuses a request for."""
    genai_types.FunctionDeclaration.model_validate({"name": "t", "parameters": schema})
    assert schema["type"] == "object"
    hold_gemini_schema(schema)


def hold_gemini_schema(schema: Json) -> None:
    if "anyOf" in schema:
        assert schema.keys() == {"anyOf"}
        assert len(schema["anyOf"]) > 1
        for branch in schema["anyOf"]:
            hold_gemini_schema(branch)
        return
    assert schema.keys() <= FOR_ALL | ONLY_FOR.get(schema["type"], set())
    assert all(schema.get("enum", ["a"]))
    assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
    assert schema["type"] != "array" or "items" in schema
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        hold_gemini_schema(inner)


# -- one tool never takes the model away from all others ---------------------------------------------------------------


def openai(**properties: Any) -> tuple[Json, list[Loss]]:
    """Converts properties for OpenAI and the servers that speak its formats."""
    converted, losses = convert({"type": "object", "properties": properties}, OPENAI_SCHEMAS, "t")
    hold(converted, OPENAI_SCHEMAS)
    return converted["properties"], losses
