"""Provides a tool source of plain functions, and a model whose answers a test writes in advance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.loop.endpoint import Endpoint
from toolbus.protocol.tool import CallError, Progress, Result, Tool

Json = dict[str, Any]


class FunctionSource:
    """A source of tools: functions of the test, each given the arguments."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.revision = 1
        self.settling = False  # as a host of a bus that has just restarted
        self.listed = 0  # how often
        self.calls: list[tuple[str, str]] = []  # name and arguments, in the order they began
        self.sent: list[dict[str, Any]] = []  # what else came with each
        self.ended: list[str] = []
        self._tools: dict[str, tuple[Tool, Callable[..., Any]]] = {}
        for name, function in functions.items():
            self.offer(function, name=name)

    def offer(self, function: Callable[..., Any], **fields: Any) -> None:
        tool = Tool(**{"name": function.__name__, "description": "A tool.", **fields})
        self._tools[tool.name] = (tool, function)
        self.revision += 1

    def remove(self, name: str) -> None:
        del self._tools[name]
        self.revision += 1

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        self.listed += 1
        return self.revision, [tool for tool, _ in self._tools.values()]

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        self.calls.append((name, arguments_json))
        self.sent.append({"context": context, "schema_hash": schema_hash, "timeout": timeout})
        tool, function = self._tools[name]
        if schema_hash != tool.schema_hash:
            return failed(Code.CATALOG_STALE, f"tool {name!r} has changed since it was listed")
        try:
            output = function(**json.loads(arguments_json))
            if asyncio.iscoroutine(output):
                output = await output
        finally:
            self.ended.append(name)
        if on_progress is not None:
            on_progress(Progress(1.0, message=name))
        return output if isinstance(output, Result) else Result(output_json=json.dumps(output, ensure_ascii=False))

    async def changes(self) -> AsyncIterator[int]:
        yield self.revision


def failed(code: Code, message: str) -> Result:
    return Result(is_error=True, error=CallError(code, message, Stage.NOT_DISPATCHED))


def call(name: str, arguments: Mapping[str, Any] | str = "{}", call_id: str = "") -> Json:
    """Returns a call as chat completions write it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id or f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}}


def says(text: str = "", *calls: Json) -> Json:
    """Returns a whole answer of chat completions."""
    message: Json = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {**each, "id": each["id"] + ("" if n == 0 else f"_{n}")} for n, each in enumerate(calls)
        ]
    return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}]}


def chunks(answer: Json) -> list[Json]:
    """Returns an answer as the events of a stream, its text letter by letter."""
    message = answer["choices"][0]["message"]
    deltas: list[Json] = [{"role": "assistant", "content": letter} for letter in message["content"] or ""]
    for index, each in enumerate(message.get("tool_calls", ())):
        name, arguments = each["function"]["name"], each["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": index, **each, "function": {"name": name, "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": letter}}]} for letter in arguments]
    written = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return [*written, {"choices": [{"index": 0, "delta": {}, "finish_reason": answer["choices"][0]["finish_reason"]}]}]


class ScriptedModel:
    """Gives one answer after the other: one of `says`, an exception, or a function that makes one of the request."""

    def __init__(self, *answers: Any, streams: bool = False) -> None:
        self.requests: list[Json] = []
        self.closed = 0  # streams that ended, or were closed
        self._answers = list(answers)
        self._streams = streams
        self.endpoint = Endpoint(OpenAIChat(), self._ask, "played")

    async def _ask(self, request: Json) -> Any:
        self.requests.append(json.loads(json.dumps(request)))
        answer = self._answers.pop(0) if self._answers else AssertionError("the model was asked once too often")
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        return self._stream(answer) if self._streams else answer

    async def _stream(self, answer: Json) -> AsyncIterator[Json]:
        try:
            for chunk in chunks(answer):
                await asyncio.sleep(0)
                yield chunk
        finally:
            self.closed += 1

    def offered(self, request: int) -> list[str]:
        """Returns the names of the tools that a request offered."""
        return [tool["function"]["name"] for tool in self.requests[request].get("tools", ())]

    def results(self, request: int) -> list[str]:
        """Returns what a request told of the results of calls."""
        return [message["content"] for message in self.requests[request]["messages"] if message["role"] == "tool"]


class ApiError(Exception):
    """An error as clients raise it for an HTTP status."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code
