"""Tests the estimates of token costs: they grow with the text, and CJK characters count more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN
from toolbus.parts.models.dialects import token_usage
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.schemas.schema_rules import OPENAI_SCHEMAS, convert
from toolbus.parts.models.dialects.token_usage import CostCache, costs, estimate_tokens
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


def test_a_cache_counts_each_tool_once_until_it_or_its_name_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []

    def count(written: Any) -> int:
        counted.append(written["function"]["name"])
        return estimate_tokens(written)

    monkeypatch.setattr(token_usage, "estimate_tokens", count)
    dialect, cache = OpenAIChat(), CostCache()
    now = replace(PLAIN, name="now")
    for tools, fresh in (
        ([PLAIN, now], [PLAIN.name, "now"]),
        ([PLAIN, now], []),
        ([now, replace(PLAIN, description="Another.")], [PLAIN.name]),
        ([PLAIN], [PLAIN.name]),  # of exports before the newest nothing is remembered
    ):
        export = dialect.export(tools)
        counted.clear()
        assert cache.of(export) == {
            tool.name: estimate_tokens(written) for tool, written in zip(tools, export.tools, strict=True)
        }
        assert counted == fresh
