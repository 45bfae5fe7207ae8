"""Runs the calls that the bus sends to a plugin, off the connection's thread, and answers each exactly once.

Async handlers run as tasks on the plugin's handler loop, plain functions on its workers. The connection's thread only
hands over. A call that is cancelled or times out before it begins is answered without running it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_options import CallOptions
from toolbus.functions.runner import run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.threads import Inbox, Workers
from toolbus.functions.tool_spec import ToolSet, ToolSpec
from toolbus.sdk.connection import Connection
from toolbus.sdk.outgoing_calls import OutgoingCall, PeerSession
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

QUEUED_SECONDS = 0.5  # in a queue, after which a call asks before it begins; below the shortest stop that counts


class Job:
    """One call of the bus.

    Attributes:
        begun: whether the handler runs or has run; set before the scope is looked at.
        task: what runs the handler; None before it begins, and for a plain function that awaits nothing.
    """

    __slots__ = ("_connection", "_runner", "arguments_json", "begun", "scope", "seconds", "session", "spec", "task")

    def __init__(
        self, connection: Connection, session: PeerSession, spec: ToolSpec, call: pb.ToolCall, runner: Runner
    ) -> None:
        self._connection = connection
        self._runner = runner
        self.session = session
        self.spec = spec
        self.arguments_json = call.arguments_json
        self.seconds = call.timeout_seconds
        self.begun = False
        self.task: asyncio.Task[Result] | None = None
        self.scope = ToolScope.of(
            call,
            send_progress=partial(connection.report, session),
            caller=partial(_call, connection, session),
        )

    def __repr__(self) -> str:
        return f"<Job {self.scope!r}>"

    def cancel(self, reason: str) -> None:
        """Cancels the call; on the connection's loop."""
        self.scope.cancel(reason)
        if not self.begun:
            self.refuse()  # what would begin it now looks at the scope
        elif self.spec.is_async or self.task is not None:
            self._runner.cancel(self)

    def answer(self, result: Result) -> None:
        """Hands the result to the connection, from any thread; the first one counts."""
        self._connection.answer(self.session, result)

    def begin(self) -> bool:
        """Tells whether to run the handler; answers a call that was cancelled or timed out."""
        self.begun = True  # before the look at the scope: `cancel` looks the other way round
        left = self.scope.time_left()
        if self.seconds - left > QUEUED_SECONDS:  # it waited, perhaps while this process stood still
            self.begun = False
            if self._connection.postpone(self):
                return False
            self.begun = True
        if self.scope.is_cancelled or left <= 0:
            self.refuse()
            return False
        return True

    def resume(self) -> None:
        """Begins a call that was held, unless it was cancelled meanwhile; on the connection's loop."""
        self._runner.queue(self)

    def refuse(self) -> None:
        """Answers a call that never began."""
        name, limit = self.spec.tool.name, None
        if self.scope.is_cancelled:
            code, text = Code.CANCELLED, f"the call of {name} was cancelled before it began: {self.scope.cancel_reason}"
        else:
            code, limit = Code.DEADLINE_EXCEEDED, ("timeout_seconds", self.seconds)
            text = f"the call of {name} waited for all of its {self.seconds:g} s in the plugin's queue and never began"
        error = CallError(code, text, Stage.NOT_DISPATCHED, limit=limit)
        self.scope.end()
        self.arguments_json = ""  # it may wait in a queue for long, behind handlers that never end
        self.answer(Result(self.scope.call_id, is_error=True, error=error))


