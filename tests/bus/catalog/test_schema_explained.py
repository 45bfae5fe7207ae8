from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.bus.catalog.deep_schemas import SELF, chain, nested
from tests.bus.catalog.schema_cases import WIDE, at_most, compiled
from toolbus.bus.catalog.schema import (
    ARGUMENT_DEPTH,
    WIDE_INTEGERS,
    load_arguments,
)


def test_an_explanation_names_path_value_and_rule() -> None:
    checker = compiled(
        {"properties": {"city": {"type": "string"}, "a b": {"items": {"maximum": 3}}}, "required": ["city"]}
    )
    # What stands between them are words of the library that checks.
    assert re.fullmatch(r"arguments\.city: 5 .*string.* \(rule /properties/city/type\)", checker.explain({"city": 5}))
    assert re.fullmatch(r'arguments: "city" .* \(rule /required\)', checker.explain({}))
    assert checker.explain({"city": "x", "a b": [1, 9]}).startswith('arguments["a b"][1]: 9 ')


def test_an_explanation_names_all_allowed_values() -> None:
    checker = compiled({"properties": {"a": {"enum": list("vwxyz")}, "b": {"anyOf": [{"enum": list("vwxyz")}]}}})
    for name in "ab":
        assert '"q" is not one of "v", "w", "x", "y", "z"' in checker.explain({name: "q"})
    many = compiled({"properties": {"a": {"enum": [f"value-{each}" for each in range(10_000)]}}}).explain({"a": "q"})
    assert len(many) < 400
    assert '"value-0"' in many
    assert '"value-9999" (rule /properties/a/enum)' in many


def test_an_explanation_shows_five_faults_and_counts_the_rest() -> None:
    sentence = compiled({"additionalProperties": {"type": "string"}}).explain({str(i): i for i in range(12)})
    assert sentence.count("(rule /additionalProperties/type)") == 5
    assert sentence.endswith("; and 7 more")


def test_an_explanation_cuts_long_values_but_keeps_the_rule() -> None:
    sentence = compiled({"properties": {"a": {"pattern": "^x$"}}}).explain({"a": "y" * 100_000})
    assert len(sentence) < 300
    assert '"^x$" (rule /properties/a/pattern)' in sentence


def test_an_explanation_of_a_choice_names_the_closest_branch() -> None:
    branch = {"properties": {"v": {"type": "integer"}}, "type": "object"}
    sentence = compiled({"properties": {"a": {"anyOf": [{"type": "null"}, branch]}}}).explain({"a": {"v": "s"}})
    assert 'closest: arguments.a.v: "s" ' in sentence


@pytest.mark.parametrize(
    ("value", "closest"),
    [
        ({"kind": "bird", "wings": -1}, "arguments.a.wings: -1 "),
        ({"kind": "bird", "wings": "x"}, 'arguments.a.wings: "x" '),
        ({"kind": "dog"}, 'arguments.a: "name" '),
        ({"kind": "fish"}, 'arguments.a.kind: one of "cat", "dog", "bird" was expected'),
        ({}, 'arguments.a: "kind" '),
        ("often", 'arguments.a: one of "always", "never" was expected'),
    ],
)
def test_an_explanation_of_a_choice_follows_its_discriminator(value: Any, closest: str) -> None:
    pets: dict[str, Any] = {
        "cat": {},
        "dog": {"name": {"type": "string"}},
        "bird": {"wings": {"type": "integer", "minimum": 0}},
    }
    branches = [
        {"type": "object", "properties": {"kind": {"const": kind}, **more}, "required": ["kind", *more]}
        for kind, more in pets.items()
    ]
    words = [{"const": "always"}, {"const": "never"}]
    choice = [*words, {"type": "object"}] if isinstance(value, str) else branches
    assert f"closest: {closest}" in compiled({"properties": {"a": {"anyOf": choice}}}).explain({"a": value})


@pytest.mark.parametrize("arguments", [{"a": object()}, {"\ud800": 1}, {1: 2}])
@pytest.mark.parametrize("schema", [{"additionalProperties": {"type": "string"}}, {"additionalProperties": SELF}])
def test_what_json_cannot_hold_is_explained(schema: Any, arguments: Any) -> None:
    assert compiled(schema).explain(arguments).startswith("arguments: they are not JSON")


