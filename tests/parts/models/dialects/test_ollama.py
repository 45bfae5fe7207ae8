"""Tests Ollama's own API: calls without ids, arguments as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from tests.parts.models.dialects.random_histories import CallNames, histories
from tests.parts.models.dialects.sample_tools import CHINESE, EITHER, SAMPLES
from tests.support.providers import ollama
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
from toolbus.parts.models.dialects.ollama import Ollama
from toolbus.protocol.tool import Result, Tool

EXPORT = Ollama().export(SAMPLES)
NAMES = EXPORT.names
SUNNY = Result(output_json='"sunny"')


def tool_call(name: str, arguments: Any = None, **more: Any) -> Json:
    return {"function": {"name": name, "arguments": {} if arguments is None else arguments}, **more}


def chunk(done_reason: str | None = None, **message: Any) -> Json:
    end = {"done": done_reason is not None} | ({"done_reason": done_reason} if done_reason else {})
    return {"model": "m", "message": {"role": "assistant", "content": "", **message}, **end}


def paired(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """Checks messages against the official type, and that each call is answered in its place.

    Returns tool and text of the answers.
    """
    pairs, pending = [], list[str]()
    for message in messages:
        read = ollama.Message.model_validate(message, extra="forbid")
        if read.role == "tool":
            assert read.tool_name == pending.pop(0)
            pairs.append((read.tool_name, read.content or ""))
        else:
            assert not pending
            pending = [call.function.name for call in read.tool_calls or ()]
    assert not pending
    return pairs


def test_tools_are_nested_and_valid_for_the_official_type() -> None:
    for declared in EXPORT.tools:
        assert ollama.Tool.model_validate(declared).type == "function"
    assert [declared["function"]["name"] for declared in EXPORT.tools] == list(NAMES.to_bus)


def test_the_official_client_sends_every_tool_as_it_was_exported() -> None:
    request = ollama._types.ChatRequest(model="m", **Ollama().request([], EXPORT))
    assert request.model_dump(exclude_none=True)["tools"] == list(EXPORT.tools)


def test_notes_about_all_parameters_are_in_the_description_of_the_tool() -> None:
    either = Ollama().export([EITHER]).tools[0]["function"]
    assert either["description"] == "Finds a user by one of two keys.\nGive at least one of: id; mail."
    assert either["parameters"].keys() == {"type", "properties"}
    repeats = Tool("now", "Tells the time. In UTC.", '{"type": "object", "description": "Tells the time."}')
    assert Ollama().export([repeats]).tools[0]["function"]["description"] == "Tells the time. In UTC."


@pytest.mark.parametrize(("tools", "keys"), [("auto", {"messages", "tools"}), ("none", {"messages"})])
def test_a_request_holds_messages_and_tools_unless_text_is_required(tools: Any, keys: set[str]) -> None:
    request = Ollama().request([Message("system", "Be brief."), Message("user", "Hi")], EXPORT, tools)
    assert request.keys() == keys
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    read = ollama._types.ChatRequest(model="m", **request)
    assert [tool.function.name for tool in read.tools or () if tool.function] == [
        tool["function"]["name"] for tool in request.get("tools", ())
    ]


def test_a_whole_answer_is_read_and_its_calls_get_ids() -> None:
    answer = chunk(
        "stop", content="Look.", thinking="Hm", tool_calls=[tool_call("now"), tool_call(NAMES.to_wire[CHINESE.name])]
    )
    turns = [Ollama().parse(form, NAMES) for form in (answer, ollama.ChatResponse.model_validate(answer))]
    for turn in turns:
        assert (turn.text, turn.reasoning, turn.stop, turn.dialect) == ("Look.", "Hm", "stop", "ollama")
        assert [(call.id, call.name, call.known) for call in turn.calls] == [
            ("call_0", "now", True),
            ("call_1", CHINESE.name, True),
        ]


def test_arguments_keep_their_nulls_and_may_be_text() -> None:
    answer = chunk(tool_calls=[tool_call("now", {"a": None}), tool_call("now", '{"a":null}')])
    for form in (answer, ollama.ChatResponse.model_validate(chunk(tool_calls=[tool_call("now", {"a": None})]))):
        turn = Ollama().parse(form, NAMES)
        assert {call.arguments_json for call in turn.calls} == {'{"a":null}'}
        assert {str(call["function"]["arguments"]) for call in Ollama().history([turn], NAMES)[0]["tool_calls"]} == {
            "{'a': None}"
        }


def test_ids_are_unique_in_a_conversation_and_the_same_each_time_a_turn_is_finished() -> None:
    dialect = Ollama()
    stream = dialect.stream(NAMES)
    stream.feed(chunk(tool_calls=[tool_call("now")]))
    first, again = stream.finish(), stream.finish()
    second = dialect.parse(chunk(tool_calls=[tool_call("now"), tool_call("now", id="theirs")]), NAMES)
    assert first == again
    assert [call.id for call in (*first.calls, *second.calls)] == ["call_0", "call_1", "theirs"]


def test_a_stream_is_assembled_from_text_thinking_and_whole_calls() -> None:
    stream = Ollama().stream(NAMES)
    events = [
        chunk(thinking="Hm"),
        chunk(thinking="."),
        ollama.ChatResponse.model_validate(chunk(content="Lo")),
        chunk(content="ok", tool_calls=[tool_call("now"), tool_call(""), {"function": None}]),
        chunk(tool_calls=[tool_call("draw", {"n": 1})]),
        chunk("stop", tool_calls=None, content=None),
        {"done": True, "message": None},
    ]
    assert [delta for event in events for delta in stream.feed(event)] == [
        *(Delta("reasoning", "Hm"), Delta("reasoning", ".")),
        *(Delta("text", "Lo"), Delta("text", "ok")),
    ]
    turn = stream.finish()
    assert (turn.text, turn.reasoning, turn.stop) == ("Look", "Hm.", "stop")
    assert [(call.name, call.arguments_json) for call in turn.calls] == [("now", "{}"), ("draw", '{"n":1}')]
    assert Ollama().history([turn], NAMES)[0] == {
        "role": "assistant",
        "content": "Look",
        "thinking": "Hm.",
        "tool_calls": [tool_call("now"), tool_call("draw", {"n": 1})],
    }


def test_results_are_identified_by_the_name_of_the_tool() -> None:
    turn = Ollama().parse(chunk(tool_calls=[tool_call(NAMES.to_wire[CHINESE.name]), tool_call("invented")]), NAMES)
    answered = tuple(Answered(call, SUNNY) for call in turn.calls)
    expected = [
        {"role": "tool", "tool_name": NAMES.to_wire[CHINESE.name], "content": "sunny"},
        {"role": "tool", "tool_name": "invented", "content": "sunny"},
    ]
    assert Ollama().results(answered, NAMES) == expected
    history = Ollama().history([turn, Answers(answered)], NAMES)
    assert history == [dict(turn.raw[0]), *expected]
    paired(history)


def test_a_turn_of_another_dialect_is_rebuilt_with_arguments_as_objects() -> None:
    calls = (ModelCall("a", CHINESE.name, '{"城市":"巴黎"}'), ModelCall("b", "now", "[1]"), ModelCall("c", "now", "{"))
    history = Ollama().history([Turn("Look", calls, "Hm", "openai", ({"role": "assistant"},))], NAMES)
    assert history[0] == {
        "role": "assistant",
        "content": "Look",
        "tool_calls": [tool_call(NAMES.to_wire[CHINESE.name], {"城市": "巴黎"}), tool_call("now"), tool_call("now")],
    }
    assert len(paired(history)) == 3


def test_a_turn_that_lost_calls_is_rebuilt_with_its_thinking() -> None:
    turn = Ollama().parse(chunk(thinking="Hm", tool_calls=[tool_call("now"), tool_call("draw")]), NAMES)
    fewer = Turn(calls=turn.calls[1:], reasoning="Hm", dialect="ollama", raw=turn.raw)
    history = Ollama().history([fewer], NAMES)
    assert history[0] == {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [tool_call("draw")]}
    paired(history)


def test_messages_in_ollamas_format_are_paired_like_all_others() -> None:
    call = chunk(tool_calls=[tool_call("now"), tool_call("draw")])["message"]
    own = {"role": "tool", "tool_name": "now", "content": "mine"}
    history = Ollama().history([call, Message("user", "And?"), own], NAMES)
    assert [text.split(",")[0] for _, text in paired(history)] == [
        "mine",
        "Error: the result of this call was not recorded",
    ]


def test_calls_without_a_name_are_dropped_from_a_message_in_ollamas_format() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": [tool_call("")]}
    assert Ollama().history([message], NAMES) == [{"role": "assistant", "content": "Hi"}]


def own_turn(text: str, calls: CallNames) -> tuple[Turn, Json]:
    turn = Ollama().parse(chunk(content=text, tool_calls=[tool_call(name) for _, name in calls]), NAMES)
    return turn, dict(turn.raw[0])


@given(histories(own_turn))
def test_any_history_is_valid_for_the_server(items: list[HistoryItem]) -> None:
    written = Ollama().history(items, NAMES)
    paired(written)
    assert Ollama().history(written, NAMES) == written
