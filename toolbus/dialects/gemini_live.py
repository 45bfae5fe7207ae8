"""Gemini Live: tools fixed when the session opens, calls in batches, their answers in one message.

Messages are those of the wire, with the keys of the Python SDK (`function_declarations`), which the server reads as
well as its own (`functionDeclarations`). With the SDK, `session_update(export)["setup"]` belongs into the config of
`live.connect`, and `answers(...)[0]["tool_response"]` are the arguments of `send_tool_response`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from toolbus.dialects.conversation import Answered, Delta, Json, ModelCall, model_call
from toolbus.dialects.dialect import as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.gemini import declaration
from toolbus.dialects.openai_realtime import arguments, mapping, string
from toolbus.dialects.realtime_dialect import CallsCancelled, RealtimeDialect, RealtimeEvent, RealtimeParser
from toolbus.dialects.result_text import object_of
from toolbus.dialects.schemas.schema_rules import GEMINI_SCHEMAS, SchemaRules
from toolbus.dialects.wire_names import GEMINI_NAMES, NameRule, NameTable
from toolbus.tool import Tool


class GeminiLive(RealtimeDialect):
    """Gemini Live."""

    name: ClassVar[str] = "gemini-live"
    name_rule: ClassVar[NameRule] = GEMINI_NAMES
    schema_rules: ClassVar[SchemaRules] = GEMINI_SCHEMAS
    fixed_at_connect: ClassVar[bool] = True

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
    given = {"id": call.id} if call.extra.get("id") else {}  # one that we made is not known there
    return {**given, "name": call.wire_name or names.wire(call.name), "response": object_of(answered.result)}


class _LiveParser(RealtimeParser):
    """Reads the server's messages, in the keys of the wire or those of the SDK."""

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._numbers = itertools.count(1)  # of messages with calls, and of calls without an id

    def feed(self, event: Any) -> list[RealtimeEvent]:
        try:
            told = as_mapping(event)
        except TypeError:
            return []
        spoken = _spoken(_either(told, "server_content", "serverContent"))
        said: list[RealtimeEvent] = [*self.joiner.join(spoken)]
        said += self._calls(_either(told, "tool_call", "toolCall"))
        ids = _list(_either(told, "tool_call_cancellation", "toolCallCancellation"), "ids")
        if cancelled := tuple(each for each in ids if isinstance(each, str)):
            said.append(CallsCancelled(cancelled, answers=False))
        return said

    def _calls(self, tool_call: Mapping[str, Any]) -> list[ModelCall]:
        """Returns the calls of one message, which are answered together."""
        asked = [each for each in _list(tool_call, "function_calls", "functionCalls") if isinstance(each, Mapping)]
        message = f"tool_call_{next(self._numbers)}" if asked else ""
        calls = []
        for each in asked:
            if name := string(each, "name"):
                given = string(each, "id")
                call_id = given or f"call_{next(self._numbers)}"
                extra = {"id": given} if given else {}
                call = model_call(self.names, call_id, name, arguments(each, "args"), **extra)
                calls.append(replace(call, response=message))
        return calls


def _spoken(content: Mapping[str, Any]) -> list[Delta]:
    """Returns what the model said, in words or as the transcript of its speech."""
    said = []
    for part in _list(_either(content, "model_turn", "modelTurn"), "parts"):
        if isinstance(part, Mapping) and (text := string(part, "text")):
            said.append(Delta("reasoning" if part.get("thought") is True else "text", text))
    if text := string(_either(content, "output_transcription", "outputTranscription"), "text"):
        said.append(Delta("text", text))
    return said


def _either(told: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    return next((found for key in keys if (found := mapping(told, key))), {})


def _list(told: Mapping[str, Any], *keys: str) -> Sequence[Any]:
    found = (told.get(key) for key in keys)
    return next((value for value in found if isinstance(value, list | tuple)), ())
