"""Tools as the bus offers them: with the normal form of their schema, and warnings for operators."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.test_normal_schema import KEYS, ODD
from tests.support.core_model import Core, tool
from tests.support.examples import examples
from toolbus.bus.catalog.entry import CompiledTool, compile_tool, unchecked
from toolbus.bus.streams.catalog_messages import listed
from toolbus.errors import InvalidTool
from toolbus.parts.models.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    ANY_SCHEMAS,
    GEMINI_SCHEMAS,
    OPENAI_SCHEMAS,
    SchemaRules,
    convert,
)
from toolbus.protocol.tool import Limits, Tool

ODD_SCHEMA = {"a": {"type": "float", "required": True}, "b": {"type": "list"}, "c": {"$ref": "http://x/y.json"}}
READ = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "array"}, "c": {}},
    "required": ["a"],
}


def odd_tool(schema: Any = ODD_SCHEMA) -> Tool:
    return tool("odd", "An odd one.", parameters_json=json.dumps(schema))


def compiled(schema: Any = ODD_SCHEMA) -> CompiledTool:
    return compile_tool(odd_tool(schema), Limits())


def test_a_tool_has_the_normal_form_in_its_schema_its_hash_and_its_check() -> None:
    item = compiled()
    assert item.tool.parameters == READ
    assert item.tool.schema_hash == odd_tool(READ).schema_hash != odd_tool().schema_hash
    assert item.declared == odd_tool()
    assert item.checker is not None
    assert item.checker.is_valid({"a": 1.5, "b": [1], "c": "anything"})
    assert not item.checker.is_valid({"a": "1.5"})
    assert compile_tool(item.tool, Limits()).warnings == ()


def test_a_schema_that_breaks_no_rule_stays_the_text_that_was_declared() -> None:
    text = '{ "type": "object",  "properties": {"b": {"maximum": 1e3}} }'
    item = compile_tool(tool("t", parameters_json=text), Limits())
    assert item.tool.parameters_json == text
    assert item.warnings == ()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"not": {"$ref": "http://x/"}}}},
        {"type": "object", "properties": {"x": {"oneOf": [{"$ref": "http://x/"}, {"type": "integer"}]}}},
        {"type": "object", "properties": {"x": {"if": {"minimum": "3"}, "then": {"type": "string"}}}},
        {"type": "object", "$ref": "#/$defs/none", "unevaluatedProperties": False},
        {"type": "object", "properties": [], "additionalProperties": False},
        {"properties": {"x": {"contains": {"pattern": "("}, "maxContains": 0}}},
    ],
)
def test_what_is_left_out_never_makes_the_rest_refuse_more(schema: dict[str, Any]) -> None:
    item = compiled(schema)
    assert item.checker is not None
    assert item.warnings
    assert all(item.checker.is_valid({"x": value}) for value in (5, "a", [1]))


@pytest.mark.parametrize("rules", [OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS, GEMINI_SCHEMAS, ANY_SCHEMAS])
def test_every_dialect_gets_a_schema_that_it_takes(rules: SchemaRules) -> None:
    parameters = compiled({"a": {"type": "float"}, "b": {"type": "list[int]"}}).tool.parameters
    schema, losses = convert(parameters, rules, "odd")
    assert losses == []
    assert schema["properties"]["a"]["type"] == "number"
    assert schema["properties"]["b"] == {"type": "array", "items": {"type": "integer"}}


def test_warnings_are_listed_and_logged_once_however_often_the_plugin_comes(caplog: pytest.LogCaptureFixture) -> None:
    core = Core()
    with caplog.at_level(logging.WARNING, "toolbus.catalog"):
        for _ in range(3):
            plugin = core.plugin("p", odd_tool())
            (listing,) = core.registry.listings("default")
            warnings = list(listed(listing).warnings)
            core.registry.withdraw(plugin)
    assert [each for each in warnings if "#/properties/a/type" in each and '"float" is read as "number"' in each]
    assert [each for each in warnings if "#/properties/c/$ref" in each and "http://x/y.json" in each]
    assert len(caplog.records) == len(warnings)
    assert all("'odd'" in record.getMessage() for record in caplog.records)


def test_the_warnings_are_those_of_the_declaration_that_is_offered() -> None:
    core = Core()
    core.plugin("p", odd_tool())
    corrected = core.plugin("p", odd_tool(READ))
    (listing,) = core.registry.listings("default")
    assert list(listed(listing).warnings) == []
    core.registry.withdraw(corrected)
    core.plugin("p", odd_tool())
    assert listed(core.registry.listings("default")[0]).warnings


def test_a_tool_that_came_by_rest_is_taken_whatever_its_schema_is() -> None:
    read = unchecked(odd_tool(), Limits())
    assert (read.tool.parameters, read.declared, read.checker) == (READ, odd_tool(), None)
    refused = unchecked(odd_tool({"properties": {"x": {"type": "strin"}}}), Limits())
    assert refused.tool == refused.declared
    assert "did you mean" in refused.warnings[0]


JSON = st.recursive(
    ODD | st.sampled_from(["#", "#/properties/x", "#x", "http://x/", "object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5))
@settings(max_examples=examples(50))
def test_any_schema_is_taken_or_refused_with_a_sentence_in_bounded_time(schema: dict[str, Any]) -> None:
    began = time.process_time()
    try:
        item = compiled(schema)
    except InvalidTool as refused:
        faults = refused.faults
    else:
        faults = ()
        assert item.checker is not None
        assert item.checker.is_valid({}) in (True, False)
        assert compile_tool(item.tool, Limits()).checker is not None  # the normal form is a schema
    assert time.process_time() - began < 2.0
    assert all("schema at #" in fault for fault in faults)
