"""Holds which sessions are attached, which sources are in their grace period, and which token binds a source.

It only looks up and remembers: sessions are opened by the handshake and ended by presence. The health of a source is
derived from these tables.
"""

from __future__ import annotations

import math
import secrets

from toolbus.bus.access.identity import Identity
from toolbus.bus.streams.peer import Peer
from toolbus.errors import NotPermitted, SessionGone
from toolbus.session import State

LOST_SECONDS = 3600.0  # how long a source is listed after its grace period, as the series of its tools are
MAX_LOST = 1_000  # such sources: names that never come back must not fill the memory


class Traffic:
    """What the streams of a bus have carried, in messages and in their calls and results."""

    __slots__ = ("frames_in", "frames_out", "items_in", "items_out")

    def __init__(self) -> None:
        self.frames_in = self.frames_out = self.items_in = self.items_out = 0


class SessionTable:
    """The attached sessions of one bus, by session id, by source and by instance."""

    def __init__(self) -> None:
        self.sessions: dict[str, Peer] = {}  # by session_id
        self.by_source: dict[str, dict[str, Peer]] = {}  # source → session_id → peer
        self._by_instance: dict[tuple[str, str], Peer] = {}  # (source, instance) → its newest session
        self._grace_ends: dict[str, float] = {}  # source that disconnected → when its grace period ends
        self._lost: dict[str, float] = {}  # source whose grace period ended → when it is forgotten
        self._tokens: dict[str, str] = {}  # source → the token that binds it while it is attached or in grace
        self.traffic = Traffic()
        self.draining = False  # whether the bus shuts down and accepts no new session
        self.drain_ends = math.inf  # when it ends what is left then; by `time.monotonic`

    def __repr__(self) -> str:
        counts = f"sessions={len(self.sessions)} sources={len(self.by_source)} in_grace={len(self._grace_ends)}"
        return f"<{type(self).__name__} {counts}>"

    def session(self, session_id: str) -> Peer:
        """Returns the live session with an id.

        Raises:
            SessionGone: no session has it.
        """
        peer = self.sessions.get(session_id)
        if peer is None or peer.state is State.CLOSED:
            raise SessionGone
        return peer

    def session_of(self, identity: Identity, session_id: str) -> Peer:
        """Returns the live session with an id, for an identity that it belongs to.

        Raises:
            SessionGone: no session of the identity has it.
        """
        peer = self.session(session_id)
        if identity.scopes is not None and peer.principal.identity.name != identity.name:
            raise SessionGone
        return peer

    def count_of(self, identity: Identity, but: Peer | None = None) -> int:
        """Returns how many sessions an identity has, without the session ``but``."""
        return sum(peer.principal.identity.name == identity.name and peer is not but for peer in self.sessions.values())

    def of_instance(self, source: str, instance: str) -> Peer | None:
        """Returns the session that a new one of this instance takes over from; None: it takes over from none.

        A session that drains is not replaced: it finishes its calls beside the new one.
        """
        older = self._by_instance.get((source, instance)) if instance else None
        return None if older is None or (older.state is State.LEAVING and not older.half_closed) else older

    def add(self, peer: Peer, token: str) -> None:
        """Adds a session under an id of its own, and binds its source to a token unless that is ""."""
        peer.session_id = secrets.token_hex(16)
        self.sessions[peer.session_id] = peer
        self.by_source.setdefault(peer.source, {})[peer.session_id] = peer
        if peer.instance:
            self._by_instance[peer.source, peer.instance] = peer
        self._grace_ends.pop(peer.source, None)
        self._lost.pop(peer.source, None)
        if token:
            self._tokens[peer.source] = token

    def remove(self, peer: Peer) -> None:
        """Removes a session that has ended."""
        self.sessions.pop(peer.session_id, None)
        of_source = self.by_source.get(peer.source, {})
        of_source.pop(peer.session_id, None)
        if not of_source:
            self.by_source.pop(peer.source, None)
            if peer.source not in self._grace_ends:
                self._tokens.pop(peer.source, None)
        if self._by_instance.get((peer.source, peer.instance)) is peer:
            del self._by_instance[peer.source, peer.instance]

    def start_grace(self, source: str, until: float) -> None:
        """Starts the grace period of a source: until then its tools stay offline and its token binds it."""
        self._grace_ends[source] = until

    def expire_grace(self, now: float) -> list[str]:
        """Ends the grace periods that are over. Returns their sources."""
        expired = [source for source, until in self._grace_ends.items() if until <= now]
        for source in expired:
            del self._grace_ends[source]
            if source not in self.by_source:
                self._tokens.pop(source, None)
                self._lost[source] = now + LOST_SECONDS
        while self._lost and (len(self._lost) > MAX_LOST or next(iter(self._lost.values())) <= now):
            del self._lost[next(iter(self._lost))]
        return expired

    def check_token(self, source: str, token: str) -> None:
        """Checks the token of an attach.

        Raises:
            NotPermitted: another token binds the source.
        """
        bound = self._tokens.get(source)
        if bound is not None and not secrets.compare_digest(bound.encode(), token.encode()):
            raise NotPermitted(
                f"source {source!r} is bound to a token, and the attach carries another or none: use another source, "
                "or the token (TOOLBUS_TOKEN) of the sessions that have it"
            )

    def is_bound(self, source: str) -> bool:
        """Tells whether a token binds a source, so that tools cannot be offered under it without the token."""
        return source in self._tokens

    def serving(self, source: str) -> bool | None:
        """Tells whether a source answers; None where it is unknown: never attached, or its grace period is over."""
        live = [peer for peer in self.by_source.get(source, {}).values() if peer.state is State.LIVE]
        if live:
            return any(peer.takes_calls for peer in live)
        return False if source in self._grace_ends else None

    @property
    def in_grace(self) -> list[str]:
        """The sources that disconnected and are in their grace period."""
        return list(self._grace_ends)

    def grace_end(self, source: str) -> float | None:
        """Returns when the grace period of a source that disconnected ends; None where it is in none."""
        return self._grace_ends.get(source)

    @property
    def lost_sources(self) -> list[str]:
        """The sources that disconnected without a drain, whose grace period ended in the last hour."""
        return list(self._lost)

    def known_sources(self) -> list[str]:
        """Returns the sources whose health is known."""
        return [source for source in {*self.by_source, *self._grace_ends} if self.serving(source) is not None]

    def notices(self, source: str = "") -> list[tuple[str, str]]:
        """Returns the notices of attached sources, or of one source, for operators: (source, text), each once."""
        pairs = ((peer.source, text) for peer in self.sessions.values() for text in peer.notices)
        return [pair for pair in dict.fromkeys(pairs) if source in ("", pair[0])]
