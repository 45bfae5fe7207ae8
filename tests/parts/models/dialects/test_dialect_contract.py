"""Tests what holds for every dialect of answers, with an answer of each provider: one suite instead of one for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from toolbus.dialects import Dialect, find_dialect
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.protocol.tool import Result

Calls = Sequence[tuple[str, str]]  # ids and names
HELLO = Message("user", "hello")
BROKE = "it broke"


def _openai(text: str, calls: Calls) -> Json:
    entries = [{"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}} for each, name in calls]
    message = {"role": "assistant", "content": text, "tool_calls": entries}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def _responses(text: str, calls: Calls) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    said: list[Json] = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}]
    items = [{"type": "function_call", "call_id": each, "name": name, "arguments": "{}"} for each, name in calls]
    return {"id": "r", "object": "response", "status": "completed", "output": [*(said if text else ()), *items]}


def _anthropic(text: str, calls: Calls) -> Json:
    blocks = [{"type": "tool_use", "id": each, "name": name, "input": {}} for each, name in calls]
    said: list[Json] = [{"type": "text", "text": text}]
    return {"role": "assistant", "content": [*(said if text else ()), *blocks], "stop_reason": "end_turn"}


def _gemini(text: str, calls: Calls) -> Json:
    parts: list[Json] = [{"functionCall": {"id": each, "name": name, "args": {}}} for each, name in calls]
    content = {"role": "model", "parts": [*([{"text": text}] if text else ()), *parts]}
    return {"candidates": [{"content": content, "finishReason": "STOP"}]}


def _ollama(text: str, calls: Calls) -> Json:
    entries = [{"function": {"name": name, "arguments": {}}} for _, name in calls]
    return {"message": {"role": "assistant", "content": text, "tool_calls": entries}, "done": True}


@dataclass(frozen=True)
class Provider:
    """How one provider writes.

    Attributes:
        answer: a whole answer with a text and calls.
        piece: the events of a stream that say "Hi".
        errors: what it sends instead of an answer.
        events: what it sends in a stream that fails.
        empty: keys of a request that offers no tools.
    """

    answer: Callable[[str, Calls], Json]
    piece: Sequence[Json]
    errors: Sequence[Json]
    events: Sequence[Json]
    empty: set[str]


PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider(
        _openai,
        [{"choices": [{"index": 0, "delta": {"content": "Hi"}}]}],
        [{"error": {"message": BROKE, "code": 500}}, {"error": BROKE}, {"error": {"code": BROKE}}],
        [
            {"error": {"message": BROKE, "type": "server_error"}},
            {"error": BROKE},
            {"choices": [{"index": 0, "delta": {}, "error": {"message": BROKE}}]},
        ],
        {"messages"},
    ),
    "openai-responses": Provider(
        _responses,
        [{"type": "response.output_text.delta", "output_index": 0, "delta": "Hi"}],
        [
            {"status": "failed", "output": [], "error": {"code": "server_error", "message": BROKE}},
            {"error": {"message": BROKE}},
            {"error": BROKE},
        ],
        [
            {"type": "response.failed", "response": {"status": "failed", "output": [], "error": {"message": BROKE}}},
            {"type": "error", "code": "x", "message": BROKE, "param": None},
            {"type": "error", "error": {"message": BROKE}},
            {"error": BROKE},
        ],
        {"input"},
    ),
    "anthropic": Provider(
        _anthropic,
        [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hi"}}],
        [{"type": "error", "error": {"type": "overloaded_error", "message": BROKE}}],
        [{"type": "error", "error": {"type": "overloaded_error", "message": BROKE}}],
        {"messages"},
    ),
    "gemini": Provider(
        _gemini,
        [{"candidates": [{"content": {"role": "model", "parts": [{"text": "Hi"}]}}]}],
        [{"error": {"code": 429, "message": BROKE, "status": "RESOURCE_EXHAUSTED"}}],
        [{"error": {"code": 429, "message": BROKE, "status": "RESOURCE_EXHAUSTED"}}],
        {"contents", "config"},
    ),
    "ollama": Provider(
        _ollama,
        [{"message": {"role": "assistant", "content": "Hi"}, "done": False}],
        [{"error": BROKE}, {"error": {"message": BROKE}}],
        [{"error": BROKE}, {"error": {"message": BROKE}}],
        {"messages"},
    ),
}

every_provider = pytest.mark.parametrize("name", PROVIDERS)


def _dialect(name: str) -> Dialect:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    return dialect


def _turn(name: str, *calls: str, text: str = "") -> Turn:
    """Returns the turn of an answer that calls these tools."""
    dialect = _dialect(name)
    answer = PROVIDERS[name].answer(text, [(f"c{number}", each) for number, each in enumerate(calls)])
    return dialect.parse(answer, dialect.export(SAMPLES).names)


def _history(name: str, *items: HistoryItem) -> list[Any]:
    dialect = _dialect(name)
    return list(dialect.history(items, dialect.export(SAMPLES).names))


def _answers(*answered: tuple[ModelCall, int]) -> Answers:
    return Answers(tuple(Answered(call, Result(output_json=str(output))) for call, output in answered))


@every_provider
def test_an_export_of_another_dialect_is_refused_with_the_fix(name: str) -> None:
    dialect = _dialect(name)
    other = replace(dialect.export([PLAIN]), dialect="mcp")
    with pytest.raises(ValueError, match=f"exported for 'mcp', the request is for '{name}': export them"):
        dialect.request([HELLO], other)


@every_provider
def test_a_request_without_tools_has_no_key_for_them(name: str) -> None:
    dialect = _dialect(name)
    for request in (
        dialect.request([HELLO], None),
        dialect.request([HELLO], dialect.export([])),
        dialect.request([HELLO], dialect.export([PLAIN]), "none"),
    ):
        assert request.keys() == PROVIDERS[name].empty
        assert not request.get("config")


@every_provider
def test_an_invented_name_is_a_call_that_is_not_known(name: str) -> None:
    (call,) = _turn(name, "no_such").calls
    assert (call.name, call.wire_name, call.known) == ("no_such", "no_such", False)


@every_provider
def test_a_call_without_a_name_is_dropped_and_not_echoed(name: str) -> None:
    turn = _turn(name, "", "now", text="Look.")
    assert [call.name for call in turn.calls] == ["now"]
    assert '"name": ""' not in json.dumps(_history(name, HELLO, turn))


@pytest.mark.parametrize(("name", "error"), [(name, each) for name in PROVIDERS for each in PROVIDERS[name].errors])
def test_an_error_instead_of_an_answer_is_raised_with_its_message(name: str, error: Json) -> None:
    dialect = _dialect(name)
    with pytest.raises(EndpointError, match=BROKE) as caught:
        dialect.parse(error, dialect.export([PLAIN]).names)
    assert caught.value.raw == error


@pytest.mark.parametrize(("name", "event"), [(name, each) for name in PROVIDERS for each in PROVIDERS[name].events])
def test_an_error_inside_a_stream_is_raised_and_what_was_read_stays(name: str, event: Json) -> None:
    dialect = _dialect(name)
    stream = dialect.stream(dialect.export([PLAIN]).names)
    for piece in PROVIDERS[name].piece:
        stream.feed(piece)
    with pytest.raises(EndpointError, match=BROKE):
        stream.feed(event)
    assert stream.finish().text == "Hi"


@every_provider
def test_calls_that_were_not_answered_are_answered_with_an_error_in_their_place(name: str) -> None:
    turn = _turn(name, "now", "get_weather")
    for answered, lost in (((), 2), (((turn.calls[1], 1),), 1)):
        for more in ((), (Message("user", "Never mind."),)):
            history = _history(name, HELLO, turn, *((_answers(*answered),) if answered else ()), *more)
            assert json.dumps(history).count("the result of this call was not recorded") == lost


@every_provider
def test_a_history_that_grows_keeps_its_beginning(name: str) -> None:
    turn = _turn(name, "now", "get_weather")
    items: list[HistoryItem] = [HELLO]
    before: list[Any] = []
    for number in range(4):
        items += [turn, _answers((turn.calls[0], number), (turn.calls[1], number))]
        history = _history(name, *items)
        assert history[: len(before)] == before
        before = history
        items.append(Turn("Sun."))
        items.append(Message("user", f"again {number}"))


@every_provider
def test_a_history_does_not_change_its_turns_nor_shares_anything_with_them(name: str) -> None:
    turn = _turn(name, "now", text="Look.")
    before = repr(turn)
    history = _history(name, HELLO, turn, turn)
    for message in history:
        message.clear()
    assert repr(turn) == before
