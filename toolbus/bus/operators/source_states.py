"""Names the states of sessions and sources for operators, in digests and metrics alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toolbus.bus.catalog.handler import Handler
from toolbus.bus.core import Core
from toolbus.bus.streams.catalog_messages import best_state
from toolbus.v1 import tool_bus_service_pb2 as wire

ATTACHED = "attached"
OFFLINE = "offline"
_NAMES: dict[int, str] = {
    wire.SESSION_STATE_LIVE: ATTACHED,
    wire.SESSION_STATE_SUSPECT: "suspect",
    wire.SESSION_STATE_DRAINING: "draining",
}
STATES = (*_NAMES.values(), OFFLINE)


_SESSION_STATES = {number: name.removeprefix("SESSION_STATE_").lower() for name, number in wire.SessionState.items()}


def session_state_of(handlers: Collection[Handler]) -> str:
    """Returns the best state of some handlers, by its name on the wire."""
    return _SESSION_STATES[best_state(handlers)]  # type: ignore[index]  # protoc's enums are ints


def state_of(*handlers: Handler) -> str:
    """Returns the best state of some handlers."""
    return _NAMES.get(best_state(handlers), OFFLINE)


def handlers_of(core: Core, source: str) -> Sequence[Handler]:
    """Returns the sessions of a source; without any, the handlers of one of its tools."""
    peers = core.presence.by_source.get(source)
    return list(peers.values()) if peers else core.registry.some_handlers(source)
