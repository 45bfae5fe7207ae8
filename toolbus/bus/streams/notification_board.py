"""Passes on the notifications of plugins to users outside a call, and stores the newest for readers that return.

A notification reaches the sessions that subscribed and the readers of the gateway, each as far as it may see the user
and the source. Nothing waits for a slow reader: what does not fit is counted, and the next notification says how many
were lost.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from toolbus.bus.access.identity import Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.policy import EVERYONE, MAX_USER
from toolbus.bus.streams.peer import Peer
from toolbus.common.newest import NewestCache
from toolbus.common.text import is_utf8, parse_json, quote
from toolbus.errors import InvalidRequest, LimitExceeded, NotPermitted
from toolbus.protocol.limits import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire

MAX_TEXT_BYTES = 16 * 1024
MAX_DATA_BYTES = 256 * 1024
MAX_STORED = 1_000  # notifications that a reader can still get when it returns
MAX_STORED_BYTES = 4 * MIB
PER_SECOND = 20.0  # of one source, twice as many in a burst
MAX_SOURCES = 1_000  # whose rate is remembered
_WAITING_BYTES = 512 * 1024  # what may wait for a session before notifications for it are counted as lost


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """One notification of a plugin: see `Notification` of the wire."""

    number: int
    source: str
    user_id: str
    text: str
    data_json: str
    time_seconds: float

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.text) + len(self.data_json) + 100

    def to_wire(self, lost: int) -> wire.Event:
        """Returns the event for a session.

        Args:
            lost: how many before this one it will not get.
        """
        return wire.Event(notification=wire.Notification(**asdict(self), lost=lost))


class NotificationBoard:
    """The notifications of one bus. All methods belong to the bus's loop."""

    def __init__(self, view: CatalogView, clock: Callable[[], float] = time.time) -> None:
        self._view = view
        self._clock = clock
        self._newest: deque[BoardEntry] = deque()  # the newest, oldest first
        self._stored_bytes = Counter[str]()  # by source
        # Numbers begin with the time in µs, so that they rise over restarts of a bus that persists nothing: no bus gets
        # one each µs. A bus with a data directory also continues after what it stored: the clock may be wrong.
        self.newest = self._first = int(clock() * 1e6)
        self._peers: dict[Peer, int] = {}  # subscribers → how many they have lost since the last that they got
        # Readers → who reads, and what to call when the bus stops.
        self._readers: dict[Callable[[BoardEntry], object], tuple[Principal, Callable[[], object]]] = {}
        self._quotas: NewestCache[str, Quota] = NewestCache(MAX_SOURCES)

    def __repr__(self) -> str:
        return f"<NotificationBoard stored={len(self._newest)} followers={len(self._peers) + len(self._readers)}>"

    def begin_after(self, number: int) -> None:
        """Goes on after a number of an earlier run, if that is higher; before anything is published."""
        if number >= self.newest:
            self.newest = self._first = number + 1

    def publish(self, source: str, user_id: str, text: str, data_json: str) -> int:
        """Passes a notification on.

        Args:
            user_id: whom it is for; "" for everyone.
            data_json: "" for none.

        Returns:
            How many sessions and readers it was sent to.

        Raises:
            InvalidRequest: a value breaks its rule.
            NotPermitted: the source's tools are not open to the user.
        """
        _check(user_id, text, data_json)
        users = self._view.permissions.sources.get(source)
        if users is not None and user_id and EVERYONE not in users and user_id not in users:
            raise NotPermitted(f"source {quote(source)} is not open to user {quote(user_id)}: an operator adds them")
        self.newest += 1
        notification = BoardEntry(self.newest, source, user_id, text, data_json, self._clock())
        self._store(notification)
        peers = [peer for peer in self._peers if self._shows_to(peer, notification)]
        readers = [read for read, (principal, _) in self._readers.items() if self.shows(notification, principal)]
        for read in readers:
            read(notification)
        return sum(self._send(peer, notification) for peer in peers) + len(readers)

    def follow(self, peer: Peer, follows: bool, after: int = 0) -> None:
        """Adds or drops a session.

        Args:
            after: the newest number that a new one has, whose later ones it gets now; 0: only those to come.
        """
        if not follows:
            self.drop(peer)
        elif peer not in self._peers:
            self._peers[peer] = self.lost_after(after)
            for notification in self.since(after, peer.principal):
                if self._shows_to(peer, notification):
                    self._send(peer, notification, room=peer.outbox.max_bytes // 2)

    def drop(self, peer: Peer) -> None:
        """Drops a session."""
        self._peers.pop(peer, None)

    def read(
        self, principal: Principal, reader: Callable[[BoardEntry], object], on_close: Callable[[], object]
    ) -> Callable[[], object]:
        """Passes notifications that a principal may see to a reader, which must not block. Returns how to end that.

        Args:
            on_close: called when the bus stops.
        """
        self._readers[reader] = principal, on_close
        return functools.partial(self._readers.pop, reader, None)

    def close(self) -> None:
        """Notifies the readers that nothing more will come."""
        for _, on_close in list(self._readers.values()):
            on_close()

    def since(self, number: int, principal: Principal) -> Iterator[BoardEntry]:
        """Yields the stored ones after a number that a principal may see, oldest first; none after 0."""
        stored = list(self._newest) if number else []
        return (each for each in stored if each.number > number and self.shows(each, principal))

    def lost_after(self, number: int) -> int:
        """Returns how many of this run of the bus came after a number and are not stored any more; 0 after 0."""
        after = max(number, self._first)
        return max(0, self.newest - after - sum(each.number > after for each in self._newest)) if number else 0

    def shows(self, notification: BoardEntry, principal: Principal) -> bool:
        """Tells whether a principal may see a notification: its user, and a tool of its source."""
        scopes = principal.identity.scopes
        if scopes is None:
            return True
        if notification.user_id and not scopes.users.match(notification.user_id):
            return False
        return not self._view.hides_source(notification.source, scopes.level, principal)

    def _shows_to(self, peer: Peer, notification: BoardEntry) -> bool:
        """Tells whether a session may see a notification: one of a guarded source sees those of its source only."""
        if peer.untrusted and notification.source != peer.source:
            return False
        return self.shows(notification, peer.principal)

    def _send(self, peer: Peer, notification: BoardEntry, room: int = _WAITING_BYTES) -> bool:
        if peer.outbox.waiting_bytes > room:
            self._peers[peer] += 1
            return False
        peer.send_event(notification.to_wire(self._peers[peer]))
        self._peers[peer] = 0
        return True

    def take_rate(self, source: str, now: float) -> None:
        """Counts a notification of a source; raises LimitExceeded where it notifies too often."""
        quota = self._quotas.get(source)
        if quota is None:
            quota = self._quotas[source] = Quota(PER_SECOND)
        passed, wait = quota.take(1, now)
        if not passed:
            raise LimitExceeded(
                "notifications_per_second", int(PER_SECOND), f"wait {wait:.2f} s, or say several things in one"
            )

    def _store(self, notification: BoardEntry) -> None:
        self._newest.append(notification)
        stored = self._stored_bytes
        stored[notification.source] += notification.size
        while len(self._newest) > MAX_STORED or stored.total() > MAX_STORED_BYTES:
            most = max(stored, key=stored.__getitem__)  # the oldest of the source that stores most goes
            oldest = next(each for each in self._newest if each.source == most)
            self._newest.remove(oldest)
            stored[most] -= oldest.size
            if not stored[most]:
                del stored[most]


def _check(user_id: str, text: str, data_json: str) -> None:
    if len(user_id) > MAX_USER or not is_utf8(user_id):
        raise InvalidRequest(f"user is {quote(user_id)}: use a user id of at most {MAX_USER} characters")
    if not text or not is_utf8(text):
        raise InvalidRequest("text is empty or cannot be written as UTF-8: say what the user should read")
    for name, value, limit in (("text", text, MAX_TEXT_BYTES), ("data", data_json, MAX_DATA_BYTES)):
        if len(value.encode()) > limit:
            raise InvalidRequest(f"{name} has {len(value.encode())} bytes, the limit is {limit}: send a link instead")
    if data_json:
        try:
            parse_json(data_json)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"data is not JSON: {error}") from None
