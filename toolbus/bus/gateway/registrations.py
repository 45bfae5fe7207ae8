"""Registers tools with a callback URL, by REST or by gRPC without a session, and persists them.

Stands between the HTTP application or the gRPC service and the registry: makes a handler for each registration, keeps
origins together, and persists what has to survive a restart (`registration_restore` restores it). What is persisted is
what the registry says about a handler, after any change: so a tool that a plugin overwrote or an operator cleared over
gRPC does not come back after a restart either.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace

from toolbus.bus.access.principal import Principal
from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.catalog.compiled_tool import CompiledTool, compile_tools
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.core import Core
from toolbus.bus.gateway.callback import CallbackHandler, Callbacks, Origin, probe_once
from toolbus.bus.gateway.registration_restore import ABSENT, restore_handlers, unchecked
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.bus.streams.withdrawal import notify_owners
from toolbus.errors import InvalidRequest, InvalidTool, NotKept, NotPermitted
from toolbus.text import quote
from toolbus.tool import Tool, is_source
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.callbacks")

DEFAULT_SOURCE = "external"  # REST-3
EXPIRE_SECONDS = 30 * 86_400.0  # a tool whose origin did not answer for so long is dropped


class Registrations:
    """The callback tools of one bus.

    Args:
        store: where they are persisted; None: nowhere.
    """

    def __init__(self, core: Core, store: RegistrationStore | None) -> None:
        self._registry = core.registry
        self._presence = core.presence
        self._policy = core.policy
        self._limits = core.limits
        self._timings = core.timings
        self._on_source = core.signals.source_changed
        self._changed = core.signals.catalog_changed
        self._store = store
        self._callbacks = Callbacks(core.dispatcher, core.limits, core.neighbours.allows, self._origin_moved)
        self._origins: dict[tuple[str, tuple[str, str, int]], Origin] = {}  # by source and address
        self._by_source: dict[str, dict[Origin, None]] = {}  # the same origins
        self._handlers: dict[str, CallbackHandler] = {}  # by key: every registration, online or offline
        self._unsaved: dict[CallbackHandler, None] = {}  # whose last change the store could not write
        self._retry_at = 0.0  # when the next change may retry that, by the monotonic clock
        self._audit = core.audit
        self._adopt = core.roles.first_use
        self._roles = core.registry.roles  # as of the last `persist`
        self._housekeeping: asyncio.Task[None] | None = None  # None until started
        self._answers_saved_at = time.time()  # when the times of the last answers were last persisted

    def __repr__(self) -> str:
        offline = sum(not origin.online for origin in self._origins.values())
        return f"<Registrations tools={len(self._handlers)} origins={len(self._origins)} offline={offline}>"

    # -- life ----------------------------------------------------------------------------------------------------

    async def restore(self, records: Iterable[StoredRegistration]) -> None:
        """Restores what was persisted, and offers at once what accepts a connection."""
        stored = {record.key: record for record in records}
        self._handlers.update(restore_handlers(stored.values(), self._registry, self._limits, self._handler))
        if stored:
            self._registry.take_unsaved()  # all of them; most are as they were persisted
            changed = [
                each for each in self._handlers.values() if set(self._places(each)) != set(stored[each.key].offers)
            ]
            self._write(changed, gone=stored.keys() - self._handlers.keys())
        if self._origins:
            offline = [origin for origin in self._origins.values() if not origin.online]
            probed_at = time.time()
            probes = asyncio.ensure_future(probe_once(offline, self._callbacks.may_serve))
            try:
                await asyncio.wait([probes], timeout=self._timings.reachable_seconds)
            finally:
                probes.cancel()
            for origin in offline:
                if origin.answered_at >= probed_at:
                    self._callbacks.bring_online(origin)
                else:
                    origin.last_failure = "not since the bus started"
                    self._callbacks.take_offline(origin)
            self._expire()

    def start(self) -> None:
        """Starts the housekeeping: probes of silent origins, and the expiry of those that never answer."""
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house(), name="toolbus callbacks")

    def serving(self, source: str) -> bool | None:
        """Returns whether an origin of a source is online; None where it has no tool with a callback URL."""
        origins = self._by_source.get(source)
        return None if origins is None else any(origin.online for origin in origins)

    @property
    def sources(self) -> Iterable[str]:
        """The sources that have callback tools."""
        return self._by_source

    async def stop(self) -> None:
        """Cancels what runs, and persists the rest."""
        tasks = [self._housekeeping, *(origin.probing for origin in self._origins.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._callbacks.stop()
        self._retry_at = 0.0
        self.persist()  # what the store could not write before
        self._persist_answers()

    # -- registering ---------------------------------------------------------------------------------------------

    def register(self, source: str, tool: Tool, target: CallbackUrl) -> Outcome:
        """Registers one tool by REST: arguments are not checked (REST-40), and some role has to accept it (REST-4).

        Raises:
            UnknownRole: the tool is for a role that is not configured.
            NotPermitted: the source may not offer tools, or the name is reserved for the bus's own tools.
            NotKept: it could not be persisted; it is offered until the bus stops.
        """
        self._check_source(source)
        if tool.name.startswith(
            f"{BUS_SOURCE}:"
        ):  # REST-3 allows a colon, and a later registration replaces an earlier
            raise NotPermitted(f"name {tool.name!r} is reserved for the bus's own tools: choose another")
        return self._register(source, [(unchecked(tool), target)], needs_role=True)[0]

    def register_by_grpc(self, request: wire.RegisterRequest) -> list[Outcome]:
        """Registers the tools of a Register without a session, all or none.

        Raises:
            RequestError: nothing was registered.
            NotKept: they could not be persisted; they are offered until the bus stops.
        """
        source = request.source or DEFAULT_SOURCE
        if not is_source(source):
            raise InvalidRequest(f"source {quote(source)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another")
        self._check_source(source)
        tools: list[Tool] = []
        targets: list[CallbackUrl] = []
        faults: list[str] = []
        for message in request.tools:
            try:
                targets.append(parse_callback_url(message.callback_url))
                tools.append(replace(Tool.from_wire(message, self._limits), callback_url=targets[-1].shown))
            except ValueError as error:
                faults.append(f"tool {quote(message.name)}: {error}")
            except InvalidTool as error:
                faults.extend(error.faults)
        if faults:
            raise InvalidTool(faults)
        return self._register(source, list(zip(compile_tools(tools, self._limits), targets, strict=True)))

    def _register(
        self, source: str, items: list[tuple[CompiledTool, CallbackUrl]], *, needs_role: bool = False
    ) -> list[Outcome]:
        self._audit.check()
        for role in dict.fromkeys(tool.tool.role for tool, _ in items if tool.tool.role):
            self._adopt(role, Principal(source))
        self._registry.check_roles([tool for tool, _ in items])
        outcomes = []
        for tool, target in items:
            handler = self._handler(source, tool, target, secrets.token_hex(8), time.time())
            outcome = self._registry.register(handler, [tool], needs_role=needs_role)
            notify_owners(outcome)
            outcomes.append(outcome)
            if outcome.accepted:
                self._handlers[handler.key] = handler
                self._audit.record("register", Principal(source), target=tool.tool.name, peer=target.shown)
                log.info("registered tool=%r source=%r callback=%s", tool.tool.name, source, target.shown)
                self._callbacks.bring_online(handler.origin)  # a plugin that registers is running (REST-43)
            else:
                self._leave_origin(handler)
        self._on_source(source)
        try:
            self.persist(strict=True)
        finally:
            self._changed()
        return outcomes

    def _check_source(self, source: str) -> None:
        if source == BUS_SOURCE:
            raise NotPermitted(f"source {source!r} is the bus's own: choose another")
        if not self._policy.may_offer(source):
            raise NotPermitted(lacks_permission(source))
        if self._presence.is_bound(source):
            raise NotPermitted(
                f"source {quote(source)} is bound to a token: use another source, or offer the tool in its session"
            )

    def _handler(
        self, source: str, tool: CompiledTool, target: CallbackUrl, key: str, answered_at: float
    ) -> CallbackHandler:
        origin = self._origins.get((source, target.origin))
        if origin is None:
            origin = self._origins[source, target.origin] = Origin(source, target.origin, answered_at)
            self._by_source.setdefault(source, {})[origin] = None
        origin.answered_at = max(origin.answered_at, answered_at)
        return CallbackHandler(key, tool, target, origin, self._callbacks, self._limits.calls_in_flight)

    # -- persisting ----------------------------------------------------------------------------------------------

    def persist(self, *, strict: bool = False) -> None:
        """Persists what has changed since the last time, whatever changed it.

        Args:
            strict: whether a failed write is an error; else it is logged and retried later.

        Raises:
            NotKept: see strict.
        """
        changed = [each for each in self._registry.take_unsaved() if isinstance(each, CallbackHandler)]
        if self._roles != self._registry.roles:
            if not set(self._roles) <= set(self._registry.roles):  # a stored place may name a role that was removed
                changed = [*self._handlers.values(), *changed]
            self._roles = self._registry.roles
        if changed or (self._unsaved and (strict or time.monotonic() >= self._retry_at)):
            self._write(changed, strict=strict)

    def _write(self, handlers: Iterable[CallbackHandler], gone: Iterable[str] = (), *, strict: bool = False) -> None:
        changed: list[StoredRegistration] = []
        dropped = list(gone)
        unsaved = {**self._unsaved, **dict.fromkeys(handlers)}
        for handler in unsaved:
            if self._registry.places(handler):
                changed.append(self._to_record(handler))
            else:
                dropped.append(handler.key)
                self._handlers.pop(handler.key, None)
                self._leave_origin(handler)
        if self._store is None:
            return
        try:
            self._store.apply(changed, dropped)
            self._unsaved.clear()
        except Exception as error:
            self._unsaved, self._retry_at = unsaved, time.monotonic() + self._timings.store_retry_seconds
            log.error("cannot persist registrations tools=%d why=%s", len(unsaved), error)
            if strict:
                raise NotKept(
                    f"the change could not be written down ({error}): it is in force until the bus stops. Make the "
                    "data directory writable, then retry"
                ) from error

    def _places(self, handler: CallbackHandler) -> tuple[tuple[str | None, int], ...]:
        places = dict(self._registry.places(handler))
        if None in places:  # else a role without a place would pass for a new role at the next start
            for role in self._registry.known_roles:
                places.setdefault(role, ABSENT)
        return tuple(places.items())

    def _to_record(self, handler: CallbackHandler) -> StoredRegistration:
        return StoredRegistration(
            key=handler.key,
            source=handler.source,
            tool=handler.offered.tool,
            callback_url=handler.target.text,
            checked=handler.offered.checker is not None,
            offers=self._places(handler),
            answered_at=handler.origin.answered_at,
        )

    def _persist_answers(self) -> None:
        if self._store is None:
            return
        since, self._answers_saved_at = self._answers_saved_at, time.time()
        origins = [origin for origin in self._origins.values() if origin.answered_at >= since]
        try:
            keys = [handler.key for origin in origins for handler in origin.handlers]
            self._store.save_answers(keys, self._answers_saved_at)
        except Exception as error:
            self._answers_saved_at = since
            log.error("cannot persist which callback URLs answered why=%s", error)

    # -- origins -------------------------------------------------------------------------------------------------

    def _origin_moved(self, origin: Origin) -> None:
        """Suspends the tools of an origin that went offline, or resumes them when it is back online."""
        if origin.online:
            names = self._registry.resume(origin.handlers)
            log.info("online source=%r origin=%s tools=%d", origin.source, origin, len(names))
        else:
            self._registry.suspend(origin.handlers, f"{origin} accepts no connection ({origin.last_failure})")
            tools = len(origin.handlers)  # after a restart none of them was offered
            reason = origin.last_failure
            log.warning("offline source=%r origin=%s tools=%d why=%s", origin.source, origin, tools, reason)
        self._on_source(origin.source)
        self._changed()

    def _leave_origin(self, handler: CallbackHandler) -> None:
        origin = handler.origin
        origin.handlers.pop(handler, None)
        if not origin.handlers and self._origins.get((origin.source, origin.address)) is origin:
            del self._origins[origin.source, origin.address]
            del self._by_source[origin.source][origin]
            if not self._by_source[origin.source]:
                del self._by_source[origin.source]
            self._on_source(origin.source)
            if origin.probing is not None:
                origin.probing.cancel()

    async def _keep_house(self) -> None:
        while True:
            try:
                silent_since = time.time() - self._timings.note_seconds
                await probe_once(
                    [each for each in self._origins.values() if each.online and each.answered_at < silent_since],
                    self._callbacks.may_serve,
                )
                self._expire()
                self._persist_answers()
                self.persist()  # what the store could not write before
            except Exception:
                log.exception("a fault of the bus in the housekeeping of callback tools")
            await asyncio.sleep(self._timings.note_seconds)

    def _expire(self) -> None:
        """Drops the tools of origins that did not answer for 30 days."""
        oldest = time.time() - EXPIRE_SECONDS
        offline = [each for each in self._origins.values() if each.probing is not None]  # probed at least once
        for origin in [each for each in offline if each.answered_at < oldest]:
            handlers = list(origin.handlers)
            for handler in handlers:
                self._registry.withdraw(handler)
            log.warning(
                "dropped source=%r origin=%s tools=%d why=no answer for 30 days", origin.source, origin, len(handlers)
            )
            self._write(handlers)
            self._changed()
