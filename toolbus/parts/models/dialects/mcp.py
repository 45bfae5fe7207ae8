"""Writes and reads the Model Context Protocol: tools as a server lists them, calls and results of `tools/call`.

It is not a chat, so it has neither a stream nor a history: each call comes alone and is answered alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from toolbus.errors import InvalidRequest
from toolbus.parts.mcp.messages.content import write_content
from toolbus.parts.mcp.messages.tools import write_declaration
from toolbus.parts.models.dialects.conversation import Answered, HistoryItem, Json, Turn, model_call
from toolbus.parts.models.dialects.dialect import Dialect, ToolChoice, TurnStream, as_mapping
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.history import arguments_text
from toolbus.parts.models.dialects.provider_results import arguments_object
from toolbus.parts.models.dialects.schemas.schema_rules import ANY_SCHEMAS
from toolbus.parts.models.dialects.wire_names import NameRule, NameTable
from toolbus.protocol.tool import Result, Tool

# The specification of 2025-11-25 on tool names.
MCP_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_.-]"), re.compile(r"[a-zA-Z0-9_.-]"), max_length=128)


class Mcp(Dialect):
    """A server's answers to `tools/list` and `tools/call`."""

    name = "mcp"
    name_rule = MCP_NAMES
    schema_rules = ANY_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return write_declaration(wire_name, tool, schema)

    def parse(self, answer: Any, names: NameTable) -> Turn:
        """Reads one `tools/call`: the whole request, its params, or either as an object of the SDK.

        Raises:
            InvalidRequest: it is another request, or does not name a tool.
        """
        request = as_mapping(answer)
        method = request.get("method", "tools/call")
        if method != "tools/call":
            raise InvalidRequest(f"the request is {method!r}, this dialect reads tools/call only: answer it elsewhere")
        params = request.get("params") or {} if "method" in request or "params" in request else request
        if not isinstance(params, Mapping):
            raise InvalidRequest(f"params is a {type(params).__name__}: give an object with name and arguments")
        wire_name = params.get("name")
        if not isinstance(wire_name, str) or not wire_name:
            raise InvalidRequest(f"tools/call names the tool {wire_name!r}: give params.name a tool that is listed")
        call_id = request.get("id")
        arguments = arguments_text(params.get("arguments"))
        call = model_call(names, "call_0" if call_id is None else str(call_id), wire_name, arguments)
        return Turn(calls=(call,), dialect=self.name, raw=(dict(request),))

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        """Returns a CallToolResult for each call."""
        return [call_tool_result(item.result) for item in answered]

    def stream(self, names: NameTable) -> TurnStream:
        _no_chat()

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        _no_chat()

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        _no_chat()


def call_tool_result(result: Result) -> Json:
    """Returns a result as the answer to `tools/call`: text, content blocks, and an object as structuredContent."""
    text = replace(result, content=()).text
    answer: Json = {
        "content": write_content(result, text),
        "isError": result.is_error or result.error is not None or result.asks,
    }
    structured = arguments_object(result.output_json)
    if structured or "".join(result.output_json.split()) == "{}":
        answer["structuredContent"] = structured
    return answer


def _no_chat() -> NoReturn:
    raise NotImplementedError(
        "MCP is not a chat: it has neither streamed answers nor a history. Read calls with parse(), answer them with "
        "results(), and talk to the model in the dialect of its provider."
    )
