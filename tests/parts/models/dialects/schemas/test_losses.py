"""Tests that no keyword gets lost silently, whatever a schema is made of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.wire_accounting import account
from tests.support.wire_capture import SentTool
from toolbus.parts.models.dialects.schemas.schema_rules import (
    ANTHROPIC_SCHEMAS,
    OPENAI_SCHEMAS,
    Inexpressible,
    SchemaRules,
    convert,
)

Json = dict[str, Any]
Schemas = st.SearchStrategy[Json]
TEXTS = st.sampled_from(["a", "b", "c d"])


def _leaf(kind: str, **keywords: st.SearchStrategy[Any]) -> Schemas:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional={"description": TEXTS, "title": TEXTS, **keywords})


LEAVES: Schemas = (
    _leaf(
        "string",
        minLength=st.integers(1, 3),
        maxLength=st.sampled_from([5, 5000]),
        pattern=st.sampled_from(["^a$", "b", "(?=x)", r"^\d$"]),
        format=st.sampled_from(["date", "uuid"]),
        enum=st.just(["a", "b"]),
        default=st.just("a"),
    )
    | _leaf(
        "integer",
        minimum=st.just(0),
        exclusiveMaximum=st.just(9),
        multipleOf=st.just(2),
        enum=st.just([1, 2]),
        examples=st.just([1]),
    )
    | _leaf("boolean", default=st.booleans(), deprecated=st.just(True))
)


def _grown(inner: Schemas) -> Schemas:
    names = st.lists(st.sampled_from(["p", "q", "z"]), unique=True, min_size=1)
    objects = st.dictionaries(st.sampled_from("pqr"), inner, max_size=2).flatmap(
        lambda properties: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties)},
            optional={
                "required": names,
                "additionalProperties": st.booleans(),
                "minProperties": st.just(1),
                "patternProperties": st.sampled_from(["^x", "^(?=x)"]).map(lambda key: {key: {"type": "string"}}),
                "not": st.just({"required": ["p"]}),
                "if": st.just({"properties": {"p": {"pattern": "x"}}}),
                "description": TEXTS,
            },
        )
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"uniqueItems": st.just(True), "maxItems": st.sampled_from([3, 3000])},
    )
    choices = st.lists(inner, min_size=2, max_size=2, unique_by=json.dumps)
    combined = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), choices).map(lambda pair: {pair[0]: pair[1]})
    return objects | arrays | combined


ROOTS = st.dictionaries(st.sampled_from("abc"), st.recursive(LEAVES, _grown, max_leaves=4), min_size=1, max_size=2)


@pytest.mark.parametrize("rules", [OPENAI_SCHEMAS, ANTHROPIC_SCHEMAS], ids=["openai", "anthropic"])
@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck), deadline=None)
@given(properties=ROOTS)
def test_every_keyword_stays_is_rewritten_with_the_same_meaning_or_is_reported(
    rules: SchemaRules, properties: Json
) -> None:
    schema = {"type": "object", "properties": properties}
    try:
        converted, losses = convert(schema, rules, "t")
    except Inexpressible:
        return
    assert len(losses) == len(set(losses))
    assert list(map(str, account(schema, SentTool("t", "", converted, {}), losses).unreported)) == []


def test_rules_of_one_alternative_for_the_whole_object_are_reported() -> None:
    schema = {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"type": "string"}}, "minProperties": 1, "additionalProperties": False},
            {"properties": {"b": {"type": "string"}}},
        ],
    }
    _, losses = convert(schema, OPENAI_SCHEMAS, "t")
    assert [(loss.path, loss.keyword) for loss in losses] == [
        ("", "anyOf"),
        ("/anyOf/0", "minProperties"),
        ("/anyOf/0", "additionalProperties"),
    ]
