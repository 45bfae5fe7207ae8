"""Notifies clients of changes: of lists of tools, prompts and resources, and of the contents of resources.

A listener is notified only if its own view of a list has changed: the digest of its list counts, not the catalog's
revision. Changes within `COALESCE_SECONDS` are one. All clients that watch a resource share one subscription at its
mounted server.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.access.identity import Identity, Principal, Scopes
from toolbus.bus.core import Core
from toolbus.bus.streams.notification_board import BoardEntry
from toolbus.errors import LimitExceeded
from toolbus.parts.mcp.features import FeatureProvider, features_of
from toolbus.parts.mcp.messages.eras import LIST_CHANGES
from toolbus.parts.mcp.server.feature_view import FeatureView
from toolbus.parts.mcp.server.mcp_listing import Listings
from toolbus.parts.mcp.server.sessions import UPDATED, McpSession, reaches
from toolbus.parts.mcp.settings import Profile
from toolbus.sdk.notification import wants_of

log = logging.getLogger("toolbus.mcp")

COALESCE_SECONDS = 0.02
NOTIFICATION_LEVEL = "notice"  # of what plugins say to users; clients get "info" and above unless they say otherwise
MAX_LISTENERS = 1_000
MAX_WATCHED = 1_000  # resources, or tasks, of one listener
MAX_WATCHED_TEXT = 256 * 1024  # characters of the URIs of a session

Json = dict[str, Any]
Notify = Callable[[str, Json], None]
_Seen = tuple[str, str, Scopes | None, bool]  # kind, profile, scopes, era: who sees the same list


class Listener:
    """One client that is notified of changes.

    Attributes:
        profile, identity, modern: determine its view of the lists.
        digests: of each list that it subscribes to, at the last notification.
        notify: sends it a notification.
        ended: set after the last notification.
    """

    def __init__(self, profile: Profile, identity: Identity, notify: Notify, *, modern: bool) -> None:
        self.profile = profile
        self.identity = identity
        self.modern = modern
        self.notify = notify
        self.digests: dict[str, bytes] = {}
        self.ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Listener {self.profile.name} {' '.join(self.digests)}>"


class _Watched:
    """A watched resource: one subscription at its mount."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.provider: FeatureProvider | None = None  # None while its mount does not run
        self.watchers: dict[object, Callable[[str], object]] = {}
        self.end: Callable[[], None] = lambda: None  # ends the subscription

    def watch(self, provider: FeatureProvider | None) -> None:
        """Subscribes at a new provider of the same mount, after it was restarted."""
        if provider is not self.provider:
            self.end()
            reports = provider is not None and "subscribe" in provider.capabilities
            self.provider = provider
            self.end = provider.subscribe(self.uri, self.updated) if provider and reports else lambda: None

    def updated(self, uri: str) -> None:
        for watcher in list(self.watchers.values()):
            watcher(uri)


