"""Tests OpenAI's realtime events against the types of its SDK, and what the providers that use them share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.dialects.sample_tools import CHINESE, PLAIN, SAMPLES
from tests.support.providers import OfficialType
from toolbus.errors import Code, Stage
from toolbus.parts.models.dialects.conversation import Answered, Delta, Json, ModelCall, Usage
from toolbus.parts.models.dialects.dialect import (
    CallsCancelled,
    RealtimeEvent,
    RealtimeParser,
    ResponseBegan,
    ResponseEnded,
    ResponseRefused,
    SpeechBegan,
    SpeechEnded,
)
from toolbus.parts.models.dialects.endings import NAMELESS
from toolbus.parts.models.dialects.openai_event_parser import MAX_CALL_KEYS
from toolbus.parts.models.dialects.openai_realtime import (
    GlmRealtime,
    Grok,
    OpenAIEventsDialect,
    OpenAIRealtime,
    QwenRealtime,
    StepFunRealtime,
)
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import CallError, Result


def sdk_type(name: str) -> OfficialType:
    return OfficialType("openai.types.realtime", name)


DIALECT = OpenAIRealtime()
CLIENT_EVENT = sdk_type("RealtimeClientEvent")
SERVER_EVENT = sdk_type("RealtimeServerEvent")
ARGUMENTS = '{"city":"Oslo"}'

CREATED: Json = {"type": "response.created", "response": {"id": "r1"}}
ADDED: Json = {
    "type": "response.output_item.added",
    "response_id": "r1",
    "output_index": 0,
    "item": {"id": "i1", "type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ""},
}
PLACE: Json = {"response_id": "r1", "item_id": "i1", "output_index": 0, "call_id": "c1"}
DELTAS: list[Json] = [
    {"type": "response.function_call_arguments.delta", "delta": piece, **PLACE} for piece in ('{"city":', '"Oslo"}')
]
DONE: Json = {"type": "response.function_call_arguments.done", "arguments": ARGUMENTS, "name": "get_weather", **PLACE}
ITEM: Json = {**ADDED["item"], "arguments": ARGUMENTS, "status": "completed"}
ITEM_DONE: Json = {**ADDED, "type": "response.output_item.done", "item": ITEM}
ENDED: Json = {"type": "response.done", "response": {"id": "r1", "status": "completed", "output": [ITEM]}}


def parser() -> RealtimeParser:
    return DIALECT.parser(DIALECT.export([PLAIN]).names)


def fed(*events: Any) -> list[RealtimeEvent]:
    reader = parser()
    return [parsed for event in events for parsed in reader.feed(event)]


def calls(*events: Any) -> list[ModelCall]:
    return [parsed for parsed in fed(*events) if isinstance(parsed, ModelCall)]


def without(event: Json, *keys: str) -> Json:
    return {key: value for key, value in event.items() if key not in keys}


def test_tools_are_flat_and_the_model_may_choose() -> None:
    export = DIALECT.export([PLAIN])
    session = DIALECT.session_update(export)["session"]
    assert session["type"] == "realtime"
    assert session["tool_choice"] == "auto"
    assert session["tools"][0] == {
        "type": "function",
        "name": "get_weather",
        "description": PLAIN.description,
        "parameters": export.tools[0]["parameters"],
    }


def test_every_sample_makes_a_session_update_that_the_sdk_accepts() -> None:
    export = DIALECT.export(SAMPLES)
    event = sdk_type("SessionUpdateEvent").kind.model_validate(DIALECT.session_update(export), strict=True)
    assert CLIENT_EVENT.validate_python(DIALECT.session_update(export)) == event
    tools = event.session.model_dump()["tools"]
    assert len(tools) == len(export.tools) > 0
    assert not any("function" in tool for tool in tools)


def test_an_update_without_tools_takes_them_away_and_chooses_nothing() -> None:
    session = DIALECT.session_update(DIALECT.export([]))["session"]
    assert session == {"type": "realtime", "tools": []}


@pytest.mark.parametrize(
    ("status", "made"), [("completed", 1), (None, 1), ("incomplete", 0), ("cancelled", 0), ("failed", 0)]
)
def test_a_call_without_arguments_is_complete_only_where_its_response_is(status: str | None, made: int) -> None:
    empty = {**DONE, "arguments": ""}
    assert calls(CREATED, ADDED, empty) == []
    response = {"id": "r1", "output": []} | ({} if status is None else {"status": status})
    ended = calls(CREATED, ADDED, empty, {"type": "response.done", "response": response})
    assert [(call.id, call.arguments_json, call.response) for call in ended] == [("c1", "", "r1")] * made
    item = {**ITEM, "arguments": ""}
    assert len(calls(CREATED, ADDED, empty, {**ITEM_DONE, "item": item}, ENDED)) == 1


def test_a_call_is_complete_with_its_done_event() -> None:
    assert fed(CREATED, ADDED, *DELTAS)[1:] == []
    assert fed(CREATED, ADDED, *DELTAS, DONE) == [
        ResponseBegan("r1"),
        ModelCall("c1", "get_weather", ARGUMENTS, True, "get_weather", {}, "r1"),
    ]


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([DONE], id="nothing but the done event"),
        pytest.param([ADDED, *DELTAS, without(DONE, "name")], id="name from the announcement"),
        pytest.param([ADDED, *DELTAS, without(DONE, "name", "call_id")], id="call_id from the announcement"),
        pytest.param([ADDED, without(DONE, "name", "call_id", "item_id")], id="known by its place alone"),
        pytest.param([ADDED, *DELTAS, without(DONE, "arguments")], id="arguments from the deltas"),
        pytest.param([{**DONE, "arguments": {"city": "Oslo"}}], id="arguments as an object"),
        pytest.param([*DELTAS, without(DONE, "name"), ITEM_DONE], id="name from the finished item"),
        pytest.param([*DELTAS, without(DONE, "name"), CREATED, ENDED], id="name from the finished response"),
        pytest.param([CREATED, ENDED], id="nothing but the finished response"),
        pytest.param([ITEM_DONE], id="nothing but the finished item"),
        pytest.param([CREATED, ADDED, *DELTAS, DONE, DONE, ITEM_DONE, ENDED], id="everything, one thing twice"),
    ],
)
def test_a_call_is_read_from_the_events_of_every_version_and_reported_once(events: list[Json]) -> None:
    assert [(call.id, call.name, call.arguments_json) for call in calls(*events)] == [("c1", "get_weather", ARGUMENTS)]


def test_calls_that_arrive_at_the_same_time_keep_their_arguments() -> None:
    other = {**PLACE, "item_id": "i2", "call_id": "c2", "output_index": 1}
    piece = {"type": "response.function_call_arguments.delta", **other}
    ordered = calls(
        ADDED,
        {**ADDED, "output_index": 1, "item": {**ADDED["item"], "id": "i2", "call_id": "c2"}},
        DELTAS[0],
        {**piece, "delta": "{}"},
        DELTAS[1],
        {"type": "response.function_call_arguments.done", **other},
        {"type": "response.function_call_arguments.done", **PLACE},
    )
    assert [(call.id, call.arguments_json) for call in ordered] == [("c2", "{}"), ("c1", ARGUMENTS)]


def test_calls_of_one_place_with_two_ids_are_two_calls() -> None:
    assert [call.id for call in calls(DONE, {**without(DONE, "item_id"), "call_id": "c2"})] == ["c1", "c2"]


def test_a_call_that_was_never_named_is_dropped() -> None:
    item = without(ITEM, "name")
    ended = {**ENDED, "response": {**ENDED["response"], "output": [item]}}
    assert calls(CREATED, *DELTAS, without(DONE, "name"), {**ITEM_DONE, "item": item}, ended) == []


def test_a_name_that_was_not_offered_is_unknown() -> None:
    (call,) = calls({**DONE, "name": "rm_rf"})
    assert (call.known, call.name, call.wire_name) == (False, "rm_rf", "rm_rf")


def test_a_mapped_name_becomes_the_name_on_the_bus() -> None:
    export = DIALECT.export([CHINESE])
    (call,) = DIALECT.parser(export.names).feed({**DONE, "name": export.tools[0]["name"]})
    assert isinstance(call, ModelCall)
    assert call.name == CHINESE.name


def test_a_response_that_has_begun_keeps_the_names_that_it_began_with() -> None:
    reader = parser()
    reader.feed(CREATED)
    reader.names = NameTable({"other": "get_weather"}, {"get_weather": "other"})
    (old,) = reader.feed(DONE)
    reader.feed(ENDED)
    (new,) = reader.feed({**DONE, "response_id": "r2", "call_id": "c2", "item_id": "i2"})
    assert isinstance(old, ModelCall)
    assert isinstance(new, ModelCall)
    assert (old.name, new.name) == ("get_weather", "other")


def test_an_event_without_its_response_belongs_to_the_one_that_began_last() -> None:
    (call,) = calls(CREATED, without(DONE, "response_id"))
    assert call.response == "r1"


@pytest.mark.parametrize(
    "end",
    [
        {"type": "response.done", "response": {"id": "r1", "status": "cancelled", "output": []}},
        {"type": "response.cancelled", "response_id": "r1"},
        {"type": "response.cancelled"},
    ],
)
def test_an_interrupted_response_cancels_its_calls(end: Json) -> None:
    assert fed(CREATED, DONE, end)[2:] == [CallsCancelled(("c1",)), ResponseEnded("r1", "cut", "cancelled")]


def test_an_interrupted_response_reports_no_more_calls() -> None:
    response = {**ENDED["response"], "status": "cancelled"}
    ended = ResponseEnded("r1", "cut", "cancelled")
    assert fed(CREATED, {**ENDED, "response": response}) == [ResponseBegan("r1"), ended]


@pytest.mark.parametrize(
    ("status", "details", "ending", "reason"),
    [
        ("completed", None, "complete", ""),
        ("incomplete", {"reason": "max_output_tokens"}, "cut", "incomplete: max_output_tokens"),
        ("incomplete", {"reason": "content_filter"}, "refused", "incomplete: content_filter"),
        ("incomplete", {}, "cut", "incomplete"),
        ("cancelled", {"reason": "turn_detected"}, "cut", "cancelled: turn_detected"),
        (
            "failed",
            {"error": {"type": "server_error", "code": "rate_limit_exceeded", "message": "Wait."}},
            *("failed", "failed: rate_limit_exceeded: Wait."),
        ),
        ("on_holiday", None, "complete", ""),
    ],
)
def test_the_end_of_a_response_tells_its_status_and_reason(status: str, details: Any, ending: Any, reason: str) -> None:
    response = {"id": "r1", "status": status, "status_details": details, "output": []}
    assert fed({"type": "response.done", "response": response}) == [ResponseEnded("r1", ending, reason)]


def test_a_call_without_a_name_is_reported_at_the_end_of_its_response() -> None:
    nameless = {**ENDED, "response": {**ENDED["response"], "output": [without(ITEM, "name")]}}
    (ended,) = fed(*DELTAS, without(DONE, "name"), nameless)
    assert ended == ResponseEnded("r1", "failed", NAMELESS)


def test_the_end_of_a_response_holds_its_tokens() -> None:
    usage = {"input_tokens": 50, "output_tokens": 8, "input_token_details": {"cached_tokens": 40}}
    (ended,) = fed({"type": "response.done", "response": {"id": "r1", "status": "completed", "usage": usage}})
    assert ended == ResponseEnded("r1", usage=Usage(50, 8, 40))


def test_an_incomplete_item_is_not_reported_as_a_call() -> None:
    assert calls({**ITEM_DONE, "item": {**ITEM, "status": "incomplete"}}) == []


@pytest.mark.parametrize(
    "kind",
    [
        "response.output_text.delta",
        "response.text.delta",
        "response.output_audio_transcript.delta",
        "response.audio_transcript.delta",
    ],
)
def test_text_is_shown_as_it_comes(kind: str) -> None:
    assert fed({"type": kind, "delta": "你好"}, {"type": kind, "delta": ""}) == [Delta("text", "你好")]


def test_objects_of_the_sdk_are_read_as_well() -> None:
    done = SERVER_EVENT.validate_python({**DONE, "event_id": "e1"})
    place = {"response_id": "r1", "item_id": "i1", "output_index": 0, "content_index": 0}
    text = SERVER_EVENT.validate_python(
        {"type": "response.output_text.delta", "delta": "hi", "event_id": "e2", **place}
    )
    assert fed(text, done)[0] == Delta("text", "hi")
    assert [call.id for call in calls(done)] == ["c1"]


def test_answers_are_one_item_for_each_call_and_one_request_for_a_response() -> None:
    first, second = ModelCall("c1", "a"), ModelCall("c2", "b")
    failed = Result(is_error=True, error=CallError(Code.TOOL, "no such city", Stage.ACCEPTED))
    events = DIALECT.answers(
        [Answered(first, Result(output_json='{"t": "\\u6674"}')), Answered(second, failed)], NameTable.empty()
    )
    assert events == [
        {
            "type": "conversation.item.create",
            "item": {"type": "function_call_output", "call_id": "c1", "output": '{"t":"晴"}'},
        },
        {
            "type": "conversation.item.create",
            "item": {"type": "function_call_output", "call_id": "c2", "output": "Error: no such city"},
        },
        {"type": "response.create"},
    ]
    for event in events[:2]:
        item = sdk_type("ConversationItemCreateEvent").kind.model_validate(event, strict=True)
        assert CLIENT_EVENT.validate_python(event) == item
    assert isinstance(CLIENT_EVENT.validate_python(events[2]), sdk_type("ResponseCreateEvent").kind)


def test_answers_to_interrupted_calls_do_not_request_a_response() -> None:
    events = DIALECT.answers([Answered(ModelCall("c1", "a"), Result())], NameTable.empty(), go_on=False)
    assert [event["type"] for event in events] == ["conversation.item.create"]


def test_without_answers_there_are_no_events() -> None:
    assert DIALECT.answers([], NameTable.empty()) == []


@pytest.mark.parametrize(
    "event",
    [
        *(None, 7, "text", b"", [], {}, {"type": None}, {"type": []}, {"type": "session.updated"}),
        {"type": "response.function_call_arguments.done"},
        {"type": "response.function_call_arguments.done", "call_id": {}, "item_id": [], "output_index": "0", "name": 3},
        {"type": "response.output_item.added", "item": []},
        {"type": "response.output_item.done", "item": {"type": "function_call", "name": "get_weather"}},
        {"type": "response.text.delta", "delta": {"text": "hi"}},
    ],
)
def test_an_unknown_or_malformed_event_is_ignored(event: Any) -> None:
    assert fed(event) == []


KEYS = ["type", "response", "response_id", "item", "item_id", "output_index", "call_id", "name", "arguments", "delta"]
KINDS = [*(event["type"] for event in (CREATED, ADDED, DELTAS[0], DONE, ITEM_DONE, ENDED)), "response.cancelled"]
VALUES = st.recursive(
    st.none() | st.integers(0, 2) | st.floats() | st.sampled_from(["", "r1", "c1", "function_call", *KINDS]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*KEYS, "output", "id"]), inner),
    max_leaves=8,
)


@given(
    st.lists(
        st.builds(
            lambda kind, rest: {**rest, "type": kind},
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(KEYS), VALUES),
        ),
        max_size=6,
    )
)
def test_any_event_is_read_without_an_error_and_no_call_is_reported_twice(events: list[Json]) -> None:
    parsed = fed(*events)
    open_ids: set[tuple[str, str]] = set()
    for each in parsed:
        if isinstance(each, ModelCall):
            assert each.id
            assert each.wire_name
            json.dumps(each.arguments_json)
            assert (each.response, each.id) not in open_ids
            open_ids.add((each.response, each.id))
        elif isinstance(each, ResponseEnded):
            open_ids.clear()


@pytest.mark.parametrize("dialect", [OpenAIRealtime, Grok, GlmRealtime, QwenRealtime, StepFunRealtime])
def test_speech_and_refused_requests_are_read_by_all_dialects_of_these_events(
    dialect: type[OpenAIEventsDialect],
) -> None:
    reader = dialect().parser(NameTable.empty())
    busy = {"type": "invalid_request_error", "code": "conversation_already_has_active_response", "message": "no"}
    events: list[tuple[Json, list[RealtimeEvent]]] = [
        ({"type": "input_audio_buffer.speech_started", "audio_start_ms": 1, "item_id": "i"}, [SpeechBegan()]),
        ({"type": "input_audio_buffer.speech_stopped", "audio_end_ms": 2, "item_id": "i"}, [SpeechEnded()]),
        ({"type": "input_audio_buffer.committed", "item_id": "i"}, [SpeechEnded()]),
        ({"type": "input_audio_buffer.cleared"}, [SpeechEnded()]),
        ({"type": "error", "error": busy}, [ResponseRefused()]),
        ({"type": "error", "error": {**busy, "code": "rate_limit_exceeded"}}, []),
        ({"type": "error", "error": {"type": "server_error", "message": "no"}}, []),
        ({"type": "error"}, []),
    ]
    for event, parsed in events:
        assert reader.feed(event) == parsed
        if "error" in event or "item_id" in event or event["type"].endswith("cleared"):
            SERVER_EVENT.validate_python({"event_id": "e1", **event})
    assert dialect().request() == [{"type": "response.create"}]


def test_memory_is_bounded_where_a_provider_never_ends_a_response() -> None:
    reader = parser()
    for number in range(MAX_CALL_KEYS):
        reader.feed({**DONE, "call_id": f"c{number}", "item_id": f"i{number}", "output_index": number})
    assert len(vars(reader)["_arriving"]) == MAX_CALL_KEYS
