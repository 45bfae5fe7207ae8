"""Tests converted schemas: always within the rules of a provider, every loss reported, never an exception."""

from __future__ import annotations

import copy
import json
import re
import time
import tracemalloc
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dialects.sample_tools import SAMPLES, TREE
from tests.support.examples import examples
from tests.support.providers import genai_types, ollama
from toolbus.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    ANY_SCHEMAS,
    GEMINI_JSON_SCHEMAS,
    GEMINI_SCHEMAS,
    OLLAMA_SCHEMAS,
    OPENAI_SCHEMAS,
    Inexpressible,
    Loss,
    LossReport,
    SchemaRules,
    convert,
)
from toolbus.tool import Tool

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
    "properties": {},
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
    _hold_gemini_schema(schema)


def _hold_gemini_schema(schema: Json) -> None:
    if "anyOf" in schema:
        assert schema.keys() == {"anyOf"}
        assert len(schema["anyOf"]) > 1
        for branch in schema["anyOf"]:
            _hold_gemini_schema(branch)
        return
    assert schema.keys() <= FOR_ALL | ONLY_FOR.get(schema["type"], set())
    assert all(schema.get("enum", ["a"]))
    assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
    assert schema["type"] != "array" or "items" in schema
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        _hold_gemini_schema(inner)


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
        "map": {"type": ["object", "null"], "properties": {}, "additionalProperties": True},
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


# -- what would hurt ---------------------------------------------------------------------------------------------------


def _doubling(levels: int) -> Json:
    """Returns a schema that doubles with each reference."""
    definitions: Json = {"d0": {"type": "string"}}
    for level in range(1, levels):
        inner = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"type": "object", "properties": {"x": inner, "y": inner}}
    return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{levels - 1}"}}, "$defs": definitions}


def _each_other(count: int) -> Json:
    """Returns a schema whose definitions all refer to all others."""
    inner = {f"p{index}": {"$ref": f"#/$defs/d{index}"} for index in range(count)}
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {f"d{index}": {"type": "object", "properties": inner} for index in range(count)},
    }


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    "schema",
    [
        _doubling(40),
        _each_other(12),
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}},
         "$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)}},
        {"$ref": "#/$defs/d0", "$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)}},
        {"properties": {f"p{index}": {"anyOf": [{"$ref": "#"}, {"type": "null"}]} for index in range(50)}},
        {"type": "object", "properties": {"a": {"enum": list(range(20_000))}}},
        {"allOf": [{"anyOf": [{"properties": {f"{row}{index}": {}}} for index in range(9)]} for row in range(9)]},
        {"properties": {"a": {"allOf": [{"anyOf": [{"minimum": row}, {"maximum": row}]} for row in range(30)]}}},
    ],
    ids=["doubling", "each other", "chain", "root chain", "self", "enum", "root alternatives", "alternatives"],
)  # fmt: skip
def test_schemas_that_grow_are_bounded(schema: Json, rules: SchemaRules) -> None:
    started = time.process_time()
    try:
        converted, _ = convert(schema, rules, "t")
    except Inexpressible:
        pass
    else:
        hold(converted, rules)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_a_chain_of_references_takes_memory_in_proportion_to_its_length(rules: SchemaRules) -> None:
    def peak(count: int) -> int:
        chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(count)}
        tracemalloc.start()
        try:
            convert({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}, rules, "t")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(250)  # what is loaded once
    assert peak(1_000) < 8 * peak(250)


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_a_schema_that_is_nested_too_deep_is_refused(rules: SchemaRules) -> None:
    schema: Json = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(Inexpressible, match="deeper than 128 levels: flatten it"):
        convert(schema, rules, "t")


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    ("text", "why"),
    [('{"title": "\\ud800"}', "half of a surrogate pair"), ('{"default": 1e999}', "not JSON")],
)
def test_a_schema_that_a_request_cannot_hold_is_refused(text: str, why: str, rules: SchemaRules) -> None:
    with pytest.raises(Inexpressible, match=why):
        convert(json.loads(text), rules, "t")


# -- one tool never takes the model away from all others ---------------------------------------------------------------