class Subscriptions:
    """The listeners of one bus. Everything happens on its loop."""

    def __init__(self, core: Core, listings: Listings, features: FeatureView) -> None:
        self._core = core
        self._listings = listings
        self._features = features
        self._listeners: dict[Listener, None] = {}
        self._watched: dict[tuple[str, str], _Watched] = {}  # by source and URI
        self._resumed: weakref.WeakSet[McpSession] = weakref.WeakSet()  # with subscriptions to unlisted resources
        self._timer: asyncio.TimerHandle | None = None  # None while nothing changed
        self._dirty: set[str] = set()  # the lists that may have changed
        self._all_features = features_of(core)
        self._end_features = self._all_features.on_change(self._changed)
        core.signals.on_change.append(lambda: self._changed("tools"))

    def __repr__(self) -> str:
        return f"<Subscriptions listeners={len(self._listeners)} resources={len(self._watched)}>"

    def add(self, listener: Listener, kinds: Iterable[str]) -> None:
        """Notifies a listener of changes of some lists from now on.

        Raises:
            LimitExceeded: the limit of listeners is reached.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            why = "the bus has as many MCP listeners as it may: try later"
            raise LimitExceeded("mcp_listeners", MAX_LISTENERS, why)
        self._listeners[listener] = None
        listener.digests = {kind: self._digest(kind, listener) for kind in kinds}

    def remove(self, listener: Listener) -> None:
        """Ends the notifications of a listener."""
        self._listeners.pop(listener, None)
        listener.ended.set()

    def follow(self, session: McpSession) -> Callable[[], None]:
        """Notifies a legacy session of changes of all lists, and passes on what plugins say to its user.

        Returns the function that ends that.
        """
        listener = Listener(session.profile, session.identity, session.notify, modern=False)
        self.add(listener, LIST_CHANGES)
        principal = Principal(session.profile.source, is_admin=session.profile.administers, identity=session.identity)
        notifications = self._core.sessions.presence.notifications
        end_reading = notifications.read(principal, functools.partial(_pass_on, session), lambda: None)

        def end() -> None:
            end_reading()
            self.remove(listener)

        return end

    def subscribe(self, session: McpSession, uri: str) -> bool:
        """Notifies a legacy session of each update of a resource; returns False if the resource is unknown."""
        end = self.watch_resource(
            session.profile, session.identity, uri, lambda updated: session.notify(UPDATED, {"uri": updated})
        )
        if end is not None:
            session.subscriptions[uri] = end
        return end is not None

    def resume(self, session: McpSession) -> None:
        """Goes on with the subscriptions of a session after a restart, each as soon as a mount has its resource."""
        waiting = [uri for uri, end in session.subscriptions.items() if end is None]
        found = [uri for uri in waiting if self.subscribe(session, uri)]
        if not session.is_restored:  # else it gets notifications of all
            for uri in found:
                session.notify(UPDATED, {"uri": uri})
        if found == waiting:
            self._resumed.discard(session)
        else:
            self._resumed.add(session)

    def watch_resource(
        self, profile: Profile, identity: Identity, uri: str, on_update: Callable[[str], object]
    ) -> Callable[[], None] | None:
        """Reports each update of a resource. Returns the function that ends that; None if the resource is unknown."""
        providers = self._features.providers_of(profile, identity, uri)
        provider = next((each for each in providers if "subscribe" in each.capabilities), None)
        if provider is None:
            return (lambda: None) if providers else None  # a resource that is never updated
        key, watcher = (provider.source, uri), object()
        watched = self._watched.setdefault(key, _Watched(uri))
        watched.watch(provider)
        watched.watchers[watcher] = on_update

        def end() -> None:
            if watched.watchers.pop(watcher, None) is not None and not watched.watchers:
                if self._watched.get(key) is watched:
                    del self._watched[key]
                watched.end()

        return end

    def end_all(self) -> None:
        for listener in list(self._listeners):
            self.remove(listener)

    def close(self) -> None:
        """Ends all listeners, for good."""
        self._end_features()
        self.end_all()
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self, kind: str) -> None:
        if kind == "resources" and self._watched:
            providers = {each.source: each for each in self._all_features.providers}
            for (source, _), watched in list(self._watched.items()):
                watched.watch(providers.get(source))
        # While the bus shuts down, its tools leave to come back: clients that list then would find no bus.
        if not (self._listeners or self._resumed) or self._core.sessions.presence.draining:
            return
        self._dirty.add(kind)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._notify_changes)

    def _notify_changes(self) -> None:
        """Notifies each listener whose own list has changed."""
        dirty, self._dirty, self._timer = self._dirty, set(), None
        for session in list(self._resumed) if "resources" in dirty else ():
            self.resume(session)
        digests: dict[_Seen, bytes] = {}
        for listener in list(self._listeners):
            for kind in dirty.intersection(listener.digests):
                seen = (kind, listener.profile.name, listener.identity.scopes, listener.modern)
                if seen not in digests:
                    digests[seen] = self._digest(kind, listener)
                if digests[seen] != listener.digests[kind]:
                    listener.digests[kind] = digests[seen]
                    listener.notify(f"notifications/{kind}/list_changed", {})

    def _digest(self, kind: str, listener: Listener) -> bytes:
        profile, identity = listener.profile, listener.identity
        if kind == "tools":
            return self._listings.catalog(profile, identity, modern=listener.modern).digest
        return self._features.digest(kind, profile, identity)


def _pass_on(session: McpSession, notification: BoardEntry) -> None:
    """Sends what a plugin said to the user of a session, or to everyone, as a message of the log.

    MCP has nothing nearer: hosts show such messages, and some give them to the model.
    """
    user = session.profile.user
    if (user and notification.user_id not in ("", user)) or not reaches(NOTIFICATION_LEVEL, session.log_level):
        return
    data = json.loads(notification.data_json) if notification.data_json else None
    said = {"text": notification.text, "user_id": notification.user_id, "number": notification.number}
    said |= {"wants": wants_of(data), "data": data}
    message = {"level": NOTIFICATION_LEVEL, "logger": notification.source, "data": said}
    session.notify("notifications/message", message)
