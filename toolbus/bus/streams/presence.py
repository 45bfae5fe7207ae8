"""Joins sessions, registry and dispatcher: what follows when a peer attaches, drains, falls silent or disconnects.

A shell hands it peers, the fields of frames and the time; it touches no socket. Every way in which a session can end
passes through ``end``, and each peer carries the ``close`` that ends its RPC. The handshake opens sessions, the session
table holds them, and the catalog watchers notify sessions of changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from toolbus.bus.access.identity import LOCAL, Identity, Principal, Scopes
from toolbus.bus.audit import Audit
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.policy import TOOLS, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.notification_board import NotificationBoard
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.refused_tools import Cause, add_refused
from toolbus.bus.streams.server_handshake import ServerHandshake, SessionTable, deny
from toolbus.bus.streams.tool_review import NOT_ALONE, ToolReview
from toolbus.common.text import clean_line, list_names, quote
from toolbus.errors import InvalidRequest, NotPermitted, ToolBusError, grpc_status
from toolbus.protocol.limits import DEFAULT_TIMINGS, Timings
from toolbus.protocol.session import Pulse, State
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

# The cost of a change depends on the watchers only: other sessions are not looked at, and events for several watchers
# are built once. Presence decides who watches, the wiring of the bus when they are notified.

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
        if known == revision or peer.outbox.backlog > catalog_messages.EVENT_BYTES:
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


log = logging.getLogger("toolbus.sessions")


class Presence(SessionTable):
    """The sessions of one bus, from their attach to their end.

    Args:
        identity: (bus_id, boot_id, version) as ``attached`` shows them.
        on_source: called with a source whose health may have changed.
        on_change: called after the catalog may have changed.
        timings: say how often `tick` is called.

    Attributes:
        audit: records who attached, was refused, offered and withdrew tools.
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
        timings: Timings = DEFAULT_TIMINGS,
        audit: Audit | None = None,
        adopt: Callable[[str, Principal], bool] = lambda role, principal: False,
    ) -> None:
        super().__init__()
        self.audit = audit or Audit()
        self._registry, self._dispatcher = registry, dispatcher
        self._policy, self._limits = policy, limits
        self._on_source = on_source
        self._on_change = on_change
        self._timings = timings
        self.review = ToolReview(registry, policy, limits, self.audit, dispatcher.seams, on_change, adopt)
        self.handshake = ServerHandshake(registry, dispatcher, policy, limits, identity, self, self.review)
        self.watchers = CatalogWatchers(dispatcher.view)
        self.notifications = NotificationBoard(dispatcher.view)
        self._last_tick: float | None = None  # None until the first tick

    # -- attach ----------------------------------------------------------------------------------------------------

    def attach(self, peer: Peer, attach: wire.Attach, now: float) -> None:
        """Takes an attach: the first one opens the session, a later one replaces its tools.

        Raises:
            RequestError: the stream must end with it.
        """
        if peer.state is State.LEAVING:
            self.handshake.refuse(peer, "the bus has sent this session a drain, so it can offer no new tools")
            return
        if peer.state is State.LIVE:
            if self.handshake.declare_again(peer, attach, now, self.audit.check):
                offers = self._registry.offers(peer)
                names, tools = list_names(offers), len(offers)
                self.audit.record("register", peer.principal, target=names, peer=peer.session_id, tools=tools)
                self._subscribe(peer, attach)
                self._on_change()
            return
        try:
            self.audit.check()
            older = self.handshake.open(peer, attach, now)
        except ToolBusError as error:
            claimed = peer.principal.of_source(attach.source)
            self.audit.record(
                "refuse", claimed, outcome="refused", why=str(error), peer=peer.address, instance=attach.instance
            )
            raise
        tools = len(self._registry.offers(peer))
        why = f"from {peer.address}" if peer.address else ""
        self.audit.record("attach", peer.principal, why=why, peer=peer.session_id, instance=peer.instance, tools=tools)
        if older is not None:  # a takeover: after the answer, since calls of the older session may move to this one
            older.send_drain("replaced")
            self.end(older, "replaced by a newer session of the same instance", now, status="OK")
        self._subscribe(peer, attach)
        self._on_source(peer.source)
        self._on_change()

    def _subscribe(self, peer: Peer, attach: wire.Attach) -> None:
        self.watchers.follow(peer, wire.SUBSCRIPTION_CATALOG in attach.subscribe)
        follows = wire.SUBSCRIPTION_NOTIFICATIONS in attach.subscribe
        self.notifications.follow(peer, follows, attach.notifications_after)

    # -- changes of the catalog ------------------------------------------------------------------------------------

    def register(self, request: wire.RegisterRequest, identity: Identity = LOCAL) -> wire.RegisterResponse:
        """Adds tools to a live session, each judged on its own.

        Raises:
            RequestError: nothing was registered; a bad tool is one only where the request says all_or_none.
        """
        peer = self.session_of(identity, request.session_id)
        if peer.state is not State.LIVE:
            raise InvalidRequest("the session is draining and can offer no new tools: attach again first")
        if request.source and request.source != peer.source:
            raise InvalidRequest(
                f"the session is of source {peer.source!r}, but the request names {quote(request.source)}: "
                "leave source empty"
            )
        self.audit.check()
        judgement = self.review.judge_more(peer, request.tools, all_or_none=request.all_or_none)
        deny(peer, "register", judgement.refused)
        if request.all_or_none and judgement.refused:
            raise NotPermitted(next(each.error for each in judgement.refused if each.error != NOT_ALONE))
        outcome, refused = self.review.offer(peer, judgement, whole=False)
        names = list_names(outcome.names)
        self.audit.record("register", peer.principal, target=names, peer=peer.session_id, tools=len(outcome.names))
        log.info("registered source=%s tools=%d refused=%d", peer.source, len(outcome.names), len(refused))
        self._on_change()
        response = catalog_messages.registered(outcome)
        add_refused(response, refused, peer.max_item_bytes)
        return response

    def unregister(self, request: wire.UnregisterRequest, identity: Identity = LOCAL) -> wire.UnregisterResponse:
        """Withdraws one tool, of the session's source or of any source.

        Raises:
            RequestError: nothing was withdrawn.
        """
        owner = self.session_of(identity, request.session_id) if request.session_id else None
        if owner is None:
            identity.check_verb("catalog", "Unregister without a session_id")
        principal = Principal(identity=identity)
        outcome = self.review.unregister(request.name, request.role, owner, principal, hidden=True)
        return catalog_messages.unregistered(request.name, outcome)

    def clear(self, request: wire.ClearRequest, identity: Identity = LOCAL) -> wire.ClearResponse:
        """Withdraws every tool of a source.

        Raises:
            RequestError: nothing was withdrawn.
        """
        if not identity.may_attach(request.source):
            identity.check_verb("catalog", f"Clear for source {quote(request.source)}")
        principal = Principal(identity=identity)
        return catalog_messages.cleared(request.source, self.review.clear(request.source, request.role, principal))

    def permission_changed(self, source: str, permission: str, *, granted: bool) -> int:
        """Notifies the sessions of a source of a granted or denied permission; a denial of `tools` withdraws its tools.

        Returns:
            How many tools were withdrawn, each counted once per role.
        """
        all_granted = self._policy.permissions_of(source)
        change = wire.PermissionChanged(permission=permission, granted=granted, all_granted=all_granted)
        peers = list(self.by_source.get(source, {}).values())
        for peer in peers:
            peer.send_event(wire.Event(permission_changed=change))
        outcome = ChangeOutcome()
        if permission == TOOLS and granted:
            self.review.review(peers, Cause.PERMISSION)
        elif permission == TOOLS:
            outcome = self.review.revoke(source, peers, lambda: self._registry.clear(source))
        log.warning("%s permission=%s source=%s", "granted" if granted else "revoked", permission, source)
        self._on_source(source)
        self._on_change()
        return outcome.count

    def approved(self, source: str) -> None:
        """Judges again the tools of a source that waited for an approval, and clears warnings about trusted ones."""
        before = self._registry.revision
        self.review.review(list(self.by_source.get(source, {}).values()), Cause.APPROVAL)
        self.review.mark(source)
        if self._registry.revision != before:
            self._on_source(source)
            self._on_change()

    def catalog_changed(self) -> None:
        """Judges the tools that were refused for a role again, if the roles changed."""
        if self.review.catalog_changed():
            self._on_change()

    # -- the end of a session ----------------------------------------------------------------------------------------

    def drain_received(self, peer: Peer) -> None:
        """A peer shuts down gracefully: its tools are withdrawn at once, its calls go on."""
        if peer.state is not State.LIVE:
            return
        peer.leave()
        self._registry.withdraw(peer)
        self.review.refused.drop(peer)
        log.log(peer.log_level, "draining source=%s pending=%d", peer.source, len(peer.pending))
        self._on_source(peer.source)
        self._on_change()

    def half_closed(self, peer: Peer, now: float) -> None:
        """A peer ended its direction: it can answer no more, but may wait for the results of its own calls."""
        pending = list(peer.pending.values())
        peer.pending.clear()
        if peer.state is State.LIVE and peer.drain_sent:
            self.drain_received(peer)  # the answer to the bus's drain
        elif peer.state is State.LIVE:
            self._disconnect(peer, "its stream ended", now)
        peer.close_half()
        self._on_source(peer.source)
        peer.recall(pending)
        self._dispatcher.endings.handler_ended(pending, "its stream ended", now)

    def end(self, peer: Peer, why: str, now: float, status: str = "UNAVAILABLE") -> None:
        """Ends a session, whatever state it is in: its calls end, its tools go offline, its RPC is closed.

        This comes before the RPC is touched: an RPC whose peer never reads cannot be closed from the bus's side, and
        stays behind as a zombie.
        """
        if peer.state is State.CLOSED:
            return
        opened = peer.state is not State.OPENING
        if peer.state is State.LIVE:
            self._disconnect(peer, why, now)
        for call in list(peer.in_flight.values()) if status == "OK" else ():
            self._dispatcher.endings.take_back(call, why, now)
        pending, in_flight = peer.end()
        if status == "OK":
            peer.recall(pending)
        self._dispatcher.endings.handler_ended(pending, why, now)
        self._dispatcher.endings.caller_ended(in_flight, now)
        if opened:
            self.remove(peer)
            self.watchers.drop(peer)
            self.notifications.drop(peer)
            self._on_source(peer.source)
            self.audit.record("end", peer.principal, why=why, peer=peer.session_id, instance=peer.instance)
            instance = peer.instance or "-"
            log.log(peer.log_level, "ended source=%s instance=%s why=%s", peer.source, instance, clean_line(why))
        if status != "OK":
            peer.outbox.discard()
        peer.close(status, why)

    def _disconnect(self, peer: Peer, why: str, now: float) -> None:
        """Takes the tools of a disconnected session offline and starts the grace period of its source."""
        self.review.refused.drop(peer)
        names = self._registry.lose(peer, why, now)
        if names:
            log.warning("offline source=%s tools=%d why=%s", peer.source, len(names), clean_line(why))
            self.start_grace(peer.source, now + self._registry.grace_seconds)
        self._on_change()

    # -- heartbeats and the grace period -----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Sends heartbeats, ends sessions that answer none, and drops tools whose grace period has ended."""
        # Where this process was late itself (a suspended machine, a debugger, high load), the peers were not silent.
        tick, before = self._timings.tick_seconds, self._last_tick
        late = 0.0 if before is None else now - before - tick
        stood_still = late > self._timings.busy_heartbeat_seconds
        self._last_tick = now
        self.watchers.clear_cache()
        for peer in list(self.sessions.values()):
            if now > peer.leave_by:
                self.end(peer, "it was sent a drain and did not leave within its grace period", now)
                continue
            if stood_still:
                peer.restart_pulse(now)
            elif late > tick / 2:
                peer.delay_pulse(late)
            if peer.unread:
                peer.last_heard, peer.missed = now, 0
            if now >= peer.quiet_until or peer.pending:
                self._judge_silence(peer, now)
        if self._registry.expire(now) or self.review.room_changed():
            self._on_change()
        self.handshake.expire_takeovers(now)
        for source in self.expire_grace(now):
            self._on_source(source)

    def _judge_silence(self, peer: Peer, now: float) -> None:
        suspect, pulse = peer.suspect, peer.pulse(now)
        silent = now - peer.last_heard
        if pulse in (Pulse.SUSPECT, Pulse.HUNG):
            log.warning("%s source=%s silent=%.1fs", pulse.value, peer.source, silent)
        if peer.suspect is not suspect:
            self._state_changed(peer)
        if pulse is Pulse.HUNG:
            self._dispatcher.endings.handler_hangs(peer, f"it answered no heartbeat for {silent:.0f} s", now)
        elif pulse is Pulse.GONE:
            self.end(peer, f"it answered no heartbeat for {silent:.0f} s", now)

    def recovered(self, peer: Peer) -> None:
        """A suspect session answers again."""
        log.info("recovered source=%s", peer.source)
        self._state_changed(peer)

    def _state_changed(self, peer: Peer) -> None:
        self._registry.touch(peer)
        self._on_source(peer.source)
        self._on_change()

    # -- keys --------------------------------------------------------------------------------------------------------

    def refresh_identities(self, current: Callable[[Identity], Identity], now: float) -> None:
        """Puts changed keys and scopes into force for the sessions that they opened.

        A session whose key has ended, or whose scopes no longer hold what it is and offers, ends.

        Args:
            current: returns an identity as it is now, and raises Unauthenticated where its key has ended.
        """
        for peer in list(self.sessions.values()):
            before = peer.principal.identity
            if before.scopes is None:
                continue
            try:
                identity = current(before)
                if identity is before:
                    continue
                identity.check_attach(peer.source)
                identity.check_offers(tool.name for tool in self._registry.declared_by(peer))
                peer.principal = replace(peer.principal, identity=identity)
                peer.quota = self._dispatcher.quotas.join(identity, peer)
                peer.allowed.clear()
                self.review.scopes_changed(peer)
                if self.review.review([peer], Cause.PERMISSION):
                    self._on_change()
            except NotPermitted as error:
                # Withdrawn first: its tools would otherwise wait for it through the grace period.
                self._registry.withdraw(peer)
                self.end(peer, str(error), now, status=grpc_status(error)[0])
                self._on_change()

    # -- graceful shutdown -------------------------------------------------------------------------------------------

    def drain(self, grace_seconds: float) -> None:
        """Announces that the bus shuts down: no new sessions, no new calls but nested ones.

        Sessions that offer tools get their drain once no call is in flight: an idle plugin leaves as soon as it has
        one, and the calls that still run may need its tools. So call this again until every session has left.
        """
        self.draining = self._dispatcher.draining = True
        idle = not self._dispatcher.in_flight.active
        for peer in self.sessions.values():
            if idle or not peer.offers_tools:
                peer.send_drain("shutdown", grace_seconds)

    @property
    def stuck_calls(self) -> int:
        """How many calls that ended for their caller a peer has not answered yet; it leaves only then."""
        return sum(not call.active for peer in self.sessions.values() for call in peer.pending.values())

    def end_idle(self, now: float) -> None:
        """Ends the streams of peers that got a drain, have no calls and do not leave by themselves."""
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
            self.review.refused.drop(peer)
            peer.leave()
        if peers:
            self._on_source(source)
            self._on_change()
        return len(peers)
