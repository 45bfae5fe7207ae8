"""Runs the calls that the bus sends to a plugin, off the connection's thread, and answers each exactly once.

Async handlers run as tasks on the plugin's handler loop, plain functions on its workers. Passing work between threads
costs more than a call, so all calls of a message are passed on together, and so are results that are ready at the same
time. If all handlers are async, the connection runs in turns of their loop, and nothing changes threads. A call that is
cancelled or times out before it begins is answered without running it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_context import NO_CONTEXT, CallContext, CallOptions
from toolbus.functions.runner import Outcome, Unfinished, finish_plain, run_async, run_plain
from toolbus.functions.scope import NestedCaller, ToolScope, inputs_of
from toolbus.functions.tool_spec import ToolSet, ToolSpec
from toolbus.functions.workers import Inbox, Workers
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk.attempt import ANSWERED, IncomingCall
from toolbus.sdk.connection import Answer, Connection
from toolbus.sdk.outgoing_calls import OutgoingCall, PeerSession
from toolbus.sdk.tracing import ToolSpan, begin_tool, carried, find_api
from toolbus.v1 import tool_pb2 as pb

QUEUED_SECONDS = 0.5  # in a queue, after which a call checks for a stall before it begins; below the shortest stall

Link = tuple[Callable[[pb.ToolProgress], None], NestedCaller]
"""The functions by which the calls of a session report progress and call other tools."""


class Job(ToolScope):
    """One call of the bus, which is also the scope of its handler: a second object would make calls 5 % slower.

    Attributes:
        begun: whether the handler runs or has run; set before the check whether the call was cancelled.
        running: whether the handler's task has made its first step.
        trace: the span of the tool, in the trace of the call; None without one.
        task: runs the handler; None before it begins, and for a plain function that awaits nothing.
    """

    __slots__ = ("_runner", "arguments_json", "begun", "running", "seconds", "session", "spec", "task", "trace")

    def __init__(
        self, runner: Runner, session: PeerSession, spec: ToolSpec, call: pb.ToolCall, now: float, link: Link
    ) -> None:
        # Without the base's constructor: its keywords take as long as all of this. A test compares the two.
        self.call_id = call_id = call.call_id
        self.request_id = call.request_id or call_id
        self.tool = call.name
        self.role = call.role
        if call.HasField("context"):
            self.context, self._inputs = CallContext.from_wire(call.context), inputs_of(call)
        else:
            self.context, self._inputs = NO_CONTEXT, None
        self.seconds = seconds = call.timeout_seconds
        self.deadline = now + seconds if seconds > 0 else None
        self.principal = None
        self.caller_source = ""
        self.cancel_reason = None
        self._send_progress, self._caller = link
        self._event = None
        self._ended = False
        self._runner = runner
        self.session = session
        self.spec = spec
        self.arguments_json = call.arguments_json
        self.begun = False
        self.running = False
        self.task: asyncio.Task[None] | None = None
        self.trace: ToolSpan | None = None

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancels the call; on the connection's loop."""
        super().cancel(reason)
        if not self.begun:
            self.refuse()  # `begin`, if it comes later, checks the scope
        elif self.spec.is_async or self.task is not None:
            self._runner.cancel(self)

    def begin(self, now: float) -> bool:
        """Tells whether to run the handler; answers a call that was cancelled or timed out."""
        self.begun = True  # before it checks the scope: `cancel` sets the scope, then checks this
        left = 1.0 if self.deadline is None else self.deadline - now
        if self.seconds - left > QUEUED_SECONDS:  # it waited, perhaps while this process stood still
            self.begun = False
            if self._runner.postpone(self):
                return False
            self.begun = True
        if self.cancel_reason is not None or left <= 0:
            self.refuse()
            return False
        return True

    def resume(self) -> None:
        """Begins a call that was held, unless it was cancelled meanwhile; on the connection's loop."""
        self._runner.queue(self)

    def refuse(self) -> None:
        """Answers a call that never began."""
        name, limit = self.spec.tool.name, None
        if self.is_cancelled:
            code, text = Code.CANCELLED, f"the call of {name} was cancelled before it began: {self.cancel_reason}"
        else:
            code, limit = Code.DEADLINE_EXCEEDED, ("timeout_seconds", self.seconds)
            text = f"the call of {name} waited for all of its {self.seconds:g} s in the plugin's queue and never began"
        self.end()
        self.arguments_json = ""  # it may wait in a queue for long, behind handlers that never end
        self._runner.fail(self, CallError(code, text, Stage.NOT_DISPATCHED, limit=limit))


