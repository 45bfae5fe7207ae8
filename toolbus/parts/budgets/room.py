"""Puts the budgets of less trusted peers into a bus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toolbus.bus.core import Core, Room
from toolbus.parts.budgets.declarations import PeerBudgets
from toolbus.parts.budgets.loop_share import LoopShare


class BudgetsRoom(Room):
    """The budgets of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        presence = core.sessions.presence
        self.budgets = PeerBudgets(
            core.catalog.registry, core.catalog.policy, core.config.limits, LoopShare(self._own_calls)
        )
        presence.budgets = self.budgets
        presence.review.read = self.budgets.read

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

    async def stop(self) -> None:
        """Ends the thread that reads declarations."""
        self.budgets.close()
