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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from toolbus.bus.access.identity import Principal
from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.entry import (
    LENT_MODEL,
    CompiledTool,
    compile_tool,
    declared_twice,
    is_operators,
    place_and_turn,
    unchecked,
)
from toolbus.bus.catalog.policy import Pinning
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.core import Core
from toolbus.bus.gateway.callback import Callbacks, CallbackSignals
from toolbus.bus.gateway.callback_handler import CallbackHandler, Origin
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.bus.storage.store import Kind, Store
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.refused_tools import add_refused
from toolbus.bus.streams.tool_review import first_fault, notify_owners, refusal
from toolbus.common.text import clean_line, quote
from toolbus.errors import InvalidRequest, InvalidTool, NotApproved, NotKept, NotPermitted, RequestError, UnknownRole
from toolbus.protocol.limits import Limits, Timings
from toolbus.protocol.tool import Tool, is_source
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# Restored tools are suspended and unconfirmed until `Callbacks` knows that their plugin listens.

log = logging.getLogger("toolbus.callbacks")

UNCONFIRMED = (
    "the bus has restarted, and the plugin has not shown yet that it is there and still has the tool: let it register "
    "again"
)
ABSENT = -1  # as a place: the role existed, and a tool for all roles was not in it

MakeHandler = Callable[[str, CompiledTool, CallbackUrl, str, float], CallbackHandler]


def only_approved(records: Iterable[StoredRegistration], pins: Pinning) -> list[StoredRegistration]:
    """Returns persisted tools without those that wait for an approval, since their sources are pinned to block now."""
    stored = list(records)
    waiting = {
        source: pins.review(source, [each.tool for each in stored if each.source == source], accepted=True)
        for source in {each.source for each in stored if pins.pin_of(each.source)}
    }
    approved = []
    for record in stored:
        why = waiting.get(record.source, {}).get((record.tool.name, record.tool.role or ""))
        if why:
            log.warning("dropped persisted tool=%r source=%r why=%s", record.tool.name, record.source, clean_line(why))
        else:
            approved.append(record)
    return approved


def restore_handlers(
    records: Iterable[StoredRegistration], registry: Registry, limits: Limits, make_handler: MakeHandler
) -> dict[str, CallbackHandler]:
    """Offers persisted tools again, suspended. Returns their handlers by key; tools that are invalid now are left out.

    Args:
        make_handler: makes a handler of source, tool, URL, key and the time of the last answer.
    """
    by_key = {record.key: record for record in records}
    for role in dict.fromkeys(role for record in by_key.values() for role, _ in record.offers):
        if role is not None:
            registry.reserve(role)
    handlers: dict[str, CallbackHandler] = {}
    places: list[tuple[int, str | None, CallbackHandler]] = []
    for record in by_key.values():
        try:
            target = parse_callback_url(record.callback_url)
            # A tool that came by gRPC is checked, or says that it is not.
            by_rest = not record.checked and record.tool.validate is None
            stored = replace(record.tool, no_defaults=True)  # earlier states did not store that
            tool = unchecked(stored, limits) if by_rest else compile_tool(stored, limits)
        except (ValueError, InvalidTool) as error:  # a rule is stricter than when it was registered
            why = clean_line(str(error))
            log.warning("dropped persisted tool=%r source=%r why=%s", record.tool.name, record.source, why)
            continue
        handler = make_handler(record.source, tool, target, record.key, record.answered_at)
        handler.origin.online = handler.is_confirmed = False
        handler.is_restored = True
        handler.listener, handler.secret = record.listener, record.secret
        handlers[record.key] = handler
        offers = dict(record.offers)
        if None in offers:  # REST-12: also for roles that are new since
            offers = {**dict.fromkeys(registry.known_roles, offers[None]), **offers}
        places += [(place, role, handler) for role, place in offers.items() if place != ABSENT]
    _register(places, registry)
    if by_key:
        origins = {handler.origin for handler in handlers.values()}
        log.info("restored tools=%d origins=%d", len(handlers), len(origins))
        for role in set(registry.known_roles) - set(registry.roles):
            log.warning("tools wait for role=%r, which is not configured: add it with --role", role)
    return handlers


def _register(places: list[tuple[int, str | None, CallbackHandler]], registry: Registry) -> None:
    for _, role, handler in sorted(places, key=lambda item: place_and_turn(item[0])):
        for _, name, error in registry.register(handler, [handler.offered], roles=[role]).failed:
            why = clean_line(error)
            log.warning("not restored tool=%r source=%r role=%r why=%s", name, handler.source, role or "", why)
    registry.suspend([handler for _, _, handler in places], UNCONFIRMED)


