"""Tests whom the loop asks to enforce schemas, and what it makes of the calls that come back."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from toolbus.loop import Endpoint, ToolLoop, openai_endpoint, responses_endpoint
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.protocol.tool import Tool

CLOSED = Tool(
    "note",
    "",
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}',
)


@pytest.mark.parametrize(
    ("base_url", "strict", "chat"),
    [
        ("https://api.openai.com/v1/", None, True),
        ("https://eu.api.openai.com/v1/", None, True),
        ("http://127.0.0.1:8080/v1/", None, None),
        ("https://api.openai.com.example/v1/", None, None),
        ("http://127.0.0.1:8080/v1/", True, True),
        ("https://api.openai.com/v1/", False, None),
    ],
)
def test_only_openai_itself_enforces_schemas_in_chat_completions_unless_a_program_says_so(
    base_url: str, strict: bool | None, chat: bool | None
) -> None:
    client = SimpleNamespace(base_url=base_url)
    (tool,) = openai_endpoint(client, "m", strict=strict).dialect.export([CLOSED]).tools
    assert tool["function"].get("strict") is chat
    (tool,) = responses_endpoint(client, "m", strict=strict).dialect.export([CLOSED]).tools
    assert tool["strict"] is (strict is not False)


async def test_a_null_that_a_strict_model_writes_for_nothing_does_not_reach_the_tool() -> None:
    source = FunctionSource()
    source.offer(
        lambda **arguments: arguments,
        name="search",
        parameters_json=json.dumps(
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "tag": {"type": ["string", "null"]},
                },
                "required": ["query"],
            }
        ),
    )
    written = {"query": "é\ud800", "limit": None, "tag": None}
    model = ScriptedModel(says("", call("search", written)), says("done"))
    reply = await ToolLoop(source, Endpoint(OpenAIChat(strict=True), model.endpoint.ask)).run("?")
    assert model.requests[0]["tools"][0]["function"]["strict"] is True
    assert reply.text == "done"
    ((_, arguments_json),) = source.calls
    assert json.loads(arguments_json) == {"query": "é\ud800", "tag": None}
    # The model reads its own call as it wrote it.
    assert json.loads(model.requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]) == written
