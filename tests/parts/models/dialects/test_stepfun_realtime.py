"""Tests StepFun realtime: OpenAI's events with nested tools."""

from __future__ import annotations

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import Answered, ModelCall
from toolbus.parts.models.dialects.openai_realtime import StepFunRealtime
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

DIALECT = StepFunRealtime()
NESTED = OfficialType("openai.types.chat", "ChatCompletionFunctionToolParam")


def test_tools_are_nested() -> None:
    event = DIALECT.session_update(DIALECT.export(SAMPLES))
    assert event["type"] == "session.update"
    assert set(event["session"]) == {"tools"}
    for tool in event["session"]["tools"]:
        assert set(tool) == {"type", "function"}
        NESTED.validate_python(tool)


def test_an_update_without_tools_removes_them() -> None:
    assert DIALECT.session_update(DIALECT.export([]))["session"] == {"tools": []}


def test_a_call_is_read_and_answered_by_its_id() -> None:
    reader = DIALECT.parser(DIALECT.export([PLAIN]).names)
    (call,) = reader.feed(
        {"type": "response.function_call_arguments.done", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    )
    assert isinstance(call, ModelCall)
    assert (call.id, call.name) == ("c1", "get_weather")
    item, go_on = DIALECT.answers([Answered(call, Result(output_json="1"))], NameTable.empty())
    assert item["item"] == {"type": "function_call_output", "call_id": "c1", "output": "1"}
    assert go_on == {"type": "response.create"}