class RegistrationWriter:
    """Writes the registrations of one bus; a failed write is retried with the next change, and when the bus stops.

    Args:
        store: None: nothing is written.
        left: called with each handler that offers nothing any more.
    """

    def __init__(
        self,
        registry: Registry,
        store: RegistrationStore | None,
        timings: Timings,
        left: Callable[[CallbackHandler], None],
    ) -> None:
        self._registry = registry
        self._store = store
        self._timings = timings
        self._left = left
        self._unsaved: dict[CallbackHandler, None] = {}  # whose last write failed
        self._retry_at = 0.0  # when the next change may retry that, by the monotonic clock
        self._roles = registry.roles  # as of the last `persist`

    def __repr__(self) -> str:
        return f"<RegistrationWriter unsaved={len(self._unsaved)}>"

    def persist(self, handlers: Iterable[CallbackHandler], *, strict: bool = False) -> None:
        """Persists all changes since the last time.

        Args:
            handlers: all of the bus.
            strict: whether a failed write is an error; else it is logged and retried later.

        Raises:
            NotKept: see strict.
        """
        changed = [each for each in self._registry.take_unsaved() if isinstance(each, CallbackHandler)]
        if self._roles != self._registry.roles:
            if not set(self._roles) <= set(self._registry.roles):  # a stored place may name a role that was removed
                changed = [*handlers, *changed]
            self._roles = self._registry.roles
        if changed or (self._unsaved and (strict or time.monotonic() >= self._retry_at)):
            self.write(changed, strict=strict)

    def retry(self, handlers: Iterable[CallbackHandler]) -> None:
        """Retries failed writes at once."""
        self._retry_at = 0.0
        self.persist(handlers)

    def write(self, handlers: Iterable[CallbackHandler], removed: Iterable[str] = (), *, strict: bool = False) -> None:
        """Writes handlers as they are now, and deletes keys.

        Args:
            strict: as of `persist`.

        Raises:
            NotKept: see strict.
        """
        changed: list[StoredRegistration] = []
        dropped = list(removed)
        unsaved = {**self._unsaved, **dict.fromkeys(handlers)}
        for handler in unsaved:
            if self._registry.places(handler):
                changed.append(self._to_record(handler))
            else:
                dropped.append(handler.key)
                self._left(handler)
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

    def save_answers(self, origins: Iterable[Origin], when: float) -> bool:
        """Persists when origins last answered. Returns whether it was written.

        Args:
            when: in seconds since the epoch.
        """
        if self._store is None:
            return True
        try:
            answered = [each for origin in origins for each in origin.handlers if self._registry.places(each)]
            self._store.apply([replace(self._to_record(each), answered_at=when) for each in answered], ())
        except Exception as error:
            log.error("cannot persist which callback URLs answered why=%s", error)
            return False
        return True

    def save_listener(self, origin: Origin) -> None:
        """Persists the plugin's listening socket, for the tools that it registered in this run."""
        if not (listener := origin.listener()):
            return
        moved = [each for each in origin.handlers if not each.is_restored and each.listener != listener]
        for handler in moved:
            handler.move_to(listener)
        if moved:
            self.write(moved)

    def places(self, handler: CallbackHandler) -> tuple[tuple[str | None, int], ...]:
        """Returns the places of a handler's tools, as they are stored."""
        places = dict(self._registry.places(handler))
        if None in places:  # else a role without a place would pass for a new role at the next start
            for role in self._registry.known_roles:
                places.setdefault(role, ABSENT)
        return tuple(places.items())

    def _to_record(self, handler: CallbackHandler) -> StoredRegistration:
        return StoredRegistration(
            key=handler.key,
            source=handler.source,
            tool=handler.offered.declared,
            callback_url=handler.target.text,
            checked=handler.offered.checker is not None,
            offers=self.places(handler),
            answered_at=handler.origin.answered_at,
            listener=handler.listener,
            secret=handler.secret,
        )


