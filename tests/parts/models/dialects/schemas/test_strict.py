"""Tests which schemas OpenAI is asked to enforce, how others are rewritten for it, and what a call then means."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parts.models.dialects.schemas.test_schema_rules import ROOTS
from tests.support.examples import examples
from toolbus.parts.models.dialects.export import ToolWriter
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.openai_responses import OpenAIResponses
from toolbus.parts.models.dialects.schemas.schema_rules import (
    OPENAI_SCHEMAS,
    Inexpressible,
    StrictSchema,
    convert_strictly,
)
from toolbus.protocol.tool import Tool

Json = dict[str, Any]
TEXT = {"type": "string"}


def closed(required: tuple[str, ...] | None = None, **properties: Any) -> Json:
    """Returns an object that forbids other properties; all are required where nothing else is said."""
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def strict(schema: Json, *, rewrite: bool = False) -> StrictSchema | None:
    """Returns what `convert_strictly` does."""
    return convert_strictly(schema, OPENAI_SCHEMAS, "t", rewrite=rewrite)[0]


def rewritten(schema: Json) -> Json:
    """Returns a schema rewritten for strict mode."""
    form = strict(schema, rewrite=True)
    assert form is not None
    return form.schema


@pytest.mark.parametrize(
    "schema",
    [
        closed(),
        closed(a=TEXT, b={"type": ["integer", "null"], "minimum": 1}),
        closed(a={"type": "array", "items": closed(x=TEXT), "minItems": 1}),
        closed(a={"anyOf": [TEXT, closed(x={"type": "string", "enum": ["y"]})]}),
        closed(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": closed(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})}},
        closed(a={"type": "string", "pattern": "^a+$"}, b={"type": "string", "format": "date"}),
    ],
)
def test_a_schema_that_is_closed_and_requires_all_its_properties_is_strict_as_it_is(schema: Json) -> None:
    form = strict(schema)
    assert form is not None
    assert not form.added_nulls
    assert form.schema["properties"].keys() == schema["properties"].keys()


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_tool_without_parameters_says_that_it_requires_none(rewrite: bool) -> None:
    form = strict({"type": "object", "properties": {}, "additionalProperties": False}, rewrite=rewrite)
    assert form is not None
    assert form.schema["required"] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
        closed((), a=TEXT),
        closed(a={}),
        closed(a={"type": "array"}),
        closed(a={"type": "object", "properties": {"x": TEXT}, "required": ["x"]}),
        closed(a={"type": "object", "additionalProperties": TEXT}),
        closed(a={"oneOf": [TEXT, {"type": "null"}]}),
        closed(a={"allOf": [TEXT]}),
        closed(a={"enum": ["x", 1]}),
        closed(a={"type": "string", "default": "x"}),
        closed(a={"type": "string", "maxLength": 3}),
        closed(a={"type": "string", "format": "uri"}),
        closed(a={"type": "array", "items": TEXT, "uniqueItems": True}),
        closed(a={"$ref": "#/$defs/t", "description": "d"}) | {"$defs": {"t": TEXT}},
        closed(a=TEXT) | {"required": ["a", "b"]},
        closed(None, **{f"p{number}": TEXT for number in range(101)}),
        closed(a={"type": "string", "enum": [str(number) for number in range(501)]}),
        closed(a={"type": "string", "enum": ["x" * 15_001]}),
        closed(a=closed(b=closed(c=closed(d=closed(e=closed(f=TEXT)))))),
    ],
)
def test_a_schema_that_strict_mode_refuses_is_not_strict(schema: Json) -> None:
    assert strict(schema) is None


def test_optional_properties_become_nullable_where_a_program_asks_for_it() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C", "description": "Unit."},
            "days": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "kind": {"type": "string", "const": "x"},
            "place": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
            "box": closed((), x={"type": "number"}),
        },
        "required": ["city"],
        "$defs": {"place": closed((), lat={"type": "number"})},
    }
    nullable_place = closed(lat={"type": ["number", "null"]})
    assert strict(schema) is None
    assert rewritten(schema) == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "At least 1 character."},
            "unit": {"type": ["string", "null"], "enum": ["C", "F", None], "description": 'Unit.\nDefault "C".'},
            "days": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "kind": {"anyOf": [{"type": "string", "const": "x"}, {"type": "null"}]},
            "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "box": {"anyOf": [closed(x={"type": ["number", "null"]}), {"type": "null"}]},
        },
        "required": ["city", "unit", "days", "kind", "place", "note", "box"],
        "additionalProperties": False,
        "$defs": {"place": nullable_place},
    }
    losses = convert_strictly(schema, OPENAI_SCHEMAS, "t", rewrite=True)[2]
    assert [(loss.path, loss.keyword) for loss in losses] == [
        ("/properties/city", "minLength"),
        ("/properties/unit", "default"),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        # Nothing and null are two calls.
        {"type": "object", "properties": {"a": {"type": ["integer", "null"], "default": 3}}},
        # Other properties are part of the tool.
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {"type": "object"}}},
        {"type": "object", "properties": {"a": {"oneOf": [TEXT, {"type": "integer"}]}}},
    ],
)
def test_a_schema_that_would_mean_other_calls_is_not_rewritten_and_has_no_losses(schema: Json) -> None:
    form, converted, losses = convert_strictly(schema, OPENAI_SCHEMAS, "t", rewrite=True)
    assert form is None
    assert converted["properties"].keys() == {"a"}
    assert losses == []


def test_a_null_that_stands_for_nothing_is_removed_and_one_that_means_null_stays() -> None:
    inner = closed((), x=TEXT, y={"type": ["string", "null"]})
    schema = closed(
        ("rows",),
        rows={"type": "array", "items": {"$ref": "#/$defs/row"}},
        either={"anyOf": [closed(("k",), k={"type": "string", "enum": ["a"]}, x=TEXT), closed((), z=TEXT)]},
        n={"type": "integer"},
    ) | {"$defs": {"row": inner}}
    form = strict(schema, rewrite=True)
    assert form is not None
    arguments = {
        "rows": [{"x": None, "y": None}, {"x": "1", "y": "2"}],
        "either": {"k": "a", "x": None},
        "n": None,
    }
    before = copy.deepcopy(arguments)
    assert form.without_added_nulls(arguments) == {"rows": [{"y": None}, {"x": "1", "y": "2"}], "either": {"k": "a"}}
    assert arguments == before
    assert form.without_added_nulls({"rows": None, "more": None}) == {"rows": None, "more": None}
    assert form.without_added_nulls([None]) == [None]


def _instance(schema: Json, root: Json, data: st.DataObject, level: int = 0) -> Any:
    """Draws a value that strict mode would let a model write."""
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root, data, level + 1)
    if "anyOf" in schema:
        return _instance(data.draw(st.sampled_from(schema["anyOf"])), root, data, level)
    if "enum" in schema:
        return data.draw(st.sampled_from(schema["enum"]))
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    match data.draw(st.sampled_from(types)):
        case "object":
            return {name: _instance(each, root, data, level) for name, each in schema["properties"].items()}
        case "array":
            return [_instance(schema["items"], root, data, level) for _ in range(data.draw(st.integers(0, 2)))]
        case "null":
            return None
        case "integer":
            return data.draw(st.integers(0, 9))
    return data.draw(st.sampled_from(["a", "b"]))


LEAVES = st.sampled_from([TEXT, {"type": "integer"}, {"type": ["string", "null"]}, {"type": "string", "enum": ["a"]}])
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.sampled_from("pqr"), inner, max_size=3).flatmap(
            lambda properties: st.sets(st.sampled_from("pqr")).map(
                lambda names: closed(tuple(sorted(names & properties.keys())), **properties)
            )
        )
        | inner.map(lambda each: {"type": "array", "items": each})
        | st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    ),
    max_leaves=6,
)


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck), deadline=None)
@given(properties=st.dictionaries(st.sampled_from("abc"), OBJECTS, max_size=3), data=st.data())
def test_arguments_of_strict_mode_are_valid_for_the_tool_after_their_nulls_are_removed(
    properties: Json, data: st.DataObject
) -> None:
    schema = closed((), **properties)
    form = strict(schema, rewrite=True)
    if form is None:
        return
    arguments = _instance(form.schema, form.schema, data)
    assert jsonschema_rs.is_valid(form.schema, arguments)
    assert jsonschema_rs.is_valid(schema, form.without_added_nulls(arguments))


@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck), deadline=None)
@given(schema=ROOTS, rewrite=st.booleans(), arguments=st.dictionaries(st.sampled_from("ab"), st.none() | st.integers()))
def test_any_schema_is_strict_or_not_without_an_error(schema: Json, rewrite: bool, arguments: Json) -> None:
    try:
        form, converted, _ = convert_strictly(schema, OPENAI_SCHEMAS, "t", rewrite=rewrite)
    except Inexpressible:
        return
    json.dumps(converted)
    if form is not None:
        form.without_added_nulls(arguments)
        assert form.schema["additionalProperties"] is False


def test_definitions_that_only_lead_to_each_other_end() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/b"}]}
    schema = closed((), a={"$ref": "#/$defs/a"}) | {"$defs": {"a": loop, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    form = strict(schema, rewrite=True)
    assert form is not None
    assert form.without_added_nulls({"a": {"x": None}}) == {"a": {"x": None}}


# -- in requests -------------------------------------------------------------------------------------------------------

AS_IT_IS = Tool("as_it_is", "", json.dumps(closed(a=TEXT)))
OPTIONAL = Tool("optional", "", json.dumps(closed((), a=TEXT)))
OPEN = Tool("open", "", json.dumps({"type": "object", "properties": {"a": {"type": "object"}}}))


@pytest.mark.parametrize(
    ("dialect", "flags"),
    [
        (OpenAIChat(), [None, None, None]),
        (OpenAIChat(strict=None), [True, None, None]),
        (OpenAIChat(strict=True), [True, True, None]),
        (OpenAIResponses(), [True, False, False]),
        (OpenAIResponses(strict=False), [False, False, False]),
        (OpenAIResponses(strict=True), [True, True, False]),
    ],
)
def test_each_tool_says_whether_it_is_strict(dialect: ToolWriter, flags: list[bool | None]) -> None:
    export = dialect.export([AS_IT_IS, OPTIONAL, OPEN])
    declarations = [each.get("function", each) for each in export.tools]
    assert [each.get("strict") for each in declarations] == flags
    assert [name for name, flag in zip(export.kept, flags, strict=True) if flag] == list(export.strict)
    cached = dialect.export([AS_IT_IS, OPTIONAL, OPEN])
    assert cached.tools == export.tools
    assert cached.strict.keys() == export.strict.keys()


def test_an_export_restores_the_meaning_of_a_call() -> None:
    export = OpenAIChat(strict=True).export([OPTIONAL, OPEN])
    assert export.without_added_nulls("optional", {"a": None}) == {}
    assert export.without_added_nulls("open", {"a": None}) == {"a": None}
    assert export.without_added_nulls("unknown", {"a": None}) == {"a": None}


@pytest.mark.parametrize(
    ("optional", "nullable"),
    [
        ({"type": ["string", "null"], "enum": ["a", "b"]}, {"type": ["string", "null"], "enum": ["a", "b", None]}),
        ({"type": "string", "enum": ["a", None]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": "string", "enum": ["a"]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": ["integer", "null"], "enum": [1]}, {"type": ["integer", "null"], "enum": [1, None]}),
        ({"type": "string"}, {"type": ["string", "null"]}),
        ({"anyOf": [TEXT, {"type": "integer"}]}, {"anyOf": [TEXT, {"type": "integer"}, {"type": "null"}]}),
    ],
)
def test_a_type_or_an_enum_that_takes_null_already_gets_it_once(optional: Json, nullable: Json) -> None:
    written = rewritten(closed((), a=optional))
    assert written["properties"]["a"] == nullable
    jsonschema_rs.meta.validate(written)
    validator = jsonschema_rs.validator_for(written)
    assert validator.is_valid({"a": None})
