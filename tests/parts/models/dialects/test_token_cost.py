"""Tests the estimates of token costs: they grow with the text, and CJK characters count more."""

from __future__ import annotations

from tests.parts.models.dialects.sample_tools import PLAIN
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.schemas.schema_rules import OPENAI_SCHEMAS, convert
from toolbus.parts.models.dialects.token_usage import costs, estimate_tokens
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable


def _export(*names: str) -> Export:
    schema, _ = convert(PLAIN.parameters, OPENAI_SCHEMAS, PLAIN.name)
    tools = tuple({"type": "function", "name": name, "parameters": schema} for name in names)
    return Export("test", tools, NameTable.build(names, PLAIN_NAMES), {})


def test_text_of_a_known_length_costs_about_a_quarter_of_it() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("a" * 400) == 100
    assert estimate_tokens({"a": 1}) == 2


def test_chinese_japanese_and_korean_characters_cost_more_than_latin_ones() -> None:
    assert estimate_tokens("天气" * 50) == 90
    assert estimate_tokens("か" * 10) == estimate_tokens("한" * 10) == 9
    assert estimate_tokens("é" * 10) == 6
    assert estimate_tokens("天" * 10 + "a" * 40) == estimate_tokens("天" * 10) + estimate_tokens("a" * 40)


def test_costs_are_listed_by_the_names_on_the_bus() -> None:
    export = _export("files.read", "now")
    table = costs(export)
    assert list(table) == ["files.read", "now"]
    assert table["files.read"] > table["now"] > 50
    assert estimate_tokens(export) == sum(table.values())


def test_an_export_without_tools_costs_nothing() -> None:
    assert estimate_tokens(_export()) == 0
    assert costs(_export()) == {}
