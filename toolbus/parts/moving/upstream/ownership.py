"""Remembers which registrations at a main server are ours: by name, role, source and callback URL, across restarts.

A listed tool that is not remembered here belongs to another program, even with a source of ours: another plugin host
may run the same plugin.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, read_state
from toolbus.parts.moving.upstream.upstream_responses import UpstreamListing, UpstreamTool

log = logging.getLogger("toolbus.upstream")

# A registration whose response was lost may still arrive there; after this time it counts as lost.
KEEP_SECONDS = 60.0
MAX_SERVERS = 8  # main servers that are remembered, those of earlier configurations included

Address = tuple[str, str, int]  # scheme, host, port


class Registration(NamedTuple):
    """One registration that was sent to a main server; a role of None is all roles."""

    name: str
    role: str | None
    source: str
    callback_url: str

    def made(self, held: UpstreamTool) -> bool:
        """Returns whether it made a tool that a main server lists under its name."""
        return held.source == self.source and held.callback_url == self.callback_url


class Ownership:
    """The registrations at one main server that this bus has made, in this run or an earlier one.

    Args:
        earlier: those of an earlier run.
    """

    def __init__(self, earlier: list[Registration] | None = None) -> None:
        self.sources: set[str] = set()  # of what was registered in this run
        self._needed_at: dict[str, dict[Registration, float]] = {}  # by name; when it was planned or listed last
        self._changed = False  # since the last `take_changes`
        for each in earlier or ():
            self._needed_at.setdefault(each.name, {})[each] = float("-inf")

    def __repr__(self) -> str:
        return f"<Ownership registrations={len(self.registrations)}>"

    @property
    def registrations(self) -> list[Registration]:
        """All of them, by name in the order in which they were made."""
        return [each for of_name in self._needed_at.values() for each in of_name]

    def add(self, registration: Registration, now: float) -> None:
        """Remembers a registration, before it is sent: without a response it may be there nevertheless."""
        self.sources.add(registration.source)
        of_name = self._needed_at.setdefault(registration.name, {})
        self._changed = self._changed or registration not in of_name
        of_name[registration] = now

    def owns(self, name: str, role: str, held: UpstreamTool) -> bool:
        """Returns whether we have registered a tool that a role of the main server lists."""
        return any(each.role in (None, role) and each.made(held) for each in self._needed_at.get(name, ()))

    def forget(self, listing: UpstreamListing, is_planned: Callable[[Registration], bool], now: float) -> None:
        """Forgets registrations that were neither planned nor listed for a while."""
        for name, of_name in list(self._needed_at.items()):
            holders = listing.holders(name).values()
            for each, needed_at in list(of_name.items()):
                if is_planned(each) or any(map(each.made, holders)):
                    of_name[each] = now
                elif now - needed_at > KEEP_SECONDS:
                    self._remove(each)

    def clear(self) -> None:
        """Forgets everything, after all was withdrawn."""
        self._changed = self._changed or bool(self._needed_at)
        self._needed_at.clear()

    def take_changes(self) -> bool:
        """Returns whether anything has changed since this was last called."""
        changed, self._changed = self._changed, False
        return changed

    async def check_earlier(self, own_url: str, is_serving: Callable[[Address], Awaitable[bool]]) -> None:
        """Drops registrations of an earlier run at addresses where another program listens now: they are its own.

        Args:
            own_url: of our gateway, where only we listen.
        """
        own = parse_callback_url(own_url).origin
        by_address: dict[Address, list[Registration]] = {}
        for each in self.registrations:
            by_address.setdefault(parse_callback_url(each.callback_url).origin, []).append(each)
        for address, registrations in by_address.items():
            if address != own and await is_serving(address):
                for each in registrations:
                    self._remove(each)

    def _remove(self, registration: Registration) -> None:
        self._changed = True
        of_name = self._needed_at[registration.name]
        del of_name[registration]
        if not of_name:
            del self._needed_at[registration.name]


UPSTREAM = Kind(  # by URL of the main server
    "upstream",
    needed=True,
    without="start without them; tools that an earlier run left at a main server are then left alone",
    synced=True,
    earlier=Earlier("upstream.json", lambda path: _read_earlier(path)),
)


class StoredOwnership:
    """The stored registrations at each main server.

    Args:
        url: of the main server.

    Raises:
        SetupError: from the constructor; they are damaged.
    """

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        self._url = url
        self._broken = False  # whether the last write failed
        content = store.load(UPSTREAM)
        self._urls = list(content)  # the newest last
        try:
            self.earlier = [_registration(row) for row in content.get(url, [])]
        except (ValueError, TypeError) as error:
            raise store.damaged(UPSTREAM, error) from error

    def save(self, registrations: list[Registration]) -> None:
        """Writes the registrations; a failure is logged once, and they are known in this run only."""
        urls = [url for url in self._urls if url != self._url] + [self._url] * bool(registrations)
        rows = {self._url: [list(each) for each in registrations]} if registrations else {}
        try:
            self._store.write(UPSTREAM, rows, [self._url, *urls[:-MAX_SERVERS]])
            self._urls, self._broken = urls[-MAX_SERVERS:], False
        except (WriteFailed, ValueError) as error:
            if not self._broken:
                log.warning("cannot store ownership (%s): after a restart the bus leaves its own tools alone", error)
            self._broken = True


def _read_earlier(path: Path) -> dict[str, Any]:
    content = read_state(path)
    return {url: [list(_registration(row)) for row in rows] for url, rows in content.items()}


def _registration(row: Any) -> Registration:
    """Reads a row of the file.

    Raises:
        ValueError: it is not one.
    """
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError(f"{row!r} is not a registration")
    name, role, source, callback_url = row
    if not all(isinstance(each, str) for each in (name, source, callback_url, role or "")):
        raise ValueError(f"{row!r} is not a registration")
    parse_callback_url(callback_url)
    return Registration(name, role, source, callback_url)
