from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from tests.parts.models.dialects.gemini_cases import (
    DIALECT,
    HELLO,
    NAMES,
    SIGNATURE,
    SIGNED,
    answers,
    call,
    call_part,
    check_contents,
    forms,
    parsed,
    whole,
)
from tests.parts.models.dialects.random_histories import CallNames, histories
from tests.parts.models.dialects.sample_tools import CHINESE
from tests.support.providers import genai_types
from toolbus.parts.models.dialects.conversation import Answered, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, NameTable
from toolbus.protocol.tool import Result

# -- histories -------------------------------------------------------------------------------------------------------


def test_a_result_with_a_reference_goes_as_text() -> None:
    """The API takes `$ref` in a response for the name of a part, and refuses the request."""
    output = {"schema": {"$ref": "#/$defs/a"}}
    (content,) = DIALECT.results([Answered(call(), Result(output_json=json.dumps(output)))], NAMES)
    response = content["parts"][0]["function_response"]["response"]
    assert response == {"result": '{"schema":{"$ref":"#/$defs/a"}}'}


def test_a_turn_is_echoed_exactly_with_its_signatures() -> None:
    answer = whole(
        {"text": "rain?", "thought": True, "thoughtSignature": SIGNATURE},
        {"text": "Let me look.", "thoughtSignature": SIGNATURE},
        {**call_part(args={"city": "Paris"}), "thoughtSignature": SIGNATURE},
        call_part("now"),
    )
    for form in forms(answer):
        turn = DIALECT.parse(form, NAMES)
        contents = DIALECT.history([HELLO, turn, answers((turn.calls[0], 1), (turn.calls[1], 2))], NAMES)
        check_contents(contents)
        assert genai_types.Content.model_validate(contents[1]) == genai_types.Content.model_validate(
            answer["candidates"][0]["content"]
        )
        assert [part.thought_signature for part in genai_types.Content.model_validate(contents[1]).parts or ()] == [
            SIGNED,
            SIGNED,
            SIGNED,
            None,
        ]


def test_ids_of_gemini_are_echoed_and_generated_ids_are_not_sent() -> None:
    turn = parsed(whole(call_part(id="fc_1"), call_part("now")))
    contents = DIALECT.history([HELLO, turn, answers((turn.calls[1], 2), (turn.calls[0], 1))], NAMES)
    check_contents(contents)
    assert [part["function_response"] for part in contents[2]["parts"]] == [
        {"id": "fc_1", "name": "get_weather", "response": {"result": 1}},
        {"name": "now", "response": {"result": 2}},
    ]


def test_blank_parts_are_never_written() -> None:
    turn = parsed(whole({"text": ""}, {"text": "", "thought": True}, call_part()))
    items: list[HistoryItem] = [
        HELLO,
        Message("user", ""),
        Turn(),
        turn,
        answers((turn.calls[0], 1)),
        {"role": "user", "parts": []},
    ]
    contents = DIALECT.history(items, NAMES)
    check_contents(contents)
    assert [len(content["parts"]) for content in contents] == [1, 1, 1]


def test_a_text_behind_responses_joins_their_content() -> None:
    model_call = call()
    contents = DIALECT.history(
        [HELLO, Turn(calls=(model_call,)), Message("user", "and?"), answers((model_call, 1))], NAMES
    )
    check_contents(contents)
    assert [set(part) for part in contents[-1]["parts"]] == [{"function_response"}, {"text"}]


def test_neighbors_of_one_role_become_one_content() -> None:
    items: list[HistoryItem] = [
        HELLO,
        Message("user", "you"),
        Message("assistant", "hi"),
        Turn(text="there"),
        Message("user", "!"),
    ]
    contents = DIALECT.history(items, NAMES)
    check_contents(contents)
    assert [len(content["parts"]) for content in contents] == [2, 2, 1]


def test_a_call_that_was_not_answered_is_answered_with_an_error() -> None:
    turn = parsed(whole(call_part(), call_part("now")))
    contents = DIALECT.history([HELLO, turn, answers((turn.calls[1], "done")), Message("user", "well?")], NAMES)
    check_contents(contents)
    assert "error" in contents[-1]["parts"][0]["function_response"]["response"]
    check_contents(DIALECT.history([HELLO, turn], NAMES))


