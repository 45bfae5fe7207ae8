"""Creates the providers' official clients for a test server, and reads calls and results from their requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.parts.models.loop.model_server import Json, ModelServer
from tests.support.providers import anthropic, genai_client, ollama, openai
from toolbus.loop import (
    Endpoint,
    anthropic_endpoint,
    gemini_endpoint,
    ollama_endpoint,
    openai_endpoint,
    responses_endpoint,
)

MODEL = "m"


@asynccontextmanager
async def official(server: ModelServer) -> AsyncIterator[Endpoint]:
    """Yields the server's model behind its provider's own client, which tries everything once only.

    The server has no TLS; a client that verifies reads the certificates of the system, which takes 25 ms.
    """
    match server.recording.dialect:
        case "openai" | "openai-responses" as dialect:
            make = openai_endpoint if dialect == "openai" else responses_endpoint
            async with openai.AsyncOpenAI(
                api_key="k",
                base_url=f"{server.url}/v1",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=False),
            ) as client:
                yield make(client, MODEL)
        case "anthropic":
            async with anthropic.AsyncAnthropic(
                api_key="k",
                base_url=server.url,
                max_retries=0,
                http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
            ) as claude:
                yield anthropic_endpoint(claude, MODEL)
        case "gemini":
            google = genai_client(server.url)
            async with google.aio as aio:
                yield gemini_endpoint(aio, MODEL)
            google.close()
        case _:
            async with ollama.AsyncClient(host=server.url, verify=False) as client_of_ollama:
                yield ollama_endpoint(client_of_ollama, MODEL)


Called = tuple[str, str, Any]  # id, name and arguments of a call
Answered = tuple[str, Any]  # id, or the name where there is none, and the result


def calls_and_results(dialect: str, request: Json) -> tuple[list[Called], list[Answered]]:
    """Returns the calls and results that a request holds, each in the place where its provider looks for it."""
    return _READERS[dialect](request)


def _chat(request: Json) -> tuple[list[Called], list[Answered]]:
    *_, start = (index for index, each in enumerate(request["messages"]) if each.get("tool_calls"))
    message, *answers = request["messages"][start:]
    calls = [
        (each["id"], each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message["tool_calls"]
    ]
    assert {each["role"] for each in answers} == {"tool"}
    return calls, [(each["tool_call_id"], each["content"]) for each in answers]


def _responses(request: Json) -> tuple[list[Called], list[Answered]]:
    calls = [each for each in request["input"] if each.get("type") == "function_call"]
    results = request["input"][-len(calls) :]
    assert {each["type"] for each in results} == {"function_call_output"}
    return (
        [(each["call_id"], each["name"], json.loads(each["arguments"])) for each in calls],
        [(each["call_id"], each["output"]) for each in results],
    )


def _anthropic(request: Json) -> tuple[list[Called], list[Answered]]:
    model_message, answered = request["messages"][-2:]
    assert (model_message["role"], answered["role"]) == ("assistant", "user")
    assert {each["type"] for each in answered["content"]} == {"tool_result"}
    uses = [each for each in model_message["content"] if each["type"] == "tool_use"]
    return (
        [(each["id"], each["name"], each["input"]) for each in uses],
        [(each["tool_use_id"], _text(each["content"])) for each in answered["content"]],
    )


def _text(content: Any) -> Any:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _gemini(request: Json) -> tuple[list[Called], list[Answered]]:
    model_message, answered = request["contents"][-2:]
    assert (model_message["role"], answered["role"]) == ("model", "user")
    calls = [part["functionCall"] for part in model_message["parts"] if "functionCall" in part]
    results = [part["functionResponse"] for part in answered["parts"]]
    return (
        [(each.get("id", ""), each["name"], each["args"]) for each in calls],
        [(each["name"], each["response"]) for each in results],
    )


def _ollama(request: Json) -> tuple[list[Called], list[Answered]]:
    *_, start = (index for index, each in enumerate(request["messages"]) if each.get("tool_calls"))
    message, *answers = request["messages"][start:]
    functions = [each["function"] for each in message["tool_calls"]]
    assert {each["role"] for each in answers} == {"tool"}
    return (
        [("", each["name"], each["arguments"]) for each in functions],
        [(each["tool_name"], each["content"]) for each in answers],
    )


_READERS = {
    "openai": _chat,
    "openai-responses": _responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "ollama": _ollama,
}
