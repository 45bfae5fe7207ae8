"""Tests calls whose server sends the arguments more than once, or in one place only, or never."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.call_arguments import (
    ANNOUNCED,
    CONTRADICTION,
    has_arguments,
    joined_pieces,
    resolved,
)
from toolbus.parts.models.dialects.conversation import Json, ModelCall, Turn
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.parts.models.dialects.openai_responses import OpenAIResponses

PARIS, OSLO = '{"city":"Paris"}', '{"city":"Oslo"}'
CHAT_CHUNK = OfficialType("openai.types.chat", "ChatCompletionChunk")

PIECES: list[tuple[list[str], str]] = [
    (["{}", PARIS], PARIS),
    (["null", PARIS], PARIS),
    (["", "{}", PARIS[:5], PARIS[5:]], PARIS),
    ([PARIS, "{}"], PARIS),
    ([PARIS[:5], PARIS[5:], "null"], PARIS),
    ([PARIS[:3], PARIS[:9], PARIS], PARIS),  # all so far in each piece
    (["{}", PARIS[:3], PARIS[:9], PARIS, PARIS], PARIS),
    ([PARIS[:5], PARIS[5:], PARIS], PARIS),  # the whole again
    ([PARIS[:5], PARIS], PARIS),
    ([PARIS, PARIS], PARIS),
    ([PARIS, '{"city": "Paris"}'], PARIS),
    ([PARIS + PARIS], PARIS),
    (["{}" + PARIS], PARIS),
    (["{}", "{}"], "{}"),
    (['{"a":', "{}", "}"], '{"a":{}}'),
    (['{"a":', "null", "}"], '{"a":null}'),
    ([PARIS, OSLO], PARIS + OSLO),  # a mistake
    ([PARIS[:10], OSLO], PARIS[:10] + OSLO),
    ([PARIS[:5]], PARIS[:5]),
    ([], ""),
]


@pytest.mark.parametrize(("pieces", "text"), PIECES)
def test_pieces_of_arguments_are_read_as_what_is_meant(pieces: list[str], text: str) -> None:
    if text in (PARIS, "{}"):
        assert json.loads(joined_pieces(pieces)) == json.loads(text)
    else:
        assert joined_pieces(pieces) == text


def test_a_long_stream_of_broken_pieces_is_read_at_once() -> None:
    assert joined_pieces(["{"] * 100_000) == "{" * 100_000


@pytest.mark.parametrize(
    ("sources", "text", "fault"),
    [
        ((PARIS, "{}"), PARIS, ""),
        (("", PARIS), PARIS, ""),
        (("{}", "", PARIS, "null"), PARIS, ""),
        ((PARIS, '{"city": "Paris"}'), '{"city": "Paris"}', ""),
        ((PARIS[:5], PARIS), PARIS, ""),
        ((PARIS, OSLO), OSLO, CONTRADICTION),
        (("{}", ""), "{}", ""),
        (("{", "{}"), "{}", ""),
        ((PARIS[:5], "{}"), PARIS[:5], ""),  # not whole: refused, with its text
        ((), "", ""),
    ],
)
def test_the_source_that_has_arguments_wins(sources: Sequence[str], text: str, fault: str) -> None:
    assert resolved(sources) == (text, fault)


def test_placeholders_are_no_arguments() -> None:
    assert not any(map(has_arguments, ("", " ", "{}", "{ }", "null", '""', "[]")))
    assert all(map(has_arguments, (PARIS, "{", "5", "x", "{}{}")))


def turn_of(dialect: Dialect, *events: Any) -> Turn:
    stream = dialect.stream(dialect.export(SAMPLES).names)
    for event in events:
        stream.feed(event)
    return stream.finish()


def calls_of(turn: Turn) -> list[tuple[str, str, str]]:
    """Returns the id, the arguments and the fault of each call."""
    return [(call.id, call.arguments_json, call.fault) for call in turn.calls]


# -- chat completions


def chunk(finish: str | None = None, **function: Any) -> Json:
    calls = [{"index": 0, "id": "a", "type": "function", "function": function}] if function else []
    choice = {"index": 0, "delta": {"tool_calls": calls} if calls else {}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


@pytest.mark.parametrize("is_named", [False, True], ids=["named once", "named in each chunk"])
@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize(("pieces", "text"), [each for each in PIECES if each[1] == PARIS])
def test_chat_completions_that_resend_arguments_make_one_call(
    pieces: list[str], text: str, official: bool, is_named: bool
) -> None:
    events = [
        chunk(arguments=piece, **({"name": "get_weather"} if is_named or not place else {}))
        for place, piece in enumerate(pieces)
    ]
    events.append(chunk("tool_calls"))
    turn = turn_of(OpenAIChat(), *(CHAT_CHUNK.kind.model_validate(each) if official else each for each in events))
    ((call_id, arguments, fault),) = calls_of(turn)
    assert (call_id, json.loads(arguments), fault) == ("a", json.loads(text), "")
    history = OpenAIChat().history([turn], OpenAIChat().export(SAMPLES).names)
    assert json.loads(history[0]["tool_calls"][0]["function"]["arguments"]) == json.loads(text)


def test_different_objects_in_a_chat_stay_an_error() -> None:
    events = [chunk(name="get_weather", arguments=PARIS), chunk(arguments=OSLO), chunk("tool_calls")]
    assert calls_of(turn_of(OpenAIChat(), *events)) == [("a", PARIS + OSLO, "")]


def test_a_call_that_is_sent_again_without_its_id_is_one_call() -> None:
    again = chunk(name="get_weather", arguments=PARIS)
    del again["choices"][0]["delta"]["tool_calls"][0]["id"]
    for first in ("{}", PARIS):
        events = [chunk(name="get_weather", arguments=first), again, chunk("tool_calls")]
        assert calls_of(turn_of(OpenAIChat(), *events)) == [("a", PARIS, "")]


# -- responses


def item(call_id: str, arguments: str | None, status: str = "completed", **more: Any) -> Json:
    call = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": "get_weather"}
    return {**call, "arguments": arguments, "status": status, **more}


def added(call_id: str = "a", arguments: str | None = "", place: int = 0) -> Json:
    announced = item(call_id, arguments, "in_progress")
    return {"type": "response.output_item.added", "output_index": place, "item": announced}


def item_done(call_id: str = "a", arguments: str | None = PARIS, place: int = 0) -> Json:
    return {"type": "response.output_item.done", "output_index": place, "item": item(call_id, arguments)}


def delta(text: str, call_id: str = "a") -> Json:
    kind = "response.function_call_arguments.delta"
    return {"type": kind, "output_index": 0, "item_id": f"fc_{call_id}", "delta": text}


def done(text: str | None, call_id: str = "a") -> Json:
    kind = "response.function_call_arguments.done"
    return {"type": kind, "output_index": 0, "item_id": f"fc_{call_id}", "arguments": text}


def completed(*output: Json) -> Json:
    return {"type": "response.completed", "response": {"status": "completed", "output": list(output)}}


ONE = [("a", PARIS, "")]


@pytest.mark.parametrize(
    ("events", "calls"),
    [
        ((added(), done(PARIS), item_done("a", "{}"), completed(item("a", "{}"))), ONE),
        ((added(), done(PARIS), item_done("a", ""), completed()), ONE),
        ((added(), done(PARIS), item_done("a", None), completed(item("a", None))), ONE),
        ((added(), delta(PARIS[:5]), delta(PARIS[5:]), item_done("a", "{}"), completed()), ONE),
        ((added(), delta(PARIS), done("{}"), item_done("a", ""), completed()), ONE),
        ((added(), delta(PARIS), done(""), completed(item("a", "{}"))), ONE),
        ((added(), done(PARIS), item_done(), completed(item("a", "{}"))), ONE),
        ((added(), done("{}"), item_done("a", "{}"), completed(item("a", PARIS))), ONE),
        ((added("a", PARIS), completed(item("a", "{}"))), ONE),
        ((added("a", PARIS), completed()), ONE),
        ((added(), delta(PARIS[:5]), delta(PARIS), item_done("a", "{}"), completed()), ONE),
        ((added(), delta(PARIS), delta(PARIS), completed()), ONE),
        ((added(), delta(PARIS[:5]), done(PARIS), completed()), ONE),
        # no arguments are meant
        ((added(), done("{}"), item_done("a", "{}"), completed()), [("a", "{}", "")]),
        ((added(), item_done("a", ""), completed()), [("a", "", "")]),
        ((added(), completed(item("a", "{}"))), [("a", "{}", "")]),
        # contradictions, and a call that was only announced
        ((added(), done(PARIS), item_done("a", OSLO), completed()), [("a", OSLO, CONTRADICTION)]),
        ((added(), delta(PARIS), done(OSLO), completed()), [("a", OSLO, CONTRADICTION)]),
        ((added(), done(PARIS), item_done(), completed(item("a", OSLO))), [("a", OSLO, CONTRADICTION)]),
        ((added(), completed()), [("a", "", ANNOUNCED)]),
        ((added("a", "{}"), completed()), [("a", "{}", ANNOUNCED)]),
        ((added(), completed(item("a", "", "in_progress"))), [("a", "", ANNOUNCED)]),
        # two calls in one place
        (
            (added(), done(PARIS), item_done(), added("b"), done(OSLO, "b"), item_done("b", OSLO), completed()),
            [("a", PARIS, ""), ("b", OSLO, "")],
        ),
        (
            (added(), added("b"), delta(PARIS), delta(OSLO, "b"), done(PARIS), done(OSLO, "b"), completed()),
            [("a", PARIS, ""), ("b", OSLO, "")],
        ),
        ((item_done(), item_done("b", OSLO), completed(item("b", OSLO))), [("b", OSLO, ""), ("a", PARIS, "")]),
        ((item_done(), item_done("b", OSLO), completed(item("a", "{}"), item("b", ""))), [*ONE, ("b", OSLO, "")]),
    ],
)
def test_calls_of_responses_have_the_arguments_of_the_event_that_has_them(
    events: Sequence[Json], calls: list[tuple[str, str, str]]
) -> None:
    turn = turn_of(OpenAIResponses(), *events)
    assert calls_of(turn) == calls
    assert [call.whole for call in turn.calls] == [not fault for _, _, fault in calls]


def test_ids_that_a_server_makes_up_for_each_event_still_mean_one_call() -> None:
    other = item("a", PARIS, id="fc_other")
    events = (added(), delta(PARIS[:5], "x"), delta(PARIS[5:], "x"), completed(other))
    assert calls_of(turn_of(OpenAIResponses(), *events)) == ONE


# -- Anthropic


def start(call_id: str = "a", given: Any = None, index: int = 0) -> Json:
    block = {"type": "tool_use", "id": call_id, "name": "get_weather", "input": given or {}}
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(text: str) -> Json:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": text}}


STOP = {"type": "content_block_stop", "index": 0}
END = ({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"})


@pytest.mark.parametrize(
    ("events", "calls"),
    [
        *(((start(), *map(piece, pieces), STOP), ONE) for pieces, text in PIECES if text == PARIS),
        ((start(given={"city": "Paris"}), STOP), ONE),
        ((start(given={"city": "Paris"}), piece("{}"), STOP), ONE),
        ((start(given={"city": "Paris"}), piece(PARIS), STOP), ONE),
        ((start(given={"city": "Oslo"}), piece(PARIS), STOP), [("a", PARIS, CONTRADICTION)]),
        ((start(), start(given={"city": "Paris"}), STOP), ONE),
        ((start(), piece(PARIS)), ONE),
        ((start(), STOP), [("a", "{}", "")]),
        ((start(),), [("a", "{}", ANNOUNCED)]),
        ((start(), piece(PARIS), STOP, start("b"), piece(OSLO), STOP), [("a", PARIS, ""), ("b", OSLO, "")]),
    ],
)
def test_calls_of_anthropic_have_the_arguments_of_the_event_that_has_them(
    events: Sequence[Json], calls: list[tuple[str, str, str]]
) -> None:
    read = calls_of(turn_of(Anthropic(), *events, *END))
    assert [(call_id, json.loads(text), fault) for call_id, text, fault in read] == [
        (call_id, json.loads(text), fault) for call_id, text, fault in calls
    ]


# -- realtime


@pytest.mark.parametrize(
    ("deltas", "stated", "calls"),
    [
        ([PARIS[:5], PARIS[5:]], "{}", ONE),
        ([PARIS[:5], PARIS], "", ONE),
        (["{}", PARIS], "{}", ONE),
        ([PARIS], OSLO, [("a", OSLO, CONTRADICTION)]),
        ([], "{}", [("a", "{}", "")]),
    ],
)
def test_calls_of_sessions_have_the_arguments_of_the_event_that_has_them(
    deltas: Sequence[str], stated: str, calls: list[tuple[str, str, str]]
) -> None:
    parser = OpenAIRealtime().parser(OpenAIRealtime().export(SAMPLES).names)
    ids = {"response_id": "r", "item_id": "i", "output_index": 0, "call_id": "a"}
    events = [
        {"type": "response.created", "response": {"id": "r"}},
        *({"type": "response.function_call_arguments.delta", **ids, "delta": each} for each in deltas),
        {"type": "response.function_call_arguments.done", **ids, "name": "get_weather", "arguments": stated},
    ]
    read = [parsed for event in events for parsed in parser.feed(event) if isinstance(parsed, ModelCall)]
    assert calls_of(Turn(calls=tuple(read))) == calls
    late = {"type": "response.output_item.done", **ids, "item": item("a", PARIS)}
    ended = {"type": "response.done", "response": {"id": "r", "status": "completed", "output": []}}
    assert not [each for event in (late, ended, late) for each in parser.feed(event) if isinstance(each, ModelCall)]