def test_the_turn_of_another_dialect_is_rebuilt_with_valid_names() -> None:
    model_call = ModelCall("toolu_1", CHINESE.name, '{"城市":"巴黎"}', wire_name=CHINESE.name)
    gone = ModelCall("toolu_2", "3d old", "[1", wire_name="3d old")
    turn = Turn("Looking.", (model_call, gone), dialect="ollama", raw=({"role": "assistant"},))
    contents = DIALECT.history([HELLO, turn, answers((model_call, 1), (gone, 2))], NAMES)
    check_contents(contents)
    assert contents[1]["parts"][:2] == [
        {"text": "Looking."},
        {"function_call": {"name": NAMES.wire(CHINESE.name), "args": {"城市": "巴黎"}}},
    ]
    assert contents[1]["parts"][2]["function_call"]["args"] == {}


def test_a_turn_whose_calls_were_changed_is_rebuilt_with_its_signature() -> None:
    turn = parsed(whole({**call_part(id="fc_1"), "thoughtSignature": SIGNATURE}, call_part("now")))
    contents = DIALECT.history([HELLO, replace(turn, calls=turn.calls[:1])], NAMES)
    check_contents(contents)
    expected = {"function_call": {"id": "fc_1", "name": "get_weather", "args": {}}, "thought_signature": SIGNATURE}
    assert contents[1]["parts"] == [expected]


def test_a_tool_that_is_no_longer_offered_keeps_the_name_of_its_call() -> None:
    turn = parsed(whole(call_part(NAMES.wire(CHINESE.name))))
    check_contents(DIALECT.history([HELLO, turn, answers((turn.calls[0], 1))], NameTable.empty(GEMINI_NAMES)))


def test_duplicate_ids_are_made_unique() -> None:
    turn = parsed(whole(call_part(id="fc_1"), call_part(id="fc_1")))
    items: list[HistoryItem] = [HELLO, turn, answers((turn.calls[0], 1), (turn.calls[1], 2))]
    contents = DIALECT.history([*items, Message("user", "again"), turn], NAMES)
    check_contents(contents)
    ids = [part["function_call"]["id"] for content in contents[1::2] for part in content["parts"]]
    assert len(set(ids)) == 4


def test_contents_in_the_providers_own_format_are_passed_on_and_their_calls_paired() -> None:
    user_content: Json = {"role": "user", "parts": [{"text": "look"}]}
    assert DIALECT.history([user_content], NAMES) == [user_content]
    model = {"role": "model", "parts": [call_part(), call_part("now")]}
    got = {"role": "user", "parts": [{"functionResponse": {"name": "now", "response": {"result": 1}}}]}
    contents = DIALECT.history([user_content, model, got, {"parts": [{"text": "go on"}]}], NAMES)
    check_contents(contents)
    first, second, text = contents[-1]["parts"]
    assert "error" in first["function_response"]["response"]
    assert second["function_response"] == {"name": "now", "response": {"result": 1}}
    assert text == {"text": "go on"}


def test_a_message_of_results_answers_the_turn_before_it() -> None:
    turn = parsed(whole(call_part()))
    sent_back = DIALECT.results([Answered(turn.calls[0], Result(output_json="1"))], NAMES)
    contents = DIALECT.history([HELLO, turn, *sent_back], NAMES)
    check_contents(contents)
    assert contents[2:] == sent_back


def test_a_response_without_a_call_is_dropped() -> None:
    stray = {"role": "user", "parts": [{"functionResponse": {"name": "now", "response": {}}}]}
    assert DIALECT.history([HELLO, stray], NAMES) == DIALECT.history([HELLO], NAMES)


def test_a_conversation_that_the_model_begins_gets_an_opening() -> None:
    contents = DIALECT.history([Message("assistant", "Welcome!"), HELLO], NAMES)
    check_contents(contents)
    assert [content["role"] for content in contents] == ["user", "model", "user"]


# -- any history -----------------------------------------------------------------------------------------------------


def own_turn(text: str, calls: CallNames) -> tuple[Turn, Json]:
    parts = [{"functionCall": {"name": name, "id": call_id}} for call_id, name in calls]
    turn = DIALECT.parse(whole({"text": text}, *parts), NAMES)
    return turn, dict(turn.raw[0]) if turn.raw else {"role": "model", "parts": []}


@settings(suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
@given(histories(own_turn))
def test_any_history_is_valid_for_the_api(items: list[HistoryItem]) -> None:
    contents = DIALECT.history(items, NAMES)
    check_contents(contents)
    check_contents(DIALECT.request(items, None)["contents"])
    check_contents(DIALECT.history(contents, NAMES))
