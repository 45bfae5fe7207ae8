"""Passes the calls of a program's loop to the connection and their results back, once for each turn of the loop.

`Host` has a `LoopCalls` for each loop on which it is used. The calls of one turn go to the connection together. If the
connection runs in the program's own turns (`SharedLoop`), the results of a message are delivered at once; if it runs on
its thread, with one wake-up. `SyncHost` has one `ThreadCaller`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from sys import modules
from typing import TYPE_CHECKING, Any

from toolbus.functions.call_options import CallOptions
from toolbus.functions.threads import Inbox
from toolbus.sdk.outgoing_calls import OutgoingCall
from toolbus.sdk.tracing import API, CallSpan, begin_call
from toolbus.tool import Progress, Result, dump_arguments

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 0.0008  # that calls of threads wait for each other; selectors round it up to a millisecond

OnProgress = Callable[[Progress], object]
Arguments = Mapping[str, Any] | str | None
NamedArguments = tuple[str, Arguments]
"""The name of a tool, and the arguments of a call: what JSON can hold, or JSON text."""


class LoopCalls:
    """The calls that one loop makes on one connection."""

    __slots__ = ("_begun", "_connection", "_context", "_inbox", "loop", "shared")

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connection = connection
        self.shared = connection.shared
        self._inbox = Inbox(loop)
        self._begun: list[OutgoingCall] = []  # in this turn of the loop
        self._context = Context()  # of the callbacks, so that none sees a variable of a caller
        self.shared.join(loop)

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call, with all others of this turn."""
        if not self._begun:
            self.loop.call_soon(self._send, context=self._context)
        self._begun.append(out)

    def begin_many(self, calls: Sequence[OutgoingCall]) -> None:
        """Sends several calls, with all others of this turn."""
        for out in calls:
            self.begin(out)

    def run(self, function: Callable[[Any], object], argument: Any = None) -> None:
        """Calls a function soon on this loop; called on the connection's loop."""
        if self.shared.in_turn_of is self.loop:
            self.loop.call_soon(function, argument, context=self._context)
        else:
            self._inbox.put(function, argument)

    def set_result(self, future: asyncio.Future[Any], result: Any) -> None:
        """Sets the result of a future of this loop; called on the connection's loop."""
        if self.shared.in_turn_of is self.loop:  # on the thread of the task
            if not future.done():
                future.set_result(result)
        else:
            self._inbox.put(_set_result, (future, result))

    def _send(self) -> None:
        calls, self._begun = self._begun, []
        self._connection.begin_many(calls, self.loop)


def deliver(out: OutgoingCall, item: Result | Progress) -> None:
    """Delivers to the task that waits for a call; the target is its `LoopCalls`, future and ``on_progress``."""
    caller, future, on_progress = out.target
    if isinstance(item, Result):
        if caller.shared.in_turn_of is not caller.loop:
            caller.set_result(future, item)
        elif not future.done():  # as `set_result` does it
            future.set_result(item)
    else:
        caller.run(_report, (future, on_progress, item))


class ThreadCaller:
    """The calls that threads make on one connection; each thread blocks until it has its result.

    Threads that got their results together often call again together. So the first of them waits for the others,
    `TOGETHER_SECONDS` at most: one message for all costs the bus less than one for each.
    """

    __slots__ = ("_begun", "_connection", "_expected", "_timed")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun: deque[OutgoingCall] = deque()  # those that the connection has not taken yet
        self._expected = 0  # results that were just delivered; as many calls may follow
        self._timed = False  # whether a timer will send the calls

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call; from any thread."""
        self._begun.append(out)  # before it reads `_expected`: `_taken` resets that, then takes the calls
        if len(self._begun) >= self._expected:
            self.send()

    def send(self) -> None:
        """Sends the waiting calls now; from any thread, and once more when the connection is closed."""
        self._connection.begin_many(self._taken())

    def deliver(self, out: OutgoingCall, item: Result | Progress) -> None:
        """Delivers to the queue that is a call's target; on the connection's loop."""
        if isinstance(item, Result):
            self._expected += 1
            if self._expected > 1 and not self._timed:
                self._timed = True
                self._connection.loop.call_later(TOGETHER_SECONDS, self._send_rest)
        out.target.put(item)

    def _send_rest(self) -> None:
        self._timed = False
        self._connection.calls.begin_many(self._taken())

    def _taken(self) -> Iterator[OutgoingCall]:
        """Yields the waiting calls, as the connection takes them."""
        self._expected = 0
        with suppress(IndexError):
            while True:
                yield self._begun.popleft()


class Batch:
    """Calls whose caller waits for all of them together."""

    __slots__ = ("_done", "_left", "_spans", "calls")

    def __init__(self, calls: Sequence[NamedArguments], timeout: float | None, done: Callable[[], object]) -> None:
        """Makes the calls, without sending them.

        Args:
            calls: names and arguments.
            timeout: seconds; None means each tool's own.
            done: called when all have ended, on the connection's loop.

        Raises:
            TypeError, ValueError: JSON cannot hold some arguments, or the timeout is not above 0.
        """
        options = CallOptions.of(timeout, None, None, "", None)
        self.calls = [
            OutgoingCall(name, dump_arguments(arguments), self._ended, options=options) for name, arguments in calls
        ]
        self._left = len(self.calls)
        self._done = done
        # By call; empty where the program traces nothing.
        spans = {out: begin_call(out) for out in self.calls} if API in modules else {}
        self._spans: dict[OutgoingCall, CallSpan] = {out: span for out, span in spans.items() if span is not None}

    @property
    def results(self) -> list[Result]:
        """The results in the order of the calls, once all have ended."""
        return [out.target for out in self.calls]

    def give_up(self) -> None:
        """Ends the spans of the calls that are not answered: their caller waits no more."""
        while self._spans:
            out, span = self._spans.popitem()
            span.end(out.call_id, None)

    def _ended(self, out: OutgoingCall, result: Result | Progress) -> None:
        out.target = result
        if self._spans and (span := self._spans.pop(out, None)) is not None:
            span.end(out.call_id, out.target)
        self._left -= 1
        if not self._left:
            self._done()


def _set_result(item: tuple[asyncio.Future[Any], Any]) -> None:
    future, result = item
    if not future.done():  # else it was cancelled meanwhile
        future.set_result(result)


def _report(item: tuple[asyncio.Future[Result], OnProgress | None, Progress]) -> None:
    future, on_progress, progress = item
    if on_progress is not None and not future.cancelled():
        try:
            on_progress(progress)
        except Exception:
            log.exception("on_progress raised; the call goes on")
