"""Writes and reads the Model Context Protocol: tools as a server lists them, calls and results of `tools/call`.

It is not a chat, so it has neither a stream nor a history: each call comes alone and is answered alone.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from toolbus.dialects.conversation import Answered, HistoryItem, Json, Turn, model_call
from toolbus.dialects.dialect import Dialect, ToolChoice, TurnStream, as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.history import arguments_text
from toolbus.dialects.result_text import arguments_object, text_of
from toolbus.dialects.schemas.schema_rules import ANY_SCHEMAS
from toolbus.dialects.wire_names import NameRule, NameTable
from toolbus.errors import InvalidRequest
from toolbus.tool import Annotations, Result, Tool
from toolbus.v1 import tool_pb2 as pb

# The specification of 2025-11-25 on tool names.
MCP_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_.-]"), re.compile(r"[a-zA-Z0-9_.-]"), max_length=128)
_UNKNOWN_TYPE = "application/octet-stream"
_HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}


class Mcp(Dialect):
    """A server's answers to `tools/list` and `tools/call`."""

    name = "mcp"
    name_rule = MCP_NAMES
    schema_rules = ANY_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        entry: Json = {
            "name": wire_name,
            "description": tool.description,
            "inputSchema": {**schema, "type": "object"},  # clients refuse a schema without it
        }
        if tool.display_name:
            entry["title"] = tool.display_name
        if hints := _hints(tool.annotations):
            entry["annotations"] = hints
        return entry

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
    content = [_block(block) for block in result.content]
    text = text_of(replace(result, content=()))
    if text != "null" or not content:
        content.insert(0, {"type": "text", "text": text})
    answer: Json = {"content": content, "isError": result.is_error or result.error is not None}
    structured = arguments_object(result.output_json)
    if structured or "".join(result.output_json.split()) == "{}":
        answer["structuredContent"] = structured
    return answer


def _hints(annotations: Annotations) -> Json:
    values = {wire: getattr(annotations, name) for name, wire in _HINTS.items()}
    return {wire: value for wire, value in values.items() if value is not None}


def _block(block: pb.ContentBlock) -> Json:
    match block.WhichOneof("kind"):
        case "text":
            return {"type": "text", "text": block.text.text}
        case "image":
            return {"type": "image", **_encoded(block.image)}
        case "audio":
            return {"type": "audio", **_encoded(block.audio)}
        case "resource_link":
            link = block.resource_link
            optional = {"description": link.description, "mimeType": link.mime_type}
            entry = {"type": "resource_link", "uri": link.uri, "name": link.name or link.uri}
            return entry | {key: value for key, value in optional.items() if value}
    return {"type": "text", "text": text_of(Result(content=(block,)))}  # a kind of a newer bus


def _encoded(part: pb.ImageContent | pb.AudioContent) -> Json:
    return {"data": base64.b64encode(part.data).decode("ascii"), "mimeType": part.mime_type or _UNKNOWN_TYPE}


def _no_chat() -> NoReturn:
    raise NotImplementedError(
        "MCP is not a chat: it has neither streamed answers nor a history. Read calls with parse(), answer them with "
        "results(), and talk to the model in the dialect of its provider."
    )
