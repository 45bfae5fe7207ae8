from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

import toolbus.sdk
import toolbus.tools
from tests.parts.moving.registry.example_tools import ANYTHING, CITY
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolDefinition


async def handler(location: str = "") -> str:
    return location


def test_both_packages_have_the_same_class() -> None:
    assert toolbus.tools.ToolDefinition is toolbus.sdk.ToolDefinition is ToolDefinition
    assert toolbus.tools.__all__ == ["ToolRegistry", "ToolDefinition", "TaskManager", "load_tools", "reload_tools"]


def test_a_definition_has_stargazers_six_fields_in_their_order_and_metadata() -> None:
    assert [field.name for field in dataclasses.fields(ToolDefinition)] == [
        *("name", "description", "parameters", "handler", "no_background", "allow_repeat", "metadata", "dict_handler")
    ]
    definition = ToolDefinition("weather", "Tells the weather.", CITY, handler)
    assert (definition.no_background, definition.allow_repeat) == (False, False)
    assert definition.handler is handler
    assert definition.parameters is CITY


def test_a_definition_can_be_made_by_position_and_by_keyword() -> None:
    by_keyword = ToolDefinition(
        name="w", description="d", parameters=CITY, handler=handler, no_background=True, allow_repeat=True
    )
    assert ToolDefinition("w", "d", CITY, handler, True, True) == by_keyword


def test_a_definition_cannot_be_changed() -> None:
    definition = ToolDefinition("w", "d", CITY, handler)
    with pytest.raises(dataclasses.FrozenInstanceError):
        definition.name = "other"  # type: ignore[misc]


def test_the_parameter_ctx_is_taken_out_of_what_models_see_and_the_schema_that_was_given_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"ctx": {}, "a": {"type": "string"}}, "required": ["ctx", "a"]}

    async def wants(a: str, ctx: Any = None) -> str:
        return a

    shown = ToolDefinition("w", "d", schema, wants).for_models().parameters
    assert shown == {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert schema["required"] == ["ctx", "a"]


@pytest.mark.parametrize("parameters", [ANYTHING, CITY, {"properties": 5}, {"type": "object", "properties": {"a": {}}}])
def test_a_definition_without_the_property_ctx_is_shown_as_it_is(parameters: dict[str, Any]) -> None:
    async def wants(ctx: Any, **others: Any) -> str:
        return ""

    definition = ToolDefinition("w", "d", parameters, wants)
    assert definition.for_models() is definition


def test_a_property_ctx_belongs_to_the_model_where_the_handler_has_no_such_parameter() -> None:
    schema = {"type": "object", "properties": {"ctx": {"type": "string"}}}

    async def takes_all(**keywords: Any) -> str:
        return ""

    async def takes_them_as_ctx(**ctx: Any) -> str:
        return ""

    for each in (takes_all, takes_them_as_ctx, print, "no handler at all"):
        definition = ToolDefinition("w", "d", schema, each)  # type: ignore[arg-type]
        assert definition.for_models() is definition


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("", "d", ANYTHING, handler), r"tool name ''.*\[A-Za-z0-9_.-\]"),
        (("a b", "d", ANYTHING, handler), "tool name 'a b'"),
        (("n" * 65, "d", ANYTHING, handler), "tool name 'nnn"),
        ((5, "d", ANYTHING, handler), "name must be a str, not int"),
        (("w", 5, ANYTHING, handler), "'w': description must be a str, not int"),
        (("w", "d", ANYTHING), "'w' has no handler: pass handler="),
        (("w", "d", [], handler), "'w': parameters must be a dict, not list"),
        (("w", "d", {"type": {1}}, handler), "'w': parameters cannot be written as JSON"),
        (("w", "d", ANYTHING, "handler"), "not on 'handler'"),
    ],
    ids=lambda each: "" if isinstance(each, str) else repr(each[:3])[:40],
)
def test_an_invalid_tool_is_refused_with_the_rule(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ToolDefinition(*fields).spec()


def test_a_handler_whose_parameters_cannot_be_given_by_name_makes_no_tool() -> None:
    async def positional(a: str, /) -> str:
        return a

    with pytest.raises(TypeError, match="positional-only"):
        ToolDefinition("w", "d", ANYTHING, positional).spec()


def _named(location):  # type: ignore[no-untyped-def]
    return location


def _one(arguments):  # type: ignore[no-untyped-def]
    return arguments


def _hinted(location: dict[str, Any]) -> Any:
    return location


def _object_argument(place: Mapping[str, Any]) -> Any:
    return place


def _text(place: str) -> Any:
    return place


def _two(a, b):  # type: ignore[no-untyped-def]
    return a


def _any_keyword(first, **others):  # type: ignore[no-untyped-def]
    return first


def _with_ctx(arguments, ctx):  # type: ignore[no-untyped-def]
    return arguments


def _with_scope(scope: ToolScope) -> str:
    return scope.tool


def _optional(arguments=None):  # type: ignore[no-untyped-def]
    return arguments


PLACE = {"type": "object", "properties": {"place": {"type": "object"}}}


@pytest.mark.parametrize(
    ("function", "parameters", "takes_dict"),
    [
        (_named, CITY, False),
        (_one, CITY, True),
        (_one, None, True),
        (lambda args: args, ANYTHING, True),
        (_hinted, CITY, True),  # a text there could not be a dict
        (_object_argument, PLACE, False),
        (_object_argument, CITY, True),
        (_text, ANYTHING, False),
        (_two, ANYTHING, False),
        (_any_keyword, ANYTHING, False),
        (_with_ctx, ANYTHING, False),
        (_optional, ANYTHING, False),
        (dict, ANYTHING, True),
        (_with_scope, ANYTHING, False),
        (lambda: 1, ANYTHING, False),
        (lambda **keywords: 1, ANYTHING, False),
    ],
)
def test_the_signature_of_a_handler_tells_whether_it_takes_one_dict(
    function: Any, parameters: dict[str, Any] | None, takes_dict: bool
) -> None:
    definition = ToolDefinition("w", "d", parameters, function)
    assert definition.takes_dict is takes_dict
    assert definition.spec().takes_dict is takes_dict
    assert ToolDefinition("w", "d", parameters, function, dict_handler=not takes_dict).takes_dict is not takes_dict


def test_without_parameters_the_hints_of_a_handler_are_the_schema() -> None:
    async def wants(city: str, days: int = 3, ctx: dict[str, Any] | None = None) -> str:
        return city

    schema = ToolDefinition("w", handler=wants).spec().tool.parameters
    assert (list(schema["properties"]), schema["required"]) == (["city", "days"], ["city"])
