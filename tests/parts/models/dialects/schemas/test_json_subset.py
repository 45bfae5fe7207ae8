"""Tests schemas for Gemini's JSON Schema: its keywords as they are, the others in words."""

from __future__ import annotations

from typing import Any

import pytest

from toolbus.parts.models.dialects.schemas.losses import Loss
from toolbus.parts.models.dialects.schemas.schema_rules import GEMINI_JSON_SCHEMAS, convert

Json = dict[str, Any]


def properties(**schemas: Any) -> tuple[Json, list[Loss]]:
    """Converts properties."""
    schema, losses = convert({"type": "object", "properties": schemas}, GEMINI_JSON_SCHEMAS, "t")
    return schema["properties"], losses


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "A", "description": "B."},
        {"type": ["string", "null"]},
        {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}], "items": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
        {"oneOf": [{"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]},
                   {"type": "object", "properties": {"b": {"type": "integer"}}, "additionalProperties": False}]},
        {"type": "integer", "enum": [1, 2]},
        {"type": "string", "format": "date"},
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": 2},
        {"type": "array"},
        {},
    ],
)  # fmt: skip
def test_keywords_that_the_provider_knows_are_unchanged(schema: Json) -> None:
    assert properties(a=schema) == ({"a": schema}, [])


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"const": "x"}, {"type": "string", "enum": ["x"]}),
        ({"const": True}, {"type": "boolean", "description": "Always true."}),
        ({"type": ["string", "null"], "enum": ["a", None]},
         {"type": ["string", "null"], "anyOf": [{"enum": ["a"]}, {"type": "null"}]}),
        ({"type": "string", "maxLength": 3, "pattern": "^a", "format": "uuid", "default": "a", "description": "B."},
         {"type": "string",
          "description": "B.\nAt most 3 characters, matching the pattern ^a, format uuid, default \"a\"."}),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9.5, "maximum": 20},
         {"type": "integer", "minimum": 1, "maximum": 9}),
        ({"type": "number", "exclusiveMinimum": 0},
         {"type": "number", "minimum": 0, "description": "More than 0."}),
        ({"type": ["integer", "string", "null"], "minimum": 1, "maxLength": 2, "items": {"type": "string"}},
         {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}],
          "description": "At most 2 characters."}),
        ({"type": "array", "prefixItems": [{}, {}], "items": False},
         {"type": "array", "prefixItems": [{}, {}], "maxItems": 2}),
        ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "required": ["c"]},
         {"type": "object", "properties": {"a": {}, "b": {}}, "required": [],
          "description": "Give at least one of: a; b, required: \"c\"."}),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
         {"type": "object", "description": "- any name that matches ^x (integer)"}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}}, {"required": ["a"]}]},
         {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
        (True, {}),
    ],
)  # fmt: skip
def test_the_rest_is_written_in_other_keywords_or_stated_in_words(schema: Any, written: Json) -> None:
    assert properties(a=schema) == ({"a": written}, [])


def test_a_list_without_a_valid_schema_does_not_become_an_empty_one() -> None:
    schema, _ = convert({"properties": {"a": {"type": "null"}}, "items": [None]}, GEMINI_JSON_SCHEMAS, "t")
    assert "prefixItems" not in schema


def test_a_reference_is_resolved_with_the_keywords_beside_it() -> None:
    schema, losses = convert(
        {
            "properties": {"to": {"$ref": "#/definitions/Address", "description": "Where it goes."}},
            "definitions": {"Address": {"type": "object", "properties": {"zip": {"type": "string"}}}},
        },
        GEMINI_JSON_SCHEMAS,
        "t",
    )
    assert losses == []
    assert "$defs" not in schema
    assert schema["properties"]["to"] == {
        "type": "object",
        "properties": {"zip": {"type": "string"}},
        "description": "Where it goes.",
    }


def test_a_schema_that_refers_to_itself_stays_so_and_requires_no_part_of_itself() -> None:
    node = {
        "type": "object",
        "properties": {"label": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
        "required": ["label", "next"],
    }
    schema, losses = convert(
        {"properties": {"list": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}, GEMINI_JSON_SCHEMAS, "t"
    )
    assert losses == []
    assert schema["$defs"] == {
        "Node": {
            "type": "object",
            "properties": {"label": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["label"],
            "description": 'Required: "next".',
        }
    }
    assert schema["properties"]["list"] == schema["$defs"]["Node"]


def test_keywords_beside_a_reference_that_stays_are_reported() -> None:
    _, losses = convert(
        {"properties": {"parent": {"$ref": "#", "description": "The one above."}}}, GEMINI_JSON_SCHEMAS, "t"
    )
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/parent", "description")]


def test_a_property_that_allows_nothing_is_left_out_and_reported() -> None:
    written, losses = properties(a=False, b={"type": "string"})
    assert written == {"b": {"type": "string"}}
    assert [(loss.path, loss.keyword) for loss in losses] == [("", "properties")]


def test_references_stay_where_they_would_make_a_schema_too_large() -> None:
    large = {"type": "string", "description": "x" * 100_000}
    named = {f"p{number}": {"$ref": "#/$defs/Large"} for number in range(20)}
    schema, losses = convert({"properties": named, "$defs": {"Large": large}}, GEMINI_JSON_SCHEMAS, "t")
    assert losses == []
    assert schema["properties"]["p19"] == {"$ref": "#/$defs/Large"}
    assert schema["$defs"] == {"Large": large}


def test_keywords_beside_a_reference_are_reported_in_the_order_of_the_schema() -> None:
    beside = {"title": "T", "deprecated": True, "description": "D", "default": {}, "readOnly": True, "maxProperties": 3}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node", **beside}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    _, losses = convert(schema, GEMINI_JSON_SCHEMAS, "t")
    assert list(dict.fromkeys(loss.keyword for loss in losses)) == [*beside]
