"""Tests that a stored conversation gets the order that providers insist on, and that calls get unique ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.dialects.random_histories import ARGUMENTS, IDS
from toolbus.parts.models.dialects.call_arguments import portable_id, unique_calls, unique_id
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall, Turn
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.dialects.history import (
    LOST_RESULT,
    AnsweredTurn,
    ProviderAnswer,
    arguments_text,
    call_wire_name,
    offered,
    pair_calls,
    valid_arguments_text,
)
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, PLAIN_NAMES, NameTable
from toolbus.protocol.tool import Result

OWN = "own"
USER = Message("user", "hello")
FIT = re.compile(r"[a-zA-Z0-9_-]{1,40}")


def call(call_id: str, name: str = "now", arguments_json: str = "{}") -> ModelCall:
    return ModelCall(call_id, name, arguments_json, True, name)


def turn(*ids: str, dialect: str = OWN) -> Turn:
    return Turn(calls=tuple(map(call, ids)), dialect=dialect)


def result(number: int) -> Result:
    return Result(output_json=str(number))


def answers(*answered: tuple[ModelCall, int]) -> Answers:
    return Answers(tuple(Answered(each, result(number)) for each, number in answered))


def paired(items: Sequence[Any], dialect: str = OWN) -> list[Any]:
    """Returns what `steps` makes: of a step its ids and outputs, where None stands for LOST_RESULT."""
    return [
        (
            [each.id for each in step.turn.calls],
            [
                None if answer is LOST_RESULT else int(answer.output_json)
                for answer in step.answers
                if isinstance(answer, Result)
            ],
        )
        if isinstance(step, AnsweredTurn)
        else step
        for step in pair_calls(items, dialect)
    ]


# -- pairing ---------------------------------------------------------------------------------------------------------


def test_an_answered_turn_is_one_entry() -> None:
    assert paired([USER, turn("a", "b"), answers((call("a"), 1), (call("b"), 2))]) == [USER, (["a", "b"], [1, 2])]


def test_a_turn_without_calls_has_no_answers() -> None:
    assert paired([turn()]) == [([], [])]


def test_answers_have_the_order_of_the_calls_whatever_their_order_was() -> None:
    items = [turn("a", "b", "c"), answers((call("c"), 3)), answers((call("b"), 2), (call("a"), 1))]
    assert paired(items) == [(["a", "b", "c"], [1, 2, 3])]


def test_an_answer_that_came_late_moves_up_to_its_call() -> None:
    assert paired([turn("a"), USER, answers((call("a"), 1))]) == [(["a"], [1]), USER]


def test_a_call_without_an_answer_gets_an_error_that_says_so() -> None:
    assert paired([turn("a", "b"), answers((call("b"), 2)), USER]) == [(["a", "b"], [None, 2]), USER]
    assert LOST_RESULT.is_error
    assert LOST_RESULT.error is not None
    assert "it is unknown whether the call ran" in LOST_RESULT.error.message


def test_an_answer_whose_turn_was_trimmed_gets_a_generated_call() -> None:
    (step,) = pair_calls([answers((call("a", "weather", '{"city":1}'), 1))], OWN)
    assert isinstance(step, AnsweredTurn)
    assert (step.turn.calls, step.answers) == ((call("a", "weather", '{"city":1}'),), (result(1),))
    assert step.turn.dialect == ""  # nothing of the provider's own is there to be echoed


def test_orphans_of_one_item_form_one_turn_and_the_other_answers_go_to_their_calls() -> None:
    items = [turn("a"), USER, answers((call("x"), 8), (call("a"), 1), (call("y"), 9))]
    assert paired(items) == [(["a"], [1]), USER, (["x", "y"], [8, 9])]


def test_a_second_answer_to_the_same_call_is_an_orphan_and_not_lost() -> None:
    assert paired([turn("a"), answers((call("a"), 1)), answers((call("a"), 2))]) == [(["a"], [1]), (["a_1"], [2])]


def test_of_two_turns_with_the_same_id_the_newer_open_one_is_answered() -> None:
    items = [turn("a"), turn("a"), answers((call("a"), 2)), answers((call("a"), 1))]
    assert paired(items) == [(["a"], [1]), (["a_1"], [2])]


def test_of_calls_with_the_same_id_the_identical_one_is_answered() -> None:
    first, second = call("a", "first"), call("a", "second")
    items = [Turn(calls=(first,)), Turn(calls=(second,)), answers((first, 1)), answers((second, 2))]
    assert paired(items) == [(["a"], [1]), (["a_1"], [2])]


def test_messages_and_entries_in_the_providers_format_keep_their_places() -> None:
    form = {"role": "user", "content": "hello"}
    assert paired([form, USER, turn("a"), form]) == [form, USER, (["a"], [None]), form]


def test_an_answer_in_the_providers_format_is_assigned_by_its_id() -> None:
    own = ProviderAnswer("b", {"content": "rain"})
    (step,) = pair_calls([turn("a", "b"), own], OWN)
    assert isinstance(step, AnsweredTurn)
    assert step.answers == (LOST_RESULT, own)


def test_an_answer_without_an_id_goes_to_the_first_call_that_is_open() -> None:
    first, second = ProviderAnswer("", {"content": "1"}), ProviderAnswer("", {"content": "2"})
    (step,) = pair_calls([turn("a", "b"), first, second], OWN)
    assert isinstance(step, AnsweredTurn)
    assert step.answers == (first, second)


@pytest.mark.parametrize("call_id", ["x", ""])
def test_an_answer_in_the_providers_format_without_a_call_stays_unchanged(call_id: str) -> None:
    written = {"content": "rain"}
    assert pair_calls([turn(), ProviderAnswer(call_id, written)], OWN)[1] is written


# -- ids -------------------------------------------------------------------------------------------------------------


def test_ids_that_a_server_repeats_in_every_turn_are_made_unique_with_their_answers() -> None:
    items = [turn("call_0"), answers((call("call_0"), 1)), turn("call_0", "call_1"), answers((call("call_0"), 2))]
    assert paired(items) == [(["call_0"], [1]), (["call_0_1", "call_1"], [2, None])]


def test_a_generated_id_is_not_used_twice() -> None:
    assert [ids for ids, _ in paired([turn("a"), turn("a_1"), turn("a")])] == [["a"], ["a_1"], ["a_2"]]


def test_ids_of_the_same_dialect_stay_unchanged_and_others_are_made_portable() -> None:
    odd = "functions.now:0"
    assert paired([turn(odd)]) == [([odd], [None])]
    ((portable,), _) = paired([turn(odd, dialect="another")])[0]
    assert FIT.fullmatch(portable)
    assert portable == portable_id(odd)


@given(st.text(st.characters(exclude_categories=())) | st.sampled_from(IDS))
def test_any_id_has_one_portable_id(call_id: str) -> None:
    portable = portable_id(call_id)
    assert not portable if not call_id else FIT.fullmatch(portable)
    assert portable_id(portable) == portable == portable_id(call_id)


@given(st.sampled_from(["", "a", "x" * 40, "call_0"]), st.integers(0, 30))
def test_a_unique_id_is_not_taken_and_is_portable(call_id: str, times: int) -> None:
    taken: set[str] = set()
    for _ in range(times + 1):
        unique = unique_id(call_id, taken)
        assert unique not in taken
        assert FIT.fullmatch(unique)
        taken.add(unique)


def test_calls_of_one_turn_get_different_ids() -> None:
    calls = unique_calls([call("a"), call("a"), call(""), call("a_1"), call("")])
    assert [each.id for each in calls] == ["a", "a_1", "call_0", "a_1_1", "call_1"]


# -- names and arguments ---------------------------------------------------------------------------------------------


def test_a_call_has_the_current_name_of_its_tool() -> None:
    names = NameTable.build(["files.read", "files_read"], PLAIN_NAMES)
    assert call_wire_name(call("a", "files.read"), names, PLAIN_NAMES) == names.to_wire["files.read"] != "files_read"


@pytest.mark.parametrize(("rule", "wire"), [(PLAIN_NAMES, "gone_tool"), (GEMINI_NAMES, "gone.tool")])
def test_a_withdrawn_tool_is_called_by_a_name_that_the_provider_accepts(rule: Any, wire: str) -> None:
    assert call_wire_name(call("a", "gone.tool"), NameTable.empty(rule), rule) == wire


def test_an_invented_name_is_not_mapped_to_a_tool_on_the_bus() -> None:
    names = NameTable.build(["files.read"], PLAIN_NAMES)
    invented = ModelCall("a", "files.read", "{}", known=False, wire_name="files.read")
    assert call_wire_name(invented, names, GEMINI_NAMES) == "files.read"
    nameless = ModelCall("a", "功能", "{}", known=False)
    assert PLAIN_NAMES.accepts(call_wire_name(nameless, names, PLAIN_NAMES))


@pytest.mark.parametrize("text", ['{"city": "Paris"}', "{}", ' {"n": 10000000000000000000000} '])
def test_arguments_that_are_an_object_stay_unchanged(text: str) -> None:
    assert valid_arguments_text(text) == text


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "null", '{"cut', '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_not_an_object_become_an_empty_object(text: str) -> None:
    assert valid_arguments_text(text) == "{}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(None, ""), ("", ""), ('{"cut', '{"cut'), ({"城": [1, None]}, '{"城":[1,null]}'), ({}, "{}"), ([1], "[1]")],
)
def test_arguments_may_come_as_text_or_as_an_object(arguments: Any, text: str) -> None:
    assert arguments_text(arguments) == text


# -- exports ---------------------------------------------------------------------------------------------------------


def test_an_export_gives_its_tools_and_names_to_its_own_dialect_only() -> None:
    export = Export("gemini", ({"name": "x"},), NameTable.build(["x"], PLAIN_NAMES), {})
    assert offered(export, Gemini()) == ([{"name": "x"}], export.names)
    with pytest.raises(ValueError, match="these tools were exported for 'gemini', the request is for 'openai': export"):
        offered(export, OpenAIChat())


def test_without_an_export_there_are_no_tools_and_every_name_is_unknown() -> None:
    assert offered(None, Gemini()) == ([], NameTable.empty(GEMINI_NAMES))


# -- any conversation ------------------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[HistoryItem | ProviderAnswer]:
    """Returns turns answered in part, late, twice, in the provider's form or not at all; each answer is new."""
    items: list[HistoryItem | ProviderAnswer] = []
    model_calls: list[ModelCall] = [call("trimmed"), call("call_0", "other")]
    number = 0
    for kind in draw(st.lists(st.sampled_from(("message", "turn", "answers", "own answer", "form")), max_size=10)):
        if kind == "message":
            items.append(USER)
        elif kind == "form":
            items.append({"role": "user"})
        elif kind == "turn":
            id_arguments = draw(st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(ARGUMENTS)), max_size=3))
            calls = tuple(call(call_id, "now", arguments) for call_id, arguments in id_arguments)
            items.append(Turn(calls=calls, dialect=draw(st.sampled_from((OWN, "another")))))
            model_calls += calls
        elif kind == "answers":
            chosen = draw(st.lists(st.sampled_from(model_calls), max_size=3))
            items.append(answers(*((each, number + place) for place, each in enumerate(chosen))))
            number += len(chosen)
        else:
            items.append(ProviderAnswer(draw(st.sampled_from(IDS)), {"content": number}))
            number += 1
    return items


