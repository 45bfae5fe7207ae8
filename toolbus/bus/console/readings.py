"""Reads of a bus what its digest shows: sessions, sources, calls in flight, and what is counted.

Everything is read on the bus's loop, in constant time for each row: how many tools somebody has is counted only where
that changed, and a very long list is counted on a thread, before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import toolbus
from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_records import origin_of
from toolbus.bus.catalog.handler import BUS_SOURCE, Handler
from toolbus.bus.console.digest import MAX_ROWS, MAX_RUNNING, Row
from toolbus.bus.core import Core
from toolbus.bus.streams.catalog_messages import best_state
from toolbus.bus.streams.peer import Peer
from toolbus.questions import INPUT_REQUIRED
from toolbus.v1 import tool_bus_service_pb2 as wire

COUNTED_AT_ONCE = 20_000  # entries of the catalog that one reading counts on the loop, some milliseconds
_STATES = {
    wire.SESSION_STATE_LIVE: "attached",
    wire.SESSION_STATE_SUSPECT: "suspect",
    wire.SESSION_STATE_DRAINING: "draining",
}
_OFFLINE = "offline"
_DROPIN = "dropin"  # source of drop-in tools, and with a colon the beginning of those of their groups

Addresses = dict[str, Any]


class ToolCounts:
    """How many tools sources and sessions have, counted again where the number of their entries is another one."""

    def __init__(self, count: Callable[[Handler | str], int]) -> None:
        self._count = count
        self._known: dict[Handler | str, tuple[int, int]] = {}  # by owner: its entries, and its tools
        self._budget = COUNTED_AT_ONCE

    def begin(self) -> None:
        """Begins a reading."""
        self._budget = COUNTED_AT_ONCE

    def keep(self, owners: Iterable[Handler | str]) -> None:
        """Forgets all but some owners."""
        self._known = {owner: self._known[owner] for owner in owners if owner in self._known}

    def is_due(self, owner: Handler | str, entries: int) -> bool:
        """Tells whether an owner has to be counted on a thread."""
        return entries > COUNTED_AT_ONCE and self._known.get(owner, (-1,))[0] != entries

    def count(self, owner: Handler | str, entries: int) -> None:
        """Counts an owner; on any thread."""
        self._known[owner] = entries, self._count(owner)

    def of(self, owner: Handler | str, entries: int) -> int | None:
        """Returns how many tools an owner has; None where it is left to a later reading."""
        known = self._known.get(owner)
        if known is not None and known[0] == entries:
            return known[1]
        if entries > self._budget:
            return known[1] if known is not None else None
        self._budget -= entries
        self.count(owner, entries)
        return self._known[owner][1]


class Readings:
    """What is read of one bus.

    Args:
        addresses: returns where it listens.
        started: when it began, in seconds since the epoch.
    """

    def __init__(self, core: Core, addresses: Callable[[], Addresses], started: float) -> None:
        self._core = core
        self._addresses = addresses
        self._counts = ToolCounts(core.registry.count_tools)
        self._began = core.records.began  # added to times of the monotonic clock, makes them seconds since the epoch
        self._started = started

    async def prepare(self) -> None:
        """Counts on a thread what would hold the loop up."""
        registry, counts = self._core.registry, self._counts
        due: list[tuple[Handler | str, int]] = [each for each in registry.sources().items() if counts.is_due(*each)]
        for peer in self._sessions():
            entries = registry.max_offers(peer)
            if counts.is_due(peer, entries):
                due.append((peer, entries))
        for owner, entries in due:
            await asyncio.to_thread(counts.count, owner, entries)
        self._counts.begin()

    def scalars(self) -> Row:
        """Returns what is one value."""
        core = self._core
        dispatcher, presence = core.dispatcher, core.presence
        total, failed = self.ended()
        return {
            "began": round(self._started, 3),
            "instance": presence.handshake.boot_id,
            "version": toolbus.__version__,
            "bus_id": core.config.bus_id,
            "draining": presence.draining,
            "revision": core.registry.revision,
            "roles": list(core.registry.roles),
            "addresses": self._addresses(),
            "in_flight": dispatcher.active,
            "stuck": dispatcher.stuck,
            "held_bytes": dispatcher.held_bytes,
            "late": core.records.late,
            "total": total,
            "total_failed": failed,
        }

    def ended(self) -> tuple[int, int]:
        """Returns how many calls have ended, and how many of them failed."""
        outcomes = self._core.records.outcomes
        total = outcomes.total()
        return total, total - outcomes[0] - outcomes[INPUT_REQUIRED]

    def running(self) -> list[Row]:
        """Returns the calls that are waited for, the oldest first."""
        return [self._running(call) for call in self._core.dispatcher.oldest(MAX_RUNNING)]

    def sessions(self) -> dict[str, Row]:
        """Returns the sessions by their ids."""
        return {peer.session_id: self._session(peer) for peer in self._sessions()}

    def sources(self) -> dict[str, Row]:
        """Returns the sources by their names."""
        registry, presence = self._core.registry, self._core.presence
        offering = registry.sources()
        names = {**presence.by_source, **dict.fromkeys(presence.known_sources()), **offering}
        refused: dict[str, int] = {}
        for peer in presence.review.refused.peers:
            refused[peer.source] = refused.get(peer.source, 0) + len(presence.review.refused.of(peer))
        shown = list(itertools.islice(names, MAX_ROWS))
        self._counts.keep([*shown, *self._sessions()])
        return {name: self._source(name, offering.get(name, 0), refused.get(name, 0)) for name in shown}

    def _sessions(self) -> list[Peer]:
        return list(itertools.islice(self._core.presence.sessions.values(), MAX_ROWS))

    def _source(self, name: str, entries: int, refused: int) -> Row:
        peers = list(self._core.presence.by_source.get(name, {}).values())
        handlers: list[Any] = list(peers) or self._core.registry.some_handlers(name)
        row = {
            "source": name,
            "kind": _kind_of(name, handlers),
            "state": _STATES.get(best_state(handlers), _OFFLINE),  # type: ignore[call-overload]  # protoc's enums are ints
            "sessions": len(peers),
            "refused": refused,
        }
        tools = self._counts.of(name, entries)
        return row if tools is None else row | {"tools": tools}

    def _session(self, peer: Peer) -> Row:
        row = {
            "session": peer.session_id,
            "source": peer.source,
            "kind": _kind_of(peer.source, [peer]),
            "state": _STATES.get(peer.session_state, _OFFLINE),  # type: ignore[call-overload]
            "attached": round(self._began + peer.attached, 3),
            "identity": peer.principal.identity.name,
            "peer": peer.address,
            "in_flight": len(peer.pending) - peer.stuck,
            "max_in_flight": peer.max_in_flight,
            "pending": len(peer.in_flight),
            "stuck": peer.stuck,
        }
        tools = self._counts.of(peer, self._core.registry.max_offers(peer))
        return row if tools is None else row | {"tools": tools}

    def _running(self, call: Call) -> Row:
        return {
            "id": call.id,
            "parent": call.parent.id if call.parent is not None else "",
            "call_id": call.call_id,
            "name": call.entry.name,
            "source": call.entry.source,
            "caller": call.caller.source,
            "user_id": origin_of(call.context)[0] if call.context is not None else "",
            "started": round(self._began + call.started, 6),
            "deadline": round(self._began + call.deadline, 6),
            "stage": self._core.dispatcher.stage(call).name.lower(),
            "trace_id": call.trace.trace_id if call.trace is not None else "",
        }


def _kind_of(source: str, handlers: list[Any]) -> str:
    if source == BUS_SOURCE or source.startswith(f"{BUS_SOURCE}."):
        return "bus"
    if source == _DROPIN or source.startswith(f"{_DROPIN}:"):
        return _DROPIN
    kind: str = handlers[0].kind if handlers else "peer"  # what is offline was a session
    return kind
