"""Opens sessions: checks an attach, registers its tools, takes over from an older session, answers ``attached``.

A peer that reconnects attaches under the same source and instance; its new session then replaces the older one, which
the caller ends. A later attach on the same stream replaces the declared tools. Knows no sockets and ends no session.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.access.identity import Identity
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.catalog.compiled_tool import CompiledTool
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.session_table import SessionTable
from toolbus.bus.streams.withdrawal import notify_owners
from toolbus.errors import (
    AlreadyAttached,
    InvalidRequest,
    LimitExceeded,
    NotAudited,
    NotPermitted,
    PeerLost,
    ProtocolError,
    RequestError,
    VersionMismatch,
)
from toolbus.text import quote, shorten
from toolbus.tool import INSTANCE, PROTOCOL_VERSIONS, SOURCE, Limits, explain_instance
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sessions")

MAX_NOTICES, MAX_NOTICE = 100, 500  # of a session; characters of each
MAX_TAKEOVERS = 5  # a minute; more means that two processes share an instance name and keep replacing each other
TAKEOVER_SECONDS = 60.0


class Handshake:
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
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._policy = policy
        self._limits = limits
        self._bus = bus
        self._table = table
        self._takeovers: dict[tuple[str, str], deque[float]] = {}  # (source, instance) → when it took over lately

    def __repr__(self) -> str:
        return f"<Handshake takeovers={len(self._takeovers)}>"

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
        self._check(peer, attach)
        tools, refused = self._read_tools(peer, attach.source, attach.tools, qualified=attach.qualified)
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
        outcome = self._declare(peer, tools, older, now)
        self._table.add(peer, attach.token)
        peer.quota = self._dispatcher.quotas.join(peer.principal.identity, peer)
        self._answer(peer, outcome.names, refused)
        if refused:
            deny(peer, "attach")
        log.info(
            "attached source=%s instance=%s tools=%d max_in_flight=%d",
            peer.source, peer.instance or "-", len(outcome.names), peer.max_in_flight,
        )  # fmt: skip
        return older

    def declare_again(self, peer: Peer, attach: wire.Attach, now: float, check_audit: Callable[[], object]) -> bool:
        """Replaces the tools of a live session by those of a later attach. Returns whether it was accepted.

        Args:
            check_audit: raises NotAudited where it could not be written down.

        Raises:
            ProtocolError: the attach is of another source or instance.
        """
        if (attach.source, attach.instance) != (peer.source, peer.instance):
            raise ProtocolError(
                f"this stream is attached as source {peer.source!r} instance {peer.instance!r}; an attach as "
                f"{shorten(attach.source)!r}/{shorten(attach.instance)!r} needs a stream of its own"
            )
        if not self._policy.may_offer(peer.source):
            self._answer(peer, (), _refused(attach.tools, lacks_permission(peer.source)))
            deny(peer, "attach")
            return False
        try:
            check_audit()
            tools, refused = self._read_tools(peer, peer.source, attach.tools, qualified=peer.qualified)
            outcome = self._declare(peer, tools, None, now)
        except (RequestError, NotAudited) as error:
            self._answer(peer, self._registry.offers(peer), _refused(attach.tools, str(error)) or _whole(str(error)))
            return False
        self._answer(peer, outcome.names, refused)
        if refused:
            deny(peer, "attach")
        log.info("declared again source=%s tools=%d", peer.source, len(outcome.names))
        return True

    def refuse_while_draining(self, peer: Peer, attach: wire.Attach) -> None:
        """Answers an attach that crossed the bus's drain: the session takes no new tools, its calls go on."""
        why = "the bus has asked this session to drain, so it can offer no new tools"
        self._answer(peer, (), _refused(attach.tools, why) or _whole(why))

    def expire_takeovers(self, now: float) -> None:
        """Drops counts of takeovers that are too old to matter."""
        for instance, times in list(self._takeovers.items()):
            if now - times[-1] > TAKEOVER_SECONDS:
                del self._takeovers[instance]

    def _check(self, peer: Peer, attach: wire.Attach) -> None:
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
        if not INSTANCE.fullmatch(attach.instance):
            raise InvalidRequest(explain_instance(attach.instance))
        peer.principal.identity.check_attach(attach.source)
        self._table.check_token(attach.source, attach.token)
        older = self._table.of_instance(attach.source, attach.instance)
        if older is not None and not self._table.is_bound(attach.source):  # a token proves whose the source is
            _check_takeover(peer.principal.identity, older)
        self._check_own_sessions(peer.principal.identity, older)
        if len(self._table.sessions) >= (limit := self._limits.sessions):
            raise LimitExceeded("sessions", limit, f"the bus has {limit} sessions and accepts no more")

    def _check_own_sessions(self, identity: Identity, older: Peer | None) -> None:
        """Checks how many sessions an identity has, without the one that the new one replaces."""
        limit = identity.scopes.sessions if identity.scopes is not None else None
        if limit is not None and self._table.count_of(identity, but=older) >= limit:
            raise LimitExceeded(
                "sessions", limit, f"{identity.shown} has {limit} sessions, and its scope sessions allows no more"
            )

    def _read_tools(
        self, peer: Peer, source: str, tools: Sequence[pb.Tool], *, qualified: bool
    ) -> tuple[list[CompiledTool], list[wire.RefusedTool]]:
        """Returns the tools that a source may offer, and those that it or its identity may not.

        Raises:
            RequestError: as for `catalog_messages.read_tools`.
        """
        if not self._policy.may_offer(source):
            return [], _refused(tools, lacks_permission(source))
        identity = peer.principal.identity
        beyond = set(identity.refused_offers(tool.name for tool in tools))
        mine = [tool for tool in tools if tool.name not in beyond] if beyond else tools
        refused: list[wire.RefusedTool] = []
        if beyond:
            why = f"{identity.shown} may not offer this tool: an operator of the bus adds it to the scope offer"
            refused = _refused([tool for tool in tools if tool.name in beyond], why)
        return catalog_messages.read_tools(mine, self._limits, qualified=qualified), refused

    def _declare(self, peer: Peer, tools: list[CompiledTool], older: Peer | None, now: float) -> Outcome:
        """Replaces the tools that this source and instance offered before."""
        self._registry.check_roles(tools)  # a refused attach leaves the older session alone
        if older is not None:
            self._registry.lose(older, "replaced by a newer session of the same instance", now)
        outcome = self._registry.register(peer, tools, qualified=peer.qualified, declare=True)
        if tools:
            peer.offers_tools = True
        notify_owners(outcome)
        return outcome

    def _count_takeover(self, peer: Peer, now: float) -> None:
        times = self._takeovers.setdefault((peer.source, peer.instance), deque(maxlen=MAX_TAKEOVERS))
        if len(times) == MAX_TAKEOVERS and now - times[0] < TAKEOVER_SECONDS:
            raise AlreadyAttached(
                f"source {peer.source!r} instance {peer.instance!r} attached more than {MAX_TAKEOVERS} times "
                "within a minute, each time ending a live session: two processes share one instance name; "
                "give each its own"
            )
        times.append(now)

    def _answer(self, peer: Peer, names: Sequence[str], refused: list[wire.RefusedTool]) -> None:
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
            refused=refused,
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


def _refused(tools: Iterable[pb.Tool], why: str) -> list[wire.RefusedTool]:
    """Returns refused tools with the reason, which stands once: repeated it could exceed what the peer can receive."""
    return [wire.RefusedTool(name=tool.name, error="" if place else why) for place, tool in enumerate(tools)]


def _whole(why: str) -> list[wire.RefusedTool]:
    """Returns the refusal of an attach without tools."""
    return [wire.RefusedTool(error=why)]


def deny(peer: Peer, operation: str) -> None:
    """Notifies a session that it lacks the permission to offer tools."""
    peer.send_event(wire.Event(permission_denied=wire.PermissionDenied(permission="tools", operation=operation)))
    log.warning("denied source=%s operation=%s permission=tools", peer.source, operation)
