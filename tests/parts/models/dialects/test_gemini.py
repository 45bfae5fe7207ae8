"""Tests the Gemini dialect against the types of the official SDK and the rules of the API."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

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
from tests.parts.models.dialects.sample_tools import CHINESE, EMPTY, PLAIN, QUALIFIED, SAMPLES, TREE
from tests.support.providers import genai, genai_types
from toolbus.errors import Code
from toolbus.parts.models.dialects.conversation import Answered, Delta, HistoryItem, Json, Message, Turn
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES
from toolbus.protocol.tool import CallError, Result


def checked(request: Json) -> Json:
    """Returns a request that the official client sends."""
    genai_types.GenerateContentConfig.model_validate(request["config"])
    check_contents(request["contents"])
    sent(request)
    return request


def sent(request: Json) -> Json:
    """Returns what the official client makes of a request on the wire."""
    bodies: list[Json] = []

    def answer(http_request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(http_request.content))
        return httpx.Response(200, json=whole({"text": "hi"}))

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        client = genai.Client(api_key="none", http_options=genai_types.HttpOptions(httpx_client=http))
        client.models.generate_content(model="gemini", **request)
    assert len(bodies) == 1
    return bodies[0]


def streamed(*chunks: Json) -> Turn:
    stream = DIALECT.stream(NAMES)
    for chunk in chunks:
        stream.feed(genai_types.GenerateContentResponse.model_validate(chunk))
    return stream.finish()


# -- tools -----------------------------------------------------------------------------------------------------------


def test_a_tool_is_offered_as_a_flat_declaration() -> None:
    exported = DIALECT.export([PLAIN])
    assert [tool.keys() for tool in exported.tools] == [{"name", "description", "parameters_json_schema"}]
    assert exported.tools[0]["parameters_json_schema"]["required"] == ["city"]


def test_json_schema_reaches_the_wire_whole_with_references_and_maps() -> None:
    exported = DIALECT.export([TREE, PLAIN])
    declarations = sent(DIALECT.request([HELLO], exported))["tools"][0]["functionDeclarations"]
    assert declarations == list(exported.tools)
    assert declarations[0]["parameters_json_schema"]["$defs"].keys() == {"Node"}
    assert declarations[1]["parameters_json_schema"]["additionalProperties"] is False
    assert exported.losses == ()


def test_an_old_server_gets_the_form_of_openapi() -> None:
    exported = Gemini(json_schema=False).export(SAMPLES)
    assert all("parameters_json_schema" not in declared for declared in exported.tools)
    assert exported.tools[0]["parameters"]["required"] == ["city"]
    assert {loss.keyword for loss in exported.losses if loss.tool == TREE.name} == {"$ref", "$schema"}
    checked(Gemini(json_schema=False).request([HELLO], exported))


@pytest.mark.parametrize(
    ("output", "written"),
    [
        ({"type": "object", "properties": {"degrees": {"type": "number", "maximum": 60}}},
         {"type": "object", "properties": {"degrees": {"type": "number", "maximum": 60}}}),
        ({"type": "array", "items": {"type": "string"}},
         {"type": "object", "properties": {"result": {"type": "array", "items": {"type": "string"}}},
          "required": ["result"]}),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}}, None),
    ],
)  # fmt: skip
def test_output_schemas_are_sent_where_a_program_wants_them(output: Json, written: Json | None) -> None:
    tool = replace(PLAIN, output_schema_json=json.dumps(output))
    assert "response_json_schema" not in DIALECT.export([tool]).tools[0]
    dialect = Gemini(output_schemas=True)
    for exported in (dialect.export([tool]), dialect.export([tool])):
        (declared,) = sent(dialect.request([HELLO], exported))["tools"][0]["functionDeclarations"]
        assert declared.get("response_json_schema") == written


def test_a_tool_without_parameters_has_none_on_the_wire() -> None:
    assert DIALECT.export([EMPTY]).tools[0].keys() == {"name", "description"}
    assert DIALECT.export([replace(EMPTY, description="")]).tools[0].keys() == {"name"}


def test_every_sample_is_offered_in_the_official_form() -> None:
    exported = DIALECT.export(SAMPLES)
    assert len(exported.tools) + len(exported.left_out) == len(SAMPLES)
    for tool in exported.tools:
        genai_types.FunctionDeclaration.model_validate(tool)
        assert GEMINI_NAMES.accepts(tool["name"])
    checked(DIALECT.request([HELLO], exported))


def test_names_with_dots_and_colons_stay_unchanged() -> None:
    exported = DIALECT.export([replace(QUALIFIED, name="notes:add.note")])
    assert exported.tools[0]["name"] == "notes:add.note"


# -- answers ---------------------------------------------------------------------------------------------------------


def test_text_thoughts_and_calls_of_one_answer_are_distinguished() -> None:
    wire = NAMES.wire(CHINESE.name)
    turn = parsed(
        whole(
            {"text": "rain?", "thought": True},
            {"text": "Let me look.", "thoughtSignature": SIGNATURE},
            {**call_part(wire, {"城市": None, "n": 12345678901234567890}, id="fc_1"), "thoughtSignature": SIGNATURE},
        )
    )
    assert (turn.text, turn.reasoning, turn.stop, turn.dialect) == ("Let me look.", "rain?", "STOP", "gemini")
    (model_call,) = turn.calls
    assert (model_call.id, model_call.name, model_call.known, model_call.wire_name) == (
        "fc_1",
        CHINESE.name,
        True,
        wire,
    )
    assert model_call.arguments_json == '{"城市":null,"n":12345678901234567890}'
    assert model_call.extra == {"id": "fc_1", "thought_signature": SIGNATURE}


def test_keys_of_rest_and_of_the_sdk_are_read_alike() -> None:
    rest = DIALECT.parse(whole({**call_part(id="fc_1"), "thoughtSignature": SIGNATURE}), NAMES)
    snake = {"function_call": {"name": "get_weather", "args": {}, "id": "fc_1"}, "thought_signature": SIGNED}
    candidate = {"content": {"parts": [snake]}, "finish_reason": genai_types.FinishReason.STOP}
    assert DIALECT.parse({"candidates": [candidate]}, NAMES) == rest


def test_keys_within_arguments_are_unchanged() -> None:
    turn = parsed(whole(call_part(args={"userId": {"thoughtSignature": 1}})))
    assert turn.calls[0].arguments_json == '{"userId":{"thoughtSignature":1}}'
    assert turn.raw[0]["parts"][0]["function_call"]["args"] == {"userId": {"thoughtSignature": 1}}


def test_calls_without_an_id_get_one_that_no_other_turn_has() -> None:
    turns = [DIALECT.parse(whole(call_part(), call_part("now")), NAMES) for _ in range(2)]
    ids = [model_call.id for turn in turns for model_call in turn.calls]
    assert len(set(ids)) == 4
    assert all(model_call.startswith("call_") for model_call in ids)


def test_a_call_without_arguments_has_an_empty_text_as_arguments() -> None:
    assert parsed(whole({"functionCall": {"name": "now"}})).calls[0].arguments_json == ""


def test_a_malformed_call_is_visible_in_the_stop() -> None:
    turn = parsed({"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL"}]})
    assert (turn.stop, turn.calls, turn.raw) == ("MALFORMED_FUNCTION_CALL", (), ())
    check_contents(DIALECT.history([HELLO, turn, Message("user", "again")], NAMES))


@pytest.mark.parametrize("whole_answer", [True, False], ids=["whole", "streamed"])
def test_a_blocked_prompt_is_a_refusal_with_the_reason(whole_answer: bool) -> None:
    for form in forms({"promptFeedback": {"blockReason": "SAFETY", "blockReasonMessage": "not this"}}):
        turn = DIALECT.parse(form, NAMES) if whole_answer else streamed(form)
        assert (turn.text, turn.ending, turn.stop) == ("", "refused", "SAFETY")
        assert turn.reason == "the prompt was blocked, not this"


def test_feedback_without_a_block_reason_is_not_an_error() -> None:
    assert parsed({**whole({"text": "hi"}), "promptFeedback": {"safetyRatings": []}}).text == "hi"


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_streamed_answer_is_assembled_from_its_chunks() -> None:
    turn = streamed(
        whole({"text": "ra", "thought": True}, stop="FINISH_REASON_UNSPECIFIED"),
        whole({"text": "in?", "thought": True}, stop="FINISH_REASON_UNSPECIFIED"),
        whole({"text": "Let "}, stop="FINISH_REASON_UNSPECIFIED"),
        whole({"text": "me look."}, stop="FINISH_REASON_UNSPECIFIED"),
        whole(
            call_part(args={"city": "Paris"}, id="fc_1"), call_part("now", id="fc_2"), stop="FINISH_REASON_UNSPECIFIED"
        ),
        whole({"text": "", "thoughtSignature": SIGNATURE}),
        {"usageMetadata": {"totalTokenCount": 7}},
    )
    assert (turn.text, turn.reasoning, turn.stop) == ("Let me look.", "rain?", "STOP")
    assert [(model_call.id, model_call.name) for model_call in turn.calls] == [("fc_1", "get_weather"), ("fc_2", "now")]
    assert turn.raw[0]["parts"] == [
        {"text": "rain?", "thought": True},
        {"text": "Let me look."},
        {"function_call": {"name": "get_weather", "args": {"city": "Paris"}, "id": "fc_1"}},
        {"function_call": {"name": "now", "args": {}, "id": "fc_2"}},
        {"text": "", "thought_signature": SIGNATURE},
    ]


def test_a_signed_text_is_never_joined_with_another() -> None:
    turn = streamed(whole({"text": "a"}), whole({"text": "b", "thoughtSignature": SIGNATURE}), whole({"text": "c"}))
    assert [part["text"] for part in turn.raw[0]["parts"]] == ["a", "b", "c"]


def test_pieces_are_shown_as_they_come_and_a_chunk_of_usage_is_ignored() -> None:
    stream = DIALECT.stream(NAMES)
    assert stream.feed({"usageMetadata": {"totalTokenCount": 7}}) == []
    assert stream.feed({"candidates": [{"content": {"role": "model"}}]}) == []
    shown = stream.feed(whole({"text": "hm", "thought": True}, {"text": "A"}, call_part()))
    assert shown == [Delta("reasoning", "hm"), Delta("text", "A")]
    assert stream.finish() == stream.finish()


def test_chunks_of_the_official_clients_stream_give_a_turn() -> None:
    chunks = [whole({"text": "Let me look."}), whole({**call_part(id="fc_1"), "thoughtSignature": SIGNATURE})]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=body))) as http:
        client = genai.Client(api_key="none", http_options=genai_types.HttpOptions(httpx_client=http))
        stream = DIALECT.stream(NAMES)
        for chunk in client.models.generate_content_stream(model="gemini", **DIALECT.request([HELLO], None)):
            stream.feed(chunk)
    assert stream.finish() == streamed(*chunks)


# -- results ---------------------------------------------------------------------------------------------------------


def test_responses_are_one_content_in_the_order_of_the_calls() -> None:
    first, second = call(id="fc_1", call_id="fc_1"), call("now")
    refused = Result(is_error=True, error=CallError(Code.NOT_FOUND, "no such tool"))
    contents = DIALECT.results([Answered(first, Result(output_json='"晴"')), Answered(second, refused)], NAMES)
    assert contents == [
        {
            "role": "user",
            "parts": [
                {"function_response": {"id": "fc_1", "name": "get_weather", "response": {"result": "晴"}}},
                {"function_response": {"name": "now", "response": {"error": "no such tool"}}},
            ],
        }
    ]
    assert DIALECT.results([], NAMES) == []


@pytest.mark.parametrize(
    ("output", "response"),
    [({"a": 1}, {"a": 1}), ([1], {"result": [1]}), (None, {"result": None}), (5, {"result": 5}), ("", {"result": ""})],
)
def test_a_result_that_is_not_an_object_is_wrapped(output: Any, response: Json) -> None:
    contents = DIALECT.results([Answered(call(), Result(output_json=json.dumps(output)))], NAMES)
    assert contents[0]["parts"][0]["function_response"]["response"] == response


# -- requests --------------------------------------------------------------------------------------------------------


def test_a_request_holds_the_system_instruction_and_tools() -> None:
    items: list[HistoryItem] = [Message("system", "Be brief."), HELLO, Message("system", "And kind.")]
    request = checked(DIALECT.request(items, DIALECT.export([PLAIN, EMPTY])))
    assert request.keys() == {"contents", "config"}
    assert request["config"]["system_instruction"] == "Be brief.\n\nAnd kind."
    body = sent(request)
    (tool,) = body["tools"]
    assert [each["name"] for each in tool["functionDeclarations"]] == ["get_weather", "now"]
    assert "toolConfig" not in body


def test_a_signature_reaches_the_wire_as_its_original_bytes() -> None:
    turn = parsed(whole({**call_part(), "thoughtSignature": SIGNATURE}))
    body = sent(DIALECT.request([HELLO, turn], None))
    assert base64.urlsafe_b64decode(body["contents"][1]["parts"][0]["thoughtSignature"]) == SIGNED


def test_the_sdk_does_not_call_tools_by_itself() -> None:
    config = DIALECT.request([HELLO], DIALECT.export([PLAIN]))["config"]
    assert config["automatic_function_calling"] == {"disable": True}


def test_forbidden_tools_stay_declared_only_where_the_history_has_calls() -> None:
    export = DIALECT.export([PLAIN])
    turn = parsed(whole(call_part()))
    request = checked(DIALECT.request([HELLO, turn, answers((turn.calls[0], 1))], export, "none"))
    assert request["config"]["tools"] == [{"function_declarations": list(export.tools)}]
    assert sent(request)["toolConfig"] == {"functionCallingConfig": {"mode": "NONE"}}
    assert checked(DIALECT.request([HELLO], export, "none"))["config"] == {}
