"""Runs the hooks of a plugin: the author's functions for events.

They run where handlers run: async ones on the plugin's loop, plain ones on its workers, never on the connection's
thread. An exception of one hook is logged, and the other hooks still run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from toolbus.functions.threads import Inbox

if TYPE_CHECKING:
    from toolbus.sdk.listing import CatalogChange

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]


class _Hook:
    """A function, and a lock that keeps its events in order."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.turn = asyncio.Lock()
        self.waiting: list[CatalogChange] | None = None  # the one change that waits for its turn; None for none


class Hooks:
    """The hooks of one plugin, by the kind of event.

    Args:
        run_sync: runs a function of no arguments off the loop.
    """

    def __init__(self, run_sync: RunSync) -> None:
        self._run_sync = run_sync
        self._hooks: defaultdict[str, list[_Hook]] = defaultdict(list)
        self._loop: asyncio.AbstractEventLoop | None = None  # where they run; None before the start
        self._inbox: Inbox | None = None  # of that loop
        self._tasks: set[asyncio.Task[None]] = set()  # a loop keeps no task alive by itself

    def __repr__(self) -> str:
        return f"<Hooks {', '.join(f'{kind}={len(functions)}' for kind, functions in self._hooks.items())}>"

    def add(self, kind: str, function: F) -> F:
        """Registers a function for one kind of event; returns it.

        Raises:
            TypeError: it is not a function.
        """
        if not callable(function):
            raise TypeError(f"on_{kind} is put on a function, not on {function!r:.80}: write it above a def")
        self._hooks[kind].append(_Hook(function))
        return function

    def wants(self, kind: str) -> bool:
        """Tells whether there is a hook for a kind of event."""
        return bool(self._hooks.get(kind))

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the loop on which they run."""
        self._loop, self._inbox = loop, Inbox(loop)

    def fire(self, kind: str, *facts: Any) -> None:
        """Calls the hooks for an event; from any thread, and without waiting.

        Each hook gets one event after the other, in order; a slow one delays only itself.
        """
        if self._inbox is not None and self.wants(kind):
            self._inbox.put(self._begin, (kind, facts))

    def fire_change(self, kind: str, change: CatalogChange) -> None:
        """Calls the hooks for a change of the catalog, as `fire`; those that a slow hook did not get yet become one."""
        if self._inbox is not None and self.wants(kind):
            self._inbox.put(self._begin_change, (kind, change))

    async def settle(self, seconds: float) -> None:
        """Waits for the hooks that run, except for the one that calls this."""
        if running := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(running, timeout=seconds)

    def _begin(self, event: tuple[str, tuple[Any, ...]]) -> None:
        kind, facts = event
        for hook in self._hooks[kind]:
            self._start(kind, hook, facts)

    def _begin_change(self, event: tuple[str, CatalogChange]) -> None:
        kind, change = event
        for hook in self._hooks[kind]:
            if hook.waiting is None:
                hook.waiting = [change]
                self._start(kind, hook, hook.waiting)
            else:
                hook.waiting[0] = hook.waiting[0].followed_by(change)

    def _start(self, kind: str, hook: _Hook, facts: Sequence[Any]) -> None:
        assert self._loop is not None  # the inbox is that loop's
        task = self._loop.create_task(self._run(kind, hook, facts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, kind: str, hook: _Hook, facts: Sequence[Any]) -> None:
        async with hook.turn:
            if facts is hook.waiting:
                hook.waiting = None
            try:
                await called(hook.function, facts, self._run_sync)
            except asyncio.CancelledError:
                raise
            except BaseException:  # SystemExit too: it would end the loop of all handlers
                log.exception("on_%s: %r failed", kind, hook.function)


async def called(function: Callable[..., Any], facts: Sequence[Any], run_sync: RunSync) -> Any:
    """Calls an author's function, a plain one off the loop; returns its value or raises its exception."""
    if inspect.iscoroutinefunction(function):
        return await function(*facts)
    returned, problem = await run_sync(lambda: _caught(function, facts))
    if problem is not None:
        raise problem
    return await returned if inspect.isawaitable(returned) else returned


def _caught(function: Callable[..., Any], facts: Sequence[Any]) -> tuple[Any, BaseException | None]:
    """Returns a function's value and its exception: a future does not pass on every kind of exception."""
    try:
        return function(*facts), None
    except BaseException as problem:
        return None, problem
