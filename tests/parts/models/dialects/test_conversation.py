"""Tests that surrogate pairs, which JSON's escapes may split, never reach a request in any dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN
from toolbus.common.text import join_surrogates_in_json
from toolbus.dialects import Dialect, Message, Turn, find_dialect
from toolbus.parts.models.dialects.conversation import Delta, ModelCall, SurrogateJoiner, model_call
from toolbus.parts.models.dialects.dialect import RealtimeDialect, RealtimeEvent
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable

Json = dict[str, Any]
HIGH, LOW = "\ud83d", "\ude00"  # of 😀


def _openai(pieces: list[str]) -> list[Json]:
    call = {"index": 0, "id": "call_1", "function": {"name": PLAIN.name, "arguments": ""}}
    deltas: list[Json] = [{"tool_calls": [call]}]
    for piece in pieces:
        more = {"index": 0, "function": {"arguments": piece}}
        deltas.append({"content": piece, "reasoning_content": piece, "tool_calls": [more]})
    return [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]


def _responses(pieces: list[str]) -> list[Json]:
    call = {"type": "function_call", "call_id": "call_1", "name": PLAIN.name, "arguments": ""}
    events: list[Json] = [{"type": "response.output_item.added", "output_index": 1, "item": call}]
    for piece in pieces:
        events.append({"type": "response.output_text.delta", "output_index": 0, "delta": piece})
        events.append({"type": "response.reasoning_text.delta", "delta": piece})
        events.append({"type": "response.function_call_arguments.delta", "output_index": 1, "delta": piece})
    return events


def _anthropic(pieces: list[str]) -> list[Json]:
    blocks: list[Json] = [
        {"type": "thinking", "thinking": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": PLAIN.name, "input": {}},
    ]
    keys = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    events: list[Json] = []
    for index, (block, (kind, key)) in enumerate(zip(blocks, keys.items(), strict=True)):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [
            {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: piece}} for piece in pieces
        ]
        events.append({"type": "content_block_stop", "index": index})
    return events


def _gemini(pieces: list[str]) -> list[Json]:
    parts: list[Json] = [{"text": piece, "thought": True} for piece in pieces]
    parts += [{"text": piece} for piece in pieces]
    parts.append({"function_call": {"name": PLAIN.name, "args": {"city": "".join(pieces)}}})
    return [{"candidates": [{"content": {"parts": [part]}}]} for part in parts]


def _ollama(pieces: list[str]) -> list[Json]:
    call = {"function": {"name": PLAIN.name, "arguments": {"city": "".join(pieces)}}}
    chunks: list[Json] = [{"content": piece, "thinking": piece} for piece in pieces]
    return [{"message": chunk} for chunk in [*chunks, {"tool_calls": [call]}]]


STREAMS: Mapping[str, Callable[[list[str]], list[Json]]] = {
    "openai": _openai,
    "openai-responses": _responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "ollama": _ollama,
}


def _heard(dialect: Dialect, events: list[Json]) -> tuple[list[Delta], Turn]:
    stream = dialect.stream(dialect.export([PLAIN]).names)
    deltas = [delta for event in events for delta in stream.feed(event)]
    return deltas, stream.finish()


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["a", HIGH, LOW, "b"], "a😀b"),
        (["a" + HIGH, LOW], "a😀"),
        (["a", HIGH], "a\ufffd"),
        ([LOW, HIGH], "\ufffd\ufffd"),
    ],
    ids=["two chunks", "inside chunks", "cut", "turned round"],
)
def test_halves_of_surrogate_pairs_are_joined_or_replaced_and_the_turn_can_be_sent_again(
    name: str, pieces: list[str], whole: str
) -> None:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    deltas, turn = _heard(dialect, STREAMS[name](pieces))
    assert (turn.text, turn.reasoning) == (whole, whole)
    assert all(delta.text.encode() for delta in deltas)  # each can be printed, and says something
    for kind in ("text", "reasoning"):
        shown = "".join(delta.text for delta in deltas if delta.kind == kind)
        assert shown in (whole, whole[:-1])  # a half at the very end is waited for in vain
    (call,) = turn.calls
    assert whole in call.arguments_json
    assert (call.name, call.known) == (PLAIN.name, True)
    request = dialect.request([Message("user", "hello"), turn], dialect.export([PLAIN]))
    assert whole in json.dumps(request, ensure_ascii=False).encode().decode()


@pytest.mark.parametrize("name", STREAMS)
def test_a_turn_without_surrogates_equals_the_streamed_text(name: str) -> None:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    deltas, turn = _heard(dialect, STREAMS[name](["天気", " 😀"]))
    assert (turn.text, turn.reasoning) == ("天気 😀", "天気 😀")
    assert [delta.text for delta in deltas if delta.kind == "text"] == ["天気", " 😀"]
    assert "\ufffd" not in json.dumps(turn.raw, ensure_ascii=False)


def test_halves_wait_for_their_own_kind_of_delta_and_single_halves_are_replaced() -> None:
    characters = SurrogateJoiner()
    pieces = [
        ("text", "a" + HIGH),
        ("reasoning", "b"),
        ("text", ""),
        ("text", LOW),
        ("text", HIGH),
        ("text", HIGH + "c"),
    ]
    kinds: list[Delta] = [Delta("text" if kind == "text" else "reasoning", text) for kind, text in pieces]
    joined = [[(delta.kind, delta.text) for delta in characters.join([delta])] for delta in kinds]
    assert joined == [[("text", "a")], [("reasoning", "b")], [], [("text", "😀")], [], [("text", "\ufffd\ufffdc")]]


def _realtime(name: str, piece: str) -> Json:
    if name == "gemini-live":
        return {"server_content": {"model_turn": {"parts": [{"text": piece}]}}}
    return {"type": "response.output_text.delta", "response_id": "r1", "delta": piece}


@pytest.mark.parametrize("name", ["openai-realtime", "gemini-live"])
def test_a_realtime_parser_joins_halves_too(name: str) -> None:
    dialect = find_dialect(name)
    assert isinstance(dialect, RealtimeDialect)
    parser = dialect.parser(NameTable.empty())
    pieces: list[list[RealtimeEvent]] = [parser.feed(_realtime(name, piece)) for piece in ("a" + HIGH, LOW)]
    assert pieces == [[Delta("text", "a")], [Delta("text", "😀")]]


def test_a_half_of_a_cancelled_response_is_not_joined_with_the_next_response() -> None:
    dialect = find_dialect("openai-realtime")
    assert isinstance(dialect, RealtimeDialect)
    parser = dialect.parser(NameTable.empty())
    parser.feed(_realtime("openai-realtime", HIGH))
    parser.feed({"type": "response.created", "response": {"id": "r2"}})
    assert parser.feed(_realtime("openai-realtime", "no")) == [Delta("text", "no")]


def test_the_texts_of_a_call_are_repaired() -> None:
    call = model_call(NameTable.build(["a"], PLAIN_NAMES), HIGH + LOW, "a" + HIGH, f'"{HIGH}"')
    assert call == ModelCall("😀", "a\ufffd", '"\ufffd"', False, "a\ufffd")


def test_json_is_repaired_in_every_text_and_unchanged_elsewhere() -> None:
    assert join_surrogates_in_json({HIGH: [1, None, True, 2.5, {"a": (HIGH + LOW,)}]}) == {
        "\ufffd": [1, None, True, 2.5, {"a": ["😀"]}]
    }
    deep: Any = HIGH
    for _ in range(100_000):
        deep = [deep]
    assert join_surrogates_in_json(deep) is deep