def outcomes(step: AnsweredTurn) -> list[str]:
    return [
        json.dumps(answer.message["content"]) if isinstance(answer, ProviderAnswer) else answer.output_json
        for answer in step.answers
        if answer is not LOST_RESULT
    ]


@given(conversations())
def test_every_call_has_one_answer_and_a_unique_id_and_no_answer_is_lost_or_repeated(
    items: list[HistoryItem | ProviderAnswer],
) -> None:
    steps = pair_calls(items, OWN)
    turns = [step for step in steps if isinstance(step, AnsweredTurn)]
    ids = [each.id for step in turns for each in step.turn.calls]
    assert all(len(step.answers) == len(step.turn.calls) for step in turns)
    assert len(set(ids)) == len(ids)
    assert all(ids)
    requested = Counter(each.arguments_json for item in items if isinstance(item, Turn) for each in item.calls)
    assert not requested - Counter(each.arguments_json for step in turns for each in step.turn.calls)
    loose = [json.dumps(entry["content"]) for entry in steps if isinstance(entry, Mapping) and "content" in entry]
    expected = [each.result.output_json for item in items if isinstance(item, Answers) for each in item.answered]
    expected += [json.dumps(item.message["content"]) for item in items if isinstance(item, ProviderAnswer)]
    assert Counter([*(output for step in turns for output in outcomes(step)), *loose]) == Counter(expected)


@given(conversations(), st.data())
def test_a_conversation_that_grows_keeps_its_beginning_but_for_answers_that_come_late(
    items: list[HistoryItem | ProviderAnswer], data: st.DataObject
) -> None:
    before = pair_calls(items[: data.draw(st.integers(0, len(items)))], OWN)
    for old, new in zip(before, pair_calls(items, OWN), strict=False):
        if isinstance(old, AnsweredTurn):
            assert isinstance(new, AnsweredTurn)
            assert old.turn == new.turn
            assert all(first in (LOST_RESULT, then) for first, then in zip(old.answers, new.answers, strict=True))
        else:
            assert old == new
    assert len(before) <= len(pair_calls(items, OWN))
