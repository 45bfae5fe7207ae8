"""Tests the same turn with every provider: a rule's call, two calls of the model, a failure, and the answer."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource
from toolbus.loop import Endpoint, Rule, ToolLoop
from toolbus.parts.models.dialects.conversation import Message
from toolbus.parts.models.dialects.dialect import Dialect

Json = dict[str, Any]
Asks = list[tuple[str, Json]]  # names and arguments of calls


def openai(text: str, asks: Asks) -> Json:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(asks)
    ]
    return {
        "choices": [{"message": {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}}]
    }


def responses(text: str, asks: Asks) -> Json:
    output: list[Json] = [
        {"type": "function_call", "call_id": f"c{n}", "name": name, "arguments": json.dumps(arguments)}
        for n, (name, arguments) in enumerate(asks)
    ]
    if text:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        output.append({"type": "message", "role": "assistant", "content": content})
    return {"status": "completed", "output": output}


def anthropic(text: str, asks: Asks) -> Json:
    blocks: list[Json] = [{"type": "text", "text": text}] if text else []
    blocks += [
        {"type": "tool_use", "id": f"c{n}", "name": name, "input": arguments}
        for n, (name, arguments) in enumerate(asks)
    ]
    return {"role": "assistant", "content": blocks, "stop_reason": "tool_use" if asks else "end_turn"}


def gemini(text: str, asks: Asks) -> Json:
    parts: list[Json] = [{"text": text}] if text else []
    parts += [{"functionCall": {"name": name, "args": arguments}} for name, arguments in asks]
    return {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}


def ollama(text: str, asks: Asks) -> Json:
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in asks]
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return {"message": message, "done": True}


PROVIDERS: list[tuple[str, str, Callable[[str, Asks], Json]]] = [
    ("openai_chat", "OpenAIChat", openai),
    ("openai_responses", "OpenAIResponses", responses),
    ("anthropic", "Anthropic", anthropic),
    ("gemini", "Gemini", gemini),
    ("ollama", "Ollama", ollama),
]


@pytest.mark.parametrize(("file", "kind", "writes"), PROVIDERS, ids=[kind for _, kind, _ in PROVIDERS])
async def test_a_turn_has_the_same_outcome_with_every_provider(
    file: str, kind: str, writes: Callable[[str, Asks], Json]
) -> None:
    dialect: Dialect = getattr(importlib.import_module(f"toolbus.parts.models.dialects.{file}"), kind)()
    answers = [
        writes("", [("files_read", {"path": "a"}), ("nothing_like_it", {})]),
        writes("all read", []),
        writes("bye", []),
    ]
    requests: list[str] = []

    def ask(request: Json) -> Json:
        requests.append(json.dumps(request, ensure_ascii=False))
        return answers[len(requests) - 1]

    source = FunctionSource()
    source.offer(lambda path: f"text of {path}", name="files.read")  # a name that some of them do not accept
    source.offer(lambda: "12:00", name="now")
    # Gemini and Ollama take the name as it is.
    wire = dialect.export((await source.tools())[1]).names.wire("files.read")
    answers[0] = writes("", [(wire, {"path": "a"}), ("nothing_like_it", {})])
    loop = ToolLoop(source, Endpoint(dialect, ask), rules=[Rule("time", "now")])
    reply = await loop.run([{"role": "system", "content": "be brief"}, {"role": "user", "content": "what time?"}])
    assert reply.text == "all read"
    assert [(done.name, done.round, done.outcome) for done in reply.calls] == [
        ("now", 0, "ok"),
        ("files.read", 1, "ok"),
        ("nothing_like_it", 1, "not_found"),
    ]
    assert "12:00" in requests[0]
    assert "text of a" in requests[1]
    assert "there is no tool" in requests[1]
    assert (await loop.run([*reply.items, Message("user", "thanks")])).text == "bye"
