"""Registers tools with a callback URL, by REST or by gRPC without a session, and persists them.

Between the HTTP application or the gRPC service and the registry: makes a handler for each registration, groups them by
origin, and persists them (`registration_restore` restores them). The registry's state of a handler is persisted after
any change, so a tool that a plugin overwrote or an operator cleared over gRPC does not come back after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from toolbus.bus.access.principal import Principal
from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.compiled_tool import CompiledTool, compile_tool, declared_twice, unchecked
from toolbus.bus.catalog.handler import LENT_MODEL, is_operators
from toolbus.bus.core import Core
from toolbus.bus.gateway.callback import Callbacks, CallbackSignals
from toolbus.bus.gateway.callback_handler import CallbackHandler, Origin
from toolbus.bus.gateway.registration_restore import UNCONFIRMED, only_approved, restore_handlers
from toolbus.bus.gateway.registration_writer import RegistrationWriter
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.refused_tools import add_refused
from toolbus.bus.streams.tool_review import first_fault, refusal
from toolbus.bus.streams.withdrawal import notify_owners
from toolbus.errors import InvalidRequest, InvalidTool, NotApproved, NotPermitted, RequestError, UnknownRole
from toolbus.text import quote
from toolbus.tool import Tool, is_source
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.callbacks")

DEFAULT_SOURCE = "external"  # REST-3
EXPIRE_SECONDS = 30 * 86_400.0  # without an answer of its origin, until a tool is dropped


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
        self._writer = RegistrationWriter(core.registry, store, core.timings, self._left)
        signals = CallbackSignals(
            self._origin_changed, self._confirmation_changed, self._writer.save_listener, self._disowned
        )
        self._callbacks = Callbacks(core.dispatcher, core.limits, core.neighbours.allows, signals)
        self._origins: dict[tuple[str, tuple[str, str, int]], Origin] = {}  # by source and address
        self._by_source: dict[str, dict[Origin, None]] = {}  # the same origins
        self._handlers: dict[str, CallbackHandler] = {}  # by key: every registration, online or offline
        self._audit = core.audit
        self._pins = core.pins
        self._adopt = core.roles.first_use
        self._housekeeping: asyncio.Task[None] | None = None  # None until started
        self._restoring = False  # whether the probes of restored origins are not complete
        self._answers_saved_at = time.time()  # when the times of the last answers were last persisted

    def __repr__(self) -> str:
        offline = sum(not origin.online for origin in self._origins.values())
        return f"<Registrations tools={len(self._handlers)} origins={len(self._origins)} offline={offline}>"

    # -- life ----------------------------------------------------------------------------------------------------

    async def restore(self, records: Iterable[StoredRegistration]) -> None:
        """Restores persisted tools, and offers at once those whose plugin still listens."""
        self._restoring = True
        stored = {record.key: record for record in records}
        approved = only_approved(stored.values(), self._pins)
        self._handlers.update(restore_handlers(approved, self._registry, self._limits, self._handler))
        if stored:
            self._registry.take_unsaved()  # all of them; most are as they were persisted
            places, handlers = self._writer.places, self._handlers.values()
            changed = [each for each in handlers if set(places(each)) != set(stored[each.key].offers)]
            self._writer.write(changed, removed=stored.keys() - self._handlers.keys())
        if self._origins:
            offline = [origin for origin in self._origins.values() if not origin.online]
            probing = asyncio.ensure_future(self._callbacks.probe_once(offline))
            try:
                await asyncio.wait([probing], timeout=self._timings.reachable_seconds)
            finally:
                probing.cancel()
            for origin in offline:
                if origin.online:
                    self._callbacks.probe(origin)  # for its tools whose plugin has not proved its secret yet
                else:
                    origin.last_failure = "not since the bus started"
                    self._callbacks.take_offline(origin)
        self._restoring = False
        self._expire()

    def start(self) -> None:
        """Starts the housekeeping: probes of silent origins, and the expiry of those that never answer."""
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house(), name="toolbus callbacks")

    def serving(self, source: str) -> bool | None:
        """Returns whether a source's tools at any origin are offered; None where it has none with a callback URL."""
        origins = self._by_source.get(source)
        return None if origins is None else any(origin.is_serving for origin in origins)

    @property
    def sources(self) -> Iterable[str]:
        """The sources that have callback tools."""
        return self._by_source

    async def stop(self) -> None:
        """Cancels all tasks, and persists the rest."""
        tasks = [self._housekeeping, *(origin.probing for origin in self._origins.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._callbacks.stop()
        self._writer.retry(self._handlers.values())
        self._persist_answers()

    # -- registering ---------------------------------------------------------------------------------------------

    def register(self, source: str, tool: Tool, target: CallbackUrl, secret: str = "") -> ChangeOutcome:
        """Registers one tool by REST: its arguments are checked only if it asks for that (REST-40).

        Some role has to accept it (REST-4).

        Args:
            secret: its `callback_secret`; empty where its plugin set none.

        Raises:
            UnknownRole: the tool is for a role that is not configured.
            NotPermitted: the source may not offer tools, or the name is reserved for the bus's own tools.
            NotKept: it could not be persisted; it is offered until the bus stops.
        """
        self._check_source(source)
        _check_name(tool.name)
        compiled = compile_tool(tool, self._limits) if tool.validate else unchecked(tool, self._limits)
        self._audit.check()
        if tool.role and not self._adopt(tool.role, Principal(source)):
            raise UnknownRole(tool.role)
        for why in self._hold(source, [compiled]).values():
            raise NotApproved(why)
        return self._register(source, [(compiled, target)], needs_role=True, secret=secret)[0]

    def register_by_grpc(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        """Registers the tools of a Register without a session, each on its own.

        Raises:
            RequestError: nothing was registered; a bad tool is one only where the request says all_or_none.
            NotKept: they could not be persisted; they are offered until the bus stops.
        """
        source = request.source or DEFAULT_SOURCE
        if not is_source(source):
            raise InvalidRequest(f"source {quote(source)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another")
        self._check_source(source)
        items: list[tuple[CompiledTool, CallbackUrl]] = []
        faults: list[tuple[pb.Tool, RequestError]] = []
        seen, new_roles, check_role = set[tuple[str, str]](), set[str](), self._presence.review.check_role
        self._audit.check()
        for message in request.tools:
            try:
                if (key := (message.name, message.role)) in seen:
                    raise declared_twice(message.name)
                seen.add(key)
                item = self._read(message)
                check_role(Principal(source), message.role, all_or_none=request.all_or_none, new=new_roles)
                items.append(item)
            except RequestError as fault:
                faults.append((message, fault))
        if not (request.all_or_none and faults) and (waiting := self._hold(source, [tool for tool, _ in items])):
            faults += [
                (message, NotApproved(waiting.pop(key)))
                for message in request.tools
                if (key := (message.name, message.role)) in waiting
            ]
            items = [item for item in items if _key(item[0].tool) not in {(each.name, each.role) for each, _ in faults}]
        if request.all_or_none and faults:
            raise first_fault([fault for _, fault in faults])
        outcomes = self._register(source, items)
        response = catalog_messages.registered(*outcomes)
        add_refused(response, [refusal(message, fault) for message, fault in faults])
        return response

    def _read(self, message: pb.Tool) -> tuple[CompiledTool, CallbackUrl]:
        """Reads a tool and where its calls are posted.

        Raises:
            InvalidTool: naming each fault.
        """
        try:
            target = parse_callback_url(message.callback_url)
        except ValueError as error:
            raise InvalidTool([f"tool {quote(message.name)}: {error}"]) from None
        tool = replace(Tool.from_wire(message, self._limits), callback_url=target.shown)
        return compile_tool(tool, self._limits), target

    def _hold(self, source: str, tools: Sequence[CompiledTool]) -> dict[tuple[str, str], str]:
        """Returns why tools of a pinned source wait for an approval, by name and role; withdraws their old ones."""
        waiting = self._pins.review(source, [tool.declared for tool in tools])
        handlers = [handler for origin in self._by_source.get(source, ()) for handler in origin.handlers]
        former = [handler for handler in handlers if _key(handler.offered.tool) in waiting]
        for handler in former:
            self._registry.withdraw(handler)
            log.warning("withdrawn tool=%r source=%r why=it changed", handler.offered.tool.name, source)
        if former:
            self._on_source(source)
            self.persist()
            self._changed()
        return waiting

    def _register(
        self, source: str, items: list[tuple[CompiledTool, CallbackUrl]], *, needs_role: bool = False, secret: str = ""
    ) -> list[ChangeOutcome]:
        self._audit.check()
        outcomes = []
        for tool, target in items:
            handler = self._handler(source, tool, target, secrets.token_hex(8), time.time())
            handler.secret, handler.listener = secret, handler.origin.listener() or ""
            outcome = self._registry.register(handler, [tool], needs_role=needs_role, waits=not needs_role)
            notify_owners(outcome)
            outcomes.append(outcome)
            if outcome.accepted:
                self._handlers[handler.key] = handler
                self._audit.record("register", Principal(source), target=tool.tool.name, peer=target.shown)
                log.info("registered tool=%r source=%r callback=%s", tool.tool.name, source, target.shown)
                self._callbacks.bring_online(handler.origin)  # a plugin that registers is running (REST-43)
                if not (handler.listener or secret):  # it registers before it listens
                    self._callbacks.await_listener(handler.origin)
            else:
                self._leave_origin(handler)
        self._presence.review.mark(source)
        self._on_source(source)
        try:
            self.persist(strict=True)
        finally:
            self._changed()
        return outcomes

    def _check_source(self, source: str) -> None:
        if is_operators(source):
            raise NotPermitted(f"source {source!r} is the bus's own, or one of a supervisor: choose another")
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
        return CallbackHandler(key, tool, target, origin, self._callbacks.exchanges, self._limits.calls_in_flight)

    # -- persisting ----------------------------------------------------------------------------------------------

    def persist(self, *, strict: bool = False) -> None:
        """Persists all changes since the last time: `RegistrationWriter.persist`.

        Raises:
            NotKept: see strict.
        """
        self._writer.persist(self._handlers.values(), strict=strict)

    def _persist_answers(self) -> None:
        since, self._answers_saved_at = self._answers_saved_at, time.time()
        origins = [origin for origin in self._origins.values() if origin.answered_at >= since]
        if not self._writer.save_answers(origins, self._answers_saved_at):
            self._answers_saved_at = since

    def _left(self, handler: CallbackHandler) -> None:
        """Forgets a handler that offers nothing any more."""
        self._handlers.pop(handler.key, None)
        self._leave_origin(handler)

    # -- origins -------------------------------------------------------------------------------------------------

    def _origin_changed(self, origin: Origin) -> None:
        """Suspends the tools of an origin that went offline, or resumes them when it is back online."""
        if origin.online:
            names = self._registry.resume([handler for handler in origin.handlers if handler.is_confirmed])
            for handler in origin.handlers:
                if not handler.is_confirmed:  # its doubt may be out of date
                    self._registry.suspend([handler], f"{origin}: {handler.doubt or UNCONFIRMED}{_trust(handler)}")
            log.info("online source=%r origin=%s tools=%d", origin.source, origin, len(names))
        else:
            why = f"{origin} accepts no connection ({origin.last_failure})"
            self._registry.suspend([each for each in origin.handlers if not each.is_restored], why)
            for handler in origin.handlers:
                if handler.is_restored:
                    again = f"if its plugin was started again, let it register again{_trust(handler)}"
                    self._registry.suspend([handler], f"{why}: {again}")
            tools = len(origin.handlers)  # after a restart none of them was offered
            reason = origin.last_failure
            log.warning("offline source=%r origin=%s tools=%d why=%s", origin.source, origin, tools, reason)
        self._on_source(origin.source)
        self._changed()

    def _confirmation_changed(self, handlers: Sequence[CallbackHandler], doubt: str) -> None:
        """Offers tools that were confirmed, or suspends those at whose URL another program may listen."""
        origin = handlers[0].origin
        if doubt:
            self._registry.suspend(handlers, f"{origin}: {doubt}{_trust(handlers[0])}")
            log.warning("unconfirmed source=%r origin=%s tools=%d why=%s", origin.source, origin, len(handlers), doubt)
        else:
            log.info("confirmed source=%r origin=%s tools=%d", origin.source, origin, len(handlers))
            if origin.online:
                self._registry.resume(handlers)
        self._on_source(origin.source)
        self._changed()

    def _disowned(self, handler: CallbackHandler, answer: str) -> None:
        """Withdraws a restored tool whose plugin has answered that it does not have it."""
        self._registry.withdraw(handler)
        tool = handler.offered.tool.name
        log.warning("withdrawn tool=%r source=%r why=its plugin answered %s", tool, handler.source, answer)
        self._on_source(handler.source)
        self.persist()
        self._changed()

    def confirm(self, source: str) -> list[str]:
        """Trusts the programs that listen at the URLs of a source's unconfirmed tools. Returns their names.

        Tools with a secret are left out: their plugin proves it.

        Raises:
            NotKept: it could not be persisted; it is in force until the bus stops.
        """
        confirmed: list[CallbackHandler] = []
        for origin in list(self._by_source.get(source, ())):
            unconfirmed = [handler for handler in origin.handlers if not (handler.is_confirmed or handler.secret)]
            if unconfirmed:
                self._callbacks.confirm(unconfirmed)
                self._callbacks.bring_online(origin)
                confirmed += unconfirmed
        self._writer.write(confirmed, strict=True)
        return [handler.offered.tool.name for handler in confirmed]

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
                await self._callbacks.probe_once(
                    [each for each in self._origins.values() if each.is_serving and each.answered_at < silent_since]
                )
                self._expire()
                self._persist_answers()
                self.persist()  # what the store could not write before
            except Exception:
                log.exception("a fault of the bus in the housekeeping of callback tools")
            await asyncio.sleep(self._timings.note_seconds)

    def _expire(self) -> None:
        """Drops the tools of origins that did not answer for 30 days."""
        if self._restoring:
            return
        oldest = time.time() - EXPIRE_SECONDS
        silent = [each for each in self._origins.values() if not each.is_serving]
        for origin in [each for each in silent if each.answered_at < oldest]:
            handlers = list(origin.handlers)
            for handler in handlers:
                self._registry.withdraw(handler)
            log.warning(
                "dropped source=%r origin=%s tools=%d why=no answer for 30 days", origin.source, origin, len(handlers)
            )
            self._writer.write(handlers)
            self._changed()


def _check_name(name: str) -> None:
    # REST-3 allows a colon, and a later registration replaces an earlier
    if ":" in name and is_operators(name.partition(":")[0]):
        raise NotPermitted(f"name {name!r} is reserved for the bus's own tools and supervisors: choose another")
    if name == LENT_MODEL:  # it would get what plugins ask a host's model
        raise NotPermitted(f"name {name!r} is reserved for hosts that lend their model, in a session: choose another")


def _key(tool: Tool) -> tuple[str, str]:
    return tool.name, tool.role or ""


def _trust(handler: CallbackHandler) -> str:
    """Returns how an operator confirms a tool, as the end of a sentence."""
    return "" if handler.secret else f", or trust it with `toolbus confirm {handler.source}`"
