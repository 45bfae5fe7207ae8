"""Tests Gemini Live against the types of google-genai."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.dialects.sample_tools import CHINESE, DOTTED, PLAIN, SAMPLES
from tests.support.providers import genai_types
from toolbus.errors import Code, Stage
from toolbus.parts.models.dialects.conversation import Answered, Delta, Json, ModelCall, Usage
from toolbus.parts.models.dialects.dialect import CallsCancelled, RealtimeEvent, ResponseEnded
from toolbus.parts.models.dialects.endings import NAMELESS
from toolbus.parts.models.dialects.gemini_live import GeminiLive
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import CallError, Result

DIALECT = GeminiLive()
CALLS: Json = {
    "tool_call": {
        "function_calls": [
            {"id": "f1", "name": "get_weather", "args": {"city": "Oslo"}},
            {"id": "f2", "name": "files.read", "args": {"path": "a"}},
        ]
    }
}


def fed(*events: Any) -> list[RealtimeEvent]:
    reader = DIALECT.parser(DIALECT.export([PLAIN, DOTTED]).names)
    return [parsed for event in events for parsed in reader.feed(event)]


def calls(*events: Any) -> list[ModelCall]:
    return [parsed for parsed in fed(*events) if isinstance(parsed, ModelCall)]


def test_tools_are_set_only_when_a_session_opens() -> None:
    assert DIALECT.fixed_at_connect


def test_every_sample_makes_a_setup_that_the_sdk_accepts() -> None:
    export = DIALECT.export(SAMPLES)
    update = DIALECT.session_update(export)
    config = genai_types.LiveConnectConfig.model_validate(update["setup"])
    assert config.tools is not None
    (tool,) = config.tools
    assert isinstance(tool, genai_types.Tool)
    assert tool.function_declarations is not None
    assert [each.name for each in tool.function_declarations] == [each["name"] for each in export.tools]
    assert genai_types.LiveClientMessage.model_validate(update).setup == genai_types.LiveClientSetup.model_validate(
        update["setup"]
    )


def test_a_setup_without_tools_declares_nothing() -> None:
    assert DIALECT.session_update(DIALECT.export([])) == {"setup": {"tools": []}}


def test_calls_of_one_message_belong_together() -> None:
    first, second = calls(CALLS)
    assert (first.id, first.name, first.arguments_json) == ("f1", "get_weather", '{"city":"Oslo"}')
    assert (second.id, second.name, second.arguments_json) == ("f2", "files.read", '{"path":"a"}')
    assert first.response == second.response != ""


def test_calls_of_two_messages_do_not() -> None:
    assert len({call.response for call in calls(CALLS, CALLS)}) == 2


def test_the_keys_of_the_wire_are_read_as_well() -> None:
    (call,) = calls({"toolCall": {"functionCalls": [{"id": "f1", "name": "get_weather", "args": {}}]}})
    assert (call.id, call.arguments_json) == ("f1", "{}")


def test_messages_of_the_sdk_are_read_as_well() -> None:
    message = genai_types.LiveServerMessage.model_validate(
        {
            **CALLS,
            "serverContent": {
                "modelTurn": {"parts": [{"text": "thinking", "thought": True}, {"text": "hello"}]},
                "outputTranscription": {"text": "spoken"},
            },
        }
    )
    parsed = fed(message)
    assert parsed[:3] == [Delta("reasoning", "thinking"), Delta("text", "hello"), Delta("text", "spoken")]
    assert [each.id for each in parsed if isinstance(each, ModelCall)] == ["f1", "f2"]


def test_a_call_without_arguments_or_without_a_known_name_is_still_a_call() -> None:
    known, unknown = calls({"tool_call": {"function_calls": [{"id": "a", "name": "get_weather"}, {"name": "rm"}]}})
    assert (known.known, known.arguments_json) == (True, "")
    assert (unknown.known, unknown.name) == (False, "rm")


def test_a_nameless_call_is_dropped() -> None:
    assert calls({"tool_call": {"function_calls": [{"id": "a"}, {"name": ""}, 7]}}) == []


def test_calls_without_ids_get_different_ones_that_are_not_sent_back() -> None:
    first, second = calls({"tool_call": {"function_calls": [{"name": "get_weather"}, {"name": "get_weather"}]}})
    assert first.id != second.id
    (event,) = DIALECT.answers([Answered(first, Result())], NameTable.empty())
    assert event["tool_response"]["function_responses"] == [{"name": "get_weather", "response": {"result": None}}]


@pytest.mark.parametrize("key", ["tool_call_cancellation", "toolCallCancellation"])
def test_cancelled_calls_are_not_to_be_answered(key: str) -> None:
    assert fed({key: {"ids": ["f1", "f2", 3]}}) == [CallsCancelled(("f1", "f2"), answers=False)]


@pytest.mark.parametrize(
    ("output", "response"),
    [
        ('{"t":21}', {"t": 21}),
        ("21", {"result": 21}),
        ('"sunny"', {"result": "sunny"}),
        ("[1,2]", {"result": [1, 2]}),
        ("null", {"result": None}),
    ],
)
def test_a_response_is_always_an_object(output: str, response: Json) -> None:
    (event,) = DIALECT.answers([Answered(ModelCall("f1", "a"), Result(output_json=output))], NameTable.empty())
    assert event["tool_response"]["function_responses"][0]["response"] == response


def test_all_answers_go_in_one_message_that_the_sdk_accepts() -> None:
    export = DIALECT.export([PLAIN, CHINESE])
    wire = export.names.wire(CHINESE.name)
    failed = Result(is_error=True, error=CallError(Code.TOOL, "no such city", Stage.ACCEPTED))
    answered = [
        Answered(
            ModelCall("f1", "get_weather", wire_name="get_weather", extra={"id": "f1"}), Result(output_json='{"t":21}')
        ),
        Answered(ModelCall("f2", CHINESE.name, extra={"id": "f2"}), failed),
    ]
    (event,) = DIALECT.answers(answered, export.names)
    response = genai_types.LiveClientToolResponse.model_validate(event["tool_response"])
    assert genai_types.LiveClientMessage.model_validate(event).tool_response == response
    assert response.function_responses is not None
    assert [(each.id, each.name) for each in response.function_responses] == [("f1", "get_weather"), ("f2", wire)]
    assert response.function_responses[1].response == {"error": "no such city"}


def test_without_answers_there_is_no_message() -> None:
    assert DIALECT.answers([], NameTable.empty()) == []


@pytest.mark.parametrize(
    "event",
    [
        *(None, 7, "text", [], {}, {"setup_complete": {}}, {"tool_call": []}, {"tool_call": {"function_calls": {}}}),
        {"server_content": {"model_turn": {"parts": [None, {"text": 7}, {"inline_data": {}}]}, "interrupted": True}},
        {"tool_call_cancellation": {"ids": "f1"}},
    ],
)
def test_an_unknown_or_malformed_message_is_ignored(event: Any) -> None:
    assert fed(event) == []


def test_arguments_that_json_cannot_hold_are_empty() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for args in ({"x": {1, 2}}, {"x": loop}):
        (call,) = calls({"tool_call": {"function_calls": [{"id": "a", "name": "get_weather", "args": args}]}})
        assert call.arguments_json == ""


NAMES = ["tool_call", "toolCall", "function_calls", "server_content", "model_turn", "parts", "text", "ids", "args"]
MESSAGES = st.recursive(
    st.none() | st.integers() | st.floats() | st.sampled_from(["get_weather", "hi", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NAMES, "tool_call_cancellation", "name", "id"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(MESSAGES)
def test_any_message_is_read_without_an_error(message: Any) -> None:
    for parsed in fed(message):
        if isinstance(parsed, ModelCall) and parsed.arguments_json:
            json.loads(parsed.arguments_json)


def test_nan_in_arguments_reaches_the_bus_which_refuses_it() -> None:
    (call,) = calls({"tool_call": {"function_calls": [{"id": "a", "name": "get_weather", "args": {"n": math.nan}}]}})
    assert call.arguments_json == '{"n":NaN}'


def turn_end(**content: Any) -> Json:
    return {"server_content": {"turn_complete": True, **content}}


@pytest.mark.parametrize(
    ("events", "ending", "reason"),
    [
        ([turn_end()], "complete", ""),
        ([turn_end(turn_complete_reason="NEED_MORE_INPUT")], "complete", ""),
        ([turn_end(turn_complete_reason="MALFORMED_FUNCTION_CALL")], "failed", "MALFORMED_FUNCTION_CALL"),
        ([turn_end(turn_complete_reason="RESPONSE_REJECTED")], "refused", "RESPONSE_REJECTED"),
        ([{"serverContent": {"interrupted": True}}, {"serverContent": {"turnComplete": True}}], "cut", "interrupted"),
        ([{"tool_call": {"function_calls": [{"args": {}}]}}, turn_end()], "failed", NAMELESS),
    ],
)
def test_the_end_of_a_turn_tells_how_it_ended(events: list[Json], ending: Any, reason: str) -> None:
    assert fed(*events) == [ResponseEnded("", ending, reason)]
    assert fed(*events, turn_end())[-1] == ResponseEnded("")


def test_the_end_of_a_turn_of_the_sdk_is_read_with_its_tokens() -> None:
    reason = genai_types.TurnCompleteReason.RESPONSE_REJECTED
    message = genai_types.LiveServerMessage(
        server_content=genai_types.LiveServerContent(turn_complete=True, turn_complete_reason=reason),
        usage_metadata=genai_types.UsageMetadata(prompt_token_count=9, response_token_count=4, thoughts_token_count=1),
    )
    assert fed(message) == [ResponseEnded("", "refused", "RESPONSE_REJECTED", Usage(9, 5, None, 1))]
