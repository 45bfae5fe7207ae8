"""Finds entries by who offers them: those of a handler, those of a source, and those that are offline.

The index also collects changed offers: for a store, and for the sessions whose tools got or lost their role. The
registry changes it under its lock.
"""

from __future__ import annotations

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.handler import Handler


class OfferIndex:
    """The entries of each handler and of each source.

    Attributes:
        by_handler: the entries that a handler offers, those that wait for a role included.
        by_source: the entries of a source, offline ones included.
        offline: the end of the grace period and the instance that disconnected, for each entry that is offline; the
            first ends first.
        unsaved: persisted handlers whose offers changed since `take_unsaved`.
        reviewed: tools whose role was added or removed since `take_reviewed`, by (name, role): whether each is offered.
    """

    __slots__ = ("by_handler", "by_source", "offline", "reviewed", "unsaved")

    def __init__(self) -> None:
        self.by_handler: dict[Handler, dict[Entry, None]] = {}
        self.by_source: dict[str, dict[Entry, None]] = {}
        self.offline: dict[Entry, tuple[float, str]] = {}
        self.unsaved: dict[Handler, None] = {}
        self.reviewed: dict[Handler, dict[tuple[str, str], bool]] = {}

    def __repr__(self) -> str:
        return f"<OfferIndex handlers={len(self.by_handler)} sources={len(self.by_source)} offline={len(self.offline)}>"

    def add(self, entry: Entry) -> None:
        """Adds an entry of a source."""
        self.by_source.setdefault(entry.source, {})[entry] = None

    def forget(self, entry: Entry) -> None:
        """Removes an entry, which has no handler any more."""
        self.offline.pop(entry, None)
        entries = self.by_source[entry.source]
        entries.pop(entry, None)
        if not entries:  # otherwise every former source would stay in memory
            del self.by_source[entry.source]

    def link(self, handler: Handler, entry: Entry) -> None:
        """Adds a handler to an entry."""
        self.by_handler.setdefault(handler, {})[entry] = None
        if handler.persisted:
            self.unsaved[handler] = None

    def unlink(self, handler: Handler, entry: Entry) -> None:
        """Removes a handler from an entry."""
        if handler.persisted:
            self.unsaved[handler] = None
        entries = self.by_handler.get(handler)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self.by_handler[handler]

    def replaced_by(self, handler: Handler) -> dict[Entry, None]:
        """Returns the entries that an attach replaces: the handler's own and, on a reconnect, those of its instance."""
        before = dict(self.by_handler.get(handler, {}))
        if handler.instance:
            for entry in self.by_source.get(handler.source, ()):
                if entry in self.offline and self.offline[entry][1] == handler.instance:
                    before[entry] = None
        return before

    def review(self, handler: Handler, entry: Entry, role: str, is_offered: bool) -> None:
        """Notes that the role of a tool was added or removed."""
        self.reviewed.setdefault(handler, {})[entry.bare_name, role] = is_offered

    def take_unsaved(self) -> list[Handler]:
        """Returns the persisted handlers whose offers changed since this was last called."""
        unsaved, self.unsaved = list(self.unsaved), {}
        return unsaved

    def take_reviewed(self) -> dict[Handler, dict[tuple[str, str], bool]]:
        """Returns the tools whose role was added or removed since the last call: whether each is offered now."""
        reviewed, self.reviewed = self.reviewed, {}
        return reviewed
