"""Tests tools, answers, streams and results of the Anthropic dialect against the official SDK."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.parts.models.dialects.anthropic_rules import (
    DIALECT,
    HELLO,
    MESSAGE,
    NAMES,
    PNG,
    TOOL,
    call,
    image,
    use,
    whole,
)
from tests.parts.models.dialects.sample_tools import CHINESE, PLAIN, SAMPLES
from tests.support.providers import OfficialType, anthropic
from toolbus.errors import Code
from toolbus.parts.models.dialects.conversation import Answered, Delta, Json, Turn
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES
from toolbus.protocol.tool import CallError, Result

_EVENT = OfficialType("anthropic.types", "RawMessageStreamEvent")


def streamed(*events: Json) -> Turn:
    """Returns the turn that events make, and holds that the SDK's objects make the same."""
    turns = []
    for forms in (events, [_EVENT.validate_python(event) for event in events]):
        stream = DIALECT.stream(NAMES)
        for event in forms:
            stream.feed(event)
        turns.append(stream.finish())
    assert turns[0] == turns[1]
    return turns[0]


def start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **more: Any) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


def stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str) -> Json:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 1}}


# -- tools -----------------------------------------------------------------------------------------------------------


def test_a_tool_is_offered_with_its_schema_as_input_schema() -> None:
    exported = DIALECT.export([PLAIN])
    assert [tool.keys() for tool in exported.tools] == [{"name", "description", "input_schema"}]
    assert exported.tools[0]["input_schema"]["properties"].keys() == {"city", "days", "unit"}
    assert exported.tools[0]["input_schema"]["type"] == "object"


def test_every_sample_is_offered_in_the_official_form() -> None:
    exported = DIALECT.export(SAMPLES)
    assert len(exported.tools) + len(exported.left_out) == len(SAMPLES)
    for tool in exported.tools:
        TOOL.validate_python(tool)
        assert PLAIN_NAMES.accepts(tool["name"])
        assert tool["input_schema"]["type"] == "object"
        assert not tool["input_schema"].keys() & {"anyOf", "oneOf", "allOf"}


def test_a_tool_without_a_description_has_none_on_the_wire() -> None:
    assert "description" not in DIALECT.export([replace(PLAIN, description="")]).tools[0]


# -- answers ---------------------------------------------------------------------------------------------------------


def test_text_thinking_and_calls_of_a_whole_answer_are_distinguished() -> None:
    answer = whole(
        [
            {"type": "thinking", "thinking": "rain?", "signature": "c2ln"},
            {"type": "redacted_thinking", "data": "ZGF0YQ=="},
            {"type": "text", "text": "Let me look."},
            use("toolu_1", NAMES.wire(CHINESE.name), {"城市": None, "n": 12345678901234567890}),
        ],
        "tool_use",
    )
    for form in (answer, anthropic.types.Message.model_validate(answer)):
        turn = DIALECT.parse(form, NAMES)
        assert (turn.text, turn.reasoning, turn.stop, turn.dialect) == (
            "Let me look.",
            "rain?",
            "tool_use",
            "anthropic",
        )
        assert [(model_call.id, model_call.name, model_call.known) for model_call in turn.calls] == [
            ("toolu_1", CHINESE.name, True)
        ]
        assert turn.calls[0].arguments_json == '{"城市":null,"n":12345678901234567890}'
        assert turn.raw == ({"role": "assistant", "content": answer["content"]},)


def test_input_that_is_not_an_object_stays_visible_and_is_echoed_as_an_empty_object() -> None:
    turn = DIALECT.parse(whole([use("toolu_1", arguments=["Paris"])]), NAMES)
    assert turn.calls[0].arguments_json == '["Paris"]'
    assert turn.raw[0]["content"][0]["input"] == {}


