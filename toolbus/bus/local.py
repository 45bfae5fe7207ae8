"""Runs functions of this process as tools, and calls tools on behalf of programs of this process.

A LocalHandler runs one function on the bus's own loop (async) or on a thread (sync), with the rules for returns and
raises that plugins have. A LocalCaller makes calls and waits for their results as futures.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import functools
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from toolbus.bus.access.identity import LOCAL, Identity, Principal
from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.entry import Entry, Slots, ToolListing, Trust, compile_tool
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.signals import Signals
from toolbus.errors import Stage
from toolbus.functions.call_context import CallContext, CallOptions, Inputs
from toolbus.functions.input_rounds import OnInput, answered
from toolbus.functions.runner import RunSync, run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolOptions, ToolSpec, llm_tool, spec_of
from toolbus.functions.workers import Workers
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, Limits, Progress, Result, dump_arguments
from toolbus.sdk.tracing import ToolSpan, begin_tool, carried, find_api, in_span
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.local")

MAX_IN_FLIGHT = 4096
OnProgress = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class _Here:
    """The place where a call runs: a loop, its thread, and the dispatcher that waits for the result there."""

    loop: asyncio.AbstractEventLoop
    thread: int
    dispatcher: Dispatcher


class LocalHandler:
    """Runs one function of this process.

    Args:
        home: returns the dispatcher of the running loop, to which the results of calls that it sends go.
        run_sync: runs a plain function off the loop.
    """

    trust = Trust.OWN
    kind = "function"
    instance = ""
    shares = False
    awaits_roles = False
    remote = False
    persisted = False
    takes_calls = True
    session_state = wire.SESSION_STATE_LIVE
    max_item_bytes = 1 << 62

    def __init__(
        self,
        source: str,
        spec: ToolSpec,
        home: Callable[[], Dispatcher],
        max_in_flight: int = 256,
        run_sync: RunSync = asyncio.to_thread,
    ) -> None:
        self.source = source
        self.max_in_flight = max_in_flight
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self._spec = spec
        self._home = home
        self._run_sync = run_sync
        self._on_threads: set[str] = set()  # calls whose plain function has not returned
        self._running: dict[str, tuple[asyncio.Task[None], ToolScope]] = {}  # by call id, until the function is done

    def __repr__(self) -> str:
        return f"<LocalHandler {self._spec.tool.name} of {self.source} running={len(self._running)}>"

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Starts the function in a task of its own, once a call."""
        here = _Here(asyncio.get_running_loop(), threading.get_ident(), self._home())
        for call in calls:
            self._start(here, call, now)

    def _start(self, here: _Here, call: Call, now: float) -> None:
        role = call.declaration.tool.role or call.role
        message = pb.ToolCall(
            call_id=call.id, name=call.entry.bare_name, timeout_seconds=call.deadline - now, role=role or None
        )
        if call.context is not None:
            message.context.CopyFrom(call.context)
        if call.exchange is not None:
            call.exchange.fill(message)
        scope = ToolScope.of(
            message,
            send_progress=functools.partial(self._progress, here),
            caller=functools.partial(self._call, here),
            principal=call.root.caller.principal,
            caller_source=call.caller.source,
        )
        trace = None
        if call.trace is not None:
            call.trace.sent = now
            call.trace.fill(message)
            api = find_api()
            trace = begin_tool(api, message) if api is not None else None
        context = trace.context() if trace is not None else None
        task = here.loop.create_task(self._run(here, call.id, call.arguments_json, scope, trace), context=context)
        self._running[call.id] = (task, scope)
        task.add_done_callback(functools.partial(self._done, here, call.id))

    def _done(self, here: _Here, call_id: str, task: asyncio.Task[None]) -> None:
        """Answers for a task that was cancelled before its first step, which runs nothing of it."""
        self._running.pop(call_id, None)
        if call_id in self.pending:
            here.dispatcher.results(self, [pb.ToolResult(call_id=call_id, is_error=True)], time.monotonic())

    async def _run(
        self, here: _Here, call_id: str, arguments_json: str, scope: ToolScope, trace: ToolSpan | None
    ) -> None:
        async def run_sync(function: Callable[[], Any]) -> Any:
            self._on_threads.add(call_id)
            try:
                return await self._run_sync(function)
            finally:
                self._on_threads.discard(call_id)

        result = await run_handler(self._spec, arguments_json, scope, run_sync)
        if trace is not None:
            trace.end(result)
        message = result.to_wire()
        message.call_id = call_id
        here.dispatcher.results(self, [message], time.monotonic())

    def _call(
        self, here: _Here, name: str, arguments_json: str, options: CallOptions
    ) -> concurrent.futures.Future[Result]:
        """Calls another tool for the function, as part of the call that it answers."""
        nested = LocalCaller(self.source, here.dispatcher, pending=self.pending)
        call = carried(options).to_wire(name, arguments_json)
        return asyncio.run_coroutine_threadsafe(nested.call(call), here.loop)

    def _progress(self, here: _Here, progress: pb.ToolProgress) -> None:
        if threading.get_ident() == here.thread:  # at once: a later turn of the loop would be after the result
            self._take_progress(here, progress)
        else:
            here.loop.call_soon_threadsafe(self._take_progress, here, progress)

    def _take_progress(self, here: _Here, progress: pb.ToolProgress) -> None:
        here.dispatcher.progress(self, [progress], time.monotonic())

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels the function's task; one on a thread sees it in its scope, and its slot is taken until it ends."""
        running = self._running.get(call.id)
        if running is not None:
            task, scope = running
            scope.cancel(reason)
            if call.id not in self._on_threads:
                task.cancel()
        return False

    def stage(self, call: Call) -> Stage:
        """A function begins as soon as it is sent."""
        return Stage.DISPATCHED


