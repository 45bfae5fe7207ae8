"""Writes calls of the bus as params of `tools/call`, and reads the answers of servers as results of the bus."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolbus.bus.calls.call import Call, Trace
from toolbus.common.text import clean_line, dump_json, shorten
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.messages import content
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

MAX_MESSAGE = 4000  # characters of a server's error message
_UNKNOWN_TOOL = re.compile(r"unknown tool|tool .{0,200}not found|no such tool", re.IGNORECASE | re.DOTALL)

# How servers of both eras say that they can only ask in the older one: the official SDKs, FastMCP.
NO_BACK_CHANNEL = re.compile(
    r"no back-?channel|server-initiated requests? (?:is|are) (?:unavailable|not (?:supported|available))|"
    r"(?:elicit|sampling|roots).{0,80}(?:stateless|2026-07-28)",
    re.IGNORECASE,
)


def write_params(call: Call, name: str) -> bytes:
    """Returns the params of a call as one line.

    Args:
        name: the server's name of the tool.
    """
    exchange = call.exchange
    more = ""
    if exchange is not None and exchange.responses_json:
        state = f',"requestState":{dump_json(exchange.state)}' if exchange.state else ""
        more = f',"inputResponses":{exchange.responses_json}{state}'
    params = f'{{"name":{dump_json(name)},"arguments":{call.arguments_json or "{}"}{more}}}'
    if "\n" in params or "\r" in params:  # only between values: inside strings JSON escapes them
        params = params.replace("\n", " ").replace("\r", " ")
    return params.encode()


def write_trace(trace: Trace) -> bytes:
    """Returns the trace of a call as fields of `_meta` (SEP-414)."""
    fields = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    return dump_json({name: value for name, value in fields.items() if value}).encode()


def read_answer(answer: Mapping[str, Any]) -> pb.ToolResult:
    """Returns an answer to `tools/call` as a result: complete, or with questions.

    Raises:
        ValueError, TypeError, RecursionError: it breaks the protocol.
    """
    if answer.get("resultType") != "input_required":
        return content.read_result(answer).to_wire()
    return pb.ToolResult(
        input_requests_json=dump_json(answer.get("inputRequests") or {}),
        request_state=str(answer.get("requestState") or ""),
    )


def text_of(answer: Mapping[str, Any]) -> str:
    """Returns the texts of an answer, joined."""
    blocks = answer.get("content")
    texts = [each.get("text") for each in blocks if isinstance(each, Mapping)] if isinstance(blocks, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def without_structure(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer whose structured content is a text, unless it has a text already."""
    blocks = answer.get("content")
    blocks = list(blocks) if isinstance(blocks, list) else []
    structured = answer.get("structuredContent")
    if structured is not None and not text_of(answer):
        blocks.append({"type": "text", "text": dump_json(structured)})
    return {**answer, "content": blocks, "structuredContent": None}


def is_stale(error: RpcError) -> bool:
    """Tells whether an error means that the server does not have the tool."""
    codes = (McpCode.INVALID_PARAMS, McpCode.METHOD_NOT_FOUND)
    return error.code in codes and _UNKNOWN_TOOL.search(error.message) is not None


def read_error(source: str, call: Call, error: RpcError) -> pb.ToolResult:
    """Returns the result of a call that a server answered with a JSON-RPC error."""
    message = shorten(clean_line(error.message), MAX_MESSAGE) or f"the server answered with error {error.code}"
    if is_stale(error):
        text = f"server {source!r} no longer has tool {call.entry.bare_name!r} ({message}): list again"
        return failure(Code.CATALOG_STALE, text, Stage.ACCEPTED, retry_safe=True)
    result = failure(Code.TOOL, message, Stage.ACCEPTED, reason=f"jsonrpc:{error.code}")
    if error.data is not None:
        result.output_json = dump_json(error.data)
    return result


def unreadable(call: Call, fault: Exception) -> pb.ToolResult:
    """Returns the result of a call whose answer breaks the protocol."""
    shown = shorten(clean_line(str(fault)), 300)
    text = f"tool {call.entry.name!r} gave a result that cannot be read: {shown}"
    return failure(Code.TOOL, text, Stage.ACCEPTED)


def failure(
    code: Code, text: str, stage: Stage, *, retry_safe: bool = False, reason: str = "", wait: float = 0.0
) -> pb.ToolResult:
    """Returns the result of a call that failed.

    Args:
        wait: seconds after which a retry makes sense.
    """
    error = CallError(code, text, stage, retry_safe, retry_after_seconds=wait, reason=reason)
    return Result(is_error=True, error=error).to_wire()


def number_of(value: object) -> float:
    """Returns a number that a server sent; 0 for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        return float(value)
    except OverflowError:
        return 0.0