def test_a_field_that_the_sdk_adds_to_a_text_is_not_echoed() -> None:
    turn = DIALECT.parse(whole([{"type": "text", "text": "{}", "parsed_output": {"a": 1}}]), NAMES)
    assert turn.raw[0]["content"] == [{"type": "text", "text": "{}"}]


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_streamed_answer_is_the_same_as_a_whole_one() -> None:
    turn = streamed(
        {"type": "message_start", "message": whole([], "end_turn")},
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="rain"),
        delta(0, "thinking_delta", thinking="?"),
        delta(0, "signature_delta", signature="c2ln"),
        stop(0),
        start(1, {"type": "redacted_thinking", "data": "ZGF0YQ=="}),
        stop(1),
        start(2, {"type": "text", "text": ""}),
        delta(2, "text_delta", text="Let me "),
        delta(2, "text_delta", text="look."),
        stop(2),
        start(3, use("toolu_1")),
        delta(3, "input_json_delta", partial_json=""),
        delta(3, "input_json_delta", partial_json='{"city": "Pa'),
        delta(3, "input_json_delta", partial_json='ris"}'),
        stop(3),
        start(4, use("toolu_2", "now")),
        stop(4),
        ended("tool_use"),
        {"type": "message_stop"},
    )
    content: list[Json] = [
        {"type": "thinking", "thinking": "rain?", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "ZGF0YQ=="},
        {"type": "text", "text": "Let me look."},
        use("toolu_1", arguments={"city": "Paris"}),
        use("toolu_2", "now"),
    ]
    assert turn.raw == ({"role": "assistant", "content": content},)
    assert turn.calls[0].arguments_json == '{"city": "Paris"}', "as the model wrote it"
    expected = DIALECT.parse(whole(content, "tool_use"), NAMES)
    assert replace(turn, calls=expected.calls) == expected
    assert [model_call.id for model_call in turn.calls] == ["toolu_1", "toolu_2"]


def test_pieces_are_shown_as_they_come_and_a_ping_is_ignored() -> None:
    stream = DIALECT.stream(NAMES)
    assert stream.feed({"type": "ping"}) == []
    assert stream.feed({"type": "something_new", "index": 7}) == []
    assert stream.feed(start(0, {"type": "thinking", "thinking": ""})) == []
    assert stream.feed(delta(0, "thinking_delta", thinking="hm")) == [Delta("reasoning", "hm")]
    assert stream.feed(start(1, {"type": "text", "text": "A"})) == [Delta("text", "A")]
    assert stream.feed(delta(1, "text_delta", text="B")) == [Delta("text", "B")]
    assert stream.feed(delta(9, "text_delta", text="of a block that never began")) == []


def test_truncated_arguments_stay_visible_and_are_echoed_as_an_empty_object() -> None:
    turn = streamed(
        start(0, use("toolu_1")),
        delta(0, "input_json_delta", partial_json='{"city": "Par'),
        stop(0),
        ended("max_tokens"),
    )
    assert (turn.calls[0].arguments_json, turn.stop) == ('{"city": "Par', "max_tokens")
    assert turn.raw[0]["content"] == [use("toolu_1")]


def test_a_stream_that_broke_off_yields_text_and_complete_blocks_only() -> None:
    cut_call = streamed(start(0, {"type": "text", "text": "I loo"}), start(1, use("toolu_1")))
    assert (cut_call.text, cut_call.calls, cut_call.stop) == ("I loo", (), "")
    cut_thought = streamed(start(0, {"type": "thinking", "thinking": "", "signature": ""}))
    assert cut_thought.raw == ()


def test_a_call_whose_end_a_server_leaves_out_counts_where_the_stream_has_ended() -> None:
    call = start(0, use("toolu_1")), delta(0, "input_json_delta", partial_json='{"city": "Paris"}')
    whole = streamed(*call, ended("tool_use"), {"type": "message_stop"})
    assert [(each.id, each.arguments_json) for each in whole.calls] == [("toolu_1", '{"city": "Paris"}')]
    assert streamed(*call, ended("tool_use")).calls == ()


