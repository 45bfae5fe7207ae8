"""Who is attached: opens, supersedes, judges and ends sessions, and tells watchers what changed.

It joins session, registry and dispatcher without touching a socket: a shell hands it peers, frames' arms and the
time, and each peer carries the ``close`` with which its RPC is ended. Every way in which a session can end passes
through ``end``.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import lacks_tools
from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.catalog.compiled_tool import CompiledTool
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.catalog_watchers import CatalogWatchers
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.withdrawal import Withdrawal, tell_owners
from toolbus.errors import (
    AlreadyAttached,
    InvalidRequest,
    LimitExceeded,
    NotPermitted,
    PeerLost,
    ProtocolError,
    RequestError,
    SessionGone,
    VersionMismatch,
)
from toolbus.session import BUSY_INTERVAL, IDLE_INTERVAL, Pulse, State
from toolbus.tool import MAX_INSTANCE, PROTOCOL_VERSIONS, SOURCE, Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.sessions")

TICK_SECONDS = 0.5  # how often silence is judged
WATCH_SECONDS = 0.02  # how often a watcher is told at most: 1,000 attaches before 1,000 watchers stay 1,000 frames
MAX_NOTICES, MAX_NOTICE = 100, 500  # of a session; characters of each
TAKEOVERD_A_MINUTE = 5  # more means two clones under one instance name that keep throwing each other out


class Presence:
    """The sessions of one bus.

    Args:
        identity: (bus_id, boot_id, version) as Attached shows them.
        on_source: called with a source whose health may have changed.
    """

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        policy: Policy,
        limits: Limits,
        *,
        identity: tuple[str, str, str],
        on_source: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._policy = policy
        self._limits = limits
        self._identity = identity
        self._on_source = on_source
        self._on_change = on_change
        self.withdrawal = Withdrawal(registry, on_change)
        self._watchers = CatalogWatchers(dispatcher.view)
        self._last_tick: float | None = None  # None until the first tick
        self._takeovers: dict[tuple[str, str], deque[float]] = {}  # when each instance was superseded, last minute
        self._by_instance: dict[tuple[str, str], Peer] = {}
        self._lost_sources: dict[str, float] = {}  # sources in their grace period → when it ends
        self._tokens: dict[str, str] = {}  # source → the token that binds it while it is attached or in grace
        self.sessions: dict[str, Peer] = {}  # by session_id
        self.by_source: dict[str, dict[str, Peer]] = {}  # source → session_id → peer
        self.draining = False

    def __repr__(self) -> str:
        return f"<Presence sessions={len(self.sessions)} sources={len(self.by_source)} lost={len(self._lost_sources)}>"

    # -- opening -------------------------------------------------------------------------------------------------

    def attach(self, peer: Peer, attach: wire.Attach, now: float) -> None:
        """Takes an attach: the first one opens the session, a later one replaces its tools.

        Raises:
            RequestError: the stream must end with it.
        """
        if peer.state is State.LIVE:
            self._attach_again(peer, attach, now)
            return
        if peer.state is State.LEAVING:  # on its way when the bus asked the peer to go: its calls go on
            refused = [tool.name for tool in attach.tools] or [""]
            self._answer(peer, (), refused, "this session was asked to leave and can offer nothing new")
            return
        self._check_identity(attach)
        may_offer = self._policy.may_offer(attach.source)
        offered = (
            catalog_messages.read_tools(attach.tools, self._limits, qualified=attach.qualified) if may_offer else []
        )
        peer.source, peer.instance, peer.qualified = attach.source, attach.instance, attach.qualified
        peer.untrusted |= self._policy.is_untrusted(attach.source)
        peer.notices = tuple(text[:MAX_NOTICE] for text in attach.notices[:MAX_NOTICES])
        peer.budget = self._dispatcher.budget(peer.source)
        older = self._by_instance.get((peer.source, peer.instance)) if peer.instance else None
        if older is not None and older.state is State.LEAVING and not older.half_closed:
            older = None  # it said goodbye, and may finish what it has
        peer.offers_tools = bool(attach.tools)  # one that may not offer them is a plugin all the same
        peer.open(self._granted(attach.max_in_flight), attach.max_message_bytes)
        if older is not None:
            self._note_takeover(peer, now)
        outcome = self._declare(peer, offered, older, now)
        peer.session_id = secrets.token_hex(16)
        self.sessions[peer.session_id] = peer
        self.by_source.setdefault(peer.source, {})[peer.session_id] = peer
        if peer.instance:
            self._by_instance[peer.source, peer.instance] = peer
        self._lost_sources.pop(peer.source, None)
        if attach.token:
            self._tokens[peer.source] = attach.token
        self._answer(peer, outcome.names, [] if may_offer else [tool.name for tool in attach.tools])
        if older is not None:  # after the answer: calls of the older one may move to this one
            older.send_drain("replaced")
            self.end(older, "replaced by a newer session of the same instance", now, status="OK")
        if not may_offer and attach.tools:
            self._deny(peer, "attach")
        self._watchers.follow(peer, wire.SUBSCRIPTION_CATALOG in attach.subscribe)
        log.info(
            "attached source=%s instance=%s tools=%d max_in_flight=%d",
            peer.source, peer.instance or "-", len(outcome.names), peer.max_in_flight,
        )  # fmt: skip
        self._on_source(peer.source)
        self._on_change()

    def _check_identity(self, attach: wire.Attach) -> None:
        if attach.protocol_version not in PROTOCOL_VERSIONS:
            raise VersionMismatch(attach.protocol_version, PROTOCOL_VERSIONS)
        if self.draining:
            raise PeerLost("the bus is draining and takes no new sessions: try again, it may be restarting")
        if not SOURCE.fullmatch(attach.source):
            raise InvalidRequest(
                f"source {attach.source[:80]!r} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another source"
            )
        if attach.source == BUS_SOURCE:
            raise NotPermitted(f"source {BUS_SOURCE!r} is the bus's own: choose another")
        if len(attach.instance) > MAX_INSTANCE:
            raise InvalidRequest(
                f"instance has {len(attach.instance)} characters, at most {MAX_INSTANCE} are allowed: shorten it"
            )
        token = self._tokens.get(attach.source)
        if token is not None and not secrets.compare_digest(token.encode(), attach.token.encode()):
            raise NotPermitted(
                f"source {attach.source!r} is bound to a token, and the attach carries another or none: use another "
                "source, or the token (TOOLBUS_TOKEN) of the sessions that have it"
            )
        if len(self.sessions) >= (limit := self._limits.sessions):
            raise LimitExceeded("sessions", limit, f"the bus has {limit} sessions and takes no more")

    def _granted(self, asked: int) -> int:
        return min(asked or self._limits.calls_in_flight, self._limits.calls_in_flight_most)

    def _declare(self, peer: Peer, offered: list[CompiledTool], older: Peer | None, now: float) -> Outcome:
        """Replaces what this source and instance offered."""
        self._registry.check_roles(offered)  # a refused attach leaves the older session alone
        if older is not None:
            self._registry.lose(older, "superseded", now)
        outcome = self._registry.register(peer, offered, qualified=peer.qualified, declare=True)
        if offered:
            peer.offers_tools = True
        tell_owners(outcome)
        return outcome

    def _note_takeover(self, peer: Peer, now: float) -> None:
        times = self._takeovers.setdefault((peer.source, peer.instance), deque(maxlen=TAKEOVERD_A_MINUTE))
        if len(times) == TAKEOVERD_A_MINUTE and now - times[0] < 60.0:
            raise AlreadyAttached(
                f"source {peer.source!r} instance {peer.instance!r} attached more than {TAKEOVERD_A_MINUTE} times "
                "within a minute, each time ending a live session: two processes share one instance name; "
                "give each its own"
            )
        times.append(now)

    def _attach_again(self, peer: Peer, attach: wire.Attach, now: float) -> None:
        if (attach.source, attach.instance) != (peer.source, peer.instance):
            raise ProtocolError(
                f"this stream is attached as source {peer.source!r} instance {peer.instance!r}; an attach as "
                f"{attach.source[:80]!r}/{attach.instance[:80]!r} needs a stream of its own"
            )
        if not self._policy.may_offer(peer.source):
            self._answer(peer, (), [tool.name for tool in attach.tools])
            self._deny(peer, "attach")
            return
        try:
            offered = catalog_messages.read_tools(attach.tools, self._limits, qualified=peer.qualified)
            outcome = self._declare(peer, offered, None, now)
        except RequestError as error:
            self._answer(peer, self._registry.offers(peer), [tool.name for tool in attach.tools] or [""], str(error))
            return
        self._answer(peer, outcome.names, [])
        self._watchers.follow(peer, wire.SUBSCRIPTION_CATALOG in attach.subscribe)
        log.info("declared anew source=%s tools=%d", peer.source, len(outcome.names))
        self._on_change()

    def _answer(self, peer: Peer, names: Sequence[str], refused: list[str], why: str = "") -> None:
        (bus_id, boot_id, version), limits = self._identity, self._limits
        why = why or lacks_tools(peer.source)
        attached = wire.Attached(
            session_id=peer.session_id,
            bus_id=bus_id,
            boot_id=boot_id,
            bus_version=version,
            protocol_version=PROTOCOL_VERSIONS[-1],
            heartbeat_seconds=IDLE_INTERVAL,
            revision=self._registry.revision,
            registered=names if sum(map(len, names)) < peer.max_item_bytes // 2 else (),
            # Said once: with thousands of tools the same text for each would exceed what the peer can receive.
            refused=[wire.RefusedTool(name=name, error="" if place else why) for place, name in enumerate(refused)],
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

    # -- changing the catalog ------------------------------------------------------------------------------------

    def session(self, session_id: str) -> Peer:
        """Returns the live session with an id.

        Raises:
            SessionGone: there is none.
        """
        peer = self.sessions.get(session_id)
        if peer is None or peer.state is State.CLOSED:
            raise SessionGone
        return peer

    def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        """Adds tools to a live session.

        Raises:
            RequestError: nothing was registered.
        """
        peer = self.session(request.session_id)
        if peer.state is not State.LIVE:
            raise InvalidRequest("the session has said goodbye and can offer nothing new")
        if request.source and request.source != peer.source:
            raise InvalidRequest(f"the session is of source {peer.source!r}, the request names {request.source[:80]!r}")
        if not self._policy.may_offer(peer.source):
            self._deny(peer, "register")
            raise NotPermitted(lacks_tools(peer.source))
        held = self._registry.max_offers(peer) + len(request.tools)  # at most: counting exactly is not flat
        if held > self._limits.tools:
            held = len({*self._registry.offers(peer), *(tool.name for tool in request.tools)})
        if held > self._limits.tools:
            raise LimitExceeded("tools", self._limits.tools, f"the session would offer {held} tools")
        offered = catalog_messages.read_tools(request.tools, self._limits, qualified=peer.qualified)
        outcome = self._registry.register(peer, offered, qualified=peer.qualified)
        if offered:
            peer.offers_tools = True
        tell_owners(outcome)
        log.info("registered source=%s tools=%d", peer.source, len(outcome.names))
        self._on_change()
        return catalog_messages.registered(outcome)

    def unregister(self, request: wire.UnregisterRequest) -> wire.UnregisterResponse:
        """Withdraws one tool, of the session's source or of anyone."""
        owner = self.session(request.session_id) if request.session_id else None
        outcome = self.withdrawal.unregister(request.name, request.role, owner)
        return catalog_messages.unregistered(request.name, outcome)

    def clear(self, request: wire.ClearRequest) -> wire.ClearResponse:
        """Withdraws every tool of a source."""
        return catalog_messages.cleared(request.source, self.withdrawal.clear(request.source, request.role))

    def right_changed(self, source: str, right: str, *, granted: bool) -> int:
        """A source got the right to offer tools, or lost it: then they are withdrawn. Its sessions are told.

        Returns:
            How many tools were withdrawn, each counted once per role.
        """
        outcome = Outcome() if granted else self._registry.clear(source)
        change = wire.PermissionChanged(permission=right, granted=granted, all_granted=[right] if granted else [])
        for peer in self.by_source.get(source, {}).values():
            peer.tell(wire.Event(permission_changed=change))
        log.warning("%s permission=%s source=%s", "granted" if granted else "revoked", right, source)
        self._on_source(source)
        self._on_change()
        return outcome.count

    def _deny(self, peer: Peer, operation: str) -> None:
        peer.tell(wire.Event(permission_denied=wire.PermissionDenied(permission="tools", operation=operation)))
        log.warning("refused source=%s operation=%s permission=tools", peer.source, operation)

    # -- ending --------------------------------------------------------------------------------------------------

    def goodbye(self, peer: Peer) -> None:
        """A peer said goodbye: its tools go at once, its calls go on."""
        if peer.state is not State.LIVE:
            return
        peer.leave()
        self._registry.withdraw(peer)
        log.info("draining source=%s pending=%d", peer.source, len(peer.pending))
        self._on_source(peer.source)
        self._on_change()

    def half_closed(self, peer: Peer, now: float) -> None:
        """A peer ended its direction: it can answer no more, but may wait for what it asked for."""
        pending = list(peer.pending.values())
        peer.pending.clear()
        if peer.state is State.LIVE and peer.drain_sent:
            self.goodbye(peer)  # it was told to leave, and does
        elif peer.state is State.LIVE:
            self._lose(peer, "its stream ended", now)
        peer.close_half()
        self._on_source(peer.source)
        peer.recall(pending)
        self._dispatcher.handler_ended(pending, "its stream ended", now)

    def end(self, peer: Peer, why: str, now: float, status: str = "UNAVAILABLE") -> None:
        """Ends a session, whatever state it is in: its calls end, its tools go offline, its RPC is closed.

        This comes before the RPC is touched: one whose peer never reads cannot be closed from our side and lives on
        as a zombie (design.md 4).
        """
        if peer.state is State.CLOSED:
            return
        opened = peer.state is not State.OPENING
        if peer.state is State.LIVE:
            self._lose(peer, why, now)
        for call in list(peer.in_flight.values()) if status == "OK" else ():
            self._dispatcher.take_back(call, why, now)
        pending, asked = peer.end()
        if status == "OK":
            peer.recall(pending)
        self._dispatcher.handler_ended(pending, why, now)
        self._dispatcher.caller_ended(asked, now)
        if opened:
            self._forget(peer)
            log.info("ended source=%s instance=%s why=%s", peer.source, peer.instance or "-", why)
        if status != "OK":
            peer.outbox.discard()
        peer.close(status, why)

    def _lose(self, peer: Peer, why: str, now: float) -> None:
        names = self._registry.lose(peer, why, now)
        if names:
            log.warning("offline source=%s tools=%d why=%s", peer.source, len(names), why)
            self._lost_sources[peer.source] = now + self._registry.grace_seconds
        self._on_change()

    def _forget(self, peer: Peer) -> None:
        self.sessions.pop(peer.session_id, None)
        self._watchers.drop(peer)
        of_source = self.by_source.get(peer.source, {})
        of_source.pop(peer.session_id, None)
        if not of_source:
            self.by_source.pop(peer.source, None)
            if peer.source not in self._lost_sources:
                self._tokens.pop(peer.source, None)
        if self._by_instance.get((peer.source, peer.instance)) is peer:
            del self._by_instance[peer.source, peer.instance]
        self._on_source(peer.source)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Judges every session's silence and drops what has been offline for too long."""
        stood_still = self._last_tick is not None and now - self._last_tick > TICK_SECONDS + BUSY_INTERVAL
        self._last_tick = now
        self._watchers.forget()
        for peer in list(self.sessions.values()):
            if now > peer.leave_by:
                self.end(peer, "it was asked to leave and did not within the time it got", now)
                continue
            if stood_still:
                peer.restart_pulse(now)
                continue
            pulse = peer.pulse(now)
            if pulse is Pulse.SUSPECT:
                log.warning("suspect source=%s silent=%.1fs", peer.source, now - peer.last_heard)
                self._state_changed(peer)
            elif pulse is Pulse.GONE:
                self.end(peer, f"it answered no heartbeat for {now - peer.last_heard:.0f} s", now)
        if self._registry.expire(now):
            self._on_change()
        for instance, times in list(self._takeovers.items()):
            if now - times[-1] > 60.0:
                del self._takeovers[instance]
        for source, until in list(self._lost_sources.items()):
            if until <= now:
                del self._lost_sources[source]
                if source not in self.by_source:
                    self._tokens.pop(source, None)
                self._on_source(source)

    def recovered(self, peer: Peer) -> None:
        """A suspect session was heard again."""
        log.info("recovered source=%s", peer.source)
        self._state_changed(peer)

    def _state_changed(self, peer: Peer) -> None:
        self._registry.touch(peer)
        self._on_source(peer.source)
        self._on_change()

    # -- telling -------------------------------------------------------------------------------------------------

    def serving(self, source: str) -> bool | None:
        """Whether a source is well; None where it is not known (never attached, or gone for good)."""
        peers = self.by_source.get(source)
        if peers:
            live = [peer for peer in peers.values() if peer.state is State.LIVE]
            if live:
                return any(peer.takes_calls for peer in live)
            return False if source in self._lost_sources else None
        return False if source in self._lost_sources else None

    def is_bound(self, source: str) -> bool:
        """Whether a token binds a source, so that nobody offers tools under it without."""
        return source in self._tokens

    def notices(self, source: str = "") -> list[tuple[str, str]]:
        """Returns what attached sources, or one of them, want an operator to know: (source, sentence) of each, once."""
        said = ((peer.source, text) for peer in self.sessions.values() for text in peer.notices)
        return [each for each in dict.fromkeys(said) if source in ("", each[0])]

    def known_sources(self) -> list[str]:
        """Sources that have a health of their own now."""
        return [source for source in {*self.by_source, *self._lost_sources} if self.serving(source) is not None]

    def tell_watchers(self) -> None:
        """Brings every session that watches the catalog up to date."""
        self._watchers.tell()

    # -- draining ------------------------------------------------------------------------------------------------

    def drain(self, grace_seconds: float) -> None:
        """Announces that the bus stops: no new sessions, no new calls but nested ones.

        Whoever offers tools hears of it when no call is in flight any more: an idle plugin leaves as soon as it does,
        and the calls that still run may need its tools. So this is to be called again until everybody has left.
        """
        self.draining = self._dispatcher.draining = True
        quiet = not self._dispatcher.active
        for peer in self.sessions.values():
            if quiet or not peer.offers_tools:
                peer.send_drain("shutdown", grace_seconds)

    def end_idle(self, now: float) -> None:
        """Ends the streams of peers that were told to leave, owe nothing and do not go by themselves."""
        for peer in list(self.sessions.values()):
            if peer.drain_sent and peer.idle:
                self.end(peer, "it left", now, status="OK")

    def drain_source(self, source: str, grace_seconds: float, now: float) -> int:
        """Asks every session of a source to finish and leave, and ends those that are still there after the grace.

        Returns:
            How many sessions there were.
        """
        peers = list(self.by_source.get(source, {}).values())
        for peer in peers:
            peer.send_drain("requested", grace_seconds)
            peer.leave_by = now + grace_seconds
            self._registry.withdraw(peer)
            peer.leave()
        if peers:
            self._on_source(source)
            self._on_change()
        return len(peers)
