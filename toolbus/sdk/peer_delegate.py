"""Defines the interface that a connection needs of its peer: the tools to offer, and the reaction to events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


class IncomingCall(Protocol):
    """A call of the bus to this peer."""

    def cancel(self, reason: str) -> None:
        """Cancels it; it still has to be answered while its session lives."""


class AnsweredCall:
    """Stands for a call that was answered at once."""

    def cancel(self, reason: str) -> None:
        """Does nothing: its answer is on its way."""


ANSWERED = AnsweredCall()


class Delegate(Protocol):
    """The tools and events of a peer. Everything runs on the connection's loop and must not block."""

    def tools(self) -> Sequence[pb.Tool]:
        """Returns the tools to declare now."""

    def attached(self, attached: wire.Attached) -> None:
        """Takes the bus's answer to an attach, with the tools that it registered, refused or lets wait."""
        return  # a peer without tools ignores it

    def registered(self, response: wire.RegisterResponse) -> None:
        """Takes the bus's answer to further tools, which did not fit into the attach."""
        return

    def refused(self, names: Sequence[str], reason: str) -> None:
        """Handles that the bus refused a whole declaration of these tools, and perhaps this peer."""
        return

    def event(self, event: wire.Event) -> None:
        """Takes an event of the catalog or about this peer."""

    def notifications_after(self) -> int:
        """Returns the number of the last notification that this peer has; 0 for none."""
        return 0

    def subscriptions(self) -> Sequence[Any]:
        """Returns the events to subscribe to."""
