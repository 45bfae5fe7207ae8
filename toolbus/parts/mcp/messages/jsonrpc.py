"""Decodes and encodes the messages of MCP: JSON-RPC 2.0, one object each.

`params` and `result` stay JSON text until a caller reads them: integers of any size and the spelling of numbers
survive, and text that is only passed on is never parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from toolbus.common.text import shorten

JsonId = int | str  # of a request; 1 and "1" are different ids
T = TypeVar("T")

_NOTHING = Raw(b"")
_NULL = Raw(b"null")


class McpCode(IntEnum):
    """Error codes: those of JSON-RPC 2.0, and those that revisions of MCP add."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL = -32603
    RESOURCE_NOT_FOUND = -32002  # until 2025-11-25; INVALID_PARAMS since
    HEADER_MISMATCH = -32020
    MISSING_CAPABILITY = -32021
    UNSUPPORTED_VERSION = -32022


# The HTTP status of an answer of 2026-07-28 that is an error; every other error goes with 200.
HTTP_STATUS: Final[Mapping[int, int]] = {
    McpCode.PARSE_ERROR: 400,
    McpCode.INVALID_REQUEST: 400,
    McpCode.INVALID_PARAMS: 400,
    McpCode.HEADER_MISMATCH: 400,
    McpCode.MISSING_CAPABILITY: 400,
    McpCode.UNSUPPORTED_VERSION: 400,
    McpCode.METHOD_NOT_FOUND: 404,
}


class RpcError(Exception):
    """A request is answered with an error.

    Args:
        code: one of `McpCode`, or a mounted server's own.
        message: the value, the rule and how to fix it.
        data: a JSON value for programs; None is left out.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __repr__(self) -> str:
        return f"RpcError({self.code}, {self.message!r})"


class _ErrorObject(msgspec.Struct):
    code: int
    message: str = ""
    data: Any = None


class JsonRpcMessage(msgspec.Struct, gc=False):
    """One message: a request, a notification or a response.

    Attributes:
        id: of a request or response; UNSET in a notification; None in a response to an unreadable request.
        method: of a request or notification; "" in a response.
        params: as JSON text; empty if the message has none, or null.
        result: as JSON text; empty in an error response.
    """

    jsonrpc: str = ""
    id: int | str | UnsetType | None = UNSET
    method: str = ""
    params: Raw = _NOTHING
    result: Raw = _NOTHING
    error: _ErrorObject | None = None

    @property
    def is_request(self) -> bool:
        """Whether the sender waits for a response."""
        return bool(self.method) and self.id is not UNSET

    @property
    def rpc_error(self) -> RpcError | None:
        """The error of a response; None if it has a result."""
        return None if self.error is None else RpcError(self.error.code, self.error.message, self.error.data)


_decoder = msgspec.json.Decoder(JsonRpcMessage)
_encode = msgspec.json.Encoder().encode


def decode(data: bytes) -> JsonRpcMessage:
    """Reads one message.

    Raises:
        RpcError: PARSE_ERROR where it is not JSON in UTF-8, INVALID_REQUEST where it is not a message of JSON-RPC 2.0.
    """
    try:
        str(data, "utf-8")  # the decoder does not check strings inside `Raw`
        message = _decoder.decode(data)
    except UnicodeDecodeError as error:
        raise RpcError(McpCode.PARSE_ERROR, f"the message is not UTF-8: {error.reason} at byte {error.start}") from None
    except msgspec.ValidationError as error:
        raise RpcError(McpCode.INVALID_REQUEST, _no_message(data, str(error))) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RpcError(McpCode.PARSE_ERROR, f"the message is not JSON: {shorten(str(error), 200)}") from None
    if message.params == _NULL:  # some clients write each field of a message
        message.params = _NOTHING
    if message.jsonrpc != "2.0":
        raise RpcError(McpCode.INVALID_REQUEST, 'jsonrpc is missing or not "2.0": send JSON-RPC 2.0')
    if message.method:
        if message.id is None:
            raise RpcError(
                McpCode.INVALID_REQUEST, "id is null: a request has a string or an integer, a notification has no id"
            )
    elif message.id is UNSET or (not message.result and message.error is None):
        raise RpcError(
            McpCode.INVALID_REQUEST, "the message has no method, and is not a response with an id and a result or error"
        )
    return message


def _no_message(data: bytes, why: str) -> str:
    if data.lstrip()[:1] == b"[":
        return "the message is an array: batches are not supported, send each message alone"
    return f"the message is not a JSON-RPC message: {shorten(why, 200)}"


def read(text: Raw | bytes | str, kind: type[T], what: str = "params") -> T:
    """Reads JSON text as a type that msgspec knows; `dict` for any object.

    Args:
        what: names the text in errors.

    Raises:
        RpcError: INVALID_PARAMS; its text says what is wrong and where.
    """
    try:
        return msgspec.json.decode(text or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RpcError(McpCode.INVALID_PARAMS, f"{what}: {shorten(str(error), 300)}") from None


def raw_json(text: str) -> Raw | None:
    """Returns JSON text as a value that is written unchanged; None if it is not valid JSON.

    Plugins may send anything, and one invalid text would break the message around it.
    """
    try:
        data = text.encode()
        msgspec.json.decode(data, type=Raw)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return Raw(data)


def request(id: JsonId, method: str, params: Any = None) -> bytes:
    """Writes a request; `params` may hold texts of `raw_json`."""
    if params is None:
        return _encode({"jsonrpc": "2.0", "id": id, "method": method})
    return _encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def notification(method: str, params: Any = None) -> bytes:
    if params is None:
        return _encode({"jsonrpc": "2.0", "method": method})
    return _encode({"jsonrpc": "2.0", "method": method, "params": params})


def answer(id: JsonId, result: Any) -> bytes:
    """Writes the result of a request."""
    return _encode({"jsonrpc": "2.0", "id": id, "result": result})


def refusal(id: JsonId | None, error: RpcError) -> bytes:
    """Writes the error of a request; id is None if the request could not be read."""
    body = {"code": error.code, "message": error.message}
    if error.data is not None:
        body["data"] = error.data
    return _encode({"jsonrpc": "2.0", "id": id, "error": body})
