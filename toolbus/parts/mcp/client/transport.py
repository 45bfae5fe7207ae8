"""Declares the transport of a connection to an MCP server; pipes and HTTP implement it.

A transport knows only those parts of requests that go into headers. It delivers every message to its `Receiver`, and
reports lost requests. It never blocks the loop: a message that cannot be sent now is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from toolbus.errors import Stage, ToolBusError

RequestId = str | int


class Lost(ToolBusError):
    """A request gets no answer, since the server has ended or the connection to it.

    Attributes:
        stage: how far the request had got.
    """

    def __init__(self, text: str, stage: Stage = Stage.UNKNOWN) -> None:
        self.stage = stage
        super().__init__(text)


class Busy(ToolBusError):
    """The server does not read its input: its pipe is full. Nothing of the message was sent."""


class HttpRefused(Lost):
    """A server answered a request with an HTTP status and no JSON-RPC message.

    Attributes:
        status: 4xx or 5xx.
    """

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text, Stage.NOT_DISPATCHED if status in (404, 405, 415) else Stage.DISPATCHED)


class SessionLost(Lost):
    """A server has lost the session (404): the handshake has to be repeated. The request did not run."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Stage.NOT_DISPATCHED)


class NeedsLogin(Lost):
    """A server requires a login; the text has the command."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Stage.NOT_DISPATCHED)


def other_form(request: RequestId) -> RequestId:
    """Returns the id as which some servers answer a request: the number for its text, or the text for a number."""
    if isinstance(request, int):
        return str(request)
    return int(request) if request.isascii() and request.isdecimal() and len(request) < 20 else request


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to the server.

    Attributes:
        data: the JSON text, without line breaks.
        id: of a request; None: a notification or a response.
        method: "" for a response.
        name: for the header `Mcp-Name`: a tool, a prompt, the URI of a resource, the id of a task.
        version: of the protocol; "" before the handshake, and in `initialize`.
        headers: additional ones for HTTP: `Mcp-Param-*`.
        stream: of a response: the stream of the server's request, as the transport named it.
    """

    data: bytes
    id: RequestId | None = None
    method: str = ""
    name: str = ""
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""


class Receiver(Protocol):
    """Takes messages and events of a transport, on its loop. `Transport.send` never calls these methods."""

    def received(self, data: bytes, stream: str = "") -> None:
        """Takes one message.

        Args:
            stream: over HTTP, the id of our request on whose stream the message came, as text; else "".
        """

    def lost(self, request: RequestId, error: Lost) -> None:
        """Ends one request that gets no response."""

    def closed(self, why: str) -> None:
        """Ends all requests, since the server has disconnected or the transport is closed; called once."""

    def activity(self) -> None:
        """Notes that the server is active: it has written to its log."""


class Transport(Protocol):
    """The transport to one MCP server."""

    shares_one_pipe: bool  # whether all messages have one order, so that a ping can follow a probe

    async def start(self, receiver: Receiver) -> None:
        """Starts the server, or prepares the connection.

        Raises:
            Lost: the server cannot be started or reached.
        """

    def send(self, message: Outgoing) -> None:
        """Sends a message, or starts to; the receiver gets the outcome.

        Raises:
            Busy: the message cannot be sent now.
            Lost: the transport is closed.
        """

    def cancel(self, request: RequestId) -> None:
        """Abandons a request after its notification was sent: over HTTP its stream is closed."""

    def agreed(self, version: str, *, modern: bool) -> None:
        """Takes the version of the handshake; over legacy HTTP, calls now wait for the standing stream."""

    async def close(self) -> None:
        """Ends the transport and its processes."""
