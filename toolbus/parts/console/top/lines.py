"""Holds the lines of the tables: of a tool, a source, a call, an error, as they are at a moment.

Texts are as the bus sent them: what draws them cleans them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolbus.parts.console.top.bus_state import FailureKey, FailureState, Row, ToolState, is_failure


@dataclass(frozen=True, slots=True)
class ToolLine:
    """A tool, how often it is called now, and how many of the running calls it has."""

    tool: ToolState
    rate: float | None
    in_flight: int
    now: float

    @property
    def source(self) -> str:
        """Whose line it is."""
        return self.tool.source

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest."""
        return self.tool.key


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source with its sessions; a program that only calls has no entry of its own among the sources.

    Attributes:
        entry: empty where there is none.
    """

    name: str
    entry: Row
    sessions: tuple[Row, ...]

    @property
    def source(self) -> str:
        """Whose line it is."""
        return self.name

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest."""
        return (self.name,)

    def first(self, field: str) -> Any:
        """Returns a field of the source, or of the first session that has it; None where none of them says."""
        return next((each[field] for each in (self.entry, *self.sessions) if each.get(field)), None)

    def total(self, field: str) -> int | None:
        """Returns the sum of a field of the sessions; None where none has it."""
        values = [each[field] for each in self.sessions if each.get(field) is not None]
        return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class CallLine:
    """A call that runs, or that has ended.

    Attributes:
        seconds: how long it took, or has run.
    """

    call: Row
    running: bool
    seconds: float | None

    @property
    def source(self) -> str:
        """Whose line it is."""
        return str(self.call.get("source", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest, also when the call ends."""
        return (str(self.call.get("id") or self.call.get("number", "")),)

    @property
    def outcome(self) -> str:
        """`running`, or as `toolbus calls` writes it."""
        return "running" if self.running else str(self.call.get("outcome", "")).lower()

    @property
    def stage(self) -> str:
        """How far it has got, or had got when it failed; "" where the bus does not say."""
        return str(self.call.get("stage") or (self.call.get("failure") or {}).get("stage") or "").lower()

    @property
    def tone(self) -> str:
        """How the outcome is drawn."""
        return "accent" if self.running else "bad" if is_failure(self.call) else "ok"


@dataclass(frozen=True, slots=True)
class FailureLine:
    """Calls of a tool that failed in the same way."""

    failure: FailureState

    @property
    def source(self) -> str:
        """Whose line it is."""
        return str(self.newest["source"])

    @property
    def key(self) -> FailureKey:
        """What stays the same of this line from digest to digest."""
        newest = self.newest
        return str(newest["source"]), str(newest["name"]), str(newest["outcome"])

    @property
    def newest(self) -> Row:
        """The record of the newest one."""
        return self.failure.newest

    @property
    def stage(self) -> str:
        """How far the newest one had got; "" where the bus does not say."""
        return str(self.failed_with("stage") or "").lower()

    def failed_with(self, field: str) -> Any:
        """Returns a field of the newest failure; None where the bus told nothing about it."""
        return (self.newest.get("failure") or {}).get(field)
