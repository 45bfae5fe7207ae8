"""Declares the interface of a handler for the registry and the dispatcher: an object that runs tools.

A stream, a local function and a callback URL are handlers alike. A handler offers tools (see entry.py) and holds the
calls that it runs; nothing here knows how it runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from toolbus.bus.catalog.slots import Slots

BUS_SOURCE = "toolbus"  # the bus's own tools: listed only for requests that name the source, never by a bare name
RUN_SOURCES = "run."  # how the sources of supervisors begin, `run.HOST.PID-ID`: their tools are hidden as the bus's own
HOST_SOURCE = "host"  # of hosts that lend their model, beside other programs of that name
LENT_MODEL = f"{HOST_SOURCE}:generate"  # the tool that calls it: needs a permission, listed to administrators only


def is_operators(source: str) -> bool:
    """Tells whether the tools of a source are for operators only: the bus's own, and those of supervisors."""
    return source == BUS_SOURCE or source.startswith(RUN_SOURCES)


class Handler(Protocol):
    """Runs tools: a stream, a local function or a callback URL."""

    kind: str  # what it is, for operators: peer, callback, function or mount
    source: str
    instance: str
    max_in_flight: int
    pending: dict[str, Any]  # calls that it has not answered, by the bus's id; stuck ones included
    slots: Slots  # how many of them each caller has
    stuck: int  # how many of them have ended for their caller, but the handler has not confirmed it
    shares: (
        bool  # whether other handlers of the source may offer the same tool beside it; else the newest replaces them
    )
    awaits_roles: bool  # whether its tools wait for a role that does not exist; else such a tool is refused
    max_item_bytes: int  # the largest call that it can receive
    remote: bool  # whether the tool runs outside the bus's process
    persisted: bool  # whether its offers outlive the bus: the registry collects changes of them for a store

    @property
    def takes_calls(self) -> bool:
        """Whether a new call may be sent now."""

    @property
    def session_state(self) -> int:
        """The state that listings show: a ``SessionState`` of the wire."""

    def send(self, calls: Sequence[Any], now: float) -> None:
        """Starts calls that are in ``pending`` already. Their results go to ``Dispatcher.results``."""

    def cancel(self, call: Any, reason: str) -> bool:
        """Cancels a call. Returns whether it was never sent, so that the handler will not confirm it."""

    def stage(self, call: Any) -> Any:
        """Returns how far a call has got: a `Stage`."""


def has_room(handler: Handler) -> bool:
    """Tells whether a handler takes one more call now."""
    return handler.takes_calls and len(handler.pending) < handler.max_in_flight


def share_of(handler: Handler, caller: object, now: float) -> int:
    """Returns how many more calls a handler takes from a caller now, so that some room stays for others."""
    free = handler.max_in_flight - len(handler.pending) if handler.takes_calls else 0
    return handler.slots.offer(caller, max(free, 0), now)


def in_flight(handler: Handler) -> int:
    """Returns how many calls a handler has, stuck ones included."""
    return len(handler.pending)
