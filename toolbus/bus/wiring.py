"""One bus: the rooms wired together. Embed it in a program, or let ``toolbus serve`` run it.

async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
    @bus.tool
    def add(a: int, b: int) -> int:
        return a + b
    result = await bus.call("add", {"a": 1, "b": 2})
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import toolbus
from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.listing import ToolListing
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.local import LocalCaller, LocalHandler, OnProgress
from toolbus.bus.operators.admin_tools import AdminTools
from toolbus.bus.operators.grants import Grants
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.guarded_service import UntrustedService
from toolbus.bus.streams.health import SERVICE, Health
from toolbus.bus.streams.listeners import Listeners
from toolbus.bus.streams.presence import TICK_SECONDS, WATCH_SECONDS, Presence
from toolbus.bus.tasks import LoopTasks, TaskManager, TaskTools, owner_of
from toolbus.errors import SetupError
from toolbus.functions.call_context import CallContext
from toolbus.functions.call_options import CallOptions
from toolbus.functions.threads import Workers
from toolbus.functions.tool_options import ToolOptions
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.sdk import llm_tool
from toolbus.tool import Result, dump_arguments

log = logging.getLogger("toolbus")

LOCAL_WORKERS = 32  # threads for local tools that are plain functions, as many as a plugin has
TASKS_FILE = "tasks.db"  # in the data directory
QUIET_SECONDS = 1.0  # how long a drained peer may say nothing before its stream is ended for it

__all__ = ["Bus", "Config"]


class Bus:
    """A running bus; use it as an async context manager. All methods belong to the loop that started it.

    Args:
        config: what to listen on and what to accept; by default what ``toolbus serve`` does.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._config = config = config or Config()
        self.loop: asyncio.AbstractEventLoop | None = None  # None until started
        self._thread = 0  # the loop's, by its identity; 0 until started
        self._timer: asyncio.TimerHandle | None = None  # the next sweep of deadlines
        self._telling: asyncio.TimerHandle | None = None  # the next word to watchers
        self._told_at = 0.0  # when watchers were last told
        self._ticking: asyncio.Task[None] | None = None  # None until started
        self._stopped = asyncio.Event()
        self._ending = False  # whether watchers are to leave
        self._changed: set[asyncio.Event] = set()  # local watchers
        self.records = CallRecords(contents=config.record_contents, began=time.time() - time.monotonic())
        self.registry = Registry(
            config.roles,
            tools_per_role=config.limits.tools_per_role,
            grace_seconds=config.grace_seconds,
            first_revision=time.time_ns() // 1_000_000,  # so that it rises across restarts too
        )
        self.policy = Policy(frozenset(config.silenced), config.permissions, config.guarded)
        self.dispatcher = Dispatcher(self.registry, self.policy, self.records, config.limits, arm=self._arm)
        self._health = Health(self._takes_calls, self._serving, self._sources)
        self._presence = Presence(
            self.registry,
            self.dispatcher,
            self.policy,
            config.limits,
            identity=(config.bus_id, secrets.token_hex(8), toolbus.__version__),
            on_source=self._health.source_changed,
            on_change=self.catalog_changed,
        )
        self._caller = LocalCaller("local", self.dispatcher)
        self._store: Any = None  # what survives a restart; None: nothing does
        self._registrations: Any = None  # tools with a callback URL; imported only where there are any
        self._council: Any = None  # what runs the council; None: there is neither HTTP nor a council file
        self._upstream: Any = None  # the main server that our tools are offered to; None: there is none
        self._workers = Workers(LOCAL_WORKERS, "toolbus-local")  # not the loop's own: its few threads are the program's
        service = ToolBusService(
            self.dispatcher,
            self._presence,
            config.limits,
            lambda request: self._callback_tools().register_by_grpc(request),
        )
        guarded = UntrustedService(self.dispatcher, self._presence, config.limits, self.policy.is_untrusted)
        self._grpc = Listeners(service, guarded, self._health, config.limits, reflection=config.grpc_reflection)
        self._http: Any = None  # the HTTP server, imported only where one is wanted
        self.tasks = TaskManager(config.background_after_seconds)
        self.dispatcher.tripwire = Tripwire(config.tripwire, config.tripwire_allow)  # type: ignore[arg-type]
        self.dispatcher.background = LoopTasks(self.tasks, self.dispatcher, lambda: self.loop)
        self._grants = Grants(
            self.registry,
            self.policy,
            self.dispatcher.view,
            self._presence,
            changed=self.catalog_changed,
            withdrawn=lambda: self._registrations.sync() if self._registrations is not None else None,
        )
        self.permit, self.grant, self.revoke = self._grants.permit, self._grants.grant, self._grants.revoke
        self.run_sync = self._workers.run  # runs a plain function off the loop
        self._offer_own()

    def __repr__(self) -> str:
        return f"<Bus {','.join(self.grpc_addresses) or 'not started'} {self._presence!r} {self.dispatcher!r}>"

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds every address, puts back what survived, and serves.

        Raises:
            SetupError: an address is taken, or the data directory cannot be used; nothing is left listening.
        """
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.dispatcher.settled_at = time.monotonic() + self._config.grace_seconds
        try:
            if self._config.http != "off" or self._config.council is not None:
                from toolbus.council.council_service import CouncilService

                if self._config.http == "off":
                    log.warning("nobody can ask the council: hosts do that over HTTP, which is off; turn it on")
                self._council = CouncilService.of_file(self, self._config.council)
            await self._open_store()
            if self._config.http != "off":
                from toolbus.bus.gateway.http_server import HttpServer

                self._http = HttpServer(self._config.limits.sessions)
                self._http.bind(self._config.http)
                self._offer_upstream(self._config.upstream)
            await self._grpc.start(self._config.grpc)
            if self._http is not None:
                await self._http.start(self._application())
        except BaseException:
            await self._grpc.stop()
            await self._stop_gateway()
            raise
        self._ticking = self.loop.create_task(self._tick(), name="toolbus tick")
        if self._upstream is not None:
            await self._upstream.start()

    async def _open_store(self) -> None:
        if self._config.data_dir is None:
            return
        from toolbus.bus.storage.registration_store import RegistrationStore

        self._store = RegistrationStore(self._config.data_dir)
        self._grants.keep_in(self._config.data_dir, self._config.permissions)
        self.tasks.keep_in(self._config.data_dir / TASKS_FILE)
        kept = self._store.load()
        if kept:
            await self._callback_tools().put_back(kept)

    def _callback_tools(self) -> Any:
        """Returns the tools with a callback URL, whose room is loaded when it is first needed."""
        if self._registrations is None:
            from toolbus.bus.gateway.registrations import Registrations
            from toolbus.bus.storage.registration_store import StoredRegistration

            self._registrations = Registrations(
                self.registry,
                self.dispatcher,
                self._presence,
                self.policy,
                self._config.limits,
                store=self._store,
                record=StoredRegistration,
                changed=self.catalog_changed,
                on_source=self._health.source_changed,
            )
            self._registrations.start()
        return self._registrations

    def _application(self) -> Any:
        from toolbus.bus.gateway.app import application
        from toolbus.bus.gateway.parts import SOURCE, Parts

        parts = Parts(
            registry=self.registry,
            view=self.dispatcher.view,
            registrations=self._callback_tools(),
            withdrawal=self._presence.withdrawal,
            limits=self._config.limits,
            own=parse_callback_url(f"http://{self._http.address}"),
            asker=lambda is_admin: LocalCaller(SOURCE, self.dispatcher, is_admin=is_admin),
            watch=self.watch,
            is_running=lambda source: bool(self._serving(source)),
            ready=self._takes_calls,
            ending=lambda: self._ending,
            records=self.records,
            tasks=self.tasks,
            task_owner=lambda user_id: owner_of(user_id, SOURCE),
            council=self._council,
        )
        return application(parts)

    def _offer_upstream(self, url: str | None) -> None:
        """Prepares to offer our tools to a main server.

        Raises:
            SetupError: it is this bus.
        """
        if url is None:
            return
        if parse_callback_url(url).meets(own := parse_callback_url(f"http://{self._http.address}")):
            raise SetupError(f"upstream {url} is this bus: name the main server, or choose another port with --http")
        from toolbus.bus.upstream import Upstream

        self._upstream = Upstream(
            url,
            self.registry,
            self.dispatcher.view,
            callback_base=own.url.rstrip("/"),
            bus_id=self._config.bus_id,
            changed=self.watch,
            on_warning=self.catalog_changed,
        )

    async def drain(self, grace_seconds: float | None = None) -> None:
        """Takes no new calls, lets those in flight end and peers leave, for ``grace_seconds`` at most.

        Args:
            grace_seconds: None means the configured ``drain_seconds``.
        """
        grace, started = self._config.drain_seconds if grace_seconds is None else grace_seconds, time.monotonic()
        if self._upstream is not None:
            await self._upstream.stop()  # while its calls still find their tools
        if not self._presence.draining:
            log.info("draining sessions=%d in_flight=%d", len(self._presence.sessions), self.dispatcher.active)
            self._presence.drain(grace)
            self._health.changed("")
            self._health.changed(SERVICE)
        while (left := started + grace - time.monotonic()) > 0:
            self._presence.drain(left)
            if time.monotonic() - started > QUIET_SECONDS:
                self._presence.end_idle(time.monotonic())
            if not self._presence.sessions and not self.dispatcher.active:
                return
            await asyncio.sleep(min(0.01, left))

    async def stop(self) -> None:
        """Ends every session and listens no more. Calls in flight end in UNAVAILABLE."""
        self._ending = True
        for waiting in self._changed:
            waiting.set()
        if self._ticking is not None:
            self._ticking.cancel()
        now = time.monotonic()
        for peer in list(self._presence.sessions.values()):
            self._presence.end(peer, "the bus stopped", now)
        self.dispatcher.stop(now)
        for handle in (self._timer, self._telling):
            if handle is not None:
                handle.cancel()
        await asyncio.sleep(0)  # lets the streams end with the status that says why
        await self._grpc.stop()
        await self._stop_gateway()
        self._workers.stop()
        self._stopped.set()
        log.info("stopped")

    async def _stop_gateway(self) -> None:
        async with contextlib.AsyncExitStack() as last_first:  # each is stopped, whatever the others raise
            if self._store is not None:
                last_first.callback(self._store.close)
            for room in (self._registrations, self._http, self._upstream):
                if room is not None:
                    last_first.push_async_callback(room.stop)
            if self._council is not None:
                last_first.callback(self._council.close)
            last_first.callback(self.tasks.close)  # first: whoever waits for a task over HTTP is answered

    async def wait_stopped(self) -> None:
        """Waits until somebody asked the whole bus to drain."""
        await self._stopped.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """Where gRPC listens: ``HOST:PORT`` or ``unix:PATH``, ports filled in."""
        return self._grpc.addresses

    async def dropin_address(self, port: int = 0) -> str:
        """Returns where sandboxed tools attach: `Listeners.untrusted_address`, listening from the first time on."""
        return await self._grpc.untrusted_address(port)

    @property
    def http_address(self) -> str | None:
        """Where HTTP listens; None where it does not."""
        return self._http.address if self._http is not None else None

    # -- for programs that embed it ------------------------------------------------------------------------------

    def tool(self, function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
        """Offers a function of this process as a tool; a decorator, with or without `ToolOptions`."""

        def offer(function: Callable[..., Any]) -> Callable[..., Any]:
            self.add_tool(spec_of(llm_tool(**options)(function)))
            return function

        return offer if function is None else offer(function)

    def add_tool(self, spec: ToolSpec, source: str = "local") -> None:
        """Offers a tool of this process.

        Raises:
            InvalidTool: its schema does not compile.
            UnknownRole: it is for a role that is not configured.
        """
        self._register(source, spec)

    def remove_tool(self, name: str, source: str = "local") -> bool:
        """Withdraws a tool of this process. Returns whether there was one."""
        outcome = self.registry.unregister(name, "", source)
        self.catalog_changed()
        return bool(outcome.names)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        background_after: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Result:
        """Calls a tool, wherever it runs. A failed call is a Result with ``error``, never an exception.

        Args:
            timeout: seconds; None means the tool's own.
            background_after: seconds after which a call becomes a task, whose id is then the result; None: never.
            context: what the tool may know about the circumstances.
        """
        options = CallOptions.of(timeout, role, context, schema_hash, background_after)
        return await self._caller.call(options.to_wire(name, dump_arguments(arguments)), on_progress)

    async def call_many(self, calls: Sequence[tuple[str, Mapping[str, Any] | str | None]]) -> list[Result]:
        """Calls several tools at once. Results stand in the order of the calls."""
        texts = [(name, dump_arguments(arguments)) for name, arguments in calls]  # none is sent where one cannot be
        return await asyncio.gather(*(self.call(name, text) for name, text in texts))

    def list(
        self, role: str | None = None, *, user_id: str = "", level: int = 0, include_offline: bool = False
    ) -> builtins.list[ToolListing]:
        """Lists what this program could call on behalf of a user."""
        return [*self.dispatcher.view.listings(role, user_id, level, include_offline=include_offline)]

    async def watch(self, since: int = -1) -> AsyncIterator[CatalogChanges]:
        """Yields the whole catalog first, then what changes, until the bus stops.

        Args:
            since: the revision that is known already; only what changed after it is told then, if that is still known.
        """
        waiting = asyncio.Event()
        self._changed.add(waiting)
        revision = since
        try:
            while not self._ending:
                waiting.clear()
                if self.registry.revision != revision:
                    changes = self.dispatcher.view.since(revision)
                    revision = changes.revision
                    yield changes
                await waiting.wait()
        finally:
            self._changed.discard(waiting)

    def add_role(self, role: str) -> None:
        """Adds a role; it gets every tool that was registered for all roles."""
        self.registry.add_role(role)
        self.catalog_changed()

    def remove_role(self, role: str) -> None:
        """Removes a role.

        Raises:
            UnknownRole: there is no such role.
        """
        self.registry.remove_role(role)
        self.catalog_changed()

    def _offer_own(self) -> None:
        """Offers what the bus itself can do: to operators always, to models where the configuration says so."""
        admin = AdminTools(
            self.registry,
            self._presence,
            self.records,
            self.dispatcher.view,
            stop=self._stopped.set,
            changed=self.catalog_changed,
            grants=self._grants,
            dropin_address=self.dropin_address,
        )
        for source, method in admin.offers(TaskTools(self.tasks).tools(), self._config.offered):
            self._register(source, spec_of(method), qualified=source == BUS_SOURCE)

    def _register(self, source: str, spec: ToolSpec, *, qualified: bool = False) -> None:
        offered = compile_tools([spec.tool], self._config.limits)
        handler = LocalHandler(source, spec, lambda: self.dispatcher, run_sync=self._workers.run)
        self.registry.register(handler, offered, qualified=qualified)
        self.catalog_changed()

    # -- what the rooms ask of the whole -------------------------------------------------------------------------

    def _takes_calls(self) -> bool:
        return not self._presence.draining and self.loop is not None

    def _serving(self, source: str) -> bool | None:
        rooms = (self._presence, self._registrations) if self._registrations is not None else (self._presence,)
        known = [well for well in (room.serving(source) for room in rooms) if well is not None]
        return any(known) if known else None

    def _sources(self) -> Sequence[str]:
        callbacks = self._registrations.sources if self._registrations is not None else ()
        return list(dict.fromkeys((*self._presence.known_sources(), *callbacks)))

    def _arm(self, when: float) -> None:
        assert self.loop is not None  # calls come only to a started bus
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(max(0.0, when - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self.dispatcher.sweep(time.monotonic())

    def catalog_changed(self) -> None:
        """Has those who watch told that the catalog changed; from any thread."""
        if self.loop is not None and threading.get_ident() != self._thread:
            self.loop.call_soon_threadsafe(self.catalog_changed)
            return
        if self._registrations is not None:
            self._registrations.sync()
        if self.loop is None or self._telling is not None:
            return
        wait = max(0.0, self._told_at + WATCH_SECONDS - self.loop.time())
        self._telling = self.loop.call_later(wait, self._tell)

    def _tell(self) -> None:
        assert self.loop is not None
        self._telling = None
        self._told_at = self.loop.time()
        self._presence.tell_watchers()
        for waiting in self._changed:
            waiting.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._presence.tick(time.monotonic())
                self._presence.tell_watchers()  # those who were too slow the last time
            except Exception:
                log.exception("a fault of the bus in its clockwork")
