"""Schemas as authors of plugins write them: what is read, with which warning, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.protocol.json_schema import (
    ALIASES,
    CHECKS,
    FORMATS,
    LISTS,
    MAPS,
    MAX_WARNINGS,
    SINGLE,
    TYPES,
    SchemaFault,
    limited,
    normal_form,
    properties_of,
)


def prop(schema: Any) -> Any:
    """Returns a property's schema as it is read."""
    return normal_form({"type": "object", "properties": {"x": schema}}).schema["properties"]["x"]


# What is written → what is read, of a property.
READ: dict[str, tuple[Any, Any]] = {
    "float": ({"type": "float"}, {"type": "number"}),
    "list": ({"type": "list"}, {"type": "array"}),
    "any": ({"type": "any", "description": "d"}, {"description": "d"}),
    "int": ({"type": "int"}, {"type": "integer"}),
    "str": ({"type": "str"}, {"type": "string"}),
    "bool": ({"type": "bool"}, {"type": "boolean"}),
    "dict": ({"type": "dict"}, {"type": "object"}),
    "None": ({"type": "None"}, {"type": "null"}),
    "capitals": ({"type": "STRING"}, {"type": "string"}),
    "a format": ({"type": "datetime"}, {"type": "string", "format": "date-time"}),
    "or null": ({"type": "number?"}, {"type": ["number", "null"]}),
    "Optional": ({"type": "Optional[int]"}, {"type": ["integer", "null"]}),
    "a union": ({"type": "int | str"}, {"type": ["integer", "string"]}),
    "a union with any": ({"type": "Union[int, Any]"}, {}),
    "an array of": ({"type": "string[]"}, {"type": "array", "items": {"type": "string"}}),
    "List[…]": ({"type": "List[Dict[str, Any]]"}, {"type": "array", "items": {"type": "object"}}),
    "Array<…>": ({"type": "Array<number>"}, {"type": "array", "items": {"type": "number"}}),
    "own items win": (
        {"type": "list[int]", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "string"}},
    ),
    "a list of types": ({"type": ["str", "null", "text"]}, {"type": ["string", "null"]}),
    "no type": ({"type": None}, {}),
    "a name as a schema": ("string", {"type": "string"}),
    "a text as a schema": ("the city", {"description": "the city"}),
    "null as a schema": (None, {}),
    "a tuple": (
        {"type": "array", "items": [{"type": "int"}, {}], "additionalItems": False},
        {"type": "array", "prefixItems": [{"type": "integer"}, {}], "items": False},
    ),
    "a flag in quotes": ({"additionalProperties": "false"}, {"additionalProperties": False}),
    "a flag beside a bound": ({"minimum": 0, "exclusiveMinimum": True}, {"minimum": 0, "exclusiveMinimum": 0}),
    "keys as values": ({"enum": {"a": 1, "b": 2}}, {"enum": ["a", "b"]}),
    "null for a keyword": ({"type": "string", "description": None, "enum": None}, {"type": "string"}),
    "a name for required": ({"type": "object", "required": "a"}, {"type": "object", "required": ["a"]}),
    "names twice": ({"type": "object", "required": ["a", "a", 1]}, {"type": "object", "required": ["a"]}),
    "a length in quotes": ({"type": "string", "minLength": "1"}, {"type": "string"}),
    "what names the rest": ({"properties": 5, "additionalProperties": False}, {}),
}


@pytest.mark.parametrize(("written", "read"), READ.values(), ids=READ.keys())
def test_what_other_systems_take_is_read_as_what_it_means_with_a_warning_at_its_place(written: Any, read: Any) -> None:
    schema = {"type": "object", "properties": {"x": written}}
    before = copy.deepcopy(schema)
    form = normal_form(schema)
    assert form.schema["properties"]["x"] == read
    assert form.warnings
    assert all(warning.startswith("schema at #/properties/x") for warning in form.warnings)
    assert schema == before
    assert normal_form(form.schema) == (form.schema, [], False)


