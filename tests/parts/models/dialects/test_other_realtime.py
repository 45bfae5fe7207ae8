"""Tests Grok, Qwen Omni and StepFun realtime: OpenAI's events, with tools and a session of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import Answered, ModelCall
from toolbus.parts.models.dialects.openai_realtime import Grok, QwenRealtime, StepFunRealtime
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

FLAT = OfficialType("openai.types.realtime", "RealtimeFunctionTool")
NESTED = OfficialType("openai.types.chat", "ChatCompletionFunctionToolParam")
every_dialect = pytest.mark.parametrize(
    "dialect", [Grok(), QwenRealtime(), StepFunRealtime()], ids=lambda each: each.name
)


@pytest.mark.parametrize(
    ("dialect", "rest"),
    [
        (Grok(), {"tool_choice": "auto"}),
        (QwenRealtime(), {"enable_search": False}),  # its search excludes tools
        (StepFunRealtime(), {}),
    ],
)
def test_tools_are_offered_in_the_form_of_the_provider(dialect: Any, rest: dict[str, Any]) -> None:
    event = dialect.session_update(dialect.export(SAMPLES))
    tools = event["session"].pop("tools")
    assert event == {"type": "session.update", "session": rest}
    for tool in tools:
        if isinstance(dialect, Grok):
            assert set(tool) == {"type", "name", "description", "parameters"}
            FLAT.kind.model_validate(tool, strict=True)
        else:
            assert set(tool) == {"type", "function"}
            NESTED.validate_python(tool)


@every_dialect
def test_an_update_without_tools_removes_them_and_changes_nothing_else(dialect: Any) -> None:
    assert dialect.session_update(dialect.export([])) == {"type": "session.update", "session": {"tools": []}}


@every_dialect
def test_a_call_is_read_and_answered_by_its_id(dialect: Any) -> None:
    event = {"type": "response.function_call_arguments.done", "call_id": "c1", "name": "get_weather"}
    (call,) = dialect.parser(dialect.export([PLAIN]).names).feed({**event, "arguments": '{"city":"Oslo"}'})
    assert isinstance(call, ModelCall)
    assert (call.id, call.name, call.arguments_json) == ("c1", "get_weather", '{"city":"Oslo"}')
    item, go_on = dialect.answers([Answered(call, Result(output_json='"sunny"'))], NameTable.empty())
    assert item["item"] == {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    assert go_on == {"type": "response.create"}
