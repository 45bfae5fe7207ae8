from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from tests.parts.models.dialects.schemas.rule_cases import (
    ALL,
    ANYTHING,
    Json,
    hold,
    openai,
)
from toolbus.parts.models.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    ANY_SCHEMAS,
    GEMINI_SCHEMAS,
    GRAMMAR_SCHEMAS,
    OPENAI_SCHEMAS,
    Inexpressible,
    SchemaRules,
    convert,
)

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
def test_a_keyword_that_would_forbid_more_without_its_pattern_is_dropped_as_a_whole(keyword: str) -> None:
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
        rows={"type": "array", "items": {"type": "string"}, "maxItems": 1998},
        more={"type": "array", "items": {"type": "string"}, "maxItems": 1999},  # its parser counts one more
        least={"type": "array", "items": {"type": "string"}, "minItems": 1999},
    )
    assert properties["text"] == {
        "type": "string",
        "minLength": 1,
        "description": "A text.\nAt most 2000 characters.",
    }
    assert properties["rows"]["maxItems"] == 1998
    assert properties["more"]["description"] == "At most 1999 items."
    assert properties["least"]["minItems"] == 1999
    assert [(loss.path, loss.keyword) for loss in losses] == [
        ("/properties/text", "maxLength"),
        ("/properties/more", "maxItems"),
    ]


def test_a_pattern_that_llama_cpp_cannot_read_is_written_in_another_way_without_a_loss() -> None:
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
        "free": {"type": "object"},
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


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "properties", "patternProperties"])
@pytest.mark.parametrize("rules", [*ALL.values(), GRAMMAR_SCHEMAS], ids=[*ALL, "grammar"])
def test_a_broken_keyword_beside_a_list_of_items_and_their_rest_is_left_out(keyword: str, rules: SchemaRules) -> None:
    pair = {"items": [{"type": "string"}], "additionalItems": False, keyword: 5}
    converted, losses = convert({"type": "object", "properties": {"a": pair}}, rules, "t")
    assert rules is ANY_SCHEMAS or (keyword not in converted["properties"]["a"] and losses)
