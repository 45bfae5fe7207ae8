"""Checks requests against the Anthropic API: the types of the official SDK, and the rules that those do not express."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import httpx2

from tests.parts.models.dialects.sample_tools import SAMPLES
from tests.support.images import PNG as PNG
from tests.support.providers import OfficialType, anthropic
from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.conversation import Answered, Answers, Json, Message, ModelCall
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

DIALECT = Anthropic()
NAMES = NameTable.build([tool.name for tool in SAMPLES], PLAIN_NAMES)
HELLO = Message("user", "hello")
ID = re.compile(r"[a-zA-Z0-9_-]+")

_BLOCK = OfficialType("anthropic.types", "ContentBlockParam")
MESSAGE = OfficialType("anthropic.types", "MessageParam")
TOOL = OfficialType("anthropic.types", "ToolParam")
_REQUEST = OfficialType("anthropic.types.message_create_params", "MessageCreateParamsNonStreaming")
_RESULT_CONTENT = OfficialType("anthropic.types.tool_result_block_param", "Content")


def blocks_of(message: Mapping[str, Any]) -> list[Json]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def check_messages(messages: Iterable[Json]) -> None:
    """Holds messages against the official types, and the rules that those do not know."""
    open_ids: list[str] = []
    seen: set[str] = set()
    role = "assistant"
    for message in messages:
        MESSAGE.validate_python(message)
        assert {message["role"], role} == {"user", "assistant"}, "roles alternate, the user begins"
        role = message["role"]
        blocks = blocks_of(message)
        assert blocks
        for block in blocks:
            _BLOCK.validate_python(block)
            assert block["type"] != "text" or block["text"].strip()
            if block["type"] == "tool_result" and isinstance(block.get("content"), list):
                for part in block["content"]:
                    _RESULT_CONTENT.validate_python(part)
        kinds = [block["type"] == "tool_result" for block in blocks]
        assert kinds == sorted(kinds, reverse=True), "results stand before text"
        assert [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"] == open_ids
        uses = [block for block in blocks if block["type"] == "tool_use"]
        open_ids = [use["id"] for use in uses]
        for use in uses:
            assert ID.fullmatch(use["id"])
            assert PLAIN_NAMES.accepts(use["name"])
            assert isinstance(use["input"], dict)
        assert not seen & set(open_ids)
        assert len(set(open_ids)) == len(open_ids)
        seen |= set(open_ids)
    assert not open_ids


def checked(request: Json) -> Json:
    """Returns a request that the official client sends as it is."""
    _REQUEST.validate_python({"model": "claude", "max_tokens": 9, **request})
    check_messages(request["messages"])
    for tool in request.get("tools", ()):
        TOOL.validate_python(tool)
    sent: list[Json] = []

    def answer(http_request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(http_request.content))
        return httpx2.Response(200, json=whole([{"type": "text", "text": "hi"}]))

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        client = anthropic.Anthropic(api_key="none", base_url="http://localhost", http_client=http)
        client.messages.create(model="claude", max_tokens=9, **request)
    assert {key: sent[0][key] for key in request} == request
    return request


def whole(content: list[Json], stop: str = "end_turn") -> Json:
    usage = {"input_tokens": 1, "output_tokens": 1}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": content}
    return {**head, "stop_reason": stop, "stop_sequence": None, "usage": usage}


def use(call_id: str, name: str = "get_weather", arguments: Any = None) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if arguments is None else arguments}


def call(call_id: str, name: str = "get_weather", arguments_json: str = "{}") -> ModelCall:
    return ModelCall(call_id, name, arguments_json, wire_name=NAMES.wire(name))


def answers(*pairs: tuple[ModelCall, Any]) -> Answers:
    return Answers(tuple(Answered(model_call, Result(output_json=json.dumps(output))) for model_call, output in pairs))


def image(mime_type: str, data: bytes = PNG) -> pb.ContentBlock:
    return pb.ContentBlock(image=pb.ImageContent(data=data, mime_type=mime_type))
