"""Tests GLM realtime: OpenAI's events and flat tools, no ids of calls on the wire, tools in audio mode only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.errors import SetupError
from toolbus.parts.models.dialects.conversation import Answered, ModelCall
from toolbus.parts.models.dialects.dialect import CallsCancelled, RealtimeEvent
from toolbus.parts.models.dialects.openai_realtime import GlmRealtime
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

DIALECT = GlmRealtime()
DONE = {
    "type": "response.function_call_arguments.done",
    "response_id": "r1",
    "output_index": 1,
    "name": "get_weather",
    "arguments": '{"city":"Oslo"}',
}
ITEM = {"id": "i1", "type": "function_call", "name": "get_weather", "arguments": '{"city":"Oslo"}'}
ITEM_DONE = {"type": "response.output_item.done", "response_id": "r1", "output_index": 1, "item": ITEM}
# The only output, although its index was 1: a place in this list is no output_index.
ENDED = {"type": "response.done", "response": {"id": "r1", "status": "completed", "output": [ITEM]}}


def fed(*events: Any) -> list[RealtimeEvent]:
    reader = DIALECT.parser(DIALECT.export([PLAIN]).names)
    return [parsed for event in events for parsed in reader.feed(event)]


def test_tools_are_flat_and_every_update_repeats_the_turn_detection() -> None:
    for tools in (SAMPLES, ()):
        session = DIALECT.session_update(DIALECT.export(tools))["session"]
        assert set(session) == {"tools", "turn_detection"}
        assert session["turn_detection"] == {"type": "server_vad"}
        for tool in session["tools"]:
            assert set(tool) == {"type", "name", "description", "parameters"}
            OfficialType("openai.types.realtime", "RealtimeFunctionTool").kind.model_validate(tool, strict=True)
    assert DIALECT.session_update(DIALECT.export(SAMPLES))["session"]["tools"]


def test_text_mode_leaves_out_all_tools_with_the_reason() -> None:
    text = GlmRealtime("text")
    export = text.export([PLAIN])
    assert export.tools == ()
    assert [left.tool for left in export.left_out] == ["get_weather"]
    assert "audio mode" in export.left_out[0].why
    assert export.names.to_bus == {}
    assert text.session_update(export)["session"] == {"turn_detection": {"type": "server_vad"}}


def test_an_unknown_mode_is_refused_with_its_value() -> None:
    with pytest.raises(SetupError, match=r"'video'.*'audio'"):
        GlmRealtime("video")  # type: ignore[arg-type]


def test_a_call_gets_an_id_from_its_response_and_place() -> None:
    (call,) = fed(DONE)
    assert isinstance(call, ModelCall)
    assert (call.id, call.name, call.response) == ("glm_r1_1", "get_weather", "r1")
    assert call.arguments_json == '{"city":"Oslo"}'


def test_a_call_that_comes_in_three_events_is_reported_once() -> None:
    parsed = fed(DONE, ITEM_DONE, ENDED)
    assert [each.id for each in parsed if isinstance(each, ModelCall)] == ["glm_r1_1"]


def test_two_calls_of_a_response_are_two() -> None:
    parsed = fed(DONE, {**DONE, "output_index": 2})
    assert [each.id for each in parsed if isinstance(each, ModelCall)] == ["glm_r1_1", "glm_r1_2"]


def test_an_interrupted_call_is_cancelled_by_its_generated_id() -> None:
    parsed = fed(DONE, {"type": "response.cancelled", "response_id": "r1"})
    assert CallsCancelled(("glm_r1_1",)) in parsed


def test_answers_carry_no_id_and_one_request_for_a_response() -> None:
    call = ModelCall("glm_r1_1", "get_weather")
    events = DIALECT.answers([Answered(call, Result(output_json='{"t":21}'))] * 2, NameTable.empty())
    item = {"type": "function_call_output", "output": '{"t":21}'}
    assert events == [
        {"type": "conversation.item.create", "item": item},
        {"type": "conversation.item.create", "item": item},
        {"type": "response.create"},
    ]
