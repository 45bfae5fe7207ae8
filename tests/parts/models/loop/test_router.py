"""Tests rules that route a message to a tool before the model is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, says
from toolbus.errors import SetupError
from toolbus.loop import LoopSettings, Rule, ToolLoop
from toolbus.parts.models.loop.tool_source import comes_from_no_file, in_order, route
from toolbus.protocol.tool import Tool

OFFERED = {name: Tool(name) for name in ("weather", "time", "file")} | {
    "file": Tool("file", metadata_json='{"origin": "dropin"}')
}


def routed(text: str, *rules: Rule) -> tuple[str, str] | None:
    return route(in_order(rules), text, OFFERED, comes_from_no_file)


def test_named_groups_are_the_arguments_and_those_that_did_not_match_are_left_out() -> None:
    rule = Rule(r"weather in (?P<city>\w+)(?: on (?P<day>\w+))?", "weather")
    assert routed("the weather in Oslo?", rule) == ("weather", '{"city":"Oslo"}')
    assert routed("the weather in 東京 on Monday", rule) == ("weather", '{"city":"東京","day":"Monday"}')
    assert routed("how are you", rule) is None


def test_a_function_gives_arguments_or_none() -> None:
    def asks(text: str) -> Mapping[str, Any] | None:
        return {"zone": 1} if "time" in text else None

    assert routed("what time is it", Rule(asks, "time")) == ("time", '{"zone":1}')
    assert routed("hello", Rule(asks, "time")) is None


def test_rules_are_tried_by_ascending_priority_and_the_first_match_wins() -> None:
    late, early = Rule("it", "weather", priority=90), Rule(re.compile("IT", re.I), "time", priority=10)
    assert routed("it", late, Rule("it", "weather"), early) == ("time", "{}")
    assert routed("it", Rule("it", "weather"), Rule("it", "time")) == ("weather", "{}")


def test_a_rule_calls_only_offered_tools() -> None:
    assert routed("it", Rule("it", "secret"), Rule("it", "time")) == ("time", "{}")


def test_a_tool_of_a_drop_in_file_is_called_only_where_may_route_allows_it() -> None:
    rule = Rule("it", "file")
    assert routed("it", rule) is None
    assert route([rule], "it", OFFERED, lambda tool: True) == ("file", "{}")


@pytest.mark.parametrize(
    ("metadata", "may"),
    [("", True), ("no json", True), ("[]", True), ('{"origin":"dropin"}', False), ('{"origin":"x"}', True)],
)
def test_metadata_tells_a_drop_in_file(metadata: str, may: bool) -> None:
    assert comes_from_no_file(Tool("t", metadata_json=metadata)) is may


@pytest.mark.parametrize("answer", [{"a": object()}, {"a": float("nan")}, 42])
def test_a_rule_that_raises_is_skipped(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert routed("it", Rule(lambda text: answer, "weather"), Rule("it", "time")) == ("time", "{}")
    assert "the rule for 'weather' failed" in caplog.text


def test_an_invalid_pattern_is_an_error_at_once() -> None:
    with pytest.raises(SetupError, match="'weather' has an invalid pattern"):
        Rule("(", "weather")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "it"}, {"role": "assistant", "content": "it"}],
        [{"role": "system", "content": "it"}],
        [{"role": "user", "content": [{"type": "text", "text": "it"}]}],
    ],
)
async def test_rules_read_only_the_users_last_message(messages: list[Any]) -> None:
    source = FunctionSource(time=lambda: 1)
    await ToolLoop(source, ScriptedModel(says("hm")).endpoint, rules=[Rule("it", "time")]).run(messages)
    assert source.calls == []


async def test_the_settings_decide_which_tools_rules_may_call() -> None:
    source = FunctionSource(time=lambda: 1)
    loop = ToolLoop(
        source,
        ScriptedModel(says("hm")).endpoint,
        LoopSettings(may_route=lambda tool: False),
        rules=[Rule("it", "time")],
    )
    await loop.run("it")
    assert source.calls == []
