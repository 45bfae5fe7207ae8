"""Tests Grok realtime: OpenAI's events, flat tools, and a session without a type."""

from __future__ import annotations

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import Answered, ModelCall
from toolbus.parts.models.dialects.openai_realtime import Grok
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

DIALECT = Grok()


def test_tools_are_flat_and_the_model_may_choose() -> None:
    event = DIALECT.session_update(DIALECT.export(SAMPLES))
    assert event["type"] == "session.update"
    assert set(event["session"]) == {"tools", "tool_choice"}
    assert event["session"]["tool_choice"] == "auto"
    for tool in event["session"]["tools"]:
        assert set(tool) == {"type", "name", "description", "parameters"}
        OfficialType("openai.types.realtime", "RealtimeFunctionTool").kind.model_validate(tool, strict=True)


def test_an_update_without_tools_removes_them() -> None:
    assert DIALECT.session_update(DIALECT.export([]))["session"] == {"tools": []}


def test_a_call_is_read_and_answered_by_its_id() -> None:
    reader = DIALECT.parser(DIALECT.export([PLAIN]).names)
    (call,) = reader.feed(
        {
            "type": "response.function_call_arguments.done",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city":"Oslo"}',
        }
    )
    assert isinstance(call, ModelCall)
    assert (call.id, call.name, call.arguments_json) == ("c1", "get_weather", '{"city":"Oslo"}')
    item, go_on = DIALECT.answers([Answered(call, Result(output_json='"sunny"'))], NameTable.empty())
    assert item["item"] == {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    assert go_on == {"type": "response.create"}
