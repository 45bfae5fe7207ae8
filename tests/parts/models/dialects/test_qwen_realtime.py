"""Tests Qwen Omni realtime: OpenAI's events with nested tools, which exclude its search."""

from __future__ import annotations

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import Answered, ModelCall
from toolbus.parts.models.dialects.openai_realtime import QwenRealtime
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

DIALECT = QwenRealtime()
NESTED = OfficialType("openai.types.chat", "ChatCompletionFunctionToolParam")


def test_tools_are_nested_and_disable_the_search() -> None:
    session = DIALECT.session_update(DIALECT.export(SAMPLES))["session"]
    assert set(session) == {"tools", "enable_search"}
    assert session["enable_search"] is False
    for tool in session["tools"]:
        assert set(tool) == {"type", "function"}
        NESTED.validate_python(tool)


def test_an_update_without_tools_does_not_change_the_search() -> None:
    event = DIALECT.session_update(DIALECT.export([]))
    assert event == {"type": "session.update", "session": {"tools": []}}


def test_a_call_is_read_and_answered_by_its_id() -> None:
    reader = DIALECT.parser(DIALECT.export([PLAIN]).names)
    (call,) = reader.feed(
        {"type": "response.function_call_arguments.done", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    )
    assert isinstance(call, ModelCall)
    assert (call.id, call.name) == ("c1", "get_weather")
    item, go_on = DIALECT.answers([Answered(call, Result(output_json="true"))], NameTable.empty())
    assert item["item"] == {"type": "function_call_output", "call_id": "c1", "output": "true"}
    assert go_on == {"type": "response.create"}