def openai(**properties: Any) -> tuple[Json, list[Loss]]:
    """Converts properties for OpenAI and the servers that speak its formats."""
    converted, losses = convert({"type": "object", "properties": properties}, OPENAI_SCHEMAS, "t")
    hold(converted, OPENAI_SCHEMAS)
    return converted["properties"], losses


@pytest.mark.parametrize(
    ("rules", "pattern", "kept"),
    [
        (OPENAI_SCHEMAS, r"^\d+$", "^[0-9]+$"),
        (OPENAI_SCHEMAS, r"https?://", None),
        (OPENAI_SCHEMAS, r"^(?!x).*$", None),
        (ANTHROPIC_SCHEMAS, r"\b[a-z]*", r"\b[a-z]*"),
        (ANTHROPIC_SCHEMAS, r"^(?<year>\d+)", r"^(?:\d+)"),
        (ANTHROPIC_SCHEMAS, r"[^\p{Cc}]*", None),
        (ANTHROPIC_SCHEMAS, r"^(?!x).*$", None),
        (ANTHROPIC_SCHEMAS, r"(?i)x", None),
        (GEMINI_SCHEMAS, r"https?://\S+", r"https?://\S+"),
        (GEMINI_SCHEMAS, r"^(?!x).*$", None),
        (ANY_SCHEMAS, r"(?i)x", r"(?i)x"),
    ],
)
def test_a_pattern_that_a_provider_cannot_read_stands_in_the_description(
    rules: SchemaRules, pattern: str, kept: str | None
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "An address.", "pattern": pattern}},
    }
    converted, losses = convert(schema, rules, "t")
    inner = converted["properties"]["a"]
    assert inner.get("pattern") == kept
    if kept is None:
        assert inner["description"] == f"An address.\nMatches the pattern {pattern}"
        assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/a", "pattern")]
        assert pattern in losses[0].why
    else:
        assert inner["description"] == "An address."
        assert losses == []


def test_a_key_of_pattern_properties_that_cannot_be_read_is_dropped_and_no_name_is_forbidden_for_it() -> None:
    inner = {
        "type": "object",
        "patternProperties": {r"^x-": {"type": "string"}, r"^(?=y)": {"type": "string"}},
        "additionalProperties": False,
    }
    properties, losses = openai(a=inner)
    assert properties["a"] == {
        "type": "object",
        "properties": {},
        "patternProperties": {"^x-": {"type": "string"}},
        "additionalProperties": True,
        "description": "Names of further properties match the pattern ^(?=y)",
    }
    assert [loss.keyword for loss in losses] == ["patternProperties", "additionalProperties"]


