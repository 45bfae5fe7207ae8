from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.loop.played import PlayedModel, Shelf, says
from toolbus.errors import SetupError
from toolbus.loop import LoopSettings, Rule, ToolLoop
from toolbus.loop.router import comes_from_no_file, in_order, route
from toolbus.tool import Tool

OFFERED = {name: Tool(name) for name in ("weather", "time", "file")} | {
    "file": Tool("file", metadata_json='{"origin": "dropin"}')
}


def found(text: str, *rules: Rule) -> tuple[str, str] | None:
    return route(in_order(rules), text, OFFERED, comes_from_no_file)


def test_named_groups_are_the_arguments_and_those_that_did_not_match_are_left_out() -> None:
    rule = Rule(r"weather in (?P<city>\w+)(?: on (?P<day>\w+))?", "weather")
    assert found("the weather in Oslo?", rule) == ("weather", '{"city":"Oslo"}')
    assert found("the weather in 東京 on Monday", rule) == ("weather", '{"city":"東京","day":"Monday"}')
    assert found("how are you", rule) is None


def test_a_function_gives_arguments_or_none() -> None:
    def asks(text: str) -> Mapping[str, Any] | None:
        return {"zone": 1} if "time" in text else None

    assert found("what time is it", Rule(asks, "time")) == ("time", '{"zone":1}')
    assert found("hello", Rule(asks, "time")) is None


def test_the_lowest_priority_is_tried_first_and_the_first_that_fits_wins() -> None:
    late, early = Rule("it", "weather", priority=90), Rule(re.compile("IT", re.I), "time", priority=10)
    assert found("it", late, Rule("it", "weather"), early) == ("time", "{}")
    assert found("it", Rule("it", "weather"), Rule("it", "time")) == ("weather", "{}")


def test_a_rule_reaches_only_what_is_offered() -> None:
    assert found("it", Rule("it", "secret"), Rule("it", "time")) == ("time", "{}")


def test_a_tool_of_a_drop_in_file_is_called_only_where_that_was_granted() -> None:
    rule = Rule("it", "file")
    assert found("it", rule) is None
    assert route([rule], "it", OFFERED, lambda tool: True) == ("file", "{}")


@pytest.mark.parametrize(
    ("metadata", "may"),
    [("", True), ("no json", True), ("[]", True), ('{"origin":"dropin"}', False), ('{"origin":"x"}', True)],
)
def test_metadata_tells_a_drop_in_file(metadata: str, may: bool) -> None:
    assert comes_from_no_file(Tool("t", metadata_json=metadata)) is may


@pytest.mark.parametrize("answer", [{"a": object()}, {"a": float("nan")}, 42])
def test_a_rule_that_fails_is_passed_over(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert found("it", Rule(lambda text: answer, "weather"), Rule("it", "time")) == ("time", "{}")
    assert "the rule for 'weather' failed" in caplog.text


def test_a_pattern_that_is_none_is_an_error_at_once() -> None:
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
async def test_rules_read_only_what_the_user_said_last(messages: list[Any]) -> None:
    shelf = Shelf(time=lambda: 1)
    await ToolLoop(shelf, PlayedModel(says("hm")).endpoint, rules=[Rule("it", "time")]).run(messages)
    assert shelf.calls == []


async def test_the_settings_say_which_tools_rules_may_call() -> None:
    shelf = Shelf(time=lambda: 1)
    loop = ToolLoop(
        shelf, PlayedModel(says("hm")).endpoint, LoopSettings(may_route=lambda tool: False), rules=[Rule("it", "time")]
    )
    await loop.run("it")
    assert shelf.calls == []
