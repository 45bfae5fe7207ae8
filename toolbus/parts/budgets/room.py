"""Puts the budgets of less trusted peers into a bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from toolbus.bus.core import Core, Room
from toolbus.bus.streams.refused_tools import DEFAULT_RECEIVE_BYTES
from toolbus.parts.budgets.connections import QuietConnections
from toolbus.parts.budgets.declarations import PeerBudgets
from toolbus.parts.budgets.free_memory import FreeMemory
from toolbus.parts.budgets.loop_share import LoopShare

log = logging.getLogger("toolbus.budgets")

LOOK_SECONDS = 2.0  # between two looks at the connections and at the memory


class BudgetsRoom(Room):
    """The budgets of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        presence = core.sessions.presence
        catalog, limits, share = core.catalog, core.config.limits, LoopShare(self._own_calls)
        seams = core.calls.dispatcher.seams

        def receives(session_id: str) -> int:
            peer = presence.sessions.get(session_id)
            return DEFAULT_RECEIVE_BYTES if peer is None else peer.max_item_bytes  # it may end before its answer

        self.budgets = PeerBudgets(catalog.registry, catalog.policy, limits, share, seams, receives)
        seams.budgets, seams.read = self.budgets, self.budgets.read
        timings = core.program.timings
        self._connections = QuietConnections(core.sessions.neighbours, 3 * timings.idle_heartbeat_seconds)
        self._memory = FreeMemory()
        self._logged = ""  # why connections could not be looked at, as it was logged last

    async def start(self) -> None:
        """Begins to look at connections and memory."""
        self.repeat(LOOK_SECONDS, self._look, "looked at connections and memory")

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._connections.look)
        except OSError as error:  # as without a free descriptor; it may look again later
            if self._logged != (logged := str(error)):
                self._logged = logged
                log.warning("connections cannot be looked at: %s", error)
        await asyncio.to_thread(self._memory.release)

    def _own_calls(self) -> bool:
        """Tells whether a program of this machine, which is not guarded, has called lately."""
        principals = (caller.principal for caller in self.core.calls.dispatcher.in_flight.callers)
        guards = self.core.catalog.policy.is_untrusted
        return any(each.identity.scopes is None and not guards(each.source) for each in principals)

    def provides(self) -> Iterable[object]:
        """Returns itself, for the metrics."""
        return [self]

    def counters(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], int]]]]:
        """Yields counters for the metrics: name, help, and the number by labels."""
        waits = [({"account": account}, number) for account, number in sorted(self.budgets.share.waits.items())]
        yield "toolbus_budget_waits", "How often a less trusted peer waited for its turn in the loop.", waits
        ended = [({"peer": peer}, number) for peer, number in sorted(self._connections.ended.items())]
        yield "toolbus_connections_ended", "Connections without a session that were ended at a full port.", ended

    async def stop(self) -> None:
        """Ends the thread that reads declarations."""
        self.budgets.close()
