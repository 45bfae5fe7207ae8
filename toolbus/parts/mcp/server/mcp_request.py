"""Declares one request of an MCP client, for the functions that answer it.

A request has the same form over HTTP and over a pipe, in both eras. `methods` has the function for each method:
``async def method(server: McpServer, request: McpRequest) -> bytes`` returns the text of the result object
(`McpRequest.complete` makes it from a dict) or raises `RpcError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from toolbus.bus.access.identity import Identity
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import (
    BUS_INFO,
    META_CAPABILITIES,
    META_LOG_LEVEL,
    META_SERVER,
    META_VERSION,
    TASKS_EXTENSION,
)
from toolbus.parts.mcp.messages.jsonrpc import JsonId, McpCode, RpcError
from toolbus.parts.mcp.server.sessions import Channel, ClientCapabilities, McpSession, reaches
from toolbus.parts.mcp.settings import Profile

encode = msgspec.json.encode
META_OF_RESULT = encode({META_SERVER: BUS_INFO})  # of each modern one

_EMPTY = msgspec.Raw(b"{}")
_NULL = msgspec.Raw(b"null")
_NOTHING = msgspec.Raw(b"")


class Meta(msgspec.Struct, frozen=True):
    """The fields of ``_meta`` of a request: those with names of the modern era, and those of both eras."""

    version: str | None = msgspec.field(name=META_VERSION, default=None)
    capabilities: msgspec.Raw = msgspec.field(name=META_CAPABILITIES, default_factory=lambda: _NOTHING)
    log_level: str | None = msgspec.field(name=META_LOG_LEVEL, default=None)
    progress_token: str | int | float | None = msgspec.field(name="progressToken", default=None)
    traceparent: str | None = None
    tracestate: str | None = None


NO_META = Meta()


class Params(msgspec.Struct, frozen=True):
    """The common params of all methods; null is read as left out."""

    named_meta: Meta | None = msgspec.field(name="_meta", default=None)

    @property
    def meta(self) -> Meta:
        return self.named_meta or NO_META


class CallParams(Params, frozen=True):
    """Params of ``tools/call``; arguments and answers stay text."""

    name: str = ""
    arguments: msgspec.Raw = msgspec.field(default_factory=lambda: _EMPTY)
    input_responses: msgspec.Raw = msgspec.field(name="inputResponses", default_factory=lambda: _NULL)
    request_state: str | None = msgspec.field(name="requestState", default=None)

    def __post_init__(self) -> None:
        if bytes(self.arguments) == b"null":  # some clients send it for a call without arguments
            msgspec.structs.force_setattr(self, "arguments", _EMPTY)


@dataclass(slots=True, eq=False)
class McpRequest:
    """One request.

    Attributes:
        params: the params that `PARAMS` declares; `fields` has all of them.
        raw: the params as text.
        modern: whether it is of protocol 2026-07-28 or later, without a session.
        version: of the protocol.
        profile: of its client.
        identity: of its client.
        client: the capabilities of its client.
        session: of a legacy client; None in the modern era.
        channel: for notifications and questions.
        headers: of HTTP, by lower-case name; empty on a pipe.
    """

    id: JsonId
    method: str
    params: Params
    raw: bytes
    modern: bool
    version: str
    profile: Profile
    identity: Identity
    client: ClientCapabilities
    session: McpSession | None
    channel: Channel
    headers: Mapping[str, str]

    @property
    def meta(self) -> Meta:
        return self.params.meta

    @property
    def fields(self) -> dict[str, Any]:
        """The params as an object, parsed at each access; what is null counts as left out."""
        fields: dict[str, Any] = msgspec.json.decode(self.raw) if self.raw else {}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def log_level(self) -> str | None:
        """The lowest level of log messages for the client; None if it gets none."""
        return self.session.log_level if self.session is not None else self.meta.log_level

    @property
    def has_tasks(self) -> bool:
        return self.modern and TASKS_EXTENSION in self.client.extensions

    def text(self, name: str) -> str:
        """Returns a param that must be a text.

        Raises:
            RpcError: it is missing or of another type.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise RpcError(McpCode.INVALID_PARAMS, f"{self.method} needs params.{name}, a string: add it")
        return value

    def complete(self, result: Mapping[str, Any], *, kind: str = "complete") -> bytes:
        """Returns a result as text, with the fields that the era requires in addition.

        Args:
            kind: the ``resultType`` of the modern era.
        """
        if not self.modern:
            return encode(result)
        meta = {META_SERVER: BUS_INFO, **result.get("_meta", {})}
        return encode({"resultType": kind, **result, "_meta": meta})

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Sends a notification that belongs to this request."""
        self.channel.send(jsonrpc.notification(method, params))

    async def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a question to a legacy client in the middle of a request, and returns the result.

        Raises:
            RpcError: the client's error; or it has no session (a modern client gets ``input_required`` instead).
        """
        if self.session is None:
            raise RpcError(McpCode.INTERNAL, f"{method} cannot be asked without a session")
        return await self.session.ask(method, params, self.channel)

    def log(self, level: str, data: Any) -> None:
        """Sends a log message that belongs to this request, if the client gets messages of that level."""
        if reaches(level, self.log_level):
            self.notify("notifications/message", {"level": level, "logger": "toolbus", "data": data})


PARAMS: Mapping[str, type[Params]] = {"tools/call": CallParams}  # by method; `Params` for the others
