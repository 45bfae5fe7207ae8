"""Tracks which of a peer's declared tools the bus has refused or lets wait for a role.

Written on the connection's loop and read from any thread. Each refusal is logged once, until its reason changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from toolbus.text import clean_line, list_names, quote
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

NO_REASON = "the bus had no room for the reason in its message: `toolbus list --refused` shows it"


@dataclass(frozen=True, slots=True)
class RefusedTool:
    """A declared tool that the bus does not offer.

    Attributes:
        name: as it was declared.
        error: the value, the rule and how to fix it.
        role: the role for which it was declared; None means every role.
        source: the source that declared it; empty except in listings.
    """

    name: str
    error: str
    role: str | None = None
    source: str = ""

    @classmethod
    def from_wire(cls, message: wire.RefusedTool) -> RefusedTool:
        """Copies it out of its message."""
        return cls(message.name, message.error or NO_REASON, message.role or None, message.source)


@dataclass(frozen=True, slots=True)
class WaitingTool:
    """A declared tool that the bus has accepted, but whose role does not exist yet.

    Attributes:
        name: as it was declared.
        role: the role for which it waits.
    """

    name: str
    role: str


_Key = tuple[str, str | None]


class Standing:
    """The refused and waiting tools of one peer.

    Args:
        source: whose tools these are, for the log.
        on_refused: called with the names of newly refused tools, and the reason.
    """

    def __init__(self, source: str, on_refused: Callable[[Sequence[str], str], object]) -> None:
        self._source = source
        self._on_refused = on_refused
        self._refused: dict[_Key, RefusedTool] = {}
        self._waiting: dict[_Key, WaitingTool] = {}
        self._logged: dict[_Key, str] = {}  # the reasons that were logged, across reconnects
        self._logged_waiting: set[_Key] = set()  # the waiting tools that were logged

    def __repr__(self) -> str:
        return f"<Standing refused={len(self._refused)} waiting={len(self._waiting)}>"

    @property
    def refused(self) -> tuple[RefusedTool, ...]:
        """The tools that the bus refused, in the order in which they were declared."""
        return tuple(self._refused.values())

    @property
    def waiting(self) -> tuple[WaitingTool, ...]:
        """The tools that wait for a role."""
        return tuple(self._waiting.values())

    def attached(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to an attach, which replaces all answers before."""
        self._refused, self._waiting = {}, {}
        self.added(refused, waiting)
        self._logged = {key: each.error for key, each in self._refused.items()}

    def added(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to a Register, which adds to the answers before."""
        new_refused = [RefusedTool.from_wire(message) for message in refused]
        new_waiting = [WaitingTool(message.name, message.role) for message in waiting]
        self._waiting = {**self._waiting, **{(each.name, each.role): each for each in new_waiting}}
        self._refused = {**self._refused, **{(each.name, each.role): each for each in new_refused}}
        self._report(new_refused)
        self._report_waiting(new_waiting)

    def reviewed(self, event: wire.ToolsReviewed) -> None:
        """Takes an event that the bus has reviewed tools again by itself."""
        moved = {*event.registered, *(each.name for each in event.refused), *(each.name for each in event.waiting)}
        self._refused = {key: each for key, each in self._refused.items() if each.name not in moved}
        self._waiting = {key: each for key, each in self._waiting.items() if each.name not in moved}
        if event.registered:
            names = clean_line(list_names(event.registered))
            log.info("the bus offers tools of %s that it had refused or let wait: %s", self._source, names)
        self.added(event.refused, event.waiting)

    def _report(self, refused: Sequence[RefusedTool]) -> None:
        """Logs new refusals, one warning for each reason, and calls the hook."""
        news: dict[str, list[str]] = {}
        for each in refused:
            key = each.name, each.role
            if self._logged.get(key) != each.error:
                self._logged[key] = each.error
                news.setdefault(each.error, []).append(each.name)
        for error, names in news.items():
            shown, why = clean_line(list_names(names)), clean_line(error)
            log.warning("the bus does not offer %s of source %s: %s", shown, self._source, why)
            self._on_refused(names, error)

    def _report_waiting(self, waiting: Sequence[WaitingTool]) -> None:
        """Logs which tools newly wait for a role, one line for each role."""
        news: dict[str, list[str]] = {}
        for each in waiting:
            if (each.name, each.role) not in self._logged_waiting:
                news.setdefault(each.role, []).append(each.name)
        self._logged_waiting = set(self._waiting)
        for role, names in news.items():
            shown, whose = clean_line(list_names(names)), self._source
            log.warning("%s of source %s waits for role %s, which the bus does not have", shown, whose, quote(role))