class Runner:
    """Runs a plugin's handlers.

    Args:
        loop: where async handlers run; any loop but the connection's.
        limit: how many async handlers run at once; the rest waits.
    """

    def __init__(self, tools: ToolSet, loop: asyncio.AbstractEventLoop, workers: Workers, limit: int) -> None:
        self._tools = tools
        self._loop = loop
        self._inbox = Inbox(loop)
        self._workers = workers
        self._limit = limit
        self._queue: deque[Job] = deque()  # async calls that wait for a place; the handler loop's
        self._running: set[Job] = set()  # async calls that have one; the handler loop's

    def __repr__(self) -> str:
        return f"<Runner running={len(self._running)} queued={len(self._queue)}>"

    def take(self, connection: Connection, session: PeerSession, call: pb.ToolCall) -> Job | _Answered:
        """Begins to answer a call; on the connection's loop."""
        spec = self._tools.get(call.name)
        if spec is None:
            text = f"this plugin no longer offers {call.name!r}: list the tools again"
            error = CallError(Code.NOT_FOUND, text, Stage.NOT_DISPATCHED)
            connection.answer(session, Result(call.call_id, is_error=True, error=error))
            return _ANSWERED
        job = Job(connection, session, spec, call, self)
        self.queue(job)
        return job

    def queue(self, job: Job) -> None:
        """Has a call begin as soon as there is a thread or a place for it."""
        if not job.spec.is_async:
            self._workers.put(self._run_sync, job)
        elif not self._inbox.put(self._begin, job):
            error = CallError(Code.UNAVAILABLE, "the plugin's loop is closed", Stage.NOT_DISPATCHED, retry_safe=True)
            job.answer(Result(job.scope.call_id, is_error=True, error=error))

    def cancel(self, job: Job) -> None:
        """Cancels the task of an async call that has begun."""
        self._inbox.put(self._cancel, job)

    # On the handler loop.

    def _begin(self, job: Job) -> None:
        if len(self._running) >= self._limit:
            self._queue.append(job)
        elif job.begin():
            self._running.add(job)
            job.task = self._loop.create_task(run_handler(job.spec, job.arguments_json, job.scope, self._workers.run))
            job.task.add_done_callback(partial(self._done, job))

    def _done(self, job: Job, task: asyncio.Task[Result]) -> None:
        self._running.discard(job)
        job.task = None
        if task.cancelled():  # before its first step, where no handler could catch it
            why = job.scope.cancel_reason or "the plugin stopped"
            error = CallError(Code.CANCELLED, f"the call of {job.spec.tool.name} was cancelled: {why}", Stage.ACCEPTED)
            job.answer(Result(job.scope.call_id, is_error=True, error=error))
        elif (problem := task.exception()) is not None:
            job.answer(_fault(job, problem))
        else:
            job.answer(task.result())
        while self._queue and len(self._running) < self._limit:
            self._begin(self._queue.popleft())

    @staticmethod
    def _cancel(job: Job) -> None:
        if job.task is not None:
            job.task.cancel(job.scope.cancel_reason)

    # On a worker's thread.

    def _run_sync(self, job: Job) -> None:
        """Runs a plain function here from beginning to end: no loop, no task, no hop."""
        if not job.begin():
            return
        running = run_handler(job.spec, job.arguments_json, job.scope, _inline)
        try:
            running.send(None)
        except StopIteration as end:
            job.answer(end.value)
        except BaseException as problem:
            job.answer(_fault(job, problem))
        else:  # it handed back something to wait for, which needs the loop
            if not self._inbox.put(self._go_on, (job, running)):
                running.close()

    def _go_on(self, item: tuple[Job, Any]) -> None:
        job, running = item
        self._running.add(job)
        job.task = self._loop.create_task(running)
        job.task.add_done_callback(partial(self._done, job))


def _call(
    connection: Connection, session: PeerSession, name: str, arguments_json: str, options: CallOptions
) -> Future[Result]:
    """Calls another tool as part of a call of the bus (`scope.NestedCaller`)."""
    future: Future[Result] = Future()
    out = OutgoingCall(name, arguments_json, _resolve, future, options, parent_session=session)
    future.add_done_callback(lambda ended: connection.cancel(out) if ended.cancelled() else None)
    connection.begin(out)
    return future


def _resolve(out: OutgoingCall, result: Any) -> None:
    if out.target.set_running_or_notify_cancel():
        out.target.set_result(result)


class _Answered:
    """Stands for a call that was answered on the spot."""

    def cancel(self, reason: str) -> None:
        """Does nothing: its answer is on its way."""


class _Pause:
    """Awaited, it hands control back to the code that drives the coroutine by hand."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _inline(function: Callable[[], Any]) -> Any:
    returned = function()
    if not isinstance(returned, Result):
        await _Pause()
    return returned


def _fault(job: Job, problem: BaseException) -> Result:
    error = CallError(
        Code.INTERNAL, f"a fault of the SDK while it ran {job.spec.tool.name}: {problem!r}", Stage.ACCEPTED
    )
    return Result(job.scope.call_id, is_error=True, error=error)


_ANSWERED = _Answered()
