"""Where the calls of a registry are made: in dispatchers of its own, or in a bus.

Handlers of a program belong to the program's event loops, so a registry without a bus has a dispatcher for each loop
that calls; all of them look into one table of tools. With a bus there is one dispatcher, on the bus's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from toolbus.dispatcher import Dispatcher
from toolbus.entry import BUS_SOURCE
from toolbus.local import LocalCaller, OnProgress
from toolbus.policy import Policy
from toolbus.records import CallRecord, Records
from toolbus.registry import Registry
from toolbus.sdk.threads import Workers
from toolbus.tasks import LoopTasks, TaskManager
from toolbus.tool import TASK_SECONDS, Limits, Result
from toolbus.v1 import tool_pb2 as pb
from toolbus.view import Onlooker, View

SOURCE = "local"  # whose the tools of this process are
WORKERS = 32  # threads for handlers that are plain functions
IDS_A_LOOP = 1 << 40  # dispatchers share handlers, so they must not share ids


class Home(Protocol):
    """Where tools are kept and calls are made."""

    registry: Registry
    view: View
    onlooker: Onlooker  # who lists
    run_sync: Any  # runs a plain function off the loop

    def dispatcher(self) -> Dispatcher:
        """Returns the dispatcher of the loop that handlers run on."""

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        """Makes a call, from any loop."""

    def changed(self) -> None:
        """Has watchers told that the catalogue changed; from any thread."""

    def records(self) -> list[CallRecord]:
        """Returns the newest calls, newest first."""


class Alone:
    """A registry of its own, with a dispatcher for each loop.

    Args:
        tasks: keeps calls that outlive their caller's patience; None: callers wait to the end.
        unnamed_may: whether calls without a user pass where users are named.
    """

    def __init__(self, tasks: TaskManager | None, *, unnamed_may: bool) -> None:
        self._tasks = tasks
        self._unnamed_may = unnamed_may
        self._policy = Policy()
        self._lock = threading.Lock()
        self._made = 0  # dispatchers so far
        self._callers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Dispatcher, LocalCaller]]
        self._callers = weakref.WeakKeyDictionary()
        self._workers = Workers(WORKERS, "toolbus-tools")
        self.run_sync = self._workers.run
        self.registry = Registry(grace_seconds=0.0)
        self.view = View(self.registry, self._policy)
        self.onlooker = Onlooker(SOURCE, administers=False, unnamed_may=unnamed_may)

    def dispatcher(self) -> Dispatcher:
        return self._here()[0]

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        return await self._here()[1].call(call, on_progress)

    def changed(self) -> None:
        """Nobody watches: listings are read anew where the revision has risen."""

    def records(self) -> list[CallRecord]:
        with self._lock:
            all_records = [dispatcher.records for dispatcher, _ in self._callers.values()]
        return sorted((each for records in all_records for each in records), key=lambda each: each.ended, reverse=True)

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
            Records(),
            Limits(),
            arm=timer.arm,
            first_id=1 + self._made * IDS_A_LOOP,
        )
        if self._tasks is not None:
            dispatcher.background = LoopTasks(self._tasks, dispatcher, weakref.ref(loop))
        timer.sweep = dispatcher.sweep
        self._made += 1
        caller = LocalCaller(
            SOURCE, dispatcher, unnamed_may=self._unnamed_may, longest_timeout=TASK_SECONDS
        )  # what it administers here are its own tasks
        return dispatcher, caller


class OnBus:
    """The registry and the dispatcher of a running bus.

    Args:
        bus: a `toolbus.Bus`.
        unnamed_may: as for `Alone`.
    """

    def __init__(self, bus: Any, *, unnamed_may: bool) -> None:
        self._bus = bus
        self.registry: Registry = bus.registry
        self.view: View = bus.dispatcher.view
        self.run_sync = bus.run_sync
        self.onlooker = Onlooker(SOURCE, administers=False, unnamed_may=unnamed_may)
        self._caller = LocalCaller(
            SOURCE, bus.dispatcher, administers=False, unnamed_may=unnamed_may, longest_timeout=TASK_SECONDS
        )

    def dispatcher(self) -> Dispatcher:
        dispatcher: Dispatcher = self._bus.dispatcher
        return dispatcher

    async def call(self, call: pb.ToolCall, on_progress: OnProgress | None) -> Result:
        loop = self._bus.loop
        if loop is None or loop is asyncio.get_running_loop():
            return await self._caller.call(call, on_progress)
        there = asyncio.run_coroutine_threadsafe(self._caller.call(call, on_progress), loop)
        return await asyncio.wrap_future(there)

    def changed(self) -> None:
        self._bus.catalogue_changed()

    def records(self) -> list[CallRecord]:
        return [each for each in self._bus.records if each.source != BUS_SOURCE]


class _Timer:
    """Wakes one dispatcher; it is armed on that dispatcher's loop only."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None  # None: no deadline is near
        self.sweep: Callable[[float], None] = lambda now: None  # the dispatcher's, once that is made

    def arm(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)

    def _wake(self) -> None:
        self._handle = None
        self.sweep(time.monotonic())
