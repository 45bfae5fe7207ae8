"""Tests that an incomplete answer is detected, whether its stream broke off or no more tokens were allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN
from tests.parts.models.loop.model_server import FLAVOURS, Recording
from toolbus.dialects import Dialect, find_dialect
from toolbus.parts.models.dialects.dialect import TurnStream

Json = dict[str, Any]


def stream_of(name: str, *events: Mapping[str, Any]) -> TurnStream:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    stream = dialect.stream(dialect.export([PLAIN]).names)
    for event in events:
        stream.feed(event)
    return stream


@pytest.mark.parametrize("answer", ["one", "two", "text"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_recorded_answer_is_complete_at_its_end_and_not_before(flavour: str, answer: str) -> None:
    recording = Recording.read(flavour)
    events = recording.answers[answer]
    stream = stream_of(recording.dialect)
    seen = [stream.complete]
    for event in events:
        stream.feed(event)
        seen.append(stream.complete)
    assert not seen[0]
    assert seen[-1]
    if recording.dialect != "openai":  # without a call that is cut, a server of this format need not say that it ended
        assert seen.index(True) >= len(events) - 1  # usage may follow


def _chunk(content: str = "", arguments: str | None = None, stop: str | None = None) -> Json:
    call = {"index": 0, "id": "call_1", "function": {"name": PLAIN.name, "arguments": arguments}}
    delta: Json = {"content": content} if arguments is None else {"tool_calls": [call]}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": stop}]}


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        ([], False),
        ([{"choices": [], "usage": {}}], False),
        ([_chunk("It is")], True),
        ([_chunk(arguments='{"city": "Bern"}')], True),
        ([_chunk("It is", stop="stop")], True),
        ([_chunk(arguments='{"city": "Be')], False),
        ([_chunk(arguments="")], False),
        ([_chunk(arguments='{"city": "Be', stop="length")], True),
        ([_chunk(arguments="", stop="tool_calls")], True),
    ],
)
def test_chat_completions_without_a_finish_reason_broke_off_where_a_call_is_incomplete_or_nothing_came(
    events: list[Json], complete: bool
) -> None:
    assert stream_of("openai", *events).complete is complete


ENDS: Mapping[str, tuple[Json, Json]] = {  # what tells nothing of an end, and what tells it
    "openai-responses": (
        {"type": "response.output_text.delta", "output_index": 0, "delta": "It is"},
        {"type": "response.incomplete", "response": {"incomplete_details": {"reason": "max_output_tokens"}}},
    ),
    "anthropic": ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}),
    "gemini": (
        {"candidates": [{"content": {"parts": [{"text": "It is"}]}}]},
        {"candidates": [{"content": {"parts": [{"text": "."}]}, "finishReason": "STOP"}]},
    ),
    "ollama": ({"message": {"content": "It is"}, "done": False}, {"message": {"content": ""}, "done": True}),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_is_complete_with_its_end_mark_and_not_before(name: str) -> None:
    before, end = ENDS[name]
    assert not stream_of(name).complete
    assert not stream_of(name, before).complete
    assert stream_of(name, before, end).complete
    assert stream_of(name).end_mark


def test_an_empty_response_that_completes_an_answer_does_not_replace_its_items() -> None:
    delta, _ = ENDS["openai-responses"]
    stream = stream_of("openai-responses", delta, {"type": "response.completed"})
    assert stream.complete
    assert stream.finish().text == "It is"
