"""Tests that malformed answers of providers cost what is malformed in them, and raise only an error that names it.

Recorded answers are changed at random: values of other types, missing and repeated events and fields, another order.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.dialects import test_openai_realtime as realtime
from tests.parts.models.dialects.answer_cases import CASES
from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.parts.models.dialects.test_dialect_contract import PROVIDERS
from tests.parts.models.dialects.test_gemini_live import CALLS
from tests.parts.models.loop.model_server import FLAVOURS, Recording
from tests.support.malformed import changed_json
from toolbus.dialects import Dialect, find_dialect
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall
from toolbus.parts.models.dialects.dialect import EndpointError, RealtimeDialect
from toolbus.protocol.tool import Result

RECORDED: list[tuple[str, list[Any]]] = [
    *((each.dialect, events) for each in map(Recording.read, FLAVOURS) for events in each.answers.values()),
    *((case.dialect, list(case.events)) for case in CASES),
]
SESSION = [
    *(realtime.CREATED, realtime.ADDED, *realtime.DELTAS, realtime.DONE, realtime.ITEM_DONE, realtime.ENDED),
    {"type": "response.output_text.delta", "delta": "Hi"},
    {"type": "error", "error": {"code": "x"}},
]
LIVE = [
    CALLS,
    {"serverContent": {"modelTurn": {"parts": [{"text": "a", "thought": True}]}, "turnComplete": True}},
    {"toolCallCancellation": {"ids": ["f1"]}},
    {"usageMetadata": {"promptTokenCount": 1}},
]
SESSIONS = {"openai-realtime": SESSION, "grok": SESSION, "glm-realtime": SESSION, "gemini-live": LIVE}


@st.composite
def malformed(draw: st.DrawFn, events: list[Any]) -> list[Any]:
    events = list(events)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(events) - 1))
        match draw(st.integers(0, 7)):
            case 0 if len(events) > 1:
                del events[place]
            case 1:
                events.insert(draw(st.integers(0, len(events))), events[place])
            case 2:
                other = draw(st.integers(0, len(events) - 1))
                events[place], events[other] = events[other], events[place]
            case _:
                events[place] = draw(changed_json(events[place]))
    return events


def dialect_of(name: str) -> Dialect:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    return dialect


def check_calls(calls: list[ModelCall]) -> list[Answered]:
    for call in calls:
        assert all(type(each) is str for each in (call.id, call.name, call.wire_name, call.arguments_json))
        assert call.id
        assert call.name
    return [Answered(call, Result(output_json="1")) for call in calls]


@given(st.data())
def test_an_answer_with_changes_is_a_turn_or_an_error_of_the_endpoint_and_the_conversation_goes_on(
    data: st.DataObject,
) -> None:
    name, events = data.draw(st.sampled_from(RECORDED))
    changed = data.draw(malformed(events))
    dialect = dialect_of(name)
    export = dialect.export(SAMPLES)
    stream = dialect.stream(export.names)
    try:
        if len(events) == 1 and data.draw(st.booleans()):
            turn = dialect.parse(changed[0], export.names)
        else:
            for event in changed:
                stream.feed(event)
                assert stream.complete in (True, False)
            turn = stream.finish()
    except EndpointError:
        return
    assert all(type(each) is str for each in (turn.text, turn.reasoning, turn.stop, turn.reason))
    answered = check_calls([*turn.calls])
    assert len({call.id for call in turn.calls}) == len(turn.calls)
    answers = [Answers(tuple(answered))] if answered else []
    history: list[HistoryItem] = [Message("user", "Hi"), turn, *answers, Message("user", "Go on")]
    for writer in map(dialect_of, PROVIDERS):
        request = writer.request(history, writer.export(SAMPLES))
        assert json.dumps(request, ensure_ascii=False).encode()
    sent_back = [*dialect.history([turn], export.names), *dialect.results(answered, export.names)]
    assert isinstance(dialect.history(sent_back, export.names), list)


@pytest.mark.parametrize("name", SESSIONS)
@given(st.data())
def test_a_session_with_changes_raises_nothing(name: str, data: st.DataObject) -> None:
    dialect = find_dialect(name)
    assert isinstance(dialect, RealtimeDialect)
    names = dialect.export(SAMPLES).names
    parser = dialect.parser(names)
    events = [parsed for event in data.draw(malformed(SESSIONS[name] * 2)) for parsed in parser.feed(event)]
    answered = check_calls([each for each in events if isinstance(each, ModelCall)])
    assert json.dumps(dialect.answers(answered, names)).encode()


LISTS: dict[str, tuple[Any, ...]] = {  # where a whole answer has its calls
    "openai": ("choices", 0, "message", "tool_calls"),
    "openai-responses": ("output",),
    "anthropic": ("content",),
    "gemini": ("candidates", 0, "content", "parts"),
    "ollama": ("message", "tool_calls"),
}


@pytest.mark.parametrize("name", LISTS)
@given(st.data())
def test_calls_beside_a_broken_one_are_read(name: str, data: st.DataObject) -> None:
    dialect = dialect_of(name)
    names = dialect.export([PLAIN]).names
    answer = copy.deepcopy(PROVIDERS[name].answer("", [(f"c{number}", PLAIN.name) for number in range(3)]))
    calls: Any = answer
    for key in LISTS[name]:
        calls = calls[key]
    place = data.draw(st.integers(0, 2))
    calls[place] = data.draw(changed_json(calls[place]))
    stream = dialect.stream(names)
    turns = [dialect.parse(answer, names)]
    if name in ("gemini", "ollama"):  # whose streams have whole calls
        stream.feed(answer)
        turns.append(stream.finish())
    for turn in turns:
        good = [call for call in turn.calls if (call.name, call.arguments_json, call.whole) == (PLAIN.name, "{}", True)]
        assert len(good) >= 2
