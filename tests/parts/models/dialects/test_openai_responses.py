"""Tests Responses: input and output items, against OpenAI's own types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from tests.parts.models.dialects.random_histories import CallNames, histories
from tests.parts.models.dialects.sample_tools import CHINESE, DOTTED, SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import (
    Answered,
    Answers,
    Delta,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    Turn,
)
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.parts.models.dialects.openai_responses import OpenAIResponses
from toolbus.protocol.tool import Result

RESPONSES = OpenAIResponses()
EXPORT = RESPONSES.export(SAMPLES)
NAMES = EXPORT.names
SUNNY = Result(output_json='"sunny"')
PARIS = '{"city":"Paris"}'


def sdk_type(name: str, closed: bool = False) -> OfficialType:
    return OfficialType("openai.types.responses", name, closed=closed)


TOOL = sdk_type("FunctionToolParam", closed=True)
ITEM = sdk_type("ResponseInputItemParam")
EVENT = sdk_type("ResponseStreamEvent")
CALL = sdk_type("ResponseFunctionToolCallParam", closed=True)
OUTPUT = OfficialType("openai.types.responses.response_input_item_param", "FunctionCallOutput", closed=True)
REASONING = sdk_type("ResponseReasoningItemParam", closed=True)
SAID, MESSAGE = sdk_type("ResponseOutputMessageParam", closed=True), sdk_type("EasyInputMessageParam", closed=True)

THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "summary": [{"type": "summary_text", "text": "Hm"}],
    "encrypted_content": "x",
}
LOOK = {
    "type": "message",
    "id": "msg",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
}


def function_call(call_id: str, name: str, arguments: str = "{}", **more: Any) -> Json:
    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {**call, "id": f"fc_{call_id}", "status": "completed", **more}


def response(*output: Json, **more: Any) -> Json:
    return {
        "id": "resp",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": list(output),
        **more,
    }


def streamed(*events: Any) -> tuple[Turn, list[Delta]]:
    stream = RESPONSES.stream(NAMES)
    deltas = [delta for event in events for delta in stream.feed(event)]
    return stream.finish(), deltas


def answered(turn: Turn, *results: Result) -> Answers:
    return Answers(tuple(Answered(call, result) for call, result in zip(turn.calls, results, strict=True)))


def paired(items: Sequence[Json]) -> list[tuple[str, str]]:
    """Checks items against the official types, and that each call is answered once, behind it.

    Returns id and text of the answers.
    """
    pairs, pending, seen = [], list[str](), set[str]()
    for item in items:
        ITEM.validate_python(item)
        match item.get("type"):
            case "function_call":
                CALL.validate_python(item)
                assert item["call_id"] not in seen
                seen.add(item["call_id"])
                pending.append(item["call_id"])
            case "function_call_output":
                OUTPUT.validate_python(item)
                assert item["call_id"] == pending.pop(0)
                pairs.append((item["call_id"], item["output"]))
            case "reasoning":
                REASONING.validate_python(item)
            case _:
                (SAID if "id" in item else MESSAGE).validate_python(item)
    assert not pending
    return pairs


# -- tools and requests


def test_tools_are_flat_and_not_strict() -> None:
    for tool in EXPORT.tools:
        TOOL.validate_python(tool)
        assert tool.keys() == {"type", "name", "description", "parameters", "strict"}
        assert tool["strict"] is False
    assert [tool["name"] for tool in EXPORT.tools] == list(NAMES.to_bus)


def test_leading_system_messages_become_the_instructions() -> None:
    system = [Message("system", "Be brief."), Message("system", "Be kind.")]
    request = RESPONSES.request([*system, Message("user", "Hi"), Message("system", "Now rhyme.")], EXPORT)
    assert request == {
        "instructions": "Be brief.\n\nBe kind.",
        "input": [
            {"type": "message", "role": "user", "content": "Hi"},
            {"type": "message", "role": "system", "content": "Now rhyme."},
        ],
        "tools": list(EXPORT.tools),
    }
    paired(request["input"])


# -- answers


@pytest.mark.parametrize("official", [False, True])
def test_a_whole_answer_is_read(official: bool) -> None:
    plain = response(
        THOUGHT, LOOK, function_call("a", "get_weather", PARIS), function_call("b", NAMES.to_wire[CHINESE.name])
    )
    turn = RESPONSES.parse(sdk_type("Response").kind.model_validate(plain) if official else plain, NAMES)
    assert (turn.text, turn.reasoning, turn.stop, turn.dialect) == ("Look.", "Hm", "completed", "openai-responses")
    assert turn.calls == (
        ModelCall("a", "get_weather", PARIS, True, "get_weather"),
        ModelCall("b", CHINESE.name, "{}", True, NAMES.to_wire[CHINESE.name]),
    )
    history = RESPONSES.history([turn, answered(turn, SUNNY, SUNNY)], NAMES)
    assert history[:4] == plain["output"]
    assert history[4:] == [
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": "sunny"},
    ]
    assert history[4:] == RESPONSES.results(answered(turn, SUNNY, SUNNY).answered, NAMES)
    paired(history)


def test_an_incomplete_answer_has_its_reason() -> None:
    cut = response(LOOK, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert RESPONSES.parse(cut, NAMES).stop == "max_output_tokens"


def test_a_refusal_is_text() -> None:
    refused = LOOK | {"content": [{"type": "refusal", "refusal": "I will not."}]}
    turn = RESPONSES.parse(response(refused), NAMES)
    assert turn.text == "I will not."
    assert RESPONSES.history([turn], NAMES) == [refused]


# -- streams

ANNOUNCED = function_call("a", "get_weather", "", status="in_progress")
EVENTS: list[Json] = [
    {"type": "response.created", "response": response(status="in_progress")},
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "id": "rs", "summary": []}},
    {
        "type": "response.reasoning_summary_text.delta",
        "output_index": 0,
        "item_id": "rs",
        "summary_index": 0,
        "delta": "Hm",
    },
    {"type": "response.output_item.done", "output_index": 0, "item": THOUGHT},
    {
        "type": "response.output_item.added",
        "output_index": 1,
        "item": {**LOOK, "status": "in_progress", "content": []},
    },
    *(
        {
            "type": "response.output_text.delta",
            "output_index": 1,
            "item_id": "msg",
            "content_index": 0,
            "delta": piece,
            "logprobs": [],
        }
        for piece in ("Lo", "ok.")
    ),
    {"type": "response.output_item.done", "output_index": 1, "item": LOOK},
    {"type": "response.output_item.added", "output_index": 2, "item": ANNOUNCED},
    *(
        {"type": "response.function_call_arguments.delta", "output_index": 2, "item_id": "fc_a", "delta": piece}
        for piece in ('{"city":', '"Paris"}')
    ),
    {
        "type": "response.function_call_arguments.done",
        "output_index": 2,
        "item_id": "fc_a",
        "arguments": PARIS,
        "name": "get_weather",
    },
    {"type": "response.output_item.done", "output_index": 2, "item": function_call("a", "get_weather", PARIS)},
    {"type": "response.completed", "response": response(THOUGHT, LOOK, function_call("a", "get_weather", PARIS))},
]
NUMBERED: list[Json] = [{**event, "sequence_number": number} for number, event in enumerate(EVENTS)]
SHOWN = [Delta("reasoning", "Hm"), Delta("text", "Lo"), Delta("text", "ok.")]


@pytest.mark.parametrize("official", [False, True])
def test_a_stream_gives_the_same_turn_as_the_whole_answer(official: bool) -> None:
    turn, deltas = streamed(*(EVENT.validate_python(event) if official else event for event in NUMBERED))
    assert turn == RESPONSES.parse(EVENTS[-1]["response"], NAMES)
    assert deltas == SHOWN


def test_a_stream_that_ends_with_an_empty_response_loses_nothing() -> None:
    turn, _ = streamed(*EVENTS[:-1], {"type": "response.completed", "response": response()})
    assert turn == RESPONSES.parse(EVENTS[-1]["response"], NAMES)


@pytest.mark.parametrize("length", range(len(EVENTS)))
def test_a_stream_that_breaks_off_can_go_into_a_history(length: int) -> None:
    turn, deltas = streamed(*EVENTS[:length])
    assert turn.text == "".join(delta.text for delta in deltas if delta.kind == "text")
    assert turn.reasoning == ("Hm" if Delta("reasoning", "Hm") in deltas else "")
    assert len(turn.calls) == (length > 8)
    if length > 10:
        assert turn.calls[0].arguments_json == PARIS
    history = RESPONSES.history([turn], NAMES)
    assert len(paired(history)) == len(turn.calls)
    assert not history or history[-1]["type"] != "reasoning"


def test_deltas_of_items_that_were_not_announced_are_collected() -> None:
    turn, deltas = streamed(
        {"type": "response.output_text.delta", "delta": "Hi"},
        {"type": "response.output_text.delta", "delta": "!"},
        {"type": "response.refusal.delta", "delta": "No."},
        {"type": "response.function_call_arguments.delta", "item_id": "fc", "delta": "{"},
        {"type": "response.function_call_arguments.done", "item_id": "fc", "name": "now", "arguments": "{}"},
        {"type": "response.function_call_arguments.done", "item_id": "nameless", "arguments": "{}"},
        {"type": "response.of_a_later_version"},
        {},
    )
    assert [delta.text for delta in deltas] == ["Hi", "!", "No."]
    assert turn.text == "Hi!No."
    assert [(call.id, call.name, call.arguments_json) for call in turn.calls] == [("fc", "now", "{}")]


def test_official_error_events_are_raised() -> None:
    event = EVENT.validate_python(
        {"type": "error", "code": None, "message": "it broke", "param": None, "sequence_number": 1}
    )
    with pytest.raises(EndpointError, match="it broke"):
        RESPONSES.stream(NAMES).feed(event)


def test_an_incomplete_stream_has_its_reason() -> None:
    cut = response(LOOK, status="incomplete", incomplete_details={"reason": "content_filter"})
    turn, _ = streamed({"type": "response.incomplete", "response": cut})
    assert (turn.text, turn.stop) == ("Look.", "content_filter")


# -- history


def test_nulls_are_not_echoed_because_the_api_refuses_them() -> None:
    turn = RESPONSES.parse(response(THOUGHT | {"status": None, "content": None}, LOOK), NAMES)
    assert RESPONSES.history([turn], NAMES) == [THOUGHT, LOOK]


def test_reasoning_without_a_following_item_is_not_echoed() -> None:
    turn = RESPONSES.parse(response(LOOK, THOUGHT), NAMES)
    assert RESPONSES.history([turn], NAMES) == [LOOK]


@pytest.mark.parametrize("broken", ["", "{", "[1]", "NaN"])
def test_arguments_that_are_not_an_object_are_echoed_as_an_empty_object(broken: str) -> None:
    turn = RESPONSES.parse(response(function_call("a", "now", broken)), NAMES)
    assert turn.calls[0].arguments_json == broken
    assert RESPONSES.history([turn], NAMES)[0]["arguments"] == "{}"


def test_ids_are_made_unique_in_calls_and_answers() -> None:
    turn = RESPONSES.parse(
        response(function_call("a", "now"), function_call("a", "draw"), function_call("", "now", id="fc_1")), NAMES
    )
    history = RESPONSES.history([turn, answered(turn, SUNNY, SUNNY, SUNNY), turn], NAMES)
    assert [call_id for call_id, _ in paired(history)] == ["a", "a_1", "fc_1", "a_2", "a_1_1", "fc_1_1"]


def test_a_turn_of_another_dialect_is_rebuilt_from_text_and_calls() -> None:
    turn = Turn("Look.", (ModelCall("x:1", DOTTED.name, PARIS), ModelCall("b", "gone tool", "{")), "Hm", "gemini")
    history = RESPONSES.history([turn, answered(turn, SUNNY, SUNNY)], NAMES)
    paired(history)
    assert history[0] == {"type": "message", "role": "assistant", "content": "Look."}
    assert [(item["name"], item["arguments"]) for item in history[1:3]] == [
        (NAMES.to_wire[DOTTED.name], PARIS),
        ("gone_tool", "{}"),
    ]


def test_items_in_openais_format_are_passed_on_and_paired_with_their_answers() -> None:
    output = [THOUGHT, function_call("a", "now"), function_call("b", "draw")]
    own = {"type": "function_call_output", "call_id": "b", "output": "mine"}
    turn = RESPONSES.parse(response(*output), NAMES)
    mine = Answers((Answered(turn.calls[0], SUNNY),))
    history = RESPONSES.history([*output, own, mine], NAMES)
    assert history[:3] == output
    assert paired(history) == [("a", "sunny"), ("b", "mine")]
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}
    assert RESPONSES.history([LOOK, picture], NAMES) == [LOOK, picture]


def own_turn(text: str, calls: CallNames) -> tuple[Turn, Any]:
    message = [LOOK | {"content": [{"type": "output_text", "text": text, "annotations": []}]}] if text else []
    turn = RESPONSES.parse(response(THOUGHT, *message, *(function_call(*call) for call in calls)), NAMES)
    return turn, function_call(*calls[0]) if calls and calls[0][1] else {"role": "user", "content": text}


@given(histories(own_turn))
def test_any_history_is_valid_for_the_api(items: list[HistoryItem]) -> None:
    written = RESPONSES.history(items, NAMES)
    paired(written)
    assert RESPONSES.history(written, NAMES) == written
