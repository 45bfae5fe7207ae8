"""Answers clients that resume a stream which the bus no longer has: it has restarted, or dropped the stream.

The id of each event names the request of its stream, or says that the stream belongs to none. So a call that was lost
with a bus ends when its client resumes the stream, and not at the client's own timeout.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from toolbus.bus.mcp_server.calls import ERROR_META, describe
from toolbus.bus.mcp_server.mcp_request import McpRequest
from toolbus.bus.mcp_server.sessions import STANDING
from toolbus.errors import Code, Stage
from toolbus.mcp import jsonrpc
from toolbus.mcp.jsonrpc import McpCode, RpcError
from toolbus.tool import CallError

MAX_ID = 64  # characters of a request's id in the id of its stream
_CALL, _REQUEST = "c", "r"
_LOST = (
    "the bus has restarted, or has dropped the stream of this request. It had the request; how far it got is not known"
)


def stream_of_request(request: McpRequest) -> str:
    """Returns the part of a stream's id that names its request."""
    id = msgspec.json.encode(request.id)
    if len(id) > MAX_ID:
        return "x"
    kind = _CALL if request.method == "tools/call" else _REQUEST
    return f"{kind}.{base64.urlsafe_b64encode(id).decode().rstrip('=').replace('-', '~')}"


def lost_answer(event_id: str) -> bytes | None:
    """Returns the answer to the request of an event's stream; None if the event names none."""
    kind, _, rest = event_id.partition(".")
    encoded = rest.partition(".")[0].replace("~", "-")
    if kind not in (_CALL, _REQUEST) or len(encoded) > 2 * MAX_ID:
        return None
    try:
        id: Any = msgspec.json.decode(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(id, int | str):
        return None
    meta = {ERROR_META: describe(CallError(Code.UNAVAILABLE, _LOST, Stage.UNKNOWN))}
    if kind == _CALL:
        return jsonrpc.answer(id, {"content": [{"type": "text", "text": _LOST}], "isError": True, "_meta": meta})
    return jsonrpc.refusal(id, RpcError(McpCode.INTERNAL, _LOST, meta))


def is_standing(event_id: str) -> bool:
    """Tells whether an event is of a standing stream, which belongs to no request."""
    return event_id.startswith(f"{STANDING}.")
