"""Writes and reads Gemini Live: tools fixed when the session opens, calls in batches, their answers in one message.

Messages have the keys of the Python SDK (`function_declarations`), which the server accepts in addition to its own
(`functionDeclarations`). With the SDK, `session_update(export)["setup"]` belongs into the config of `live.connect`,
and `answers(...)[0]["tool_response"]` are the arguments of `send_tool_response`.

Schemas have OpenAPI's keywords: the server ignores `parameters_json_schema`, and the model then calls tools without
arguments (googleapis/python-genai issue 1147). Images in results are only described: the model does not read
images beside a tool response before it continues (pydantic-ai issue 7362).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from toolbus.parts.models.dialects.conversation import Answered, Delta, Json, ModelCall, model_call
from toolbus.parts.models.dialects.dialect import (
    CallsCancelled,
    RealtimeDialect,
    RealtimeEvent,
    RealtimeParser,
    ResponseEnded,
    as_mapping,
    mapping,
    objects,
    string,
)
from toolbus.parts.models.dialects.endings import LIVE_ENDINGS, NAMELESS
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.gemini import MAX_DECLARATIONS, declaration, response_object, snake_case
from toolbus.parts.models.dialects.openai_event_parser import arguments
from toolbus.parts.models.dialects.schemas.schema_rules import GEMINI_SCHEMAS, SchemaRules
from toolbus.parts.models.dialects.token_usage import gemini_usage
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, NameRule, NameTable
from toolbus.protocol.tool import Tool


class GeminiLive(RealtimeDialect):
    """Gemini Live."""

    name: ClassVar[str] = "gemini-live"
    name_rule: ClassVar[NameRule] = GEMINI_NAMES
    schema_rules: SchemaRules = GEMINI_SCHEMAS
    fixed_at_connect: ClassVar[bool] = True
    max_tools: ClassVar[int | None] = MAX_DECLARATIONS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return declaration(wire_name, tool, schema)

    def session_update(self, export: Export) -> Json:
        tools = [{"function_declarations": list(export.tools)}] if export.tools else []
        return {"setup": {"tools": tools}}

    def parser(self, names: NameTable) -> RealtimeParser:
        return _LiveParser(names)

    def answers(self, answered: Sequence[Answered], names: NameTable, *, go_on: bool = True) -> list[Json]:
        if not answered:
            return []
        return [{"tool_response": {"function_responses": [_response(each, names) for each in answered]}}]


def _response(answered: Answered, names: NameTable) -> Json:
    call = answered.call
    call_id = {"id": call.id} if call.extra.get("id") else {}  # the server does not know an id that was generated here
    return {**call_id, "name": call.wire_name or names.wire(call.name), "response": response_object(answered.result)}


class _LiveParser(RealtimeParser):
    """Reads the server's messages, with the keys of the wire or those of the SDK."""

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._numbers = itertools.count(1)  # of messages with calls, and of calls without an id
        self._interrupted = False  # whether the user interrupted the current turn
        self._nameless = False  # whether a call of it had no name
        self._usage: Mapping[str, Any] = {}  # the newest counts

    def feed(self, event: Any) -> list[RealtimeEvent]:
        try:
            message = snake_case(as_mapping(event))
        except TypeError:
            return []
        content = snake_case(mapping(message, "server_content"))
        events: list[RealtimeEvent] = [*self.joiner.join(_deltas(content))]
        events += self._calls(snake_case(mapping(message, "tool_call")))
        ids = mapping(message, "tool_call_cancellation").get("ids")
        if cancelled := tuple(each for each in ids if isinstance(each, str)) if isinstance(ids, list | tuple) else ():
            events.append(CallsCancelled(cancelled, answers=False))
        self._usage = snake_case(mapping(message, "usage_metadata")) or self._usage
        self._interrupted = self._interrupted or content.get("interrupted") is True
        if content.get("turn_complete") is True:
            events.append(self._turn_end(content))
        return events

    def _turn_end(self, content: Mapping[str, Any]) -> ResponseEnded:
        """Returns the end of a turn. It has no id, and its calls came as responses of their own."""
        given = content.get("turn_complete_reason")
        word = str(getattr(given, "value", given) or ("interrupted" if self._interrupted else ""))
        ending, reason = LIVE_ENDINGS.get(word.lower(), "refused"), word
        if ending == "complete":
            ending, reason = ("failed", NAMELESS) if self._nameless else ("complete", "")
        usage = gemini_usage(self._usage)
        self._interrupted, self._nameless, self._usage = False, False, {}
        return ResponseEnded("", ending, reason, usage)

    def _calls(self, tool_call: Mapping[str, Any]) -> list[ModelCall]:
        """Returns the calls of one message, which are answered together."""
        function_calls = objects(tool_call.get("function_calls"))
        message_id = f"tool_call_{next(self._numbers)}" if function_calls else ""
        calls = []
        for each in function_calls:
            if name := string(each, "name"):
                server_id = string(each, "id")
                call_id = server_id or f"call_{next(self._numbers)}"
                extra = {"id": server_id} if server_id else {}
                call = model_call(self.names, call_id, name, arguments(each, "args"), **extra)
                calls.append(replace(call, response=message_id))
            else:
                self._nameless = True
        return calls


def _deltas(content: Mapping[str, Any]) -> list[Delta]:
    """Returns the model's text, or the transcript of its speech."""
    deltas = []
    for part in objects(mapping(content, "model_turn").get("parts")):
        if text := string(part, "text"):
            deltas.append(Delta("reasoning" if part.get("thought") is True else "text", text))
    if text := string(mapping(content, "output_transcription"), "text"):
        deltas.append(Delta("text", text))
    return deltas
