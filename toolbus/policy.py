"""Who may call what, and who may offer. Pure questions that the dispatcher and every listing ask.

A listing and a call ask the same function with the same caller: what is listed can be called, what can be called is
listed (design.md 6).
"""

from __future__ import annotations

from typing import Protocol

from toolbus.entry import BUS_SOURCE, Entry


class Caller(Protocol):
    """What a policy may know about who asks."""

    source: str
    administers: bool  # whether it may call the bus's own tools


class Policy:
    """The rules in force. An instance belongs to one bus.

    Args:
        silenced: sources that may attach and call but not offer tools.
    """

    def __init__(self, silenced: frozenset[str] = frozenset()) -> None:
        self._silenced = silenced

    def may_offer(self, source: str) -> bool:
        """Whether a source has the right ``tools``."""
        return source not in self._silenced

    def refusal(self, caller: Caller, entry: Entry) -> str | None:
        """Why a caller may not call a tool, as a sentence; None where it may."""
        if entry.source == BUS_SOURCE and not caller.administers:
            return f"{entry.name!r} administers the bus; {caller.source!r} has no right to"
        return None