class RunClock:
    """The time since the epoch as buses on a data directory count it: by the monotonic clock, on from the run before.

    So neither a wrong clock, at a start or while running, nor a time in which no bus ran lets anything expire.

    Args:
        store: where it is persisted; None: nowhere.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        stored = {} if store is None else store.load(CLOCK)
        seen = stored.get("seconds")
        self._ahead = (seen if isinstance(seen, int | float) else time.time()) - time.monotonic()
        self.save()

    def now(self) -> float:
        """Returns the time, in seconds."""
        return time.monotonic() + self._ahead

    def save(self) -> None:
        """Persists the time, for the next run to go on."""
        try:
            if self._store is not None:
                self._store.write(CLOCK, {"seconds": self.now()})
        except Exception as problem:  # of any database; the next run then goes on from an earlier time
            log.warning("the time cannot be persisted: %s", problem)


# How long buses ran on a data directory, from which the expiry of registrations is counted.
CLOCK = Kind("clock", needed=False, without="count from the time of the system's clock")
DEFAULT_SOURCE = "external"  # REST-3
EXPIRE_SECONDS = 30 * 86_400.0  # without an answer of its origin, until a tool is dropped


def compile_by_rest(tool: Tool, limits: Limits) -> CompiledTool:
    """Compiles a tool that comes by REST: its arguments are checked only if it asks for that (REST-40).

    Raises:
        InvalidTool: it asks for that, and its schema breaks a rule.
    """
    tool = replace(tool, no_defaults=True)  # its server gets what was sent
    return compile_tool(tool, limits) if tool.validate else unchecked(tool, limits)


class Registrations:
    """The callback tools of one bus.

    Args:
        store: where they are persisted; None: nowhere.
    """

    def __init__(self, core: Core, store: RegistrationStore | None) -> None:
        self._registry = core.catalog.registry
        self._presence = core.sessions.presence
        self._policy = core.catalog.policy
        self._limits = core.config.limits
        self._timings = core.program.timings
        self._on_source = core.signals.source_changed
        self._changed = core.signals.catalog_changed
        self._writer = RegistrationWriter(core.catalog.registry, store, core.program.timings, self._left)
        signals = CallbackSignals(
            self._origin_changed, self._confirmation_changed, self._writer.save_listener, self._disowned
        )
        self._callbacks = Callbacks(core, signals)
        self._origins: dict[tuple[str, tuple[str, str, int]], Origin] = {}  # by source and address
        self.sources: dict[str, dict[Origin, None]] = {}  # the same origins, by source
        self._clock = RunClock(core.program.store if store is not None else None)
        self._handlers: dict[str, CallbackHandler] = {}  # by key: every registration, online or offline
        self._audit = core.audit
        self._review = core.sessions.presence.review
        self._pins = core.calls.dispatcher.seams.pins
        self._adopt = core.catalog.roles.first_use
        self._restoring = False  # whether the probes of restored origins are not complete
        self._answers_saved_at = self._clock.now()  # when the times of the last answers were last persisted

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

    def serving(self, source: str) -> bool | None:
        """Returns whether a source's tools at any origin are offered; None where it has none with a callback URL."""
        origins = self.sources.get(source)
        return None if origins is None else any(origin.is_serving for origin in origins)

    async def stop(self) -> None:
        """Cancels all tasks, and persists the rest."""
        running = [origin.probing for origin in self._origins.values() if origin.probing is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._callbacks.stop()
        self._writer.retry(self._handlers.values())
        self._persist_answers()

    # -- registering ---------------------------------------------------------------------------------------------

    def register(
        self, source: str, tool: Tool, target: CallbackUrl, secret: str = "", compiled: CompiledTool | None = None
    ) -> ChangeOutcome:
        """Registers one tool by REST; some role has to accept it (REST-4).

        Args:
            secret: its `callback_secret`; empty where its plugin set none.
            compiled: `compile_by_rest` of it, if known.

        Raises:
            UnknownRole: the tool is for a role that is not configured.
            NotPermitted: the source may not offer tools, or the name is reserved for the bus's own tools.
            NotKept: it could not be persisted; it is offered until the bus stops.
        """
        self._check_source(source)
        _check_name(tool.name)
        compiled = compiled or compile_by_rest(tool, self._limits)
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
        tool = replace(Tool.from_wire(message, self._limits), callback_url=target.shown, no_defaults=True)
        return compile_tool(tool, self._limits), target

    def _hold(self, source: str, tools: Sequence[CompiledTool]) -> dict[tuple[str, str], str]:
        """Returns why tools of a pinned source wait for an approval, by name and role; withdraws their old ones."""
        waiting = self._pins.review(source, [tool.declared for tool in tools])
        handlers = [handler for origin in self.sources.get(source, ()) for handler in origin.handlers]
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
            handler = self._handler(source, tool, target, secrets.token_hex(8), self._clock.now())
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
            origin = self._origins[source, target.origin] = Origin(source, target.origin, answered_at, self._clock.now)
            self.sources.setdefault(source, {})[origin] = None
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
        since, self._answers_saved_at = self._answers_saved_at, self._clock.now()
        self._clock.save()
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
        """Withdraws a tool whose plugin has answered that it does not have it (any more)."""
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
        for origin in list(self.sources.get(source, ())):
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
            del self.sources[origin.source][origin]
            if not self.sources[origin.source]:
                del self.sources[origin.source]
            self._on_source(origin.source)
            if origin.probing is not None:
                origin.probing.cancel()

    async def keep_house(self) -> None:
        """Probes silent origins, drops those that never answer, and persists what the store could not write before."""
        silent_since = self._clock.now() - self._timings.note_seconds
        await self._callbacks.probe_once(
            [each for each in self._origins.values() if each.is_serving and each.answered_at < silent_since]
        )
        self._expire()
        self._persist_answers()
        self.persist()

    def _expire(self) -> None:
        """Drops the tools of origins that did not answer for 30 days in which a bus ran."""
        if self._restoring:
            return
        oldest = self._clock.now() - EXPIRE_SECONDS
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
