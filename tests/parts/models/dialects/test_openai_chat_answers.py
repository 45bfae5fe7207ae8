from __future__ import annotations

from typing import Any

import pytest

from tests.parts.models.dialects.openai_chat_cases import (
    ASSISTANT,
    CHAT,
    NAMES,
    PARIS,
    SUNNY,
    answer,
    answered,
    chunk,
    entry,
    paired,
    sdk_type,
    streamed,
    turn_of,
)
from tests.parts.models.dialects.sample_tools import CHINESE
from toolbus.parts.models.dialects.conversation import Delta, Json, ModelCall, Turn
from toolbus.parts.models.dialects.dialect import EndpointError

ANSWERED, CHUNK = sdk_type("ChatCompletion"), sdk_type("ChatCompletionChunk")


def called(*entries: Json) -> list[tuple[str, str, str]]:
    """Returns id, name and arguments of the calls that chunks with one entry each make up."""
    turn, _ = streamed(*(chunk(tool_calls=[one]) for one in entries))
    return [(call.id, call.name, call.arguments_json) for call in turn.calls]


# -- whole answers


def test_an_answer_of_the_official_class_is_read() -> None:
    official = ANSWERED.kind.model_validate(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            **answer(
                {
                    "content": "Let me look.",
                    "tool_calls": [entry(None, "a", "get_weather", PARIS) | {"type": "function"}],
                },
                "tool_calls",
            ),
        }
    )
    turn = CHAT.parse(official, NAMES)
    assert (turn.text, turn.stop, turn.dialect) == ("Let me look.", "tool_calls", "openai")
    assert turn.calls == (ModelCall("a", "get_weather", PARIS, True, "get_weather"),)
    ASSISTANT.validate_python(CHAT.history([turn], NAMES)[0])


def test_names_are_mapped_back_to_the_bus_and_invented_names_are_unknown() -> None:
    wire = NAMES.to_wire[CHINESE.name]
    turn = turn_of(entry(None, "a", wire), entry(None, "b", CHINESE.name), entry(None, "c", "made_up"))
    assert [(call.name, call.known, call.wire_name) for call in turn.calls] == [
        (CHINESE.name, True, wire),
        (CHINESE.name, False, CHINESE.name),
        ("made_up", False, "made_up"),
    ]


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": "Hi", "reasoning_content": "Hm"}, "Hi", "Hm"),
        ({"content": "Hi", "reasoning": "Hm"}, "Hi", "Hm"),
        ({"content": None, "refusal": "I will not."}, "I will not.", ""),
        ({"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, "Hi", ""),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
                    {"type": "text", "text": "Hi"},
                ]
            },
            "Hi",
            "Hm",
        ),
        ({}, "", ""),
        ({"content": None, "tool_calls": None, "function_call": None}, "", ""),
    ],
)
def test_text_and_reasoning_are_found_under_every_key_of_the_servers(message: Json, text: str, reasoning: str) -> None:
    turn = CHAT.parse(answer(message), NAMES)
    assert (turn.text, turn.reasoning, turn.calls) == (text, reasoning, ())


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, PARIS])
def test_arguments_may_be_an_object_already(arguments: Any) -> None:
    turn = turn_of(entry(None, "a", "get_weather", arguments))
    assert turn.calls[0].arguments_json == PARIS
    assert CHAT.history([turn], NAMES)[0]["tool_calls"][0]["function"]["arguments"] == PARIS


@pytest.mark.parametrize("failed", [{"choices": []}, {}])
def test_an_answer_without_choices_is_an_error(failed: Json) -> None:
    with pytest.raises(EndpointError, match="without choices") as caught:
        CHAT.parse(failed, NAMES)
    assert caught.value.raw == failed


# -- streams


def test_deltas_are_merged_by_index() -> None:
    assert called(
        entry(0, "a", "get_weather", ""),
        entry(0, None, None, '{"city"'),
        entry(1, "b", "now", ""),
        entry(0, None, None, ':"Paris"}'),
        entry(1, None, None, "{}"),
    ) == [("a", "get_weather", PARIS), ("b", "now", "{}")]


def test_the_last_id_and_name_that_are_not_empty_win() -> None:
    assert called(entry(0, "a", "no"), entry(0, "", "now", ""), entry(0, "b", "", "{"), entry(0, None, "", "}")) == [
        ("b", "now", "{}")
    ]


def test_entries_without_a_name_are_dropped_and_not_echoed() -> None:
    turn, _ = streamed(chunk(tool_calls=[entry(0, "a", None, "{}"), entry(1, "b", "now", "{}")]))
    assert [call.id for call in turn.calls] == ["b"]
    assert [call["id"] for call in CHAT.history([turn], NAMES)[0]["tool_calls"]] == ["b"]
    whole = turn_of(entry(None, "a", "", "{}"), entry(None, "b", "now", "{}"), {"id": "c"})
    assert [call.id for call in whole.calls] == ["b"]
    assert paired(CHAT.history([whole, answered(whole, SUNNY)], NAMES)) == [("b", "sunny")]


