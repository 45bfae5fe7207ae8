"""Puts the guards of the configuration around the calls of a bus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.core import Core, Room
from toolbus.common.text import list_names, quote
from toolbus.parts.guards.guards import Guards
from toolbus.parts.guards.settings import AFTER, BEFORE, GuardSettings


class GuardsRoom(Room):
    """The guards of one bus; without any, calls do not come here."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        rules = core.config.part(GuardSettings).guards
        dispatcher = core.calls.dispatcher
        self._guards = Guards(rules, core.catalog.registry, dispatcher)
        if rules:
            dispatcher.interceptors = (*dispatcher.interceptors, self._guards)

    async def stop(self) -> None:
        """Ends the looks of guards."""
        self._guards.close()

    def provides(self) -> Iterable[object]:
        """Returns itself, for explanations and metrics."""
        return [self]

    def explain(self, entry: Entry) -> Iterator[tuple[str, bool | None, str]]:
        """Yields the steps of a call that guards add."""
        for when, rules in zip((BEFORE, AFTER), self._guards.rules_of(entry), strict=True):
            if rules:
                names = (f"{quote(rule.guard)} ({rule.budget_ms:g} ms, else {rule.on_failure})" for rule in rules)
                yield f"guards {when}", None, list_names(names)

    def counters(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], int]]]]:
        """Yields counters for the metrics: name, help, and the number by labels."""
        counts = [
            ({"guard": guard, "when": when, "verdict": verdict}, number)
            for (guard, when, verdict), number in sorted(self._guards.verdicts.items())
        ]
        yield "toolbus_guard_verdicts", "What guards decided, by guard and by when they looked.", counts