@pytest.mark.parametrize(
    ("patterns", "rest"),
    [
        ({"^x": {"type": "string"}}, {"type": "string"}),
        ({"^x": {"type": "string"}, "^y": {"type": "string"}}, {"type": "string"}),
        ({"^x": {"type": "string"}, "^y": {"type": "null"}}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ],
)
def test_a_closed_map_with_patterns_of_names_takes_entries_where_grammars_know_no_patterns(
    patterns: Json, rest: Json
) -> None:
    properties, losses = openai(a={"type": "object", "patternProperties": patterns, "additionalProperties": False})
    assert properties["a"].pop("description").splitlines() == [
        f"Names of further properties match the pattern {pattern}" for pattern in patterns
    ]
    assert properties["a"] == {
        "type": "object",
        "properties": {},
        "patternProperties": patterns,
        "additionalProperties": rest,
    }
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/a", "additionalProperties")]


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_additional_items_that_are_a_list_break_no_export(rules: SchemaRules) -> None:
    convert({"type": "object", "properties": {"a": {"items": [{}], "additionalItems": [{}]}}}, rules, "t")


def test_an_open_object_says_that_it_is_open_where_servers_would_close_it() -> None:
    named = {"^x": {"type": "string"}}
    properties, losses = openai(
        a={"type": "object", "patternProperties": named},
        b={"type": "object", "properties": {"c": {"type": "null"}}, "patternProperties": named},
        c={"type": "object", "properties": {}, "unevaluatedProperties": False},
    )
    assert [inner.get("additionalProperties") for inner in properties.values()] == [True, True, None]
    assert losses == []


@pytest.mark.parametrize("keyword", ["not", "if"])
def test_what_would_forbid_more_without_its_pattern_is_dropped_as_a_whole(keyword: str) -> None:
    properties, losses = openai(a={"type": "string", keyword: {"pattern": "x"}}, b={"type": "string", "not": {}})
    assert properties == {"a": {"type": "string"}, "b": {"type": "string", "not": {}}}
    assert [(loss.path, loss.keyword) for loss in losses] == [
        (f"/properties/a/{keyword}", "pattern"),
        ("/properties/a", keyword),
    ]


def test_alternatives_of_which_one_allows_more_than_it_says_may_hold_together() -> None:
    branches = [{"type": "string", "pattern": "x"}, {"type": "string", "maxLength": 3}]
    properties, losses = openai(a={"oneOf": branches})
    assert list(properties["a"]) == ["anyOf"]
    assert [loss.keyword for loss in losses] == ["pattern", "oneOf"]


def test_bounds_for_which_llama_cpp_refuses_a_request_stand_in_the_description() -> None:
    properties, losses = openai(
        text={"type": "string", "minLength": 1, "maxLength": 2000, "description": "A text."},
        rows={"type": "array", "items": {"type": "string"}, "maxItems": 1999},
    )
    assert properties["text"] == {
        "type": "string",
        "minLength": 1,
        "description": "A text.\nAt most 2000 characters.",
    }
    assert properties["rows"]["maxItems"] == 1999
    assert [(loss.path, loss.keyword) for loss in losses] == [("/properties/text", "maxLength")]


def test_what_llama_cpp_cannot_read_is_written_in_another_way_without_a_loss() -> None:
    properties, losses = openai(
        anything=True,
        described={"description": "Whatever fits."},
        free={"type": "object"},
        closed={"type": "object", "additionalProperties": False},
        pair={"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        least={"minimum": 3},
    )
    assert properties == {
        "anything": ANYTHING,
        "described": {"description": "Whatever fits.", **ANYTHING},
        "free": {"type": "object", "properties": {}, "additionalProperties": True},
        "closed": {"type": "object", "properties": {}, "additionalProperties": False},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}], "items": ANYTHING, "maxItems": 1},
        "least": {"minimum": 3, **ANYTHING},
    }
    assert losses == []


def test_references_that_are_not_plain_paths_point_to_definitions_of_their_own() -> None:
    schema = {
        "type": "object",
        "properties": {
            "child": {"$ref": "#"},
            "other": {"$ref": "#/$defs/a~1b"},
            "named": {"$ref": "#n"},
            "plain": {"$ref": "#/$defs/p"},
        },
        "$defs": {
            "a/b": {"type": "object", "properties": {"up": {"$ref": "#"}}},
            "x": {"$anchor": "n", "type": "string", "pattern": "y"},
            "p": {"type": "integer"},
            "root1": {"type": "null"},
        },
    }
    converted, losses = convert(schema, OPENAI_SCHEMAS, "t")
    hold(converted, OPENAI_SCHEMAS)
    references = {name: inner["$ref"] for name, inner in converted["properties"].items()}
    assert references == {
        "child": "#/$defs/root2",
        "other": "#/$defs/ref1",
        "named": "#/$defs/ref2",
        "plain": "#/$defs/p",
    }
    assert converted["$defs"]["root2"]["properties"] == converted["properties"]
    assert converted["$defs"]["ref1"]["properties"] == {"up": {"$ref": "#/$defs/root2"}}
    assert converted["$defs"]["ref2"]["description"] == "Matches the pattern y"
    assert [(loss.path, loss.keyword) for loss in losses] == [("/$defs/x", "pattern")]


def test_items_of_an_older_draft_that_are_true_or_false_become_schemas_for_grammars() -> None:
    properties, losses = openai(a={"type": "array", "items": [True, False]})
    assert properties["a"]["prefixItems"] == [ANYTHING, {**ANYTHING, "not": {}}]
    assert losses == []


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
