"""Tests what all dialects have in common when they export tools: the cache of converted schemas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES, tool
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.parts.models.dialects.openai_chat import OpenAIChat


class Counting(OpenAIChat):
    """Notes what it converts."""

    def __init__(self, max_cached_schemas: int = 500) -> None:
        super().__init__(max_cached_schemas)
        self.converted: list[str] = []

    def _convert(self, tool: Any) -> Any:
        self.converted.append(tool.name)
        return super()._convert(tool)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_same_tools_give_the_same_export(name: str) -> None:
    dialect = find_dialect(name)
    first, again = dialect.export(SAMPLES), dialect.export(SAMPLES)
    assert (first.tools, first.losses, first.left_out) == (again.tools, again.losses, again.left_out)
    assert dialect.export(reversed(SAMPLES)).tools == find_dialect(name).export(reversed(SAMPLES)).tools


def test_schemas_are_not_copied_for_each_export() -> None:
    dialect = OpenAIChat()
    first, again = (dialect.export([PLAIN]).tools[0]["function"] for _ in range(2))
    assert first is not again
    assert first["parameters"] is again["parameters"]


def test_a_change_of_one_tool_converts_one_tool() -> None:
    dialect = Counting()
    dialect.export(SAMPLES)
    dialect.converted.clear()
    changed = dataclasses.replace(PLAIN, description="Tells the weather of a town.")
    dialect.export([changed if each is PLAIN else each for each in SAMPLES])
    assert dialect.converted == [PLAIN.name]


def test_users_with_different_tools_who_alternate_have_each_tool_converted_once() -> None:
    dialect = Counting()
    for some in (SAMPLES, SAMPLES[:3], SAMPLES[2:], SAMPLES):
        dialect.export(some)
    assert sorted(dialect.converted) == sorted(each.name for each in SAMPLES)


def test_the_cache_of_converted_schemas_is_bounded() -> None:
    dialect = Counting(max_cached_schemas=4)
    for number in range(10):
        dialect.export([PLAIN, tool(f"tool_{number}")])
        assert len(dialect._converted) <= 4
    dialect.export([tool("tool_0")])
    assert dialect.converted.count("tool_0") == 2
    assert dialect.converted.count(PLAIN.name) == 1
