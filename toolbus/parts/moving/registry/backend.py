"""Makes the calls of a `ToolRegistry`: in dispatchers of its own, or in a bus.

Handlers of a program belong to the program's event loops, so a registry without a bus has a dispatcher for each loop
that calls; all of them look into one table of tools. With a bus there is one dispatcher, on the bus's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Seams
from toolbus.bus.calls.call_records import CallRecord, CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import BUS_SOURCE, ToolListing
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller, OnProgress
from toolbus.common.cancellation import is_being_cancelled
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.workers import Workers
from toolbus.parts.tasks import TaskManager
from toolbus.protocol.tool import MAX_LEVEL, MIB, TASK_SECONDS, CallError, Limits, Result
from toolbus.v1 import tool_pb2 as pb

SOURCE = "local"  # the source of this process's tools, unless it names another
WORKERS = 32  # threads for handlers that are plain functions
IDS_PER_LOOP = 1 << 40  # dispatchers share handlers, so they must not share ids
UNLIMITED_CALLS = 1 << 30  # calls in flight: no peer can be overloaded, so a limit would only lose calls
# Results are not sent, so one may be larger than a message, and one source holds all of them.
STANDALONE_LIMITS = Limits(result_bytes=64 * MIB, held_bytes_per_source=Limits().held_bytes)
BUS_HAS_TASKS = (
    "a bus has a task manager of its own: leave task_manager out, and set background_after_seconds in its Config"
)
EVERYTHING = Principal(SOURCE, is_admin=False, may_omit_user=True)  # sees the tools of all users


class Backend(ABC):
    """Holds the tools and makes the calls.

    Attributes:
        registry: of the tools.
        view: lists them.
        observer: lists on behalf of a user.
        run_sync: runs a plain function off the event loop.
        tasks: turns calls into tasks; None: all calls run to their end.
        limits: for tools that are registered.
        slots: how many calls of a tool may be in flight.
    """

    registry: Registry
    view: CatalogView
    principal: Principal
    run_sync: Any
    tasks: TaskManager | None
    limits: Limits
    slots: int

    @abstractmethod
    def dispatcher(self) -> Dispatcher:
        """Returns the dispatcher of the event loop that handlers run on."""

    @abstractmethod
    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        """Makes a call, from any event loop."""

    @abstractmethod
    def set_tasks(self, tasks: TaskManager | None) -> None:
        """Has calls from now on become tasks of another manager, or of none; from any thread.

        Raises:
            SetupError: the bus has one of its own.
        """

    @abstractmethod
    def changed(self) -> None:
        """Notifies watchers that the catalog changed; from any thread."""

    @abstractmethod
    def records(self) -> list[CallRecord]:
        """Returns the newest calls, newest first."""

    def listings(self, user_id: str | None) -> Sequence[ToolListing]:
        """Returns the tools that can be called on behalf of a user, each name once; None: those of all users."""
        observer, level = (EVERYTHING, MAX_LEVEL) if user_id is None else (self.principal, 0)
        listings = self.view.listings(None, user_id or "", level, principal=observer)
        if len(self.registry.roles) < 2:
            return listings
        by_name: dict[str, ToolListing] = {}
        for listing in listings:  # roles may have different tools of one name; a call finds the first of them
            by_name.setdefault(listing.tool.name, listing)
        return tuple(by_name.values())


class Standalone(Backend):
    """A registry without a bus, with a dispatcher for each event loop.

    Args:
        tasks: holds the calls that become tasks; None: callers wait to the end.
        source: of the caller.
        may_omit_user: whether calls without a user pass where a tool is for certain users.
    """

    def __init__(self, tasks: TaskManager | None, source: str, *, may_omit_user: bool) -> None:
        self.tasks = tasks
        self._seams = Seams(background=tasks)
        self._policy = Policy()
        self._lock = threading.Lock()
        self._dispatchers = 0  # dispatchers so far
        self._callers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Dispatcher, LocalCaller]]
        self._callers = weakref.WeakKeyDictionary()
        self._records = CallRecords()  # of all loops, the ended ones too
        workers = Workers(WORKERS, "toolbus-tools")
        weakref.finalize(self, workers.stop)  # its threads would otherwise never end
        self.run_sync = workers.run
        self.limits = STANDALONE_LIMITS
        self.slots = UNLIMITED_CALLS
        self.registry = Registry(grace_seconds=0.0)
        self.view = CatalogView(self.registry, self._policy)
        self.principal = Principal(source, is_admin=False, may_omit_user=may_omit_user)

    def dispatcher(self) -> Dispatcher:
        return self._on_this_loop()[0]

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        return await self._on_this_loop()[1].call(call, on_progress)

    def set_tasks(self, tasks: TaskManager | None) -> None:
        self.tasks = self._seams.background = tasks

    def changed(self) -> None:
        """Does nothing: it has no watchers, and listings are rebuilt for a new revision."""

    def records(self) -> list[CallRecord]:
        return list(self._records)

    def _on_this_loop(self) -> tuple[Dispatcher, LocalCaller]:
        loop = asyncio.get_running_loop()
        with self._lock:
            dispatcher_and_caller = self._callers.get(loop)
            if dispatcher_and_caller is None:
                dispatcher_and_caller = self._callers[loop] = self._make_dispatcher(loop)
            return dispatcher_and_caller

    def _make_dispatcher(self, loop: asyncio.AbstractEventLoop) -> tuple[Dispatcher, LocalCaller]:
        timer = _Timer()
        dispatcher = Dispatcher(
            self.registry,
            self._policy,
            self._records,
            self.limits,
            arm=timer.arm,
            seams=self._seams,
            first_id=1 + self._dispatchers * IDS_PER_LOOP,
        )
        timer.sweep = dispatcher.deadlines.sweep
        self._dispatchers += 1
        caller = LocalCaller(  # an admin here: the tools of the bus are its own task tools
            self.principal.source,
            dispatcher,
            UNLIMITED_CALLS,
            may_omit_user=self.principal.may_omit_user,
            longest_timeout=TASK_SECONDS,
        )
        return dispatcher, caller


class OnBus(Backend):
    """The registry and the dispatcher of a running bus.

    Args:
        bus: a `toolbus.Bus`.
        source, may_omit_user: as for `Standalone`.
    """

    def __init__(self, bus: Any, source: str, *, may_omit_user: bool) -> None:
        self._bus = bus
        self.registry: Registry = bus.registry
        self.view: CatalogView = bus.dispatcher.view
        self.run_sync = bus.run_sync
        self.tasks = bus.tasks
        self.principal = Principal(source, is_admin=False, may_omit_user=may_omit_user)
        self.limits = Limits()
        self.slots = self.limits.calls_in_flight
        self._caller = LocalCaller(
            source, bus.dispatcher, is_admin=False, may_omit_user=may_omit_user, longest_timeout=TASK_SECONDS
        )

    def dispatcher(self) -> Dispatcher:
        dispatcher: Dispatcher = self._bus.dispatcher
        return dispatcher

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        loop, here = self._bus.loop, asyncio.get_running_loop()
        if loop is here:
            return await self._caller.call(call, on_progress)
        if loop is None:
            return _unavailable("the bus has not been started")
        report = None
        if on_progress is not None:  # it belongs to this loop
            report = functools.partial(here.call_soon_threadsafe, on_progress)  # type: ignore[arg-type]
        coroutine = self._caller.call(call, report)
        try:
            there = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return _unavailable("the bus has stopped")
        try:
            return await asyncio.wrap_future(there)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            # The loop cancels its tasks at its end, so the stage of this call is unknown.
            return _unavailable("the bus's event loop ended", Stage.UNKNOWN)

    def set_tasks(self, tasks: TaskManager | None) -> None:
        raise SetupError(BUS_HAS_TASKS)

    def changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the bus's loop is closed, so it has no watchers
            self._bus.catalog_changed()

    def records(self) -> list[CallRecord]:
        return [each for each in self._bus.records if each.source != BUS_SOURCE]


def _unavailable(why: str, stage: Stage = Stage.NOT_DISPATCHED) -> Result:
    return Result(is_error=True, error=CallError(Code.UNAVAILABLE, f"{why}: no tool can be called", stage))


class _Timer:
    """Wakes one dispatcher at its next deadline, on that dispatcher's loop; holds no reference to the loop."""

    def __init__(self) -> None:
        self._handle: weakref.ref[asyncio.TimerHandle] | None = None  # None: no deadline is set
        self.sweep: Callable[[float], None] = lambda now: None  # of the dispatcher, once it exists

    def arm(self, when: float) -> None:
        armed = self._handle() if self._handle is not None else None
        if armed is not None:
            armed.cancel()
        handle = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)
        self._handle = weakref.ref(handle)  # it holds its loop, which may end long before the deadline

    def _wake(self) -> None:
        self._handle = None
        self.sweep(time.monotonic())
