"""Declares how the bytes of a connection to an MCP server travel: by pipes, or by HTTP.

A transport knows no requests beyond what it has to put into headers. It hands every message that arrives to its
`Receiver`, and says which requests were lost. It never blocks the loop: what cannot be taken now is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from toolbus.errors import Stage, ToolBusError

RequestId = str | int


class Lost(ToolBusError):
    """A request got no answer, since the server or the way to it is gone.

    Attributes:
        stage: how far the request had got.
    """

    def __init__(self, text: str, stage: Stage = Stage.UNKNOWN) -> None:
        self.stage = stage
        super().__init__(text)


class Busy(ToolBusError):
    """The server takes nothing more now: its pipe is full. Nothing of the message was sent."""


class HttpRefused(Lost):
    """A server answered a request with an HTTP status and no JSON-RPC message.

    Attributes:
        status: 4xx or 5xx.
    """

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text, Stage.NOT_DISPATCHED if status in (404, 405, 415) else Stage.DISPATCHED)


class SessionLost(Lost):
    """A server does not know the session any more (404): the handshake has to be repeated. Nothing was done."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Stage.NOT_DISPATCHED)


class NeedsLogin(Lost):
    """A server wants a user to log in; the text says with which command."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Stage.NOT_DISPATCHED)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to the server.

    Attributes:
        data: the JSON text, without line breaks.
        id: of a request; None: a notification or an answer.
        method: "" for an answer.
        name: what HTTP names in `Mcp-Name`: a tool, a prompt, the URI of a resource, the id of a task.
        version: of the protocol, once it is agreed; "" before, and in `initialize`.
        headers: more of them, for HTTP: `Mcp-Param-*`.
        stream: of an answer: the stream on which the server's request came, as the transport named it.
    """

    data: bytes
    id: RequestId | None = None
    method: str = ""
    name: str = ""
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""


class Receiver(Protocol):
    """Takes what arrives at a transport, on its loop. None of these methods may be called by `Transport.send`."""

    def received(self, data: bytes, stream: str = "") -> None:
        """Takes one message.

        Args:
            stream: where the server's requests came from, if answers and calls can be told apart by it: over HTTP the
                id of the request whose stream it is, as text.
        """

    def lost(self, request: RequestId, error: Lost) -> None:
        """Ends one request that gets no answer any more."""

    def closed(self, why: str) -> None:
        """Ends all requests, since the server is gone; called once, whoever closed the transport."""

    def activity(self) -> None:
        """Notes that the server does something: it writes to its log, or downloads itself."""


class Transport(Protocol):
    """The way to one MCP server."""

    shares_one_pipe: bool  # whether all messages come in order over one pipe, so that a probe can be followed by a ping

    async def start(self, receiver: Receiver) -> None:
        """Begins.

        Raises:
            Lost: the server cannot be started or reached.
        """

    def send(self, message: Outgoing) -> None:
        """Sends a message, or begins to; what becomes of it is told to the receiver.

        Raises:
            Busy: it cannot be taken now.
            Lost: the transport is closed.
        """

    def cancel(self, request: RequestId) -> None:
        """Gives a request up: over HTTP its stream is closed. The notification was sent already."""

    def agreed(self, version: str, *, modern: bool) -> None:
        """Says which version the handshake has led to; over legacy HTTP the standing stream may be opened now."""

    async def close(self) -> None:
        """Ends the transport and all that it started."""