def hostile() -> dict[str, tuple[Any, str, bool]]:
    back = {"type": "object", "properties": {"c": {"$ref": "#/$defs/0"}}}
    two = {"type": "object", "anyOf": [SELF, {"minProperties": 0, **SELF}]}
    uneval = chain(6, lambda to: {"anyOf": [{"$ref": to}], "unevaluatedProperties": False}, back)
    lists: Callable[[dict[str, Any]], dict[str, Any]] = lambda items: {"properties": {"a": {"items": items}}}  # noqa: E731
    return {
        "nested quantifiers": (
            {"properties": {"a": {"pattern": "^(a+)+$"}}},
            json.dumps({"a": "a" * 900_000 + "b"}),
            False,
        ),
        "nested quantifiers with look-around": (
            {"properties": {"a": {"pattern": "(?=a)(a+)+$"}}},
            json.dumps({"a": "a" * 7000 + "b"}),
            False,
        ),
        "back-references": (lists({"pattern": r"(a*)*\1c"}), json.dumps({"a": ["a" * 20] * 700}), False),
        "many states": ({"properties": {"a": {"pattern": "a[ab]{500}c"}}}, json.dumps({"a": "abb" * 300_000}), False),
        "many texts": (lists({"pattern": "a[ab]{50}c"}), json.dumps({"a": ["abb" * 100] * 3000}), False),
        "two ways down, deep": (two, nested(ARGUMENT_DEPTH - 2, "1"), False),
        "two ways down": (two, nested(18, "1"), False),
        "two ways down in all of them": ({"allOf": [SELF, {"minProperties": 0, **SELF}]}, nested(120), True),
        "doubled in place, then back": (
            chain(10, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}, back),
            nested(120, "1"),
            False,
        ),
        "unevaluated, then back": (uneval, nested(120), True),
        "4,000 schemas for each item": (
            lists({"allOf": [{"minimum": -i} for i in range(4000)]}),
            json.dumps({"a": [1] * 100_000}),
            False,
        ),
        "2,000 objects to compare": (
            lists({"enum": [{"a": i} for i in range(2000)]}),
            json.dumps({"a": [{"a": 1999}] * 5000}),
            False,
        ),
        "100,000 faults": (lists({"type": "string"}), json.dumps({"a": [1] * 100_000}), False),
        "100,000 faults in a choice": (lists({"anyOf": [{"type": "string"}]}), json.dumps({"a": [1] * 100_000}), False),
        "a fault in every quote of a long text": (
            {"properties": {"a": {"allOf": [{"maxLength": i} for i in range(3000)]}}},
            json.dumps({"a": "x" * 500_000}),
            False,
        ),
        "wide unique integers": (
            {"properties": {"a": {"uniqueItems": True}}},
            json.dumps({"a": [WIDE + i for i in range(WIDE_INTEGERS)]}),
            True,
        ),
        "tiny divisors": (lists({"multipleOf": 1e-300}), json.dumps({"a": [1e300] * 1000}), True),
    }


HOSTILE = hostile()


@pytest.mark.parametrize(("schema", "text", "valid"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_arguments_are_checked_against_a_hostile_schema_in_bounded_time(
    schema: Any, text: str, valid: bool
) -> None:
    with at_most(2.5):
        checker = compiled(schema)
    arguments = load_arguments(text)
    with at_most(2.5):
        assert checker.is_valid(arguments) is valid
    with at_most(2.5):
        sentence = checker.explain(arguments)
    assert (sentence == "") is valid
    assert len(sentence) < 3000


def test_a_pattern_that_backtracks_too_often_is_refused_with_an_explanation() -> None:
    checker = compiled({"properties": {"a": {"pattern": r"(a*)*\1c"}}})
    arguments = {"a": "a" * 30 + "b"}
    assert not checker.is_valid(arguments)
    assert "backtracking" in checker.explain(arguments)


def test_an_ordinary_schema_is_checked_by_the_validator_itself() -> None:
    schema = {
        "type": "object",
        "properties": {"to": {"type": "string", "pattern": "^[a-z]{1,32}$"}, "tags": {"items": {"type": "string"}}},
    }
    assert type(compiled(schema).is_valid).__name__ == "builtin_function_or_method"