# A whole schema → what is read.
ROOTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "properties without their wrapper": (
        {"x": {"type": "string"}},
        {"type": "object", "properties": {"x": {"type": "string"}}},
    ),
    "an empty property": ({"x": {}}, {"type": "object", "properties": {"x": {}}}),
    "properties named like keywords": (
        {"type": {"type": "int"}, "description": {}, "items": {"type": "list"}, "required": {}},
        {
            "type": "object",
            "properties": {"type": {"type": "integer"}, "description": {}, "items": {"type": "array"}, "required": {}},
        },
    ),
    "with the names that are required": (
        {"x": {"type": "string"}, "required": ["x"]},
        {"required": ["x"], "type": "object", "properties": {"x": {"type": "string"}}},
    ),
    "beside the type": (
        {"type": "object", "x": {"type": "string"}},
        {"type": "object", "properties": {"x": {"type": "string"}}},
    ),
    "required in properties": (
        {
            "type": "object",
            "properties": {"a": {"required": True}, "b": {"required": "true"}, "c": {"required": False}},
            "required": ["z"],
        },
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["z", "a", "b"]},
    ),
    "a list of properties": (
        {"type": "object", "properties": [{"name": "q", "type": "str", "required": True}]},
        {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    ),
    "an unknown draft": ({"$schema": "http://example.com/mine", "type": "object"}, {"type": "object"}),
    "dict for the root": ({"type": "dict"}, {"type": "object"}),
}


@pytest.mark.parametrize(("written", "read"), ROOTS.values(), ids=ROOTS.keys())
def test_a_whole_schema_is_read_as_what_it_means(written: dict[str, Any], read: dict[str, Any]) -> None:
    form = normal_form(written)
    assert form.schema == read
    assert form.warnings


UNCHANGED: dict[str, dict[str, Any]] = {
    "empty": {},
    "data that looks wrong": {"properties": {"x": {"default": {"type": "float"}, "enum": [{"required": True}]}}},
    "a property that is called type": {"properties": {"type": {"type": "string"}, "required": {"type": "boolean"}}},
    "extensions of the author's own": {"type": "object", "x-limits": {"calls": 5}},
    "only keywords": {"items": {"type": "string"}},
    "draft 07 with a tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"x": {"items": [{}], "additionalItems": False}},
    },
    "draft 04 with a flag": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"x": {"minimum": 1, "exclusiveMinimum": True}},
    },
    "a reference": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
}


@pytest.mark.parametrize("schema", UNCHANGED.values(), ids=UNCHANGED.keys())
def test_a_schema_that_breaks_no_rule_is_its_own_normal_form(schema: dict[str, Any]) -> None:
    form = normal_form(schema)
    assert form.schema is schema
    assert (form.warnings, form.left_out) == ([], False)


@pytest.mark.parametrize(
    ("name", "near"),
    [("strin", "string"), ("flaot", "number"), ("objekt", "object"), ("Boolaen", "boolean"), ("list[strin]", "")],
)
def test_a_type_that_nobody_knows_is_refused_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(SchemaFault) as caught:
        prop({"type": name})
    text = str(caught.value)
    assert text.startswith(f'schema at #/properties/x/type: "{name}" is not a type')
    assert (f'did you mean "{near}"' in text) if near else ("did you mean" not in text)


def test_every_alias_and_format_stands_for_a_type() -> None:
    for name, kind in ALIASES.items():
        assert prop({"type": name}) == ({} if kind == "any" else {"type": kind})
        assert prop({"type": name.upper()}) == prop({"type": name})
    for name, kind in FORMATS.items():
        assert prop({"type": name}) == {"type": "string", "format": kind}


def test_many_warnings_are_counted() -> None:
    properties = {f"p{number}": {"type": "str"} for number in range(MAX_WARNINGS + 5)}
    shown = limited(normal_form({"type": "object", "properties": properties}).warnings)
    assert len(shown) == MAX_WARNINGS + 1
    assert "5 more" in shown[-1]