class LocalCaller:
    """Makes calls on behalf of a program in the bus's process.

    Args:
        pending: for a function that calls other tools: the calls that it answers; each of its calls is part of
            one. A function may not set the context of a call, and is not an admin.
        is_admin: whether it may call the bus's own tools.
        may_omit_user: whether its calls that name no user pass rules that name users.
        longest_timeout: seconds; a longer timeout of a call is shortened to this.
        identity: on whose behalf the program calls.
    """

    max_item_bytes = 1 << 62

    def __init__(
        self,
        source: str,
        dispatcher: Dispatcher,
        max_in_flight: int = MAX_IN_FLIGHT,
        *,
        pending: dict[str, Any] | None = None,
        is_admin: bool = True,
        may_omit_user: bool = False,
        longest_timeout: float = MAX_TIMEOUT_SECONDS,
        identity: Identity = LOCAL,
    ) -> None:
        self.source = source
        self.max_in_flight = max_in_flight
        self.in_flight: dict[str, Any] = {}
        self.pending: dict[str, Any] = {} if pending is None else pending
        self.may_set_context = pending is None
        self.principal = Principal(source, is_admin and pending is None, may_omit_user, identity)
        self.longest_timeout = longest_timeout
        self.budget = dispatcher.budget(self.principal.account)
        self.quota = dispatcher.quotas.join(identity, self)
        self.allowed: set[Entry] = set()
        self.allowed_at = 0
        self._dispatcher = dispatcher
        self._ids = itertools.count(1)
        self._waiting: dict[str, tuple[asyncio.Future[Result], OnProgress | None]] = {}  # by call_id

    def __repr__(self) -> str:
        return f"<LocalCaller {self.source} in_flight={len(self.in_flight)}>"

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None = None) -> Result:
        """Makes one call and waits for its result. Cancelling the wait cancels the call."""
        if not call.call_id:
            call.call_id = f"{self.source}-{next(self._ids)}"
        call_id = call.call_id
        if call_id in self._waiting:
            raise ValueError(f"call_id {call_id!r} is already in flight: give each call an id of its own")
        if call.accepts and not call.HasField("context"):
            call.context.SetInParent()  # what it accepts is read with the context
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (future, on_progress)
        try:
            self._dispatcher.calls(self, [call], time.monotonic())
            return await future
        except asyncio.CancelledError:
            self._dispatcher.endings.cancels(
                self, [pb.ToolCancel(call_id=call_id, reason="cancelled")], time.monotonic()
            )
            raise
        finally:
            self._waiting.pop(call_id, None)

    def give_up(self, call_id: str) -> None:
        """Ends the wait for a call as cancelling it would: the call is cancelled, `call` raises CancelledError."""
        waiting = self._waiting.get(call_id)
        if waiting is not None:
            waiting[0].cancel()

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        """Takes plain results."""
        for call_id, output_json in results:
            self._settle(call_id, Result(call_id, output_json or "null"))

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        """Takes any other result."""
        result.call_id = call_id
        self._settle(call_id, Result.from_wire(result))

    def _settle(self, call_id: str, result: Result) -> None:
        waiting = self._waiting.get(call_id)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(result)

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        """Passes progress to the function that watches the call."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and waiting[1] is not None:
            try:
                waiting[1](Progress.from_wire(progress))
            except Exception:  # it runs in the middle of the plugin's frame
                log.exception("on_progress failed", extra=call_fields(call_id, "", "", self.principal))


LOCAL_WORKERS = 32  # threads for local tools that are plain functions, as many as a plugin has


class EmbeddedBus:
    """A bus as its own process uses it. All methods belong to the loop that started the bus."""

    def __init__(self, registry: Registry, dispatcher: Dispatcher, signals: Signals, limits: Limits) -> None:
        self.registry = registry
        self.dispatcher = dispatcher
        self.loop: asyncio.AbstractEventLoop | None = None  # None until started
        self._limits = limits
        self._signals = signals
        self._caller = LocalCaller("local", dispatcher)
        self._workers = Workers(LOCAL_WORKERS, "toolbus-local")  # not the loop's own: its few threads are the program's
        self.run_sync = self._workers.run  # runs a plain function off the loop
        self.catalog_changed = signals.catalog_changed  # notifies of a changed catalog; from any thread

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
        self.offer(source, spec)

    def offer(self, source: str, spec: ToolSpec, *, qualified: bool = False) -> None:
        """Offers a tool of this process on behalf of a source.

        Args:
            qualified: whether it is listed as ``source:name``.

        Raises:
            InvalidTool, UnknownRole: as for `add_tool`.
        """
        offered = [compile_tool(spec.tool, self._limits)]
        handler = LocalHandler(source, spec, lambda: self.dispatcher, run_sync=self.run_sync)
        self.registry.register(handler, offered, qualified=qualified)
        self.catalog_changed()

    def remove_tool(self, name: str, source: str = "local") -> bool:
        """Withdraws a tool of this process. Returns whether it was offered."""
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
        on_input: OnInput | None = None,
        inputs: Inputs | None = None,
    ) -> Result:
        """Calls a tool, wherever it runs, as `Host.call` does."""
        if on_input is not None:
            return await answered(
                *(self.call, name, dump_arguments(arguments), on_input, inputs),
                timeout=timeout,
                role=role,
                context=context,
                schema_hash=schema_hash,
                background_after=background_after,
                on_progress=on_progress,
            )
        options = CallOptions.of(timeout, role, context, schema_hash, background_after, inputs)
        call = options.to_wire(name, dump_arguments(arguments))
        return await in_span(call, lambda: self._caller.call(call, on_progress))

    async def call_many(self, calls: Sequence[tuple[str, Mapping[str, Any] | str | None]]) -> list[Result]:
        """Calls several tools at once. Results stand in the order of the calls."""
        texts = [(name, dump_arguments(arguments)) for name, arguments in calls]  # none is sent where one cannot be
        return await asyncio.gather(*(self.call(name, text) for name, text in texts))

    def list(
        self, role: str | None = None, *, user_id: str = "", level: int = 0, include_offline: bool = False
    ) -> builtins.list[ToolListing]:
        """Lists what this program could call on behalf of a user."""
        return [*self.dispatcher.view.listings(role, user_id, level, include_offline=include_offline)]

    def watch(self, since: int = -1) -> AsyncIterator[CatalogChanges]:
        """Yields the whole catalog first, then what changes, until the bus stops.

        Args:
            since: the revision that is known already; only what changed after it is yielded, if that is still known.
        """
        return self._signals.watch(since)
