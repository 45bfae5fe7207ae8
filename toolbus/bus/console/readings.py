"""Reads a bus for its digests: sessions, sources, calls in flight, and counts.

Everything is read on the bus's loop, in constant time for each row: the tools of a source are counted only after a
change, and very long lists in steps, before the digest.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_record import origin_of
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.handler import BUS_SOURCE, Handler
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.console.digest import MAX_ROWS, MAX_RUNNING, Row
from toolbus.bus.core import Core
from toolbus.bus.operators.source_states import OFFLINE, handlers_of, state_of
from toolbus.bus.streams.peer import Peer
from toolbus.questions import INPUT_REQUIRED
from toolbus.version import VERSION

COUNTED_AT_ONCE = 5_000  # entries of the catalog, in less than a millisecond
LONG_SECONDS = 5.0  # between two counts of an owner with more
# Kinds of sources by their names: the name alone, or followed by the separator.
_OWN = (("bus", BUS_SOURCE, "."), ("dropin", "dropin", ":"))
_OWN_KINDS = tuple(name for _, name, _ in _OWN)

Addresses = dict[str, Any]


class ToolCounts:
    """How many tools sources and sessions have; counted again where the number of their entries has changed.

    Args:
        at_once: how many entries of the catalog are counted before others get their turn.
    """

    def __init__(self, registry: Registry, at_once: int = COUNTED_AT_ONCE) -> None:
        self._registry = registry
        self._at_once = at_once
        self._known: dict[Handler | str, tuple[int, int]] = {}  # by owner: its entries, and its tools
        self._long_at: dict[Handler | str, float] = {}  # when owners with very many tools were counted
        self._budget = self._at_once

    def begin(self) -> None:
        """Begins a reading."""
        self._budget = self._at_once

    def retain(self, owners: Iterable[Handler | str]) -> None:
        """Forgets all but some owners."""
        self._known = {owner: self._known[owner] for owner in owners if owner in self._known}
        self._long_at = {owner: when for owner, when in self._long_at.items() if owner in self._known}

    async def count_long(self, owner: Handler | str, entries: int) -> None:
        """Counts an owner with very many tools, in steps."""
        if entries <= self._at_once or self._known.get(owner, (-1,))[0] == entries:
            return
        now = time.monotonic()
        if now - self._long_at.get(owner, -LONG_SECONDS) < LONG_SECONDS:
            return
        self._long_at[owner] = now
        everything, names = self._registry.all_entries(owner), set[str]()
        for first in range(0, len(everything), self._at_once):
            names |= self._names(everything[first : first + self._at_once])
            await asyncio.sleep(0)
        self._known[owner] = entries, len(names)

    def of(self, owner: Handler | str, entries: int) -> int | None:
        """Returns how many tools an owner has; None where it is left to a later reading."""
        known = self._known.get(owner)
        if known is not None and known[0] == entries:
            return known[1]
        if entries > self._budget:
            return known[1] if known is not None else None
        self._budget -= entries
        count = len(self._names(self._registry.all_entries(owner)))
        self._known[owner] = entries, count
        return count

    def _names(self, entries: Iterable[Entry]) -> set[str]:
        hides = self._registry.tables.hides
        return {entry.bare_name for entry in entries if not hides(entry)}


class Readings:
    """The readings of one bus.

    Args:
        addresses: returns where it listens.
        started: when it began, in seconds since the epoch.
    """

    def __init__(self, core: Core, addresses: Callable[[], Addresses], started: float) -> None:
        self._core = core
        self._addresses = addresses
        self._counts = ToolCounts(core.registry)
        self._began = core.records.began  # added to times of the monotonic clock, makes them seconds since the epoch
        self.started = started

    async def prepare(self) -> None:
        """Counts the long lists, which would hold the loop up."""
        registry = self._core.registry
        for source, entries in registry.sources().items():
            await self._counts.count_long(source, entries)
        for peer in self._sessions():
            await self._counts.count_long(peer, registry.max_offers(peer))
        self._counts.begin()

    def scalars(self) -> Row:
        """Returns the single values."""
        core = self._core
        dispatcher, presence = core.dispatcher, core.presence
        total, failed = self.ended()
        return {
            "began": round(self.started, 3),
            "instance": presence.handshake.boot_id,
            "version": VERSION,
            "bus_id": core.config.bus_id,
            "draining": presence.draining,
            "revision": core.registry.revision,
            "roles": list(core.registry.roles),
            "addresses": self._addresses(),
            "in_flight": dispatcher.in_flight.active,
            "stuck": dispatcher.in_flight.stuck,
            "held_bytes": dispatcher.in_flight.held,
            "late": core.records.late,
            "loop_lag": round(core.stalls.lag, 6),
            "total": total,
            "total_failed": failed,
        }

    def ended(self) -> tuple[int, int]:
        """Returns how many calls have ended, and how many of them failed."""
        outcomes = self._core.records.outcomes
        total = outcomes.total()
        return total, total - outcomes[0] - outcomes[INPUT_REQUIRED]

    def running(self) -> list[Row]:
        """Returns the calls in flight, the oldest first."""
        return [self._running(call) for call in self._core.dispatcher.in_flight.oldest(MAX_RUNNING)]

    def sessions(self) -> dict[str, Row]:
        """Returns the sessions by their ids."""
        return {peer.session_id: self._session(peer) for peer in self._sessions()}

    def sources(self) -> dict[str, Row]:
        """Returns the sources by their names."""
        registry, presence = self._core.registry, self._core.presence
        offering = registry.sources()
        names = {**presence.by_source, **dict.fromkeys(presence.in_grace), **offering}
        refused: dict[str, int] = {}
        for peer in presence.review.refused.peers:
            refused[peer.source] = refused.get(peer.source, 0) + len(presence.review.refused.of(peer))
        shown = list(itertools.islice(names, MAX_ROWS))
        self._counts.retain([*shown, *self._sessions()])
        return {name: self._source(name, offering.get(name, 0), refused.get(name, 0)) for name in shown}

    def _sessions(self) -> list[Peer]:
        return list(itertools.islice(self._core.presence.sessions.values(), MAX_ROWS))

    def _source(self, name: str, entries: int, refused: int) -> Row:
        handlers = handlers_of(self._core, name)
        row = {
            "source": name,
            "kind": _kind_of(name, handlers),
            "state": state_of(*handlers),
            "sessions": len(self._core.presence.by_source.get(name, ())),
            "refused": refused,
        }
        core = self._core
        if row["state"] == OFFLINE and (until := core.presence.grace_end(name)) is not None:
            row["offline_since"] = round(self._began + until - core.registry.grace_seconds, 3)
            row["offline_until"] = round(self._began + until, 3)
        if not core.policy.may_offer(name):
            row["silenced"] = True
        tools = self._counts.of(name, entries)
        return row if tools is None else row | {"tools": tools}

    def _session(self, peer: Peer) -> Row:
        row = {
            "session": peer.session_id,
            "source": peer.source,
            "kind": _kind_of(peer.source, [peer]),
            "state": state_of(peer),
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
            "stage": self._core.dispatcher.in_flight.stage(call).name.lower(),
            "trace_id": call.trace.trace_id if call.trace is not None else "",
        }


def _kind_of(source: str, handlers: Sequence[Handler]) -> str:
    if source.startswith(_OWN_KINDS):
        for kind, name, separator in _OWN:
            if source == name or source.startswith(name + separator):
                return kind
    return handlers[0].kind if handlers else "peer"  # an offline source had a session
