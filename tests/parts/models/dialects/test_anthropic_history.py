"""Tests conversations and requests of the Anthropic dialect against the official SDK and the rules of the API."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from tests.parts.models.dialects.anthropic_rules import (
    DIALECT,
    HELLO,
    NAMES,
    answers,
    blocks_of,
    call,
    check_messages,
    checked,
    image,
    use,
    whole,
)
from tests.parts.models.dialects.random_histories import CallNames, histories
from tests.parts.models.dialects.sample_tools import DOTTED, EMPTY, PLAIN
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.protocol.tool import Result

# -- histories -------------------------------------------------------------------------------------------------------


def test_a_turn_is_echoed_exactly_with_its_thinking() -> None:
    content: list[Json] = [
        {"type": "thinking", "thinking": "", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "ZGF0YQ=="},
        use("toolu_1", arguments={"city": "Paris"}),
    ]
    turn = DIALECT.parse(whole(content), NAMES)
    messages = DIALECT.history([HELLO, turn, answers((turn.calls[0], 1))], NAMES)
    check_messages(messages)
    assert messages[1] == {"role": "assistant", "content": content}


def test_blank_texts_are_never_written() -> None:
    turn = DIALECT.parse(whole([{"type": "text", "text": "\n\n"}, use("toolu_1")]), NAMES)
    items: list[HistoryItem] = [
        HELLO,
        Message("user", ""),
        Turn(),
        Message("assistant", " "),
        turn,
        answers((turn.calls[0], 1)),
    ]
    messages = DIALECT.history([*items, {"role": "user", "content": [{"type": "text", "text": ""}]}], NAMES)
    check_messages(messages)
    assert [[block["type"] for block in blocks_of(message)] for message in messages] == [
        ["text"],
        ["tool_use"],
        ["tool_result"],
    ]


def test_a_text_behind_results_joins_their_turn() -> None:
    model_call = call("toolu_1")
    messages = DIALECT.history(
        [HELLO, Turn(calls=(model_call,)), answers((model_call, 1)), Message("user", "and?")], NAMES
    )
    check_messages(messages)
    assert [block["type"] for block in messages[-1]["content"]] == ["tool_result", "text"]


def test_results_move_before_the_users_message_meanwhile() -> None:
    model_call = call("toolu_1")
    messages = DIALECT.history(
        [HELLO, Turn(calls=(model_call,)), Message("user", "hurry"), answers((model_call, 1))], NAMES
    )
    check_messages(messages)
    assert [block["type"] for block in messages[-1]["content"]] == ["tool_result", "text"]


def test_neighbors_of_one_role_become_one_message() -> None:
    items: list[HistoryItem] = [
        HELLO,
        Message("user", "you"),
        Message("assistant", "hi"),
        Turn(text="there"),
        Message("user", "!"),
    ]
    messages = DIALECT.history(items, NAMES)
    check_messages(messages)
    assert [len(blocks_of(message)) for message in messages] == [2, 2, 1]


def test_a_call_that_was_not_answered_is_answered_with_an_error() -> None:
    first, second = call("toolu_1"), call("toolu_2")
    turn = Turn(calls=(first, second))
    messages = DIALECT.history([HELLO, turn, answers((second, "done")), Message("user", "well?")], NAMES)
    check_messages(messages)
    assert [block.get("is_error", False) for block in messages[-1]["content"]] == [True, False, False]
    check_messages(DIALECT.history([HELLO, turn], NAMES))


def test_the_turn_of_another_dialect_is_rebuilt_with_valid_names_and_ids() -> None:
    model_call = ModelCall("functions.read:0", DOTTED.name, '{"path":"a"}', wire_name="files.read")
    gone = ModelCall("功能", "old:tool", "[1", wire_name="old:tool")
    turn = Turn("Reading.", (model_call, gone), dialect="ollama", raw=({"role": "assistant"},))
    messages = DIALECT.history([HELLO, turn, answers((model_call, 1), (gone, 2))], NAMES)
    check_messages(messages)
    text, first, second = messages[1]["content"]
    assert text == {"type": "text", "text": "Reading."}
    assert (first["name"], first["input"]) == (NAMES.wire(DOTTED.name), {"path": "a"})
    assert second["input"] == {}
    assert messages == DIALECT.history([HELLO, turn, answers((model_call, 1), (gone, 2))], NAMES), "the same every time"


def test_duplicate_ids_are_made_unique_also_in_an_echo() -> None:
    turn = DIALECT.parse(whole([use("call_0"), use("call_0", "now")]), NAMES)
    items: list[HistoryItem] = [HELLO, turn, answers((turn.calls[0], 1), (turn.calls[1], 2))]
    messages = DIALECT.history([*items, Message("user", "again"), *items[1:]], NAMES)
    check_messages(messages)
    contents = [block.get("content") for block in blocks_of(messages[2])]
    assert contents == ["1", "2", None]


def test_ids_of_another_server_of_this_dialect_are_made_portable() -> None:
    turn = DIALECT.parse(whole([use("functions.get:0")]), NAMES)
    check_messages(DIALECT.history([HELLO, turn, answers((turn.calls[0], 1))], NAMES))
    sent = DIALECT.results([Answered(turn.calls[0], Result(output_json="1"))], NAMES)
    own = DIALECT.history([HELLO, turn, *sent], NAMES)
    check_messages(own)
    assert own[-1]["content"][0]["content"] == "1"


def test_a_turn_whose_calls_were_changed_is_not_echoed() -> None:
    turn = DIALECT.parse(whole([use("toolu_1"), use("toolu_2")]), NAMES)
    messages = DIALECT.history([HELLO, replace(turn, calls=turn.calls[:1])], NAMES)
    check_messages(messages)
    assert [block["id"] for block in messages[1]["content"]] == ["toolu_1"]


def test_messages_in_the_providers_own_format_are_passed_on_and_their_calls_paired() -> None:
    user_message: Json = {"role": "user", "content": "look at this"}
    assert DIALECT.history([user_message], NAMES) == [user_message]
    assistant_message = {"role": "assistant", "content": [use("toolu_1"), use("toolu_2")]}
    got: Json = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "content": "2"}]}
    messages = DIALECT.history([user_message, assistant_message, got, {"role": "user", "content": "go on"}], NAMES)
    check_messages(messages)
    assert [block.get("content") for block in messages[-1]["content"]][1:] == ["2", None]


def test_a_result_without_a_call_is_dropped() -> None:
    stray: Json = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "2"}]}
    assert DIALECT.history([HELLO, stray], NAMES) == DIALECT.history([HELLO], NAMES)


def test_a_conversation_that_the_assistant_begins_gets_an_opening() -> None:
    messages = DIALECT.history([Message("assistant", "Welcome!"), HELLO], NAMES)
    check_messages(messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


# -- requests --------------------------------------------------------------------------------------------------------


def test_a_request_holds_system_messages_and_tools() -> None:
    items: list[HistoryItem] = [Message("system", "Be brief."), HELLO, Message("system", "And kind.")]
    request = checked(DIALECT.request(items, DIALECT.export([PLAIN, EMPTY])))
    assert request.keys() == {"system", "messages", "tools"}
    assert request["system"] == "Be brief.\n\nAnd kind."
    assert [tool["name"] for tool in request["tools"]] == ["get_weather", "now"]


def test_a_request_without_tools_and_system_holds_messages_alone() -> None:
    assert checked(DIALECT.request([HELLO], None)).keys() == {"messages"}
    assert checked(DIALECT.request([HELLO], DIALECT.export([]))).keys() == {"messages"}


def test_forbidden_tools_stay_declared_only_where_the_history_has_calls() -> None:
    export = DIALECT.export([PLAIN])
    model_call = call("toolu_1")
    request = checked(DIALECT.request([HELLO, Turn(calls=(model_call,)), answers((model_call, 1))], export, "none"))
    assert request["tool_choice"] == {"type": "none"}
    assert request["tools"] == list(export.tools)
    assert checked(DIALECT.request([HELLO], export, "none")).keys() == {"messages"}


def test_without_declared_tools_calls_become_text() -> None:
    model_call = call("toolu_1", arguments_json='{"city":"巴黎"}')
    seen = Answers((Answered(model_call, Result(output_json='"sun"', content=(image("image/png"),))),))
    request = checked(DIALECT.request([HELLO, Turn("Hm.", (model_call,)), seen, Message("user", "and?")], None))
    assert request.keys() == {"messages"}
    assistant_blocks, user_blocks = (blocks_of(message) for message in request["messages"][1:])
    assert [block["text"] for block in assistant_blocks] == ["Hm.", '[called get_weather with {"city": "巴黎"}]']
    assert [block.get("text") for block in user_blocks] == ["[get_weather answered]", "sun", None, "and?"]


# -- any history -----------------------------------------------------------------------------------------------------


def own_turn(text: str, calls: CallNames) -> tuple[Turn, Json]:
    turn = DIALECT.parse(whole([{"type": "text", "text": text}, *(use(*each) for each in calls)]), NAMES)
    return turn, dict(turn.raw[0]) if turn.raw else {"role": "assistant", "content": ""}


@settings(suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
@given(histories(own_turn))
def test_any_history_is_valid_for_the_api(items: list[HistoryItem]) -> None:
    messages = DIALECT.history(items, NAMES)
    check_messages(messages)
    check_messages(DIALECT.request(items, None)["messages"])
    check_messages(DIALECT.history(messages, NAMES))
