"""Notifies the sessions that watch the catalog of its changes.

The cost of a change depends on the watchers only: other sessions are not looked at, and events for several watchers are
built once. Presence decides who watches, the wiring of the bus when they are notified.
"""

from __future__ import annotations

from toolbus.bus.access.identity import Scopes
from toolbus.bus.access.principal import Principal
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.peer import Peer
from toolbus.v1 import tool_bus_service_pb2 as wire

NO_REVISION = -1  # of a watcher that has got no event yet


class CatalogWatchers:
    """The watchers of the catalog, each with the revision that it knows."""

    def __init__(self, view: CatalogView) -> None:
        self._view = view
        # Watcher → the revision that its last event brought it to, and the scopes under which it saw that.
        self._known: dict[Peer, tuple[int, Scopes | None]] = {}
        # Cache: known revision, scopes then and now → the events that such a watcher missed up to `_events_at`.
        self._events: dict[tuple[int, Scopes | None, Scopes | None], list[wire.Event]] = {}
        self._events_at = NO_REVISION  # the revision up to which the cached events go

    def __repr__(self) -> str:
        return f"<CatalogWatchers {len(self._known)} revision={self._events_at}>"

    def follow(self, peer: Peer, watches: bool) -> None:
        """Adds or drops a watcher; a new one gets the whole catalog at once."""
        if not watches:
            self.drop(peer)
        elif peer not in self._known:
            self._known[peer] = NO_REVISION, None
            self._notify(peer, self._view.revision)

    def drop(self, peer: Peer) -> None:
        """Drops a watcher."""
        self._known.pop(peer, None)

    def notify(self) -> None:
        """Brings every watcher up to date; one that reads slowly gets all changes at once, later (backpressure)."""
        revision = self._view.revision
        for peer in list(self._known):
            self._notify(peer, revision)

    def clear_cache(self) -> None:
        """Drops the cached events: their counts of calls grow old, and a long list would stay in memory."""
        self._events.clear()

    def _notify(self, peer: Peer, revision: int) -> None:
        known, before = self._known[peer]
        if known == revision or peer.outbox.waiting_bytes > catalog_messages.EVENT_BYTES:
            return
        missed = self._missed(known, before, revision, peer.principal)
        self._known[peer] = revision, peer.principal.identity.scopes
        for event in missed:
            change = event.catalog
            # Under access rules and scopes an event may carry a revision only: something changed that it may not see.
            changed = change.full or change.added or change.changed or change.removed
            if changed or self._view.permissions or peer.principal.identity.scopes is not None:
                peer.send_event(event)

    def _missed(self, known: int, before: Scopes | None, revision: int, principal: Principal) -> list[wire.Event]:
        """Returns the events for a watcher that knows a revision: the same objects for all that know the same."""
        if self._events_at != revision:
            self._events_at = revision
            self._events.clear()
        key = (known, before, principal.identity.scopes)
        missed = self._events.get(key)
        if missed is None:
            changes = self._view.since(known, principal, before=before)
            missed = self._events[key] = list(catalog_messages.changes(changes))
        return missed
