"""Opens sessions: checks an attach, has its tools judged, takes over from an older session, answers ``attached``.

A peer that reconnects attaches under the same source and instance; its new session then replaces the older one, which
the caller ends. A later attach on the same stream replaces the declared tools. Knows no sockets and ends no session.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.access.identity import Identity
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import BUS_SOURCE, RUN_SOURCES, is_operators
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams.catalog_messages import waiting_to_wire
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.refused_tools import Cause, Refusal, to_wire
from toolbus.bus.streams.tool_review import Judgement, ToolReview
from toolbus.common.text import quote, shorten
from toolbus.errors import (
    AlreadyAttached,
    InvalidRequest,
    LimitExceeded,
    NotAudited,
    NotPermitted,
    PeerLost,
    ProtocolError,
    RequestError,
    SessionGone,
    VersionMismatch,
)
from toolbus.protocol.session import State
from toolbus.protocol.tool import INSTANCE, PROTOCOL_VERSIONS, SOURCE, Limits, explain_instance
from toolbus.v1 import tool_bus_service_pb2 as wire

# Holds which sessions are attached, which sources are in their grace period, and which token binds a source.
#
# It only looks up and remembers: sessions are opened by the handshake and ended by presence. The health of a source is
# derived from these tables.

GUARDED_SESSIONS = 32  # of one guarded source, whose groups have one each
SHARE = 20  # one in so many of the bus's sessions are for one identity whose scopes state no number
LOST_SECONDS = 3600.0  # how long a source is listed after its grace period, as the series of its tools are
MAX_LOST = 1_000  # such sources: names that never come back must not fill the memory


def own_sessions(identity: Identity, limits: Limits) -> int | None:
    """Returns how many sessions an identity may have; None of a program of this machine."""
    if identity.scopes is None:
        return None
    return max(1, limits.sessions // SHARE) if identity.scopes.sessions is None else identity.scopes.sessions


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
        self.grace_ends: dict[str, float] = {}  # source that disconnected → when its grace period ends
        self.lost: dict[str, float] = {}  # source that left without a drain and whose grace period ended → until when
        self._tokens: dict[str, str] = {}  # source → the token that binds it while it is attached or in grace
        self.traffic = Traffic()
        self.draining = False  # whether the bus shuts down and accepts no new session
        self.drain_ends = math.inf  # when it ends what is left then; by `time.monotonic`

    def __repr__(self) -> str:
        counts = f"sessions={len(self.sessions)} sources={len(self.by_source)} in_grace={len(self.grace_ends)}"
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
        self.grace_ends.pop(peer.source, None)
        self.lost.pop(peer.source, None)
        if token:
            self._tokens[peer.source] = token

    def remove(self, peer: Peer) -> None:
        """Removes a session that has ended."""
        self.sessions.pop(peer.session_id, None)
        of_source = self.by_source.get(peer.source, {})
        of_source.pop(peer.session_id, None)
        if not of_source:
            self.by_source.pop(peer.source, None)
            if peer.source not in self.grace_ends:
                self._tokens.pop(peer.source, None)
        if self._by_instance.get((peer.source, peer.instance)) is peer:
            del self._by_instance[peer.source, peer.instance]

    def start_grace(self, source: str, until: float) -> None:
        """Starts the grace period of a source: until then its tools stay offline and its token binds it."""
        self.grace_ends[source] = until

    def expire_grace(self, now: float) -> list[str]:
        """Ends the grace periods that are over. Returns their sources."""
        expired = [source for source, until in self.grace_ends.items() if until <= now]
        for source in expired:
            del self.grace_ends[source]
            if source not in self.by_source:
                self._tokens.pop(source, None)
                self.lost[source] = now + LOST_SECONDS
        while self.lost and (len(self.lost) > MAX_LOST or next(iter(self.lost.values())) <= now):
            del self.lost[next(iter(self.lost))]
        return expired

    def check_token(self, source: str, token: str) -> None:
        """Checks the token of an attach.

        Raises:
            NotPermitted: another token binds the source.
            PeerLost: another token bound the sessions that broke, for the rest of their grace period: a later attach,
                as a supervisor that was killed and started again does it, gets the source.
        """
        bound = self._tokens.get(source)
        if bound is None or secrets.compare_digest(bound.encode(), token.encode()):
            return
        if source not in self.by_source:
            raise PeerLost(
                f"source {source!r} is bound to the token of a session that broke, until its grace period ends"
            )
        raise NotPermitted(
            f"source {source!r} is bound to a token, and the attach carries another or none: use another source, or "
            "the token (TOOLBUS_TOKEN) of the sessions that have it; `toolbus run --replicas N` starts processes that "
            "share one"
        )

    def is_bound(self, source: str) -> bool:
        """Tells whether a token binds a source, so that tools cannot be offered under it without the token."""
        return source in self._tokens

    def serving(self, source: str) -> bool | None:
        """Tells whether a source answers; None where it is unknown: never attached, or its grace period is over."""
        live = [peer for peer in self.by_source.get(source, {}).values() if peer.state is State.LIVE]
        if live:
            return any(peer.takes_calls for peer in live)
        return False if source in self.grace_ends else None

    def known_sources(self) -> list[str]:
        """Returns the sources whose health is known."""
        return [source for source in {*self.by_source, *self.grace_ends} if self.serving(source) is not None]

    def notices(self, source: str = "") -> list[tuple[str, str]]:
        """Returns the notices of attached sources, or of one source, for operators: (source, text), each once."""
        pairs = ((peer.source, text) for peer in self.sessions.values() for text in peer.notices)
        return [pair for pair in dict.fromkeys(pairs) if source in ("", pair[0])]


log = logging.getLogger("toolbus.sessions")

MAX_NOTICES, MAX_NOTICE = 100, 500  # of a session; characters of each
MAX_TAKEOVERS = 5  # a minute; more means that two processes share an instance name and keep replacing each other
TAKEOVER_SECONDS = 60.0


class ServerHandshake:
    """The attach of every session of one bus.

    Args:
        bus: (bus_id, boot_id, version) as ``attached`` shows them.
        table: where opened sessions are added.
    """

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        policy: Policy,
        limits: Limits,
        bus: tuple[str, str, str],
        table: SessionTable,
        review: ToolReview,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._policy = policy
        self._limits = limits
        self._review = review
        self._bus = bus
        self._table = table
        self._takeovers: dict[tuple[str, str], deque[float]] = {}  # (source, instance) → when it took over lately

    def __repr__(self) -> str:
        return f"<ServerHandshake takeovers={len(self._takeovers)}>"

    @property
    def boot_id(self) -> str:
        """Identifies this run of the bus."""
        return self._bus[1]

    def open(self, peer: Peer, attach: wire.Attach, now: float) -> Peer | None:
        """Opens a session by its first attach.

        Returns:
            The older session that this one replaces (a takeover); the caller is to end it.

        Raises:
            RequestError: the attach is refused; nothing has changed.
        """
        self.check(peer, attach)
        judgement = self._judge(peer, attach, qualified=attach.qualified)
        peer.source, peer.instance, peer.qualified = attach.source, attach.instance, attach.qualified
        peer.principal = peer.principal.of_source(attach.source)
        peer.untrusted |= self._policy.is_untrusted(attach.source)
        peer.notices = tuple(text[:MAX_NOTICE] for text in attach.notices[:MAX_NOTICES])
        peer.budget = self._dispatcher.budget(peer.principal.account)
        peer.offers_tools = bool(attach.tools)  # a source that may not offer them counts as a plugin all the same
        peer.open(
            min(attach.max_in_flight or self._limits.calls_in_flight, self._limits.calls_in_flight_most),
            attach.max_message_bytes,
        )
        older = self._table.of_instance(peer.source, peer.instance)
        if older is not None:
            self._count_takeover(peer, now)
            self._registry.lose(older, "replaced by a newer session of the same instance", now)
        outcome, refused = self._review.offer(peer, judgement, whole=True)
        self._table.add(peer, attach.token)
        peer.quota = self._dispatcher.quotas.join(peer.principal.identity, peer)
        self._answer(peer, outcome.names, refused, outcome.waiting)
        deny(peer, "attach", refused)
        log.log(
            peer.log_level,
            "attached source=%s instance=%s tools=%d refused=%d max_in_flight=%d",
            peer.source, peer.instance or "-", len(outcome.names), len(refused), peer.max_in_flight,
        )  # fmt: skip
        return older

    def declare_again(self, peer: Peer, attach: wire.Attach, now: float, check_audit: Callable[[], object]) -> bool:
        """Replaces the tools of a live session by those of a later attach. Returns whether it was accepted.

        Args:
            check_audit: raises NotAudited where the audit cannot be written.

        Raises:
            ProtocolError: the attach is of another source or instance.
        """
        if (attach.source, attach.instance) != (peer.source, peer.instance):
            raise ProtocolError(
                f"this stream is attached as source {peer.source!r} instance {peer.instance!r}; an attach as "
                f"{shorten(attach.source)!r}/{shorten(attach.instance)!r} needs a stream of its own"
            )
        try:
            check_audit()
        except NotAudited as error:
            self.refuse(peer, str(error))
            return False
        try:
            judgement = self._judge(peer, attach, qualified=peer.qualified)
        except RequestError as error:
            refused = [Refusal.of(tool, str(error), Cause.DECLARATION) for tool in attach.tools]
            judgement = Judgement([], refused)
        if attach.all_or_none and judgement.refused:
            self._answer(peer, self._registry.offers(peer), judgement.refused, self._registry.waits(peer))
            deny(peer, "attach", judgement.refused)
            return False
        outcome, refused = self._review.offer(peer, judgement, whole=True)
        self._answer(peer, outcome.names, refused, outcome.waiting)
        deny(peer, "attach", refused)
        log.info("declared again source=%s tools=%d refused=%d", peer.source, len(outcome.names), len(refused))
        return True

    def expire_takeovers(self, now: float) -> None:
        """Drops counts of takeovers that are too old to matter."""
        for instance, times in list(self._takeovers.items()):
            if now - times[-1] > TAKEOVER_SECONDS:
                del self._takeovers[instance]

    def check(self, peer: Peer, attach: wire.Attach) -> None:
        """Checks everything of an attach but its tools; raises as `open`."""
        if attach.protocol_version not in PROTOCOL_VERSIONS:
            raise VersionMismatch(attach.protocol_version, PROTOCOL_VERSIONS)
        if self._table.draining:
            raise PeerLost("the bus is draining and takes no new sessions: try again, it may be restarting")
        if not SOURCE.fullmatch(attach.source):
            raise InvalidRequest(
                f"source {quote(attach.source)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another source"
            )
        if attach.source == BUS_SOURCE:
            raise NotPermitted(f"source {BUS_SOURCE!r} belongs to the bus itself: choose another source")
        if is_operators(attach.source) and not attach.qualified:
            raise InvalidRequest(
                f"source {attach.source!r} begins with {RUN_SOURCES!r}, as those of supervisors do, whose tools are "
                "for operators: attach as qualified, or choose another source"
            )
        if not INSTANCE.fullmatch(attach.instance):
            raise InvalidRequest(explain_instance(attach.instance))
        peer.principal.identity.check_attach(attach.source)
        self._table.check_token(attach.source, attach.token)
        older = self._table.of_instance(attach.source, attach.instance)
        if older is not None and not self._table.is_bound(attach.source):  # a token proves whose the source is
            _check_takeover(peer.principal.identity, older)
        self._check_own_sessions(peer.principal.identity, older)
        of_source = len(self._table.by_source.get(attach.source, ())) - (older is not None)
        if self._policy.is_untrusted(attach.source) and of_source >= GUARDED_SESSIONS:
            raise LimitExceeded(
                "sessions", GUARDED_SESSIONS, f"guarded source {attach.source!r} has {of_source}, the most of one"
            )
        if len(self._table.sessions) >= (limit := self._limits.sessions):
            raise LimitExceeded("sessions", limit, f"the bus has {limit} sessions and accepts no more")

    def _check_own_sessions(self, identity: Identity, older: Peer | None) -> None:
        """Checks how many sessions an identity has, without the one that the new one replaces."""
        limit = own_sessions(identity, self._limits)
        if limit is not None and self._table.count_of(identity, but=older) >= limit:
            raise LimitExceeded(
                "sessions", limit, f"{identity.shown} has {limit} sessions, all that its scope sessions allows"
            )

    def _judge(self, peer: Peer, attach: wire.Attach, *, qualified: bool) -> Judgement:
        """Judges the tools of an attach; raises as `ToolReview.judge`."""
        return self._review.judge(
            peer.principal.identity, attach.source, attach.tools, qualified=qualified, all_or_none=attach.all_or_none
        )

    def refuse(self, peer: Peer, why: str) -> None:
        """Refuses a whole later attach, whatever its tools are."""
        whole = [Refusal("", "", why, Cause.DECLARATION)]
        self._answer(peer, self._registry.offers(peer), whole, self._registry.waits(peer), refused_total=0)

    def _count_takeover(self, peer: Peer, now: float) -> None:
        times = self._takeovers.setdefault((peer.source, peer.instance), deque(maxlen=MAX_TAKEOVERS))
        if len(times) == MAX_TAKEOVERS and now - times[0] < TAKEOVER_SECONDS:
            raise AlreadyAttached(
                f"source {peer.source!r} instance {peer.instance!r} attached more than {MAX_TAKEOVERS} times "
                "within a minute, each time ending a live session: two processes share one instance name; "
                "give each its own"
            )
        times.append(now)

    def _answer(
        self,
        peer: Peer,
        names: Sequence[str],
        refused: Sequence[Refusal],
        waiting: Sequence[tuple[str, str]] = (),
        refused_total: int | None = None,
    ) -> None:
        (bus_id, boot_id, version), limits = self._bus, self._limits
        identity = peer.principal.identity
        attached = wire.Attached(
            session_id=peer.session_id,
            identity=identity.name,
            expires_seconds=max(0.0, identity.expires - time.time()) if math.isfinite(identity.expires) else 0.0,
            bus_id=bus_id,
            boot_id=boot_id,
            bus_version=version,
            protocol_version=PROTOCOL_VERSIONS[-1],
            heartbeat_seconds=peer.timings.idle_heartbeat_seconds,
            echoes=True,
            revision=self._registry.revision,
            registered=names if sum(map(len, names)) < peer.max_item_bytes // 2 else (),
            refused=to_wire(refused, peer.max_item_bytes),
            waiting=waiting_to_wire(waiting, peer.max_item_bytes),
            refused_total=len(refused) if refused_total is None else refused_total,
            limits=wire.Limits(
                message_bytes=limits.message_bytes,
                calls_in_flight=peer.max_in_flight,
                arguments_bytes=limits.arguments_bytes,
                result_bytes=limits.result_bytes,
                schema_bytes=limits.schema_bytes,
                description_bytes=limits.description_bytes,
                tools=limits.tools,
                call_depth=limits.call_depth,
                grace_seconds=self._registry.grace_seconds,
            ),
        )
        peer.outbox.seal()
        peer.outbox.room(attached.ByteSize()).attached.CopyFrom(attached)


def _check_takeover(identity: Identity, older: Peer) -> None:
    """Checks that an identity replaces a session of its own.

    Raises:
        AlreadyAttached: the session is of another identity.
    """
    if identity.scopes is not None and older.principal.identity.name != identity.name:
        raise AlreadyAttached(
            f"source {older.source!r} instance {older.instance!r} is attached by another identity than "
            f"{identity.shown}: use another instance, or wait until that session has ended"
        )


def deny(peer: Peer, operation: str, refused: Iterable[Refusal]) -> None:
    """Notifies a session that it lacks the permission to offer tools, where a tool was refused for that."""
    if not any(each.cause is Cause.PERMISSION for each in refused):
        return
    peer.send_event(wire.Event(permission_denied=wire.PermissionDenied(permission="tools", operation=operation)))
    log.warning("denied source=%s operation=%s permission=tools", peer.source, operation)
