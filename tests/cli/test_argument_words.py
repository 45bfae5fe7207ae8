"""Words of the command line become the arguments of a tool, by the types that its schema declares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from toolbus.cli import terminal
from toolbus.cli.call_command import ArgumentWords, schema_of
from toolbus.protocol.tool import Tool

UNTYPED: list[tuple[tuple[str, ...], Any]] = [
    ((), {}),
    (
        ("a=1", "b=x", "c=", 'd="2"', "e=[1]", "f=NaN", "g=a=b"),
        {"a": 1, "b": "x", "c": "", "d": "2", "e": [1], "f": "NaN", "g": "a=b"},
    ),
    (('{"a": 1}', "a=2"), {"a": 2}),
]
STRING = {"type": "string"}
NODE = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "integer"}]}  # refers to itself
DEFINITIONS = {"text": STRING, "node": NODE}

# What is declared of an argument, its value on the command line → what the tool gets.
TYPED: list[tuple[Any, str, Any]] = [
    (STRING, "2024", "2024"),
    (STRING, "true", "true"),
    (STRING, "null", "null"),
    (STRING, "[1]", "[1]"),
    (STRING, '"2"', "2"),
    (STRING, "", ""),
    ("string", "2024", "2024"),  # as other systems write it
    ({"type": "str"}, "2024", "2024"),
    ({"type": "integer"}, "3", 3),
    ({"type": "integer"}, "three", "three"),  # the bus says what is wrong with it
    ({"type": "number"}, "2.5", 2.5),
    ({"type": "boolean"}, "true", True),
    ({"type": "array", "items": STRING}, '["a"]', ["a"]),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"anyOf": [STRING, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
    ({"anyOf": [STRING, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [STRING, {"type": "integer"}]}, "5.5", "5.5"),
    ({"anyOf": [STRING, {}]}, "5", 5),
    ({"oneOf": [STRING, {"type": "array"}]}, "5", "5"),
    ({"allOf": [STRING]}, "5", "5"),
    ({"$ref": "#/$defs/text"}, "5", "5"),
    ({"$ref": "#/$defs/node"}, "5", 5),
    ({"$ref": "#/$defs/gone"}, "5", 5),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "auto"]}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({}, "5", 5),
    (True, "5", 5),
]


@pytest.mark.parametrize(("words", "expected"), UNTYPED)
def test_without_a_schema_a_value_is_json_if_it_can_be(words: tuple[str, ...], expected: Any) -> None:
    assert json.loads(ArgumentWords.read(words).text()) == expected


@pytest.mark.parametrize(("declared", "value", "expected"), TYPED)
def test_the_declared_type_decides_what_a_value_is(declared: Any, value: str, expected: Any) -> None:
    schema = {"type": "object", "properties": {"a": declared}, "$defs": DEFINITIONS}
    arguments = json.loads(ArgumentWords.read((f"a={value}", "b=1")).text(schema))
    assert repr(arguments) == repr({"a": expected, "b": 1})


def test_values_of_a_map_have_the_type_of_its_values() -> None:
    schema = {"type": "object", "additionalProperties": STRING}
    assert json.loads(ArgumentWords.read(("a=1",)).text(schema)) == {"a": "1"}


def test_a_document_without_pairs_stays_as_it_is_written() -> None:
    assert ArgumentWords.read(('{"a": 1.0,  "b": 2}',)).text({"type": "object"}) == '{"a": 1.0,  "b": 2}'


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("city",), "'city' is not KEY=VALUE"),
        (("=1",), "is not KEY=VALUE"),
        (("city=Oslo", "days=1", "city=Rome"), "'city=Rome' sets city again: write a list as one value, city='[…]'"),
        (("{a}",), "is not JSON: "),
        (('{"a": NaN}',), "JSON has no NaN"),
        (("a=1", '{"b": 1}'), "before all pairs"),
        (("@/nowhere",), "cannot read /nowhere"),
    ],
)
def test_words_that_are_not_arguments_are_wrong_usage(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        ArgumentWords.read(words)
    assert ended.value.exit_code == terminal.USAGE
    assert error in capsys.readouterr().err


class CatalogOfOne:
    """Lists one tool, by its full name only."""

    async def list(self, role: str | None, *, names: Sequence[str] = (), **options: Any) -> list[Any]:
        listed = SimpleNamespace(tool=Tool("lore:search", "", '{"type": "object", "properties": {"q": {}}}'))
        return [listed] if not names or "lore:search" in names else []


async def test_a_tool_that_is_listed_with_its_source_is_found_by_its_bare_name() -> None:
    host: Any = CatalogOfOne()
    for name in ("lore:search", "search"):
        assert await schema_of(host, name, None, None) == {"type": "object", "properties": {"q": {}}}
    assert await schema_of(host, "arch", None, None) is None


class CatalogOfOperators:
    """Lists its one tool only where its source is asked for, as the bus does with those of operators."""

    async def list(self, role: str | None, *, source: str = "", names: Sequence[str] = (), **options: Any) -> list[Any]:
        schema = '{"type": "object", "properties": {"id": {"type": "string"}}}'
        listed = SimpleNamespace(tool=Tool("toolbus:cancel_call", "", schema))
        return [listed] if (source, *names) == ("toolbus", "toolbus:cancel_call") else []


async def test_an_id_of_digits_stays_a_text_for_a_tool_of_operators() -> None:
    host: Any = CatalogOfOperators()
    schema = await schema_of(host, "toolbus:cancel_call", None, None)
    assert json.loads(ArgumentWords.read(["id=102832457529680"]).text(schema)) == {"id": "102832457529680"}
    assert await schema_of(host, "toolbus:nothing", None, None) is None
