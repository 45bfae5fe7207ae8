"""Tests what a model reads of a result in each dialect: failures are marked, images are shown or described."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.support.images import GIF, HEIC, JPEG, PNG, WEBP
from tests.support.providers import OfficialType, ollama
from toolbus.dialects import DIALECTS, Answered, Answers, Dialect, Message, ModelCall, Turn, find_dialect
from toolbus.errors import Code
from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.dialects.ollama import Ollama
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.parts.models.dialects.openai_responses import OpenAIResponses
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.protocol.tool import MIB, CallError, Result
from toolbus.v1 import tool_pb2 as pb

NAMES = NameTable.build(["draw", "now"], PLAIN_NAMES)
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
DRAWN = pb.ContentBlock(image=pb.ImageContent(data=PNG, mime_type="image/png"))
VECTOR = pb.ContentBlock(image=pb.ImageContent(data=b"<svg/>", mime_type="image/svg+xml"))
DRAW, NOW = ModelCall("c1", "draw", "{}", wire_name="draw"), ModelCall("c2", "now", "{}", wire_name="now")
FAILED = Result(is_error=True, error=CallError(Code.TOOL, "city not found"))
OLLAMA = Ollama(images=True)
SHOWING = (OpenAIChat, OpenAIResponses, Anthropic, Gemini)


def _messages(name: str, *results: Result) -> list[dict[str, Any]]:
    dialect = find_dialect(name)
    answered = [Answered(call, result) for call, result in zip((DRAW, NOW), results, strict=False)]
    return dialect.results(answered, NAMES) if isinstance(dialect, Dialect) else dialect.answers(answered, NAMES)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "result",
    [
        FAILED,
        Result(is_error=True, output_json='"city not found"'),
        Result(error=CallError(Code.UNAVAILABLE, "the city not found plugin is offline")),
        Result(is_error=True, output_json='{"error":"city not found"}', error=CallError(Code.TOOL, "city not found")),
    ],
)
def test_a_failure_is_marked_in_every_dialect(name: str, result: Result) -> None:
    written, success = json.dumps(_messages(name, result)), json.dumps(_messages(name, Result(output_json='"sun"')))
    assert "city not found" in written
    assert "error" in written.lower()
    assert "error" not in success.lower().replace('"iserror": false', "")


@pytest.mark.parametrize("dialect", [*(kind() for kind in SHOWING), OLLAMA], ids=lambda dialect: dialect.name)
def test_images_reach_a_model_that_looks_at_them_in_results_and_in_a_history(dialect: Dialect) -> None:
    shown = Result(output_json='"done"', content=(DRAWN, VECTOR))
    turn = Turn(calls=(DRAW, NOW))
    answered = (Answered(DRAW, shown), Answered(NOW, Result(output_json='"noon"')))
    for messages in (
        dialect.results(answered, NAMES),
        dialect.history([Message("user", "Draw"), turn, Answers(answered), Message("user", "And now?")], NAMES),
    ):
        text = json.dumps(messages)
        assert text.count(DATA) == 1
        assert "[image/svg+xml, 6 bytes]" in text  # a type that none of them takes
        assert text.index("done") < text.index(DATA)


def test_images_of_chat_completions_follow_all_answers_as_the_users_message() -> None:
    messages = _messages("openai", Result(content=(DRAWN,)), Result(output_json='"noon"'))
    assert messages == [
        {"role": "tool", "tool_call_id": "c1", "name": "draw", "content": f"[image/png, {len(PNG)} bytes]"},
        {"role": "tool", "tool_call_id": "c2", "name": "now", "content": "noon"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "[images in the result of draw]"},
                {"type": "image_url", "image_url": {"url": URL}},
            ],
        },
    ]


def test_images_of_responses_stand_in_the_output_of_the_call() -> None:
    (item,) = _messages("openai-responses", Result(output_json='"done"', content=(DRAWN,)))
    assert item["output"] == [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": URL}]
    (alone,) = _messages("openai-responses", Result(content=(DRAWN,)))
    assert alone["output"] == [{"type": "input_image", "image_url": URL}]


def test_images_of_gemini_stand_behind_all_responses() -> None:
    (content,) = _messages("gemini", Result(output_json='"done"', content=(DRAWN,)), Result(output_json='"noon"'))
    assert [next(iter(part)) for part in content["parts"]] == [
        *("function_response", "function_response", "text", "inline_data")
    ]
    assert content["parts"][3] == {"inline_data": {"mime_type": "image/png", "data": DATA}}


def test_images_of_ollama_follow_as_the_users_message_and_the_official_client_sends_them() -> None:
    answered = [Answered(DRAW, Result(content=(DRAWN,))), Answered(NOW, Result(output_json='"noon"'))]
    messages = OLLAMA.results(answered, NAMES)
    assert messages[2:] == [{"role": "user", "content": "[images in the result of draw]", "images": [DATA]}]
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"model": "m", "message": {"role": "assistant", "content": "Nice."}})

    ollama.Client(transport=httpx.MockTransport(answer)).chat(model="m", messages=messages)
    assert bodies[0]["messages"] == messages


def test_images_of_a_session_follow_all_answers_before_the_model_goes_on() -> None:
    answered = [Answered(DRAW, Result(content=(DRAWN,))), Answered(NOW, Result(output_json='"noon"'))]
    events = OpenAIRealtime().answers(answered, NAMES)
    kinds = [event.get("item", event)["type"] for event in events]
    assert kinds == ["function_call_output", "function_call_output", "message", "response.create"]
    assert events[2]["item"]["role"] == "user"
    assert events[2]["item"]["content"] == [
        {"type": "input_text", "text": "[images in the result of draw]"},
        {"type": "input_image", "image_url": URL},
    ]
    OfficialType("openai.types.realtime", "RealtimeClientEvent").validate_python(events[2])
    assert DATA not in json.dumps(OpenAIRealtime(images=False).answers(answered, NAMES))


@pytest.mark.parametrize("name", ["grok", "glm-realtime", "qwen-realtime", "stepfun-realtime", "gemini-live", "ollama"])
def test_other_models_read_a_description_of_the_images(name: str) -> None:
    text = json.dumps(_messages(name, Result(content=(DRAWN,))))
    assert DATA not in text
    assert f"[image/png, {len(PNG)} bytes]" in text


@pytest.mark.parametrize(
    "dialect", [*(kind(images=False) for kind in SHOWING), Ollama()], ids=lambda dialect: dialect.name
)
def test_a_model_that_refuses_images_reads_their_description(dialect: Dialect) -> None:
    text = json.dumps(dialect.results([Answered(DRAW, Result(output_json='"done"', content=(DRAWN,)))], NAMES))
    assert DATA not in text
    assert f"[image/png, {len(PNG)} bytes]" in text


@pytest.mark.parametrize("size", [0, 15 * MIB + 1], ids=["empty", "too large"])
def test_an_image_that_a_provider_would_refuse_is_described(size: int) -> None:
    block = pb.ContentBlock(image=pb.ImageContent(data=b"0" * size, mime_type="image/png"))
    for name in ("openai", "openai-responses", "gemini", "anthropic"):
        text = json.dumps(_messages(name, Result(output_json='"done"', content=(block,))))
        assert f"[image/png, {size} bytes]" in text
        assert len(text) < 1000


BROKEN = [b"<svg/>", b"<!DOCTYPE html>", PNG[:-1], PNG[:40], JPEG[:-2], GIF[:-1], WEBP[:-1], HEIC[:-1], b"%PDF-1.7"]


def _shown(name: str, data: bytes, declared: str) -> str:
    block = pb.ContentBlock(image=pb.ImageContent(data=data, mime_type=declared))
    return json.dumps(_messages(name, Result(output_json='"done"', content=(block,))))


@pytest.mark.parametrize("name", ["openai", "openai-responses", "gemini", "anthropic"])
@pytest.mark.parametrize("declared", ["image/png", "image/webp", "image/jpg", "IMAGE/PNG; q=1", ""])
@pytest.mark.parametrize(("data", "true_type"), [(PNG, "image/png"), (JPEG, "image/jpeg"), (WEBP, "image/webp")])
def test_an_image_goes_out_with_the_type_that_its_bytes_have(
    name: str, declared: str, data: bytes, true_type: str
) -> None:
    shown = _shown(name, data, declared)
    assert base64.b64encode(data).decode() in shown
    assert true_type in shown


@pytest.mark.parametrize("name", ["openai", "openai-responses", "gemini", "anthropic"])
@pytest.mark.parametrize("data", BROKEN)
def test_bytes_that_are_not_a_whole_image_are_described_whatever_their_type(name: str, data: bytes) -> None:
    shown = _shown(name, data, "image/png")
    assert base64.b64encode(data).decode() not in shown
    assert f"[image/png, {len(data)} bytes]" in shown


def test_each_provider_gets_the_types_that_it_takes() -> None:
    for name, data, is_sent in (("anthropic", HEIC, False), ("gemini", HEIC, True), ("gemini", GIF, False)):
        assert (base64.b64encode(data).decode() in _shown(name, data, "image/png")) is is_sent
    trailing = PNG + b"\0\0"  # as some programs write them
    assert base64.b64encode(trailing).decode() in _shown("anthropic", trailing, "image/png")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_text_that_repeats_the_output_is_written_once(name: str) -> None:
    texts = tuple(pb.ContentBlock(text=pb.TextContent(text=text)) for text in ("alpha", "beta"))
    for result in (
        Result(output_json='"alpha\\nbeta"', content=texts),
        Result(output_json='{"result":["alpha","beta"]}', content=(*texts, DRAWN)),
        Result(is_error=True, error=CallError(Code.TOOL, "alpha\nbeta"), content=texts),
    ):
        messages = _messages(name, result)
        for message in messages if name == "mcp" else ():
            message.pop("structuredContent", None)  # the same for programs
        assert json.dumps(messages).count("alpha") == 1
