"""Tests converted schemas: always within the rules of a provider, every loss reported, never an exception."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.parts.models.dialects.sample_tools import SAMPLES, TREE
from tests.parts.models.dialects.schemas.rule_cases import (
    ALL,
    ANYTHING,
    DRAFT,
    Json,
    gemini,
    hold,
    openai,
)
from tests.support.examples import examples
from toolbus.parts.models.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    GEMINI_JSON_SCHEMAS,
    GEMINI_SCHEMAS,
    OPENAI_SCHEMAS,
    Inexpressible,
    LossReport,
    SchemaRules,
    convert,
)
from toolbus.protocol.tool import Tool

# -- every rule at once ----------------------------------------------------------------------------------------------


VALUES = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2.5, 10**30, 1e300, "", "a", "date-time", "object", "#", "#/$defs/a"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "$ref"]), inner, max_size=2)
    ),
    max_leaves=4,
)


REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/anyOf/0", "#/$defs/gone", "#b", "x", 3]
)


NAMES = st.sampled_from(["a", "b", "type", "$ref", "enum", "属性", "a b", "/~"])


TYPES = st.sampled_from(["string", "number", "integer", "boolean", "object", "array", "null", "any"])


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    maps = st.dictionaries(NAMES, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    known = {
        **dict.fromkeys(("properties", "patternProperties"), maps),
        **dict.fromkeys(("$defs", "definitions"), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), lists),
        **dict.fromkeys(("items", "additionalProperties", "not", "if", "contains", "additionalItems"), inner),
        "type": TYPES | st.lists(TYPES, max_size=3),
        "$ref": REFERENCES,
        "required": st.lists(NAMES, max_size=3),
        **dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"), VALUES),
        **dict.fromkeys(("minLength", "maxItems", "const", "default", "example", "pattern", "format"), VALUES),
        "enum": st.lists(VALUES, max_size=3),
        **dict.fromkeys(("title", "description", "nullable", "$anchor", "x-other", "propertyOrdering"), VALUES),
    }
    well = st.fixed_dictionaries({}, optional=known)
    broken = st.dictionaries(st.sampled_from(sorted(known)), VALUES, max_size=3)
    return well | well | broken


SCHEMAS = st.recursive(st.booleans() | VALUES, _keywords, max_leaves=10)


ROOTS = _keywords(SCHEMAS)


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))
@given(schema=ROOTS)
@example(schema={"additionalProperties": False, "patternProperties": {"a": {}}})
def test_any_object_becomes_a_schema_within_the_rules_or_is_refused_with_a_reason(
    rules: SchemaRules, schema: Json
) -> None:
    before = copy.deepcopy(schema)
    try:
        converted, losses = convert(schema, rules, "t")
    except Inexpressible:
        pass
    else:
        hold(converted, rules)
        again, more = convert(converted, rules, "t")
        assert not more
        # Of a schema that refers to itself, the first level is written out.
        assert again == converted or (rules is GEMINI_JSON_SCHEMAS and "$defs" in converted)
        assert all(loss.tool == "t" and loss.why for loss in losses)
    assert repr(schema) == repr(before)


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
@pytest.mark.parametrize("tool", SAMPLES, ids=lambda tool: tool.name)
def test_the_sample_tools_are_valid_for_all_rules(tool: Tool, rules: SchemaRules) -> None:
    if tool.name == "查询天气" and rules is ANTHROPIC_SCHEMAS:
        converted, losses = convert(tool.parameters, rules, tool.name)
        assert converted["properties"] == {}
        assert losses[0].keyword == "properties"
        return
    converted, _ = convert(tool.parameters, rules, tool.name)
    hold(converted, rules)
    if "properties" in tool.parameters:
        assert converted["properties"].keys() == tool.parameters["properties"].keys() - (
            {"$ref"} if rules is ANTHROPIC_SCHEMAS else set()
        )


def test_a_dialect_brings_a_rewriting_of_its_own_and_its_losses_are_reported_with_their_places() -> None:
    def names_only(root: Json, report: LossReport) -> Json:
        for name, inner in root["properties"].items():
            second = report.over({"properties": {name: inner}})
            second.lose(inner, "type", f"{name} is all that is offered")
        return {"type": "object", "properties": {name: {} for name in root["properties"]}}

    schema = {"allOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "number"}}}]}
    converted, losses = convert(schema, SchemaRules(names_only), "t")
    assert converted == {"type": "object", "properties": {"a": {}, "b": {}}}
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/a", "type"), ("/properties/b", "type")]
    assert convert(schema, SchemaRules(), "t")[1] == []


# -- the root ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS, GEMINI_SCHEMAS])
@pytest.mark.parametrize("schema", [{}, {"type": ["object", "null"]}, {"properties": {}}, {"allOf": [{}, True]}])
def test_a_root_that_can_only_be_an_object_gets_the_type_without_a_loss(schema: Json, rules: SchemaRules) -> None:
    assert convert(schema, rules, "t") == ({"type": "object", "properties": {}}, [])


@pytest.mark.parametrize("rules", [OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS, GEMINI_SCHEMAS])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"type": ["string", "null"]},
        {"enum": [1, 2]},
        {"const": None},
        {"anyOf": [{"type": "string"}, False]},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    ],
)
def test_a_root_that_is_not_an_object_is_refused_with_the_fix(schema: Json, rules: SchemaRules) -> None:
    with pytest.raises(Inexpressible, match='give it "type": "object"'):
        convert(schema, rules, "t")


def test_a_root_of_alternatives_becomes_one_object_that_allows_all_of_them() -> None:
    schema = {
        "oneOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "k": {"type": "string"}},
                "required": ["a", "k"],
            },
            {"type": "object", "properties": {"b": {"type": "string"}, "k": {"type": "number"}}, "required": ["k"]},
            {"type": "string"},
        ]
    }
    converted, losses = convert(schema, OPENAI_SCHEMAS, "t")
    assert converted == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "k": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "b": {"type": "string"},
        },
        "required": ["k"],
    }
    assert [(loss.path, loss.keyword) for loss in losses] == [("", "oneOf")]


def test_a_root_of_parts_becomes_one_object_with_all_of_them() -> None:
    schema = {
        "$defs": {"base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": {"type": "string"}}}],
    }
    converted, losses = convert(schema, GEMINI_SCHEMAS, "t")
    assert converted["properties"] == {"id": {"type": "integer"}, "name": {"type": "string"}}
    assert converted["required"] == ["id"]
    assert losses == []


# -- OpenAI and Anthropic ----------------------------------------------------------------------------------------------


def test_openai_gets_required_keywords_and_loses_malformed_ones() -> None:
    properties = {
        "list": {"type": "array"},
        "map": {"type": ["object", "null"]},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "number"}]},
        "odd": {"type": "any", "required": True, "minLength": "3", "enum": []},
        "gone": {"$ref": "#/$defs/gone"},
    }
    converted, losses = convert({"type": "object", "properties": properties}, OPENAI_SCHEMAS, "t")
    assert converted["properties"] == {
        "list": {"type": "array", "items": ANYTHING},
        "map": {"type": ["object", "null"]},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": ANYTHING},
        "odd": ANYTHING,
        "gone": ANYTHING,
    }
    assert {(loss.path, loss.keyword) for loss in losses} == {
        *(("/properties/odd", keyword) for keyword in ("type", "required", "minLength", "enum")),
        ("/properties/gone", "$ref"),
    }


def test_values_that_look_like_schemas_are_unchanged() -> None:
    value = {"type": "any", "$ref": "#/nowhere", "properties": []}
    schema = {"type": "object", "properties": {"a": {"enum": [value], "default": value}}}
    assert convert(schema, OPENAI_SCHEMAS, "t") == (schema, [])


def test_references_into_merged_schemas_are_dropped() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#/anyOf/1/properties/b"}}},
                        {"type": "object", "properties": {"b": {"type": "string"}}}]}  # fmt: skip
    converted, losses = convert(schema, OPENAI_SCHEMAS, "t")
    assert converted["properties"]["a"] == ANYTHING
    assert [loss.keyword for loss in losses] == ["anyOf", "$ref"]


def test_anthropic_loses_properties_with_refused_names_but_never_a_required_one() -> None:
    schema = {"type": "object", "properties": {"城市": {"type": "string"}, "ok": {"type": "string"}}}
    converted, losses = convert(schema, ANTHROPIC_SCHEMAS, "t")
    assert list(converted["properties"]) == ["ok"]
    assert [(loss.path, loss.keyword) for loss in losses] == [("", "properties")]
    with pytest.raises(Inexpressible, match=r"城市.*is required.*rename it"):
        convert(schema | {"required": ["城市"]}, ANTHROPIC_SCHEMAS, "t")


# -- Gemini ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "converted", "lost"),
    [
        ({"const": "x"}, {"type": "string", "enum": ["x"]}, []),
        ({"enum": ["a", "b", None]}, {"type": "string", "enum": ["a", "b"], "nullable": True}, []),
        ({"type": ["integer", "null"]}, {"type": "integer", "nullable": True}, []),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
         {"type": "integer", "nullable": True, "default": None}, []),
        ({"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, []),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}], "description": "d"},
         {"anyOf": [{"type": "string", "description": "d"}, {"type": "integer", "description": "d"}]}, ["oneOf"]),
        ({"allOf": [{"type": "string", "minLength": 2}, {"minLength": 3, "maxLength": 9}]},
         {"type": "string", "minLength": 3, "maxLength": 9}, []),
        ({"enum": [1, 2]}, {"type": "integer", "description": "Allowed values: 1, 2."}, ["enum"]),
        ({"type": "string", "enum": ["a", ""]},
         {"type": "string", "description": 'Allowed values: "a", "".'}, ["enum"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 5}, {"type": "integer", "minimum": 1, "maximum": 5}, []),
        ({"type": "integer", "exclusiveMaximum": 4.5}, {"type": "integer", "maximum": 4}, []),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, {"type": "integer", "minimum": 4}, []),
        ({"type": "number", "exclusiveMinimum": 0}, {"type": "number", "minimum": 0, "description": "More than 0."},
         ["exclusiveMinimum"]),
        ({"type": "integer", "multipleOf": 5}, {"type": "integer", "description": "A multiple of 5."}, ["multipleOf"]),
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
         {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "number"}]}}, ["prefixItems"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True},
         {"type": "array", "items": {"type": "string"}}, ["uniqueItems"]),
        ({"type": "string", "format": "uuid"}, {"type": "string", "description": "Format: uuid."}, ["format"]),
        ({"type": "string", "format": "date-time"}, {"type": "string", "format": "date-time"}, []),
        ({"properties": {"b": {"type": "string"}}, "required": ["b", "c"], "additionalProperties": {"type": "string"}},
         {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
         ["additionalProperties", "required"]),
        ({"type": "object", "patternProperties": {"^x": {}}, "if": {}, "not": {}}, {"type": "object"},
         ["patternProperties", "if", "not"]),
        ({"type": "string", "examples": ["e"], "$comment": "c", "default": {"$ref": "#"}}, {"type": "string"},
         ["examples", "$comment", "default"]),
        ({"type": "object", "properties": {"b": {}}, "default": {"const": 1, "$ref": "x"}},
         None, ["type", "items"]),
    ],
)  # fmt: skip
def test_gemini_gets_its_own_keywords(schema: Json, converted: Json | None, lost: list[str]) -> None:
    properties, losses = gemini(a=schema)
    if converted is not None:
        assert properties["a"] == converted
    assert [loss.keyword for loss in losses] == lost
    assert all(loss.path.startswith("/properties/a") for loss in losses)


def test_alternatives_are_merged_with_the_keywords_beside_them() -> None:
    shape = {
        "type": "object",
        "properties": {"kind": {"type": "string"}},
        "required": ["kind"],
        "anyOf": [
            {"properties": {"r": {"type": "number"}}, "required": ["r"]},
            {"properties": {"w": {"type": "number"}}},
        ],
    }
    properties, losses = gemini(shape=shape)
    first, second = properties["shape"]["anyOf"]
    assert first["required"] == ["kind", "r"]
    assert list(second["properties"]) == ["kind", "w"]
    assert losses == []


def test_references_are_expanded_and_cut_where_they_recur() -> None:
    converted, losses = convert(TREE.parameters, GEMINI_SCHEMAS, "t")
    inner = converted["properties"]["children"]["items"]
    assert inner["properties"]["children"]["items"] == {"type": "object"}
    assert [(loss.path, loss.keyword) for loss in losses] == [
        ("", "$schema"),
        ("/$defs/Node/properties/children/items", "$ref"),
    ]


def test_a_property_named_like_a_keyword_is_a_property() -> None:
    names = ["type", "$ref", "additionalProperties", "anyOf", "enum", "properties", "items", "required"]
    properties, losses = gemini(**{name: {"type": "string"} for name in names})
    assert list(properties) == names
    assert losses == []


def test_schemas_that_no_value_can_satisfy_are_left_out() -> None:
    properties, losses = gemini(never=False, nor={"allOf": [False]}, yes={"type": "string"})
    assert list(properties) == ["yes"]
    assert [loss.keyword for loss in losses] == ["properties", "properties"]


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS])
def test_the_draft_is_named_that_the_schema_is_written_in(rules: SchemaRules) -> None:
    old = "http://json-schema.org/draft-07/schema#"
    pair = {"type": "array", "items": [{"type": "string"}], "additionalItems": False}
    converted, losses = convert({"$schema": old, "type": "object", "properties": {"a": pair}}, rules, "t")
    assert converted["$schema"] == DRAFT
    assert converted["properties"]["a"]["prefixItems"] == [{"type": "string"}]
    assert losses == []
    plain = {"$schema": old, "type": "object", "properties": {"a": {"type": "string"}}}
    assert convert(plain, rules, "t") == (plain, [])


def test_the_exclusive_bounds_of_draft_4_are_written_as_numbers() -> None:
    a = {"type": "number", "exclusiveMinimum": True, "minimum": 0, "maximum": 9, "exclusiveMaximum": False}
    properties, losses = openai(a=a)
    assert properties["a"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 9}
    assert losses == []


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"enum": ["a", "b"]}, "string"),
        ({"enum": [1, 2.0]}, "integer"),
        ({"enum": [1, 2.5]}, "number"),
        ({"const": True}, "boolean"),
        ({"enum": ["a", 1]}, None),
        ({"enum": ["a", None]}, None),
        ({"const": None}, None),
        ({"enum": ["a"], "type": ["string", "null"]}, ["string", "null"]),
    ],
)
def test_a_choice_says_the_type_of_its_values(choice: Json, kind: object) -> None:
    properties, losses = openai(a=choice)
    assert (properties["a"].get("type"), losses) == (kind, [])
    assert properties["a"] | choice == properties["a"]


# -- losses are complete -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b", "c"]}, ["'b'", "'c'"]),
        ({"type": "object", "properties": {"a": False, "b": False}}, ["'a'", "'b'"]),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}, {"pattern": "c"}]}, ["'b'", "'c'"]),
    ],
)
def test_each_value_that_is_lost_has_an_entry_of_its_own(schema: Json, lost: list[str]) -> None:
    _, losses = gemini(x=schema, y={"type": "array", "items": {"type": "string"}})
    whys = [loss.why for loss in losses if loss.keyword in ("required", "properties", "pattern")]
    assert len(whys) == len(lost)
    assert all(name.strip("'") in why for name, why in zip(lost, whys, strict=True))


def test_a_part_that_is_visited_twice_is_reported_once() -> None:
    part = {"type": "string", "format": "uuid"}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}},
        "$defs": {"p": part},
    }
    _, losses = convert(schema, GEMINI_SCHEMAS, "t")
    assert [(loss.path, loss.keyword) for loss in losses] == [("/$defs/p", "format")]


@pytest.mark.parametrize(("keyword", "count"), [("oneOf", "exactly"), ("anyOf", "at least")])
def test_alternatives_at_the_root_that_only_name_required_properties_become_a_sentence(
    keyword: str, count: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        keyword: [{"required": ["a"]}, {"required": ["b"]}],
    }
    for rules in (OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS, GEMINI_SCHEMAS):
        converted, _ = convert(schema, rules, "t")
        assert converted["description"] == f"Give {count} one of: a; b."


def test_a_schema_that_is_too_deep_to_be_written_is_refused_and_not_an_error_of_the_export() -> None:
    def endless(root: Json, report: LossReport) -> Json:
        return endless(root, report)

    with pytest.raises(Inexpressible, match="nested too deep with its references followed: flatten it"):
        convert({"type": "object"}, SchemaRules(endless), "t")