def test_a_missing_id_is_generated_from_the_index() -> None:
    assert called(entry(0, None, "now", "{}"), entry(3, "", "get_weather", PARIS)) == [
        ("call_0", "now", "{}"),
        ("call_3", "get_weather", PARIS),
    ]
    assert [call.id for call in turn_of(entry(None, None, "now"), entry(None, None, "now")).calls] == [
        "call_0",
        "call_1",
    ]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(None, "a", "now", "{}")], [("a", "now", "{}")]),
        ([entry(None, "a", "now", {})], [("a", "now", "{}")]),
        ([entry(None, None, "now", '{"a"'), entry(None, None, None, ":1}")], [("call_0", "now", '{"a":1}')]),
        ([entry(None, "a", "now", "{"), entry(None, "a", "now", "}")], [("a", "now", "{}")]),
        ([entry(None, "a", "now", "{}"), entry(None, "b", "now", "{}")], [("a", "now", "{}"), ("b", "now", "{}")]),
        (
            [entry(None, None, "now", "{}"), entry(None, None, "now", "{}")],
            [("call_0", "now", "{}"), ("call_1", "now", "{}")],
        ),
        (
            [entry(None, None, "now"), entry(None, None, "draw", "{}")],
            [("call_0", "now", ""), ("call_1", "draw", "{}")],
        ),
        (
            [entry(0, "a", "now", "{}"), entry(0, "b", "draw", '{"n":1}')],
            [("a", "now", "{}"), ("b", "draw", '{"n":1}')],
        ),
        ([entry(1, "b", "draw", "{}"), entry(0, "a", "now", "{}")], [("a", "now", "{}"), ("b", "draw", "{}")]),
        ([entry(0, "a", "now", "{}"), entry(1, "a", "now", "{}")], [("a", "now", "{}"), ("a_1", "now", "{}")]),
    ],
    ids=[
        *("whole call without index", "arguments as object", "pieces without index or id", "id and name repeated"),
        *(
            "ids tell calls apart",
            "names tell calls apart",
            "another name",
            "all numbered 0",
            "out of order",
            "same id",
        ),
    ],
)
def test_calls_with_wrong_indexes_are_separated(entries: list[Json], expected: list[tuple[str, str, str]]) -> None:
    assert called(*entries) == expected


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [], "usage": {"total_tokens": 5}},
        {"choices": None},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": None, "content": None}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": None}]}}]},
        {"choices": [{"index": 0}]},
        {"choices": [{"index": 1, "delta": {"content": "another answer"}}]},
        {},
    ],
)
def test_empty_chunks_change_nothing(event: Json) -> None:
    turn, deltas = streamed(chunk(content="Hi"), event, chunk("stop"), event)
    assert (turn.text, turn.calls, turn.stop, deltas) == ("Hi", (), "stop", [Delta("text", "Hi")])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_and_goes_back_under_the_key_it_came_with(key: str) -> None:
    turn, deltas = streamed(
        chunk(**{key: "Hm"}), chunk(**{key: "."}), chunk(content=""), chunk(tool_calls=[entry(0, "a", "now", "{}")])
    )
    assert deltas == [Delta("reasoning", "Hm"), Delta("reasoning", ".")]
    message = CHAT.history([turn], NAMES)[0]
    assert message == {
        "role": "assistant",
        "content": "",
        key: "Hm.",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }


def test_reasoning_sent_under_both_keys_is_shown_once() -> None:
    turn, deltas = streamed(chunk(reasoning="Hm", reasoning_content="Hm"), chunk(content="Hi"))
    assert (turn.reasoning, deltas) == ("Hm", [Delta("reasoning", "Hm"), Delta("text", "Hi")])


def test_without_reasoning_none_goes_back() -> None:
    turn, _ = streamed(chunk(content="Hi", reasoning_content=""))
    assert CHAT.history([turn], NAMES) == [{"role": "assistant", "content": "Hi"}]


def test_reasoning_of_another_provider_is_not_sent_to_this_one() -> None:
    turn = Turn("Hi", reasoning="Hm", dialect="anthropic")
    assert CHAT.history([turn], NAMES) == [{"role": "assistant", "content": "Hi"}]


def test_chunks_of_the_official_class_are_read_even_invalid_ones() -> None:
    whole = CHUNK.kind.model_validate(chunk(role="assistant", tool_calls=[entry(0, "a", "now", "{}")]))
    bent = CHUNK.kind.construct(**chunk(tool_calls=[entry(None, "b", "get_weather", {"city": "Paris"})]))
    thinking = CHUNK.kind.construct(**chunk(reasoning_content="Hm"))
    turn, deltas = streamed(whole, bent, thinking)
    assert [call.id for call in turn.calls] == ["a", "b"]
    assert (turn.calls[1].arguments_json, deltas) == (PARIS, [Delta("reasoning", "Hm")])


def test_a_refusal_is_shown_as_text_and_goes_back_as_a_refusal() -> None:
    turn, deltas = streamed(chunk(refusal="I will "), chunk(refusal="not."))
    assert "".join(delta.text for delta in deltas) == turn.text == "I will not."
    message = CHAT.history([turn], NAMES)[0]
    assert ASSISTANT.validate_python(message) == {"role": "assistant", "content": None, "refusal": "I will not."}
