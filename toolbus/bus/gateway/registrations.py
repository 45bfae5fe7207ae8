"""The tools that were registered with a callback URL, by REST or by gRPC without a session.

Stands between whoever asks (the HTTP application, the gRPC service) and the registry: makes a handler for each
registration, keeps origins together, and writes down what has to survive a restart. What is kept is what the registry
says about a handler, after whatever changed it: so a tool that a plugin overwrote or an operator cleared over gRPC does
not come back either.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.catalog.compiled_tool import CompiledTool, compile_tools
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.core import Core
from toolbus.bus.gateway.callback import CallbackHandler, Callbacks, Origin, accepting
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.bus.streams.withdrawal import notify_owners
from toolbus.errors import InvalidRequest, InvalidTool, NotKept, NotPermitted
from toolbus.tool import Tool, is_source
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.callbacks")

DEFAULT_SOURCE = "external"  # REST-3
FORGET_SECONDS = 30 * 86_400.0  # what has not answered for so long is dropped
ABSENT = -1  # as a place: the role was there, and a tool for all roles was not in it


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
        self._callbacks = Callbacks(core.dispatcher, core.limits, self._origin_moved)
        self._origins: dict[tuple[str, tuple[str, str, int]], Origin] = {}
        self._by_source: dict[str, dict[Origin, None]] = {}  # the same origins
        self._kept: dict[str, CallbackHandler] = {}  # by key: every registration that is offered or away
        self._unwritten: dict[CallbackHandler, None] = {}  # what the shelf could not take yet
        self._retry_at = 0.0  # when other changes may try that again, by the monotonic clock
        self._roles = core.registry.roles  # as of the last look
        self._housekeeping: asyncio.Task[None] | None = None  # None until started
        self._noted_at = time.time()  # when it was last written down who has answered

    def __repr__(self) -> str:
        away = sum(not origin.online for origin in self._origins.values())
        return f"<Registrations tools={len(self._kept)} origins={len(self._origins)} away={away}>"

    # -- life ----------------------------------------------------------------------------------------------------

    async def restore(self, records: Iterable[StoredRegistration]) -> None:
        """Restores what was persisted, and offers at once what accepts a connection."""
        self._restore_records({record.key: record for record in records})
        if self._origins:
            with_hope = [origin for origin in self._origins.values() if not origin.online]
            heard_before = time.time()
            first_round = asyncio.ensure_future(accepting(with_hope))
            try:
                await asyncio.wait([first_round], timeout=self._timings.reachable_seconds)
            finally:
                first_round.cancel()
            for origin in with_hope:
                if origin.answered_at >= heard_before:
                    self._callbacks.bring_back(origin)
                else:
                    origin.why = "not since the bus has started"
                    self._callbacks.set_aside(origin)
            self._forget_old()

    def start(self) -> None:
        """Starts to look after what has not answered for long."""
        self._housekeeping = asyncio.get_running_loop().create_task(self._housekeep(), name="toolbus callbacks")

    def serving(self, source: str) -> bool | None:
        """Whether somebody answers for a source; None where it has no tool with a callback URL."""
        origins = self._by_source.get(source)
        return None if origins is None else any(origin.online for origin in origins)

    @property
    def sources(self) -> Iterable[str]:
        """Whose tools there are."""
        return self._by_source

    async def stop(self) -> None:
        """Ends what runs, and writes down who has answered."""
        tasks = [self._housekeeping, *(origin.probing for origin in self._origins.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._callbacks.stop()
        self._retry_at = 0.0
        self.sync()  # what the shelf could not take before
        self._note_answers()

    def _restore_records(self, kept: dict[str, StoredRegistration]) -> None:
        for role in dict.fromkeys(role for record in kept.values() for role, _ in record.offers):
            if role is not None:
                self._registry.reserve(role)
        places: list[tuple[int, str | None, CallbackHandler]] = []
        for record in kept.values():
            try:
                target = parse_callback_url(record.callback_url)
                by_rest = not record.checked and record.tool.validate is None  # by gRPC it would be checked, or say no
                item = _unchecked(record.tool) if by_rest else self._checked([record.tool])[0]
            except (ValueError, InvalidTool) as problem:  # a stricter rule than when it was registered
                log.warning("dropped kept tool=%r source=%r why=%s", record.tool.name, record.source, problem)
                continue
            handler = self._handler(record.source, item, target, record.key, record.answered_at)
            handler.origin.online = False
            self._kept[record.key] = handler
            offers = dict(record.offers)
            if None in offers:  # REST-12: for roles, too, that are new since
                offers = {**dict.fromkeys(self._registry.known_roles, offers[None]), **offers}
            places += [(place, role, handler) for role, place in offers.items() if place != ABSENT]
        for _, role, handler in sorted(places, key=lambda item: item[0]):
            for _, name, why in self._registry.register(handler, [handler.offered], roles=[role]).failed:
                log.warning("not put back tool=%r source=%r role=%r why=%s", name, handler.source, role or "", why)
        self._registry.suspend([handler for _, _, handler in places], "the bus has restarted")
        if kept:
            log.info("put back tools=%d origins=%d", len(self._kept), len(self._origins))
            for role in set(self._registry.known_roles) - set(self._registry.roles):
                log.warning("tools wait for role=%r, which is not configured: add it with --role", role)
            self._registry.take_unsaved()  # all of them; most stand where they stood
            changed = [each for each in self._kept.values() if set(self._places(each)) != set(kept[each.key].offers)]
            self._write(changed, gone=kept.keys() - self._kept.keys())

    # -- changing ------------------------------------------------------------------------------------------------

    def register(self, source: str, tool: Tool, target: CallbackUrl) -> Outcome:
        """Registers one tool by REST: arguments are not checked (REST-40), and some role has to take it (REST-4).

        Raises:
            UnknownRole: the tool is for a role that is not configured.
            NotPermitted: the source may not offer tools, or the name is one of the bus's own.
            NotKept: it could not be written down; it is offered until the bus stops.
        """
        self._may_offer(source)
        if tool.name.startswith(f"{BUS_SOURCE}:"):  # REST-3 lets names have a colon, and the last writer has a name
            raise NotPermitted(f"name {tool.name!r} is kept for the bus's own tools: choose another")
        return self._register(source, [(_unchecked(tool), target)], needs_role=True)[0]

    def register_by_grpc(self, request: wire.RegisterRequest) -> list[Outcome]:
        """Registers the tools of a Register without a session, all or none.

        Raises:
            RequestError: nothing was registered.
            NotKept: they could not be written down; they are offered until the bus stops.
        """
        source = request.source or DEFAULT_SOURCE
        if not is_source(source):
            raise InvalidRequest(f"source {source[:80]!r} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another")
        self._may_offer(source)
        tools: list[Tool] = []
        targets: list[CallbackUrl] = []
        faults: list[str] = []
        for message in request.tools:
            try:
                targets.append(parse_callback_url(message.callback_url))
                tools.append(replace(Tool.from_wire(message, self._limits), callback_url=targets[-1].shown))
            except ValueError as problem:
                faults.append(f"tool {message.name[:80]!r}: {problem}")
            except InvalidTool as problem:
                faults.extend(problem.faults)
        if faults:
            raise InvalidTool(faults)
        return self._register(source, list(zip(self._checked(tools), targets, strict=True)))

    def _register(
        self, source: str, items: list[tuple[CompiledTool, CallbackUrl]], *, needs_role: bool = False
    ) -> list[Outcome]:
        self._registry.check_roles([item for item, _ in items])
        outcomes = []
        for item, target in items:
            handler = self._handler(source, item, target, secrets.token_hex(8), time.time())
            outcome = self._registry.register(handler, [item], needs_role=needs_role)
            notify_owners(outcome)
            outcomes.append(outcome)
            if outcome.accepted:
                self._kept[handler.key] = handler
                log.info("registered tool=%r source=%r callback=%s", item.tool.name, source, target.shown)
                self._callbacks.bring_back(handler.origin)  # whoever registers is there (REST-43)
            else:
                self._leave_origin(handler)
        self._on_source(source)
        try:
            self.sync(strict=True)
        finally:
            self._changed()
        return outcomes

    def _may_offer(self, source: str) -> None:
        if source == BUS_SOURCE:
            raise NotPermitted(f"source {source!r} is the bus's own: choose another")
        if not self._policy.may_offer(source):
            raise NotPermitted(lacks_permission(source))
        if self._presence.is_bound(source):
            raise NotPermitted(
                f"source {source[:80]!r} is bound to a token: use another source, or offer the tool in its session"
            )

    def _checked(self, tools: list[Tool]) -> list[CompiledTool]:
        return compile_tools(tools, self._limits)

    def _handler(
        self, source: str, item: CompiledTool, target: CallbackUrl, key: str, answered_at: float
    ) -> CallbackHandler:
        known = (source, target.origin)
        origin = self._origins.get(known)
        if origin is None:
            origin = self._origins[known] = Origin(source, target.origin, answered_at)
            self._by_source.setdefault(source, {})[origin] = None
        origin.answered_at = max(origin.answered_at, answered_at)
        return CallbackHandler(key, item, target, origin, self._callbacks, self._limits.calls_in_flight)

    # -- keeping -------------------------------------------------------------------------------------------------

    def sync(self, *, strict: bool = False) -> None:
        """Writes down what has changed since the last time, whoever changed it.

        Args:
            strict: whether a shelf that takes nothing is an error, or a line in the log and another try later.

        Raises:
            NotKept: see strict.
        """
        moved = self._registry.take_unsaved()
        if self._roles != self._registry.roles:
            if not set(self._roles) <= set(self._registry.roles):  # some may be kept as absent from a role that is gone
                moved = [*self._kept.values(), *moved]
            self._roles = self._registry.roles
        if moved or (self._unwritten and (strict or time.monotonic() >= self._retry_at)):
            self._write(moved, strict=strict)

    def _write(self, moved: Iterable[Any], gone: Iterable[str] = (), *, strict: bool = False) -> None:
        changed: list[Any] = []
        dropped = list(gone)
        both = {**self._unwritten, **dict.fromkeys(moved)}
        for handler in both:
            if self._registry.places(handler):
                changed.append(self._to_record(handler))
            else:
                dropped.append(handler.key)
                self._kept.pop(handler.key, None)
                self._leave_origin(handler)
        if self._store is None:
            return
        try:
            self._store.apply(changed, dropped)
            self._unwritten.clear()
        except Exception as problem:
            self._unwritten, self._retry_at = both, time.monotonic() + self._timings.store_retry_seconds
            log.error("cannot write down registrations tools=%d why=%s", len(both), problem)
            if strict:
                raise NotKept(
                    f"the change could not be written down ({problem}): it holds until the bus stops; see that its "
                    "data directory can be written, then ask again"
                ) from problem

    def _places(self, handler: CallbackHandler) -> tuple[tuple[str | None, int], ...]:
        places = dict(self._registry.places(handler))
        if None in places:  # what is not said would pass for a role that is new at the next start
            for role in self._registry.known_roles:
                places.setdefault(role, ABSENT)
        return tuple(places.items())

    def _to_record(self, handler: CallbackHandler) -> StoredRegistration:
        item = handler.offered
        return StoredRegistration(
            key=handler.key,
            source=handler.source,
            tool=item.tool,
            callback_url=handler.target.text,
            checked=item.checker is not None,
            offers=self._places(handler),
            answered_at=handler.origin.answered_at,
        )

    # -- origins -------------------------------------------------------------------------------------------------

    def _origin_moved(self, origin: Origin) -> None:
        """Takes the tools of an origin out of the lists, or puts them back."""
        if origin.online:
            names = self._registry.resume(origin.handlers)
            log.info("online source=%r origin=%s tools=%d", origin.source, origin, len(names))
        else:
            self._registry.suspend(origin.handlers, f"nobody accepts a connection at {origin} ({origin.why})")
            tools = len(origin.handlers)  # after a restart none of them was offered
            log.warning("offline source=%r origin=%s tools=%d why=%s", origin.source, origin, tools, origin.why)
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

    async def _housekeep(self) -> None:
        while True:
            try:
                silent = time.time() - self._timings.note_seconds
                await accepting([each for each in self._origins.values() if each.online and each.answered_at < silent])
                self._forget_old()
                self._note_answers()
                self.sync()  # what the shelf could not take before
            except Exception:
                log.exception("a fault of the bus in its housekeeping of callbacks")
            await asyncio.sleep(self._timings.note_seconds)

    def _forget_old(self) -> None:
        """Drops what has not answered for 30 days."""
        oldest = time.time() - FORGET_SECONDS
        away = [each for each in self._origins.values() if each.probing is not None]  # and was asked at least once
        for origin in [each for each in away if each.answered_at < oldest]:
            handlers = list(origin.handlers)
            for handler in handlers:
                self._registry.withdraw(handler)
            log.warning(
                "dropped source=%r origin=%s tools=%d why=no answer for 30 days", origin.source, origin, len(handlers)
            )
            self._write(handlers)
            self._changed()

    def _note_answers(self) -> None:
        if self._store is None:
            return
        since, self._noted_at = self._noted_at, time.time()
        heard = [origin for origin in self._origins.values() if origin.answered_at >= since]
        try:
            self._store.answered([handler.key for origin in heard for handler in origin.handlers], self._noted_at)
        except Exception as problem:
            self._noted_at = since
            log.error("cannot write down who has answered why=%s", problem)


def _unchecked(tool: Tool) -> CompiledTool:
    """Arguments of a tool that came by REST go out as the model wrote them (REST-40)."""
    return CompiledTool(tool, None, frozenset())
