"""Writes the context of a call as headers of its callback, for plugins that ask for it when they register.

The REST contract fixes the body of a callback, and leaves its headers free. Servers bound the headers of a request, by
8 KiB at least, so the context is bounded too: what does not fit is left out, and a header names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from toolbus.bus.calls.call import Call
from toolbus.tool import Tool
from toolbus.v1 import tool_pb2 as pb

ASKED_FOR = "context_headers"  # in a tool's metadata
MAX_BYTES = 6_000  # of all headers together: the smallest limit of common servers is 8,190
_USER, _LEFT_OUT = "X-Toolbus-User", "X-Toolbus-Left-Out"


def wants_context(tool: Tool) -> bool:
    """Tells whether a tool's plugin has asked for the context of its calls."""
    return ASKED_FOR in tool.metadata_json and json.loads(tool.metadata_json).get(ASKED_FOR) is True


def context_headers(call: Call) -> dict[str, str]:
    """Returns the context of a call: each header's value is JSON in ASCII; what is empty has no header.

    `X-Toolbus-User`, `-Role`, `-Timeout`, `-Attributes`, `-Member`, `-Messages`, and `traceparent` as it came. Of the
    messages the newest that fit remain; of a member's fields those that fit.
    """
    headers: dict[str, str] = {}
    left_out: list[str] = []
    room = MAX_BYTES
    for name, value in _fields(call):
        text = _json(value)
        while len(name) + len(text) > room and isinstance(value, list | dict) and value:
            if name not in left_out:
                left_out.append(name)
            value = value[1:] if isinstance(value, list) else _without_longest(value)
            text = _json(value)
        if len(name) + len(text) > room or not value:
            if value and name not in left_out:
                left_out.append(name)
            continue
        headers[name] = text
        room -= len(name) + len(text)
    if left_out:
        headers[_LEFT_OUT] = ", ".join(left_out)
    if call.context is not None and call.context.traceparent.isascii() and call.context.traceparent.isprintable():
        headers.update({"traceparent": call.context.traceparent} if 0 < len(call.context.traceparent) <= 200 else {})
    return headers


def _fields(call: Call) -> Iterator[tuple[str, Any]]:
    """Yields headers and their values, the most important first: the last are the first to be left out."""
    context = call.context if call.context is not None else pb.CallContext()
    yield _USER, context.user_id
    yield "X-Toolbus-Role", call.entry.table.role or ""
    yield "X-Toolbus-Timeout", round(call.timeout, 3)
    yield "X-Toolbus-Attributes", dict(context.attributes)
    yield "X-Toolbus-Member", json.loads(context.member_json) if context.member_json else None
    yield "X-Toolbus-Messages", list(_messages(context.messages))


def _messages(messages: Iterable[pb.ContextMessage]) -> Iterator[dict[str, str]]:
    for each in messages:
        name = {"name": each.name} if each.name else {}
        yield {"role": each.role, "content": each.content, **name}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _without_longest(fields: dict[str, Any]) -> dict[str, Any]:
    longest = max(fields, key=lambda name: len(_json(fields[name])))
    return {name: value for name, value in fields.items() if name != longest}