class Runner:
    """Runs a plugin's handlers.

    Args:
        loop: where async handlers run; any loop but the connection's.
        limit: how many async handlers run at once; further calls wait.
    """

    def __init__(self, tools: ToolSet, loop: asyncio.AbstractEventLoop, workers: Workers, limit: int) -> None:
        self._tools = tools
        self._loop = loop
        self._inbox = Inbox(loop)
        self._workers = workers
        self._limit = limit
        self._connection: Connection | None = None  # None before the first call
        self._shares: bool | None = None  # whether the handler loop lends the connection its turns; None before a call
        self._queue: deque[Job] = deque()  # async calls above the limit; used on the handler loop only
        self._running: set[Job] = set()  # async calls that run; used on the handler loop only
        self._answers: list[Answer] = []  # of async calls, until the end of the loop's turn
        self._will_send = False  # whether the loop will send them in this turn
        self._plain_answers: deque[Answer] = deque()  # of plain functions, until a worker is at rest
        workers.at_rest = self._send_plain_answers

    def __repr__(self) -> str:
        return f"<Runner running={len(self._running)} queued={len(self._queue)}>"

    # On the connection's loop.

    def take(
        self, connection: Connection, session: PeerSession, calls: Mapping[str, pb.ToolCall]
    ) -> Mapping[str, IncomingCall]:
        """Begins to answer calls."""
        self._connection = connection
        link: Link = partial(connection.report, session), partial(_call, connection, session)
        now, get = time.monotonic(), self._tools.get
        taken: dict[str, IncomingCall] = {}
        plain: list[Job] = []
        api = find_api()
        on_loop: list[Job] = []
        for call_id, call in calls.items():
            if (spec := get(call.name)) is None:
                text = f"this plugin no longer offers {call.name!r}: list the tools again"
                error = CallError(Code.NOT_FOUND, text, Stage.NOT_DISPATCHED)
                connection.answer(session, Result(call_id, is_error=True, error=error))
                taken[call_id] = ANSWERED
                continue
            taken[call_id] = job = Job(self, session, spec, call, now, link)
            if api is not None:
                job.trace = begin_tool(api, call)
            (on_loop if spec.is_async else plain).append(job)
        if plain:
            self._workers.put_all(self._run_plain, plain)
        if on_loop:
            self._put_on_loop(on_loop)
        return taken

    def queue(self, job: Job) -> None:
        """Begins a call as soon as a thread is free, or fewer async handlers run than the limit."""
        if job.spec.is_async:
            self._put_on_loop([job])
        else:
            self._workers.put(self._run_plain, job)

    def _put_on_loop(self, jobs: list[Job]) -> None:
        in_turn = self._connection is not None and self._connection.shared.in_turn_of is self._loop
        # A task factory may run a task's first step at once, and within a turn that would be on the wrong loop.
        if in_turn and self._loop.get_task_factory() is None:
            self._begin_all(jobs)
        elif not self._inbox.put(self._begin_all, jobs):
            for job in jobs:
                self.fail(job, CallError(Code.UNAVAILABLE, "the plugin's loop is closed", Stage.NOT_DISPATCHED, True))

    def cancel(self, job: Job) -> None:
        """Cancels the task of an async call that has begun."""
        self._inbox.put(self._cancel, job)

    # From any thread.

    def postpone(self, job: Job) -> bool:
        """Holds a call that waited in a queue; returns False where it may begin."""
        return self._connection is not None and self._connection.postpone(job)

    def fail(self, job: Job, error: CallError) -> None:
        """Answers a call whose handler did not run to its end."""
        assert self._connection is not None  # the call came by it
        result = Result(job.call_id, is_error=True, error=error)
        if job.trace is not None:
            job.trace.end(result)
        self._connection.answer(job.session, result)

    # On the handler loop.

    def _begin_all(self, jobs: list[Job]) -> None:
        if self._shares is None:
            self._shares = all(spec.is_async for spec in self._tools)
        if self._shares and self._connection is not None:
            self._connection.shared.join(self._loop)
        now = time.monotonic()
        begun = [job for job in jobs if self._begin(job, now)]
        if begun:
            self._will_send = True
            self._loop.call_soon(self._after_first_steps, begun)  # runs directly after their first steps

    def _begin(self, job: Job, now: float) -> bool:
        if len(self._running) >= self._limit:
            self._queue.append(job)
            return False
        if not job.begin(now):
            return False
        self._running.add(job)
        context = job.trace.context() if job.trace is not None else None
        job.task = self._loop.create_task(self._run_async(job), name=job.tool, context=context)
        return True

    async def _run_async(self, job: Job) -> None:
        job.running = True
        try:
            outcome = await run_async(job.spec, job.arguments_json, job)
        except GeneratorExit as problem:
            outcome = self._closed(job, problem)
        self._end(job, outcome)

    async def _finish_plain(self, job: Job, unfinished: Unfinished) -> None:
        job.running = True
        try:
            outcome = await finish_plain(job.spec, job, unfinished)
        except GeneratorExit as problem:
            outcome = self._closed(job, problem)
        self._end(job, outcome)

    def _closed(self, job: Job, problem: GeneratorExit) -> Result:
        """Returns the result of a handler that raised GeneratorExit, or whose task was dropped.

        Raises:
            GeneratorExit: the loop is closed, so nothing can be answered any more.
        """
        if self._loop.is_closed():
            raise problem
        text = f"GeneratorExit: the handler of {job.spec.tool.name} raised it, or its task was dropped"
        return Result(
            job.call_id, is_error=True, error=CallError(Code.TOOL, text, Stage.ACCEPTED, reason="GeneratorExit")
        )

    def _end(self, job: Job, outcome: Outcome) -> None:
        self._running.discard(job)
        job.task = None
        if job.trace is not None:
            job.trace.end(outcome)
        if not self._will_send:
            self._will_send = True
            self._loop.call_soon(self._send_answers)
        self._answers.append((job.session, job.call_id, outcome))
        if self._queue:
            self._begin_queued()

    def _begin_queued(self) -> None:
        now = time.monotonic()
        while self._queue and len(self._running) < self._limit:
            job = self._queue.popleft()
            if self._begin(job, now):
                self._loop.call_soon(self._after_first_steps, [job])

    def _after_first_steps(self, jobs: list[Job]) -> None:
        """Answers the calls whose tasks were cancelled before their first step, so that no code of theirs ran."""
        for job in jobs:
            if not job.running and (task := job.task) is not None and task.cancelled():
                self._running.discard(job)
                job.task = None
                job.end()
                why = job.cancel_reason or "the plugin stopped"
                text = f"the call of {job.spec.tool.name} was cancelled: {why}"
                self.fail(job, CallError(Code.CANCELLED, text, Stage.ACCEPTED))
        if self._queue:
            self._begin_queued()
        self._send_answers()

    def _send_answers(self) -> None:
        self._will_send = False
        if self._answers and self._connection is not None:
            answers, self._answers = self._answers, []
            self._connection.answer_all(answers, self._loop)

    def _cancel(self, job: Job) -> None:
        if job.task is not None and job.running:  # else its first step checks the scope
            job.task.cancel(job.cancel_reason)

    def _await_rest(self, item: tuple[Job, Unfinished, Context]) -> None:
        """Awaits what a plain function has returned."""
        job, unfinished, context = item
        self._running.add(job)
        job.task = self._loop.create_task(self._finish_plain(job, unfinished), context=context)
        self._loop.call_soon(self._after_first_steps, [job])

    # On a worker's thread.

    def _run_plain(self, job: Job) -> None:
        """Runs a plain function from beginning to end on this thread, without a loop or a task."""
        if not job.begin(time.monotonic()):
            return
        context = Context()  # of its own, so that the next call on this thread sees no variable of this one
        if job.trace is not None:
            job.trace.attach(context)
        outcome = context.run(run_plain, job.spec, job.arguments_json, job)
        if isinstance(outcome, Unfinished):  # the function returned an awaitable, which needs the loop
            self._inbox.put(self._await_rest, (job, outcome, context))
        else:
            if job.trace is not None:
                job.trace.end(outcome)
            self._plain_answers.append((job.session, job.call_id, outcome))

    def _send_plain_answers(self) -> None:
        """Sends the answers since the last time; the watch of the workers calls it too."""
        waiting = self._plain_answers
        if waiting and self._connection is not None:
            answers: list[Answer] = []
            try:
                while True:
                    answers.append(waiting.popleft())
            except IndexError:
                pass
            self._connection.answer_all(answers)


def _call(
    connection: Connection, session: PeerSession, name: str, arguments_json: str, options: CallOptions
) -> Future[Result]:
    """Calls another tool as part of a call of the bus (`scope.NestedCaller`)."""
    future: Future[Result] = Future()
    out = OutgoingCall(name, arguments_json, _resolve, future, carried(options), parent_session=session)
    future.add_done_callback(lambda ended: connection.cancel(out) if ended.cancelled() else None)
    connection.begin(out)
    return future


def _resolve(out: OutgoingCall, result: Any) -> None:
    if out.target.set_running_or_notify_cancel():
        out.target.set_result(result)
