"""Tells whether a message of a less trusted peer waits for its turn in a bus."""

from __future__ import annotations

from toolbus.bus import Bus
from toolbus.errors import LimitExceeded
from toolbus.parts.budgets.declarations import PeerBudgets


def budgets_of(bus: Bus) -> PeerBudgets:
    """Returns the budgets of a bus."""
    budgets = bus.core.calls.dispatcher.seams.budgets
    assert isinstance(budgets, PeerBudgets)
    return budgets


def waits(bus: Bus, source: str) -> bool:
    """Tells whether a message of a guarded source waits: one always fits, whatever its size."""
    try:
        with budgets_of(bus).waiting(source, 1 << 40):
            return False
    except LimitExceeded:
        return True
