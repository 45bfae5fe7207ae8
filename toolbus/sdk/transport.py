"""Defines what carries a peer's messages: one Invoke stream, and unary RPCs beside it.

An attempt has a transport of its own. It knows the outbox, whose messages it writes in their order, and one function,
which takes each message that it reads; what they mean is the attempt's. Statuses are gRPC's, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from toolbus.v1 import tool_bus_service_pb2 as wire

Receive = Callable[[wire.InvokeResponse], None]
STOPPED = "UNAVAILABLE", "the bus stopped answering"  # how a stream ends that this end cancels


class UnaryFailed(Exception):
    """A unary RPC failed.

    Attributes:
        code: the name of its status.
        text: that of the bus, or why it was not reached.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class PeerTransport(Protocol):
    """Carries one stream. Everything runs on the connection's loop."""

    @property
    def reached(self) -> bool:
        """Whether it has reached a server, which may then have read what was written."""

    def start(self, receive: Receive) -> None:
        """Begins to connect and to write; passes each message to ``receive``, one after the other.

        An error that ``receive`` raises ends the stream, and `ended` raises it.
        """

    async def ended(self) -> tuple[str, str]:
        """Waits until the stream has ended; returns its status and the text of that."""

    def wake(self) -> None:
        """Writes soon what waits in the outbox."""

    def half_close(self) -> None:
        """Ends this end's direction once everything is written."""

    def cancel(self) -> None:
        """Ends the stream at once."""

    async def unary(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Sends a request to a unary RPC of the service; returns the response.

        Raises:
            UnaryFailed: it failed. UNAVAILABLE where the transport was closed under it.
        """

    async def close(self) -> None:
        """Ends everything that still runs."""
