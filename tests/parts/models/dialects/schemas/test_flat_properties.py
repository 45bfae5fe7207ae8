"""Tests schemas for Ollama: what its official client would drop is stated in words, or reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolbus.parts.models.dialects.schemas.losses import Loss
from toolbus.parts.models.dialects.schemas.schema_rules import OLLAMA_SCHEMAS, convert

Json = dict[str, Any]


def properties(definitions: Json | None = None, **schemas: Any) -> tuple[Json, list[Loss]]:
    """Converts properties."""
    schema, losses = convert({"type": "object", "properties": schemas, "$defs": definitions or {}}, OLLAMA_SCHEMAS, "t")
    return schema["properties"], losses


NODE: Json = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
    "required": ["label"],
}
MEMBER = "- kind (always {}, required)\n  - {} (number, required)"


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "description": "A city."}, {"type": "string", "description": "A city."}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"type": ["string", "null"]}),
        ({"anyOf": [{"type": "string", "maxLength": 9, "description": "A."}, {"type": "null"}], "description": "B."},
         {"type": ["string", "null"], "description": "B.\nA.\nAt most 9 characters."}),
        ({"type": "string", "nullable": True, "enum": ["a"]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"type": ["string", "integer"]}),
        ({"anyOf": [{"const": "a"}, {"const": 1}, {"type": "null"}]},
         {"type": ["string", "integer", "null"], "enum": ["a", 1, None]}),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string", "minLength": 2}]},
         {"type": ["string", "array"], "items": {"type": "string"},
          "description": "Array of string or string (at least 2 characters)."}),
        ({"anyOf": [{"const": "a", "type": "string"}, {"type": "null"}]},
         {"type": ["string", "null"], "enum": ["a", None]}),
        ({"anyOf": [{"const": "a"}, {"type": "null"}]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "prefixItems": [{"const": 1}]}]},
         {"type": "array",
          "description": "- either array of string\n- or array (items in this order)\n  - item 1 (always 1)"}),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array"}]},
         {"type": "array", "description": "Array of string or array."}),
        ({"anyOf": [True, {"type": "string", "enum": ["a"]}]},
         {"description": "Anything or string (one of \"a\")."}),
        ({"const": "a"}, {"type": "string", "enum": ["a"]}),
        ({"type": "object", "required": ["all"], "patternProperties": {"": {"type": "string"}},
          "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}}},
         {"type": "object",
          "description": 'The field kind says which one of them, required: "all".\n- any name (string)'}),
        ({"type": "object", "properties": {"g": {"anyOf": [{"type": "object", "maxProperties": 1, "properties": {
            "m": {"type": "string", "minLength": 1}}}, {"type": "null"}]}}},
         {"type": "object",
          "description": "Fields:\n- g (one of these)\n  - either object (at most 1 field)\n"
                         "    - m (string, at least 1 character)\n  - or null"}),
        ({"enum": [1, 2.5]}, {"type": "number", "enum": [1, 2.5]}),
        ({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 2, "default": 4, "examples": [2, 8]},
         {"type": "integer",
          "description": "At least 1, at most 9, a multiple of 2, default 4, for example 2, 8."}),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 0},
         {"type": "number", "description": "More than 0, at least 0."}),
        ({"type": "string", "pattern": "^a$", "format": "email", "deprecated": True},
         {"type": "string", "description": "Matching the pattern ^a$, format email, deprecated."}),
        ({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
          "uniqueItems": True, "minItems": 1},
         {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
          "description": "No item twice, at least 1 item."}),
        ({"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}], "items": False},
         {"type": "array",
          "description": "Items in this order, no further items.\n- item 1 (number)\n- item 2 (string)"}),
        ({"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
         {"type": "object", "description": "- any name (integer, at least 0)"}),
        ({"type": "object", "patternProperties": {"^x": {"type": "string"}}, "additionalProperties": False},
         {"type": "object", "description": "No other fields.\n- any name that matches ^x (string)"}),
        ({"type": "string", "not": {"const": "x"}, "x-unit": "m"},
         {"type": "string", "description": 'Not: {"const": "x"}, x-unit: "m".'}),
        ({"allOf": [{"type": "string", "minLength": 2}, {"minLength": 3, "description": "B."}], "description": "A."},
         {"type": "string", "description": "A.\nB.\nAt least 3 characters."}),
        (True, {}),
    ],
)  # fmt: skip
def test_a_property_keeps_four_fields_and_states_the_rest(schema: Any, written: Json) -> None:
    assert properties(a=schema) == ({"a": written}, [])


def test_fields_of_nested_objects_are_a_list_that_a_model_reads() -> None:
    address = {
        "type": "object",
        "description": "Where it goes.",
        "properties": {
            "street": {"type": "string", "description": "With the\nnumber."},
            "country": {"enum": ["DE", "FR"], "default": "DE"},
            "geo": {"type": "object", "properties": {"lat": {"type": "number", "minimum": -90}}, "required": ["lat"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}},
        },
        "required": ["street"],
        "additionalProperties": False,
    }
    written, losses = properties({"Address": address}, to={"$ref": "#/$defs/Address", "title": "To"})
    assert losses == []
    assert written["to"] == {
        "type": "object",
        "description": "Where it goes.\n"
        "No other fields.\n"
        "Fields:\n"
        "- street (string, required): With the number.\n"
        '- country (one of "DE", "FR", default "DE")\n'
        "- geo (object)\n"
        "  - lat (number, required, at least -90)\n"
        "- tags (array of string (at most 5 characters))",
    }


def test_alternatives_of_objects_are_described_one_by_one() -> None:
    def member(kind: str, field: str) -> Json:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, field: {"type": "number"}},
            "required": ["kind", field],
        }

    written, losses = properties(shape={"oneOf": [member("circle", "r"), member("square", "side")]})
    assert losses == []
    assert written["shape"] == {
        "type": "object",
        "description": "- either object\n"
        '  - kind (always "circle", required)\n'
        "  - r (number, required)\n"
        "- or object\n"
        '  - kind (always "square", required)\n'
        "  - side (number, required)",
    }


def test_a_recursive_schema_is_described_once_and_stays_whole_in_items() -> None:
    written, losses = properties({"Node": NODE}, tree={"$ref": "#/$defs/Node"})
    assert losses == []
    assert written["tree"]["description"] == (
        "Fields:\n- label (string, required)\n- children (array of Node (see below))\n"
        "Node is: object\n- label (string, required)\n- children (array of Node (see below))"
    )
    schema, losses = convert(
        {"properties": {"trees": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}, "$defs": {"Node": NODE}},
        OLLAMA_SCHEMAS,
        "t",
    )
    assert losses == []
    assert schema["properties"]["trees"]["items"] == schema["$defs"]["Node"]
    assert schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_notes_about_all_parameters_go_into_the_description_of_the_tool() -> None:
    schema, losses = convert(
        {
            "type": "object",
            "description": "About both.",
            "properties": {"a": {"type": "string"}},
            "additionalProperties": False,
            "dependentRequired": {"a": ["b"]},
        },
        OLLAMA_SCHEMAS,
        "t",
    )
    assert losses == []
    assert schema["description"] == 'About both.\nDependentRequired: {"a": ["b"]}, no other fields.'


def test_parts_that_do_not_fit_into_the_description_are_reported_with_their_place() -> None:
    def nested(levels: int) -> Json:
        return {"type": "object", "properties": {"n": nested(levels - 1)}} if levels else {"type": "string"}

    many = {f"field_{number}": {"type": "string", "description": "x" * 100} for number in range(200)}
    written, losses = properties(wide={"type": "object", "properties": many})
    assert len(written["wide"]["description"]) < 13_000
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/wide", "properties")]
    assert "field_1" in losses[0].why
    _, losses = properties(deep=nested(9))
    assert [(loss.path, loss.keyword) for loss in losses] == [(f"/properties/deep{'/properties/n' * 6}", "properties")]
    _, losses = properties(listed={"type": "object", "properties": {"n": {"enum": list(range(99))}}})
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/listed/properties/n", "enum")]
    _, losses = properties(long={"type": "string", "not": {"enum": list(range(500))}})
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/long", "not")]


def test_a_title_is_stated_where_it_says_more_than_the_name() -> None:
    assert properties(user_id={"type": "string", "title": "User Id"}) == ({"user_id": {"type": "string"}}, [])
    written, losses = properties(user_id={"type": "string", "title": "Owner", "description": "Who pays."})
    assert (written["user_id"]["description"], losses) == ("Owner\nWho pays.", [])
    written, _ = properties(kind={"oneOf": [{"const": "a", "title": "Apples"}, {"const": "b", "title": "Bread"}]})
    assert written["kind"]["description"] == '- either always "a": Apples\n- or always "b": Bread'


def test_malformed_keywords_and_forbidden_properties_are_left_out_and_reported() -> None:
    written, losses = properties(a={"type": "any", "minimum": "1", "properties": [], "anyOf": []}, b=False)
    assert json.dumps(written) == '{"a": {}}'
    assert [(loss.path, loss.keyword) for loss in losses] == [
        *(("/properties/a", keyword) for keyword in ("type", "minimum", "properties", "anyOf")),
        ("", "properties"),
    ]