def test_the_properties_are_those_of_the_normal_form() -> None:
    assert properties_of({"x": {"type": "int"}}) == {"x": {"type": "integer"}}
    assert properties_of({"type": "strin"}) == {}
    assert properties_of(None) == {}


def test_a_schema_nested_too_deep_is_refused_with_a_sentence() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(SchemaFault, match="nested too deep"):
        normal_form(schema)


KEYS = sorted({*MAPS, *LISTS, *SINGLE, *CHECKS, "x", "dependencies", "const", "default", ""})
ODD = st.sampled_from([*TYPES, *ALIASES, "strin", "list[", "int|", "?", "[]", "true", "(", 0, -1, 1.5, True, None])
JSON = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5))
@example({"examples": {"$ref": "string"}, "enum": ["string", {}]})
@example({"pattern": "a{,3}"})
@settings(max_examples=examples(150))
def test_any_object_is_read_or_refused_and_reading_twice_changes_nothing(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    try:
        form = normal_form(schema)
    except SchemaFault:
        with pytest.raises(SchemaFault, match=r"^schema at #"):
            normal_form(schema)
        return
    assert json.dumps(schema) == before
    assert (form.schema == schema) or form.warnings
    again = normal_form(form.schema)
    assert (again.schema, again.left_out) == (form.schema, False)
    # What is said again tells an author what to correct, and was read as it is written.
    assert [each for each in again.warnings if "no call can have" not in each and "means two things" not in each] == []
    assert set(again.warnings) <= set(form.warnings)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "enum": [1, 2]},
            {"type": "array", "items": {"type": "integer", "enum": [1, 2]}},
        ),
        ({"type": "array", "enum": ["a"]}, {"type": "array", "items": {"enum": ["a"]}}),
        (
            {"type": ["array", "null"], "items": {"type": "integer"}, "enum": ["1"]},
            {"type": ["array", "null"], "items": {"type": "integer", "enum": [1]}},
        ),
        ({"type": "integer", "enum": ["1", "2"]}, {"type": "integer", "enum": [1, 2]}),
        ({"type": "number", "enum": ["1.5", 2]}, {"type": "number", "enum": [1.5, 2]}),
        ({"type": "boolean", "enum": ["true", "False"]}, {"type": "boolean", "enum": [True, False]}),
        ({"type": "string", "enum": [1, "a"]}, {"type": "string", "enum": ["1", "a"]}),
        ({"type": "integer", "const": "1"}, {"type": "integer", "const": 1}),
        ({"type": ["integer", "null"], "enum": ["1", None]}, {"type": ["integer", "null"], "enum": [1, None]}),
        ({"type": "integer", "enum": ["a"]}, {"type": "integer"}),  # no call could be right
        ({"type": "integer", "enum": [1, "a"]}, {"type": "integer", "enum": [1, "a"]}),
        ({"type": "string", "pattern": "^a{,3}$"}, {"type": "string", "pattern": "^a{,3}$"}),
    ],
)
def test_values_that_the_type_does_not_allow_are_read_as_meant_or_warned_of(written: Any, read: Any) -> None:
    form = normal_form({"type": "object", "properties": {"x": written}})
    assert form.schema["properties"]["x"] == read
    assert form.warnings
    assert len(set(form.warnings)) == len(form.warnings)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a", None]},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": "array", "enum": [["a"], ["b"]]},
        {"type": ["string", "integer"], "enum": ["a", 1]},
        {"not": {"type": "integer", "enum": ["a"]}},
        {"type": "string", "pattern": r"^a\{,3}$"},
    ],
)
def test_values_of_the_type_are_not_warned_of(schema: Any) -> None:
    assert normal_form({"type": "object", "properties": {"x": schema}}).warnings == []
