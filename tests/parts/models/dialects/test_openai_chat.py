"""Tests chat completions: written to OpenAI's own types, read as the many servers send them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from tests.parts.models.dialects.openai_chat_cases import (
    ASSISTANT,
    CHAT,
    EXPORT,
    NAMES,
    PARIS,
    SUNNY,
    answer,
    answered,
    chunk,
    entry,
    official,
    paired,
    sdk_type,
    streamed,
    turn_of,
)
from tests.parts.models.dialects.random_histories import CallNames, histories
from tests.parts.models.dialects.sample_tools import DOTTED, PLAIN, SAMPLES, UNDERSCORED
from toolbus.errors import Code, Stage
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.protocol.tool import CallError, Result

TOOL = sdk_type("ChatCompletionFunctionToolParam", closed=True)


ANSWER = sdk_type("ChatCompletionToolMessageParam", closed=True)


SHORT = OpenAIChat(short_ids=True)

# -- tools


def test_tools_are_written_nested_as_the_official_type_wants_them() -> None:
    assert [TOOL.validate_python(tool)["function"]["name"] for tool in EXPORT.tools] == [
        NAMES.to_wire[tool.name] for tool in SAMPLES if tool.name in EXPORT.kept
    ]
    function = EXPORT.tools[0]["function"]
    assert EXPORT.tools[0] == {"type": "function", "function": function}
    assert function.keys() == {"name", "description", "parameters"}
    assert function["parameters"]["properties"]["city"] == PLAIN.parameters["properties"]["city"]


def test_a_request_offers_the_tools_of_its_export() -> None:
    request = CHAT.request([Message("system", "Be brief."), Message("user", "Hi")], EXPORT)
    assert request == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "tools": list(EXPORT.tools),
    }


# -- history


def test_an_answered_turn_goes_back_unchanged_with_an_answer_to_each_call() -> None:
    turn = turn_of(
        entry(None, "a", "get_weather", PARIS) | {"type": "function"},
        entry(None, "b", "now", "{}") | {"type": "function"},
        content="",
        refusal=None,
        reasoning_content="Hm",
    )
    failed = Result(is_error=True, error=CallError(Code.NOT_FOUND, "no such tool", Stage.NOT_DISPATCHED))
    history = CHAT.history([Message("user", "Hi"), turn, answered(turn, SUNNY, failed)], NAMES)
    assert history[1] == dict(turn.raw[0])
    assert history[2:] == [
        {"role": "tool", "tool_call_id": "a", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "name": "now", "content": "Error: no such tool"},
    ]
    assert history[2:] == CHAT.results(answered(turn, SUNNY, failed).answered, NAMES)
    for message in history[2:]:
        ANSWER.validate_python(official(message))


def test_unknown_keys_of_a_call_are_echoed() -> None:
    signature = {"extra_content": {"google": {"thought_signature": "s"}}}
    turn, _ = streamed(chunk(tool_calls=[entry(0, "a", "now", "{}") | signature]))
    assert dict(turn.calls[0].extra) == signature
    assert CHAT.history([turn], NAMES)[0]["tool_calls"][0]["extra_content"] == signature["extra_content"]


@pytest.mark.parametrize("broken", ["", '{"city": "Par', "[1]", "null", '"text"', '{"n": NaN}', "{" * 5000])
def test_arguments_that_are_not_an_object_are_echoed_as_an_empty_object(broken: str) -> None:
    turn = turn_of(entry(None, "a", "now", broken))
    assert turn.calls[0].arguments_json == broken
    for item in (turn, Turn(calls=turn.calls)):
        assert CHAT.history([item], NAMES)[0]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_answers_are_sorted_by_their_calls_and_missing_answers_are_generated() -> None:
    turn = turn_of(entry(None, "a", "now"), entry(None, "b", "draw"), entry(None, "c", "draw"))
    late = Answers((Answered(turn.calls[2], Result(output_json="3")), Answered(turn.calls[0], Result(output_json="1"))))
    history = CHAT.history([turn, Message("user", "And?"), late], NAMES)
    answers = paired(history)
    assert [call_id for call_id, _ in answers] == ["a", "b", "c"]
    assert [answers[0][1], answers[2][1]] == ["1", "3"]
    assert [message["role"] for message in history] == ["assistant", "tool", "tool", "tool", "user"]


def test_an_answer_whose_turn_was_trimmed_gets_its_call_back() -> None:
    turn = turn_of(entry(None, "a", "get_weather", PARIS))
    history = CHAT.history([answered(turn, SUNNY)], NAMES)
    assert paired(history) == [("a", "sunny")]
    assert history[0]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}


def test_ids_that_a_server_repeats_in_every_turn_are_made_unique() -> None:
    turns = [turn_of(entry(None, None, "now")) for _ in range(3)]
    items = [
        item for number, turn in enumerate(turns) for item in (turn, answered(turn, Result(output_json=str(number))))
    ]
    assert paired(CHAT.history(items, NAMES)) == [("call_0", "0"), ("call_0_1", "1"), ("call_0_2", "2")]


@pytest.mark.parametrize("call_id", ["x" * 200, "functions.now:0", "调用", "\ud800", ""])
def test_ids_of_other_providers_are_made_portable(call_id: str) -> None:
    turn = Turn(calls=(ModelCall(call_id, PLAIN.name, PARIS),), dialect="gemini", raw=({"parts": []},))
    history = CHAT.history([turn, answered(turn, SUNNY)], NAMES)
    [(call_id, text)] = paired(history)
    assert text == "sunny"
    assert len(call_id) <= 40
    assert call_id.isascii()


def test_a_turn_of_another_dialect_is_rebuilt_with_the_names_of_the_table() -> None:
    calls = (
        ModelCall("a", DOTTED.name, "{}", wire_name="files.read", extra={"thought_signature": "s"}),
        ModelCall("b", "gone.tool", "{}"),
        ModelCall("c", DOTTED.name, "{}", known=False, wire_name=DOTTED.name),
    )
    turn = Turn("Look", calls, dialect="gemini", raw=({"parts": []},))
    history = CHAT.history([turn, answered(turn, SUNNY, SUNNY, SUNNY)], NAMES)
    paired(history)
    used = [call["function"]["name"] for call in history[0]["tool_calls"]]
    assert used == [NAMES.to_wire[DOTTED.name], "gone_tool", "files_read"]
    assert [message["name"] for message in history[1:]] == used
    assert history[0].keys() == {"role", "content", "tool_calls"}
    assert ASSISTANT.validate_python(history[0])["content"] == "Look"
    assert NAMES.to_wire[DOTTED.name] != UNDERSCORED.name


def test_a_turn_that_lost_calls_is_rebuilt() -> None:
    turn = turn_of(entry(None, "a", "now"), entry(None, "b", "draw"), reasoning="Hm")
    fewer = Turn(turn.text, turn.calls[:1], turn.reasoning, turn.dialect, turn.raw, turn.stop)
    history = CHAT.history([fewer, answered(fewer, SUNNY)], NAMES)
    assert paired(history) == [("a", "sunny")]
    assert history[0]["reasoning"] == "Hm"


@pytest.mark.parametrize(
    "turn",
    [
        Turn(),
        Turn(dialect="openai", raw=({"role": "assistant", "content": None},)),
        Turn(" \n", dialect="openai", raw=({"role": "assistant", "content": " \n"},)),
        Message("assistant", ""),
    ],
)
def test_an_empty_answer_is_written_as_a_text_since_servers_refuse_a_conversation_with_an_empty_one(
    turn: HistoryItem,
) -> None:
    assert CHAT.history([turn], NAMES) == [{"role": "assistant", "content": "(empty answer)"}]


def test_messages_in_the_providers_format_are_passed_on_and_paired_like_all_others() -> None:
    turn = turn_of(entry(None, "a", "now", "{}"))
    assistant_message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [entry(None, "a", "now", "{}") | {"type": "function"}],
    }
    own = {"role": "tool", "tool_call_id": "a", "content": "mine"}
    picture = {"role": "user", "content": [{"type": "text", "text": "See"}]}
    assert CHAT.history([picture, assistant_message, own], NAMES) == [picture, assistant_message, own]
    assert paired(CHAT.history([assistant_message, answered(turn, SUNNY), turn, own], NAMES)) == [
        ("a", "sunny"),
        ("a_1", "mine"),
    ]
    assert len(paired(CHAT.history([assistant_message, picture], NAMES))) == 1


@pytest.mark.parametrize("calls", [[], [entry(None, "a", "", "{}")], [{}]])
def test_calls_without_a_name_are_dropped_from_a_message_in_the_providers_format(calls: list[Json]) -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    assert CHAT.history([message], NAMES) == [{"role": "assistant", "content": "Hi"}]


def own_turn(text: str, call_names: CallNames) -> tuple[Turn, Json]:
    calls = [entry(None, call_id, name, "{}") for call_id, name in call_names]
    turn = CHAT.parse(answer({"content": text, "tool_calls": calls}), NAMES)
    return turn, dict(turn.raw[0])


@given(histories(own_turn))
def test_any_history_is_valid_for_servers_and_read_back_the_same(items: list[HistoryItem]) -> None:
    written = CHAT.history(items, NAMES)
    paired(written)
    assert CHAT.history(written, NAMES) == written


@given(histories(own_turn))
def test_any_history_has_ids_of_nine_letters_and_digits_for_a_server_that_takes_no_others(
    items: list[HistoryItem],
) -> None:
    written = SHORT.history(items, NAMES)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call_id) for call_id, _ in paired(written))
    assert SHORT.history(written, NAMES) == written


def test_an_id_that_a_server_with_short_ids_gave_stays_and_another_ones_is_always_mapped_alike() -> None:
    calls = [ModelCall(call_id, "now", "{}") for call_id in ("aB3dE5gH7", "call_62136354", "call_62136354")]
    items = [
        Turn(calls=(each,), dialect=dialect) for each, dialect in zip(calls, ("openai", "openai", "x"), strict=True)
    ]
    ids = [call_id for call_id, _ in paired(SHORT.history(items, NAMES))]
    assert ids[0] == "aB3dE5gH7"
    assert len(set(ids)) == 3
    assert paired(SHORT.history(items[:2], NAMES)) == paired(SHORT.history(items, NAMES))[:2]
