"""Tests chat completions: written to OpenAI's own types, read as the many servers send them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from tests.dialects.random_histories import CallNames, histories
from tests.dialects.sample_tools import CHINESE, DOTTED, PLAIN, SAMPLES, UNDERSCORED
from tests.support.providers import OfficialType
from toolbus.dialects.conversation import Answered, Answers, Delta, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.dialects.dialect import EndpointError
from toolbus.dialects.export import Export
from toolbus.dialects.openai_chat import OpenAIChat
from toolbus.dialects.wire_names import NameTable
from toolbus.errors import Code, Stage
from toolbus.tool import CallError, Result

CHAT = OpenAIChat()
EXPORT = CHAT.export(SAMPLES)
NAMES = EXPORT.names
PARIS = '{"city":"Paris"}'
REASONING = ("reasoning", "reasoning_content")
SUNNY = Result(output_json='"sunny"')


def sdk_type(name: str, **options: bool) -> OfficialType:
    return OfficialType("openai.types.chat", name, **options)


TOOL = sdk_type("ChatCompletionFunctionToolParam", closed=True)
ASSISTANT = sdk_type("ChatCompletionAssistantMessageParam", closed=True)
ANSWER = sdk_type("ChatCompletionToolMessageParam", closed=True)
CALLS = sdk_type("ChatCompletionMessageFunctionToolCallParam", many=True)
MESSAGES = sdk_type("ChatCompletionMessageParam", many=True)
ANSWERED, CHUNK = sdk_type("ChatCompletion"), sdk_type("ChatCompletionChunk")


def entry(index: int | None = None, call_id: str | None = None, name: str | None = None, arguments: Any = None) -> Json:
    """Returns an element of tool_calls; what is None is left out."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    outer = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return outer | ({"function": function} if function else {})


def chunk(finish_reason: str | None = None, **delta: Any) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def streamed(*events: Any, names: NameTable = NAMES) -> tuple[Turn, list[Delta]]:
    stream = CHAT.stream(names)
    deltas = [delta for event in events for delta in stream.feed(event)]
    return stream.finish(), deltas


def called(*entries: Json) -> list[tuple[str, str, str]]:
    """Returns id, name and arguments of the calls that chunks with one entry each make up."""
    turn, _ = streamed(*(chunk(tool_calls=[one]) for one in entries))
    return [(call.id, call.name, call.arguments_json) for call in turn.calls]


def answer(message: Json, finish_reason: str = "stop") -> Json:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}]}


def official(message: Json) -> Json:
    """Returns a message without what only other servers know."""
    unknown = (*REASONING, "name") if message["role"] == "tool" else REASONING
    return {key: value for key, value in message.items() if key not in unknown}


def paired(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """Checks that each assistant message is followed by one answer for each of its calls, in their order.

    Returns id and text of the answers.
    """
    MESSAGES.validate_python([official(message) for message in messages])
    pairs, pending, seen = [], list[str](), set[str]()
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == pending.pop(0)
            pairs.append((message["tool_call_id"], message["content"]))
            continue
        assert not pending
        pending = [call["id"] for call in CALLS.validate_python(message.get("tool_calls", []))]
        assert not seen.intersection(pending)
        assert len(set(pending)) == len(pending)
        seen.update(pending)
    assert not pending
    return pairs


def turn_of(*calls: Json, **message: Any) -> Turn:
    return CHAT.parse(answer({"content": None, "tool_calls": list(calls), **message}, "tool_calls"), NAMES)


def answered(turn: Turn, *results: Result) -> Answers:
    return Answers(tuple(Answered(call, result) for call, result in zip(turn.calls, results, strict=True)))


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


@pytest.mark.parametrize("export", [None, CHAT.export([])])
def test_a_request_without_tools_has_no_key_for_them(export: Export | None) -> None:
    assert CHAT.request([Message("user", "Hi")], export).keys() == {"messages"}


def test_a_request_with_tools_none_holds_no_tools() -> None:
    assert CHAT.request([Message("user", "Hi")], EXPORT, "none").keys() == {"messages"}


def test_an_export_of_another_dialect_is_refused_with_the_fix() -> None:
    other = Export("anthropic", ({"name": "x"},), NameTable.empty(), {})
    with pytest.raises(ValueError, match="exported for 'anthropic', the request is for 'openai': export them"):
        CHAT.request([], other)


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


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"error": "model not found"}, "model not found"),
        ({"error": {"code": "overloaded"}}, "overloaded"),
        ({"choices": []}, "without choices"),
        ({}, "without choices"),
    ],
)
def test_an_error_instead_of_an_answer_is_raised_with_its_text(failed: Json, why: str) -> None:
    with pytest.raises(EndpointError, match=why) as caught:
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


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "CUDA out of memory", "type": "server_error"}},
        {"error": "CUDA out of memory"},
        {"choices": [{"index": 0, "delta": {}, "error": {"message": "CUDA out of memory"}}]},
    ],
)
def test_an_error_inside_a_stream_is_raised(event: Json) -> None:
    stream = CHAT.stream(NAMES)
    stream.feed(chunk(content="Hi"))
    with pytest.raises(EndpointError, match="CUDA out of memory"):
        stream.feed(event)
    assert stream.finish().text == "Hi"


def test_a_refusal_is_shown_as_text_and_goes_back_as_a_refusal() -> None:
    turn, deltas = streamed(chunk(refusal="I will "), chunk(refusal="not."))
    assert "".join(delta.text for delta in deltas) == turn.text == "I will not."
    message = CHAT.history([turn], NAMES)[0]
    assert ASSISTANT.validate_python(message) == {"role": "assistant", "content": None, "refusal": "I will not."}


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


def test_an_echoed_turn_is_a_copy() -> None:
    turn = turn_of(entry(None, "a", "now", "{}"))
    before = json.dumps(turn.raw)
    CHAT.history([turn], NAMES)[0]["tool_calls"][0]["function"]["name"] = "changed"
    assert json.dumps(turn.raw) == before


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


def test_a_turn_whose_calls_were_not_answered_gets_errors_as_answers() -> None:
    turn = turn_of(entry(None, "a", "now"), entry(None, "b", "draw"))
    history = CHAT.history([turn, Message("user", "Never mind.")], NAMES)
    assert [text.split(",")[0] for _, text in paired(history)] == [
        "Error: the result of this call was not recorded"
    ] * 2
    assert history[-1] == {"role": "user", "content": "Never mind."}


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


def test_a_history_that_grows_keeps_its_beginning() -> None:
    turns = [turn_of(entry(None, "x", "now"), entry(None, "x", "draw")) for _ in range(4)]
    items: list[Turn | Answers] = []
    before: list[Json] = []
    for turn in turns:
        items += [turn, answered(turn, SUNNY, SUNNY)]
        history = CHAT.history(items, NAMES)
        paired(history)
        assert history[: len(before)] == before
        before = history


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
