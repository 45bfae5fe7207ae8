"""Writes the context of a call as headers of its callback, for plugins that request this when they register.

The REST contract fixes the body of a callback, and leaves its headers free. Servers bound the headers of a request, by
8 KiB at least, so the context is bounded too: a header names the parts that are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from toolbus.bus.calls.call import Call, Trace
from toolbus.protocol.tool import Tool
from toolbus.v1 import tool_pb2 as pb

WANTS_CONTEXT = "context_headers"  # key of a tool's metadata
MAX_BYTES = 6_000  # of all headers together: the smallest limit of common servers is 8,190
_USER, _LEFT_OUT = "X-Toolbus-User", "X-Toolbus-Left-Out"
_UNREADABLE = ()  # stands for text that is not JSON: it is left out


def wants_context(tool: Tool) -> bool:
    """Tells whether a tool's plugin wants the context of its calls."""
    if WANTS_CONTEXT not in tool.metadata_json:
        return False
    metadata = _read(tool.metadata_json)  # a gRPC peer may send any text
    return isinstance(metadata, dict) and metadata.get(WANTS_CONTEXT) is True


def context_headers(call: Call) -> dict[str, str]:
    """Returns the context of a call: each header's value is JSON in ASCII; what is empty has no header.

    `X-Toolbus-User`, `-Role`, `-Timeout`, `-Attributes`, `-Member`, `-Messages`. Of the messages the newest that fit
    remain; of a member's fields those that fit. Takes time in proportion to the context.
    """
    headers: dict[str, str] = {}
    left_out: list[str] = []
    room = MAX_BYTES
    for name, value in _fields(call):
        text, is_whole = _fitted(value, room - len(name))
        if not is_whole:
            left_out.append(name)
        if text:
            headers[name] = text
            room -= len(name) + len(text)
    if left_out:
        headers[_LEFT_OUT] = ", ".join(left_out)
    return headers


def trace_headers(trace: Trace) -> dict[str, str]:
    """Returns the trace of a call: every callback has it."""
    headers = {"traceparent": trace.traceparent}
    return headers | {"tracestate": trace.tracestate} if trace.tracestate else headers


def _fields(call: Call) -> Iterator[tuple[str, Any]]:
    """Yields headers and their values, the most important first: the last are the first to be left out."""
    context = call.context if call.context is not None else pb.CallContext()
    yield _USER, context.user_id
    yield "X-Toolbus-Role", call.entry.table.role or ""
    yield "X-Toolbus-Timeout", round(call.timeout, 3)
    yield "X-Toolbus-Attributes", dict(context.attributes)
    yield "X-Toolbus-Member", _read(context.member_json) if context.member_json else None
    yield "X-Toolbus-Messages", context.messages


def _fitted(value: Any, room: int) -> tuple[str, bool]:
    """Returns as much of a value as fits, as JSON, and whether that is all of it; "" for an empty value."""
    if not value:
        return "", value is not _UNREADABLE
    if isinstance(value, dict):
        return _fitted_fields(value, room)
    if isinstance(value, str | int | float):
        text = _json(value)
        return (text, True) if len(text) <= room else ("", False)
    parts: list[str] = []
    room -= 1  # the brackets; each part has a comma, or the last one does not
    for each in reversed(value):
        part = _json(_message(each) if isinstance(each, pb.ContextMessage) else each)
        room -= len(part) + 1
        if room < 0:
            break
        parts.append(part)
    return f"[{','.join(reversed(parts))}]" if parts else "", len(parts) == len(value)


def _fitted_fields(fields: dict[str, Any], room: int) -> tuple[str, bool]:
    """Leaves out the longest fields until the rest fit."""
    texts = {name: _json(value) for name, value in fields.items()}
    parts: dict[str, str] = {}
    room -= 1
    for name in sorted(texts, key=lambda name: len(texts[name])):
        part = f"{_json(name)}:{texts[name]}"
        room -= len(part) + 1
        if room < 0:
            break
        parts[name] = part
    included = [parts[name] for name in fields if name in parts]
    return f"{{{','.join(included)}}}" if included else "", len(included) == len(fields)


def _message(message: pb.ContextMessage) -> dict[str, str]:
    name = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **name}


def _read(text: str) -> Any:
    """Returns the value of a JSON text; `_UNREADABLE` where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
