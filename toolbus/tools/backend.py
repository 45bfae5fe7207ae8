"""Where the calls of a registry are made: in dispatchers of its own, or in a bus.

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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from toolbus.bus.calls.call_records import CallRecord, CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.catalog_view import CatalogView, Observer
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.listing import ToolListing
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller, OnProgress
from toolbus.bus.tasks import TaskManager
from toolbus.errors import Code, Stage
from toolbus.functions.threads import Workers
from toolbus.tool import MAX_LEVEL, MIB, TASK_SECONDS, CallError, Limits, Progress, Result
from toolbus.v1 import tool_pb2 as pb

SOURCE = "local"  # whose the tools of this process are, unless it says otherwise
WORKERS = 32  # threads for handlers that are plain functions
IDS_A_LOOP = 1 << 40  # dispatchers share handlers, so they must not share ids
ANY_NUMBER = 1 << 30  # calls at once: where no peer can be overloaded, a limit would only lose calls
# Nothing is sent, so a result may be larger than a message, and one source holds what there is.
ALONE = Limits(result_bytes=64 * MIB, held_bytes_per_source=Limits().held_bytes)
WHOLE = Observer(SOURCE, is_admin=False, may_omit_user=True)  # sees what is offered, whoever may call it


class Backend(Protocol):
    """Where tools are kept and calls are made."""

    registry: Registry
    view: CatalogView
    observer: Observer  # who lists on behalf of a user
    run_sync: Any  # runs a plain function off the loop
    limits: Limits  # for what is registered
    slots: int  # how many calls a tool takes at once

    def dispatcher(self) -> Dispatcher:
        """Returns the dispatcher of the loop that handlers run on."""

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        """Makes a call, from any loop."""

    def changed(self) -> None:
        """Has watchers told that the catalog changed; from any thread."""

    def records(self) -> list[CallRecord]:
        """Returns the newest calls, newest first."""


def offered(home: Backend, user_id: str | None) -> Sequence[ToolListing]:
    """Returns what can be called on behalf of a user, each name once; None: everything, whoever may."""
    caller, level = (WHOLE, MAX_LEVEL) if user_id is None else (home.observer, 0)
    listings = home.view.listings(None, user_id or "", level, caller=caller)
    if len(home.registry.roles) < 2:
        return listings
    by_name: dict[str, ToolListing] = {}
    for each in listings:  # roles may have different tools of one name; a call finds the first of them
        by_name.setdefault(each.tool.name, each)
    return tuple(by_name.values())


class Standalone:
    """A registry of its own, with a dispatcher for each loop.

    Args:
        tasks: keeps calls that outlive their caller's patience; None: callers wait to the end.
        source: who calls.
        unnamed_may: whether calls without a user pass where users are named.
    """

    def __init__(self, tasks: TaskManager | None, source: str, *, may_omit_user: bool) -> None:
        self._tasks = tasks
        self._policy = Policy()
        self._lock = threading.Lock()
        self._made = 0  # dispatchers so far
        self._callers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Dispatcher, LocalCaller]]
        self._callers = weakref.WeakKeyDictionary()
        self._records = CallRecords()  # of all loops, the ended ones too
        workers = Workers(WORKERS, "toolbus-tools")
        weakref.finalize(self, workers.stop)  # its threads would else wait for ever
        self.run_sync = workers.run
        self.limits = ALONE
        self.slots = ANY_NUMBER
        self.registry = Registry(grace_seconds=0.0)
        self.view = CatalogView(self.registry, self._policy)
        self.observer = Observer(source, is_admin=False, may_omit_user=may_omit_user)

    def dispatcher(self) -> Dispatcher:
        return self._here()[0]

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        return await self._here()[1].call(call, on_progress)

    def changed(self) -> None:
        """Nobody watches: listings are read anew where the revision has risen."""

    def records(self) -> list[CallRecord]:
        return list(self._records)

    def _here(self) -> tuple[Dispatcher, LocalCaller]:
        loop = asyncio.get_running_loop()
        with self._lock:
            here = self._callers.get(loop)
            if here is None:
                here = self._callers[loop] = self._new(loop)
            return here

    def _new(self, loop: asyncio.AbstractEventLoop) -> tuple[Dispatcher, LocalCaller]:
        timer = _Timer()
        dispatcher = Dispatcher(
            self.registry,
            self._policy,
            self._records,
            self.limits,
            arm=timer.arm,
            background=self._tasks,
            first_id=1 + self._made * IDS_A_LOOP,
        )
        timer.sweep = dispatcher.sweep
        self._made += 1
        caller = LocalCaller(  # what it administers here are its own tasks
            self.observer.source,
            dispatcher,
            ANY_NUMBER,
            may_omit_user=self.observer.may_omit_user,
            longest_timeout=TASK_SECONDS,
        )
        return dispatcher, caller


class OnBus:
    """The registry and the dispatcher of a running bus.

    Args:
        bus: a `toolbus.Bus`.
        source, unnamed_may: as for `Standalone`.
    """

    def __init__(self, bus: Any, source: str, *, may_omit_user: bool) -> None:
        self._bus = bus
        self.registry: Registry = bus.registry
        self.view: CatalogView = bus.dispatcher.view
        self.run_sync = bus.run_sync
        self.observer = Observer(source, is_admin=False, may_omit_user=may_omit_user)
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
        if on_progress is not None:  # it belongs to this loop
            on_progress = functools.partial(_tell, here, on_progress)
        coroutine = self._caller.call(call, on_progress)
        try:
            there = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return _unavailable("the bus has stopped")
        try:
            return await asyncio.wrap_future(there)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # It cancels what still runs on it; how far this call had got is lost with it.
            return _unavailable("the bus's event loop ended", Stage.UNKNOWN)

    def changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the bus's loop is closed, and nobody watches
            self._bus.catalog_changed()

    def records(self) -> list[CallRecord]:
        return [each for each in self._bus.records if each.source != BUS_SOURCE]


def _tell(loop: asyncio.AbstractEventLoop, on_progress: OnProgress, progress: Progress) -> None:
    loop.call_soon_threadsafe(on_progress, progress)


def _unavailable(why: str, stage: Stage = Stage.NOT_DISPATCHED) -> Result:
    return Result(is_error=True, error=CallError(Code.UNAVAILABLE, f"{why}: no tool can be called", stage))


class _Timer:
    """Wakes one dispatcher; it is armed on that dispatcher's loop only, and keeps neither of them alive."""

    def __init__(self) -> None:
        self._handle: weakref.ref[asyncio.TimerHandle] | None = None  # None: no deadline is near
        self.sweep: Callable[[float], None] = lambda now: None  # the dispatcher's, once that is made

    def arm(self, when: float) -> None:
        armed = self._handle() if self._handle is not None else None
        if armed is not None:
            armed.cancel()
        handle = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)
        self._handle = weakref.ref(handle)  # it knows its loop, which a program may have ended long before it is due

    def _wake(self) -> None:
        self._handle = None
        self.sweep(time.monotonic())
