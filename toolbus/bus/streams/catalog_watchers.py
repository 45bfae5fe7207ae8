"""The sessions that want to hear of the catalog, and the word to them.

A change costs what those who watch need: sessions that do not are never looked at, and what several watchers missed is
put into words once. Presence says who watches, and whoever wires the bus says when they are told.
"""

from __future__ import annotations

from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.peer import Peer
from toolbus.v1 import tool_bus_service_pb2 as wire

NOTHING = -1  # the revision that a watcher knows which was told nothing yet


class CatalogWatchers:
    """Who watches the catalog, and what each has been told."""

    def __init__(self, view: CatalogView) -> None:
        self._view = view
        self._known: dict[Peer, int] = {}  # watcher → the revision that its last event brought it to
        self._said: dict[int, list[wire.Event]] = {}  # what watchers that knew a revision missed up to `_said_at`
        self._said_at = NOTHING  # the revision up to which `_said` goes

    def __repr__(self) -> str:
        return f"<CatalogWatchers {len(self._known)} revision={self._said_at}>"

    def follow(self, peer: Peer, watches: bool) -> None:
        """Takes down whether a session wants to hear of the catalog; a new watcher gets its first list at once."""
        if not watches:
            self.drop(peer)
        elif peer not in self._known:
            self._known[peer] = NOTHING
            self._tell(peer, self._view.revision)

    def drop(self, peer: Peer) -> None:
        """A session watches no more."""
        self._known.pop(peer, None)

    def tell(self) -> None:
        """Brings every watcher up to date; one that reads slowly gets it all at once, later."""
        revision = self._view.revision
        for peer in list(self._known):
            self._tell(peer, revision)

    def forget(self) -> None:
        """Drops what was said: the counts of calls in it grow old, and a long list would stay in memory."""
        self._said.clear()

    def _tell(self, peer: Peer, revision: int) -> None:
        known = self._known[peer]
        if known == revision or peer.outbox.waiting_bytes > catalog_messages.EVENT_BYTES:
            return
        missed = self._missed(known, revision)
        self._known[peer] = revision
        for event in missed:
            change = event.catalog
            # A revision alone says that something changed which is not for everyone.
            if change.full or change.added or change.changed or change.removed or self._view.permissions:
                peer.tell(event)

    def _missed(self, known: int, revision: int) -> list[wire.Event]:
        """Returns what a watcher that knows a revision has to hear: the same messages for all that know the same."""
        if self._said_at != revision:
            self._said_at = revision
            self._said.clear()
        missed = self._said.get(known)
        if missed is None:
            missed = self._said[known] = list(catalog_messages.changes(self._view.since(known)))
        return missed