def test_citations_are_echoed_with_their_text() -> None:
    citation = {
        "type": "char_location",
        "cited_text": "x",
        "document_index": 0,
        "document_title": "t",
        "start_char_index": 0,
        "end_char_index": 1,
    }
    turn = streamed(
        start(0, {"type": "text", "text": "x", "citations": []}),
        delta(0, "citations_delta", citation=citation),
        stop(0),
    )
    assert turn.raw[0]["content"] == [{"type": "text", "text": "x", "citations": [citation]}]


def test_the_official_clients_stream_gives_the_same_turn_as_its_events() -> None:
    events: list[Json] = [
        {"type": "message_start", "message": {**whole([]), "stop_reason": None}},
        {"type": "ping"},
        start(0, {"type": "text", "text": ""}),
        delta(0, "text_delta", text="Let me look."),
        stop(0),
        start(1, use("toolu_1")),
        delta(1, "input_json_delta", partial_json='{"city":"Paris"}'),
        stop(1),
        {**ended("tool_use"), "delta": {"stop_reason": "tool_use", "stop_sequence": None}},
        {"type": "message_stop"},
    ]
    body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    answered = httpx2.Response(200, text=body, headers={"content-type": "text/event-stream"})
    options: Any = {"model": "claude", "max_tokens": 9, "messages": DIALECT.history([HELLO], NAMES)}
    with httpx2.Client(transport=httpx2.MockTransport(lambda _: answered)) as http:
        client = anthropic.Anthropic(api_key="none", base_url="http://localhost", http_client=http)
        raw, helped = DIALECT.stream(NAMES), DIALECT.stream(NAMES)
        for event in client.messages.create(**options, stream=True):
            raw.feed(event)
        with client.messages.stream(**options) as helping:
            for helped_event in helping:
                helped.feed(helped_event)
    assert raw.finish() == helped.finish() == streamed(*(event for event in events if event["type"] != "ping"))


# -- results ---------------------------------------------------------------------------------------------------------


def test_results_are_one_user_turn_in_the_order_of_the_calls() -> None:
    first, second = call("toolu_1"), call("toolu_2", "now")
    refused = Result(is_error=True, error=CallError(Code.NOT_FOUND, "no such tool"))
    written = DIALECT.results([Answered(first, Result(output_json='"晴"')), Answered(second, refused)], NAMES)
    assert written == [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "晴"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such tool", "is_error": True},
            ],
        }
    ]
    assert DIALECT.results([], NAMES) == []


def result_block(result: Result) -> Json:
    written = DIALECT.results([Answered(call("toolu_1"), result)], NAMES)
    MESSAGE.validate_python(written[0])
    block: Json = written[0]["content"][0]
    return block


def test_images_of_a_result_are_sent_to_the_model() -> None:
    block = result_block(Result(output_json='{"n":1}', content=(image("image/png"),)))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    assert block["content"] == [{"type": "text", "text": '{"n":1}'}, {"type": "image", "source": source}]
    assert [part["type"] for part in result_block(Result(content=(image("image/png"),)))["content"]] == ["image"]


@pytest.mark.parametrize(
    "result",
    [
        Result(content=(image("image/svg+xml", b"<svg/>"),)),
        Result(content=(image("image/png", b""),)),
        Result(content=(image("image/png", b"0" * 4_000_000),)),
        Result(output_json='"no"', is_error=True, content=(image("image/png"),)),
    ],
    ids=["a type that it does not know", "empty", "too large", "of a failure"],
)
def test_an_image_that_the_api_refuses_becomes_text(result: Result) -> None:
    content = result_block(result)["content"]
    assert isinstance(content, str)
    assert "[image/" in content


def test_a_result_without_text_has_no_content() -> None:
    assert result_block(Result(output_json='""')) == {"type": "tool_result", "tool_use_id": "toolu_1"}
