"""Holds the work behind a running task, and makes the call of a task again once its questions are answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolbus.bus.tasks.delivery import Target
from toolbus.bus.tasks.task import Task
from toolbus.bus.tasks.task_caller import TaskCaller
from toolbus.text import dump_json
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.calls.call import Call, CancelCalls, MakeCalls

INPUT_SECONDS = 3600.0  # how long a task waits for answers: people answer slowly
NO_ANSWERS = f"it asked for input, and not all of it was answered within {INPUT_SECONDS:g} s"


@dataclass(slots=True)
class Work:
    """The work behind a running task.

    Attributes:
        stop: cancels it, from any thread; may be called after it has ended.
        call: the call that it is; None where it is a program's own.
        target: where its result is delivered; None: nowhere.
        waiters: the futures that its end resolves.
        state: the request_state of its tool, for the call with the answers.
        answers: to the questions, so far.
    """

    stop: Callable[[], None]
    call: TaskCall | None = None
    target: Target | None = None
    waiters: set[asyncio.Future[Task]] = field(default_factory=set)
    state: str = ""
    answers: dict[str, Any] = field(default_factory=dict)

    def go_on(self) -> None:
        """Makes the call again with all answers; from any thread."""
        answers, self.answers = self.answers, {}
        if self.call is not None:
            self.call.again(answers, self.state)


class TaskCall:
    """A call that became a task.

    Args:
        caller: receives its result from now on.
        cancel, calls: those of its dispatcher, called on the loop that runs now; None, or no loop: it can neither be
            cancelled nor made again.
    """

    def __init__(
        self, call: Call, task_id: str, caller: TaskCaller, cancel: CancelCalls | None, calls: MakeCalls | None
    ) -> None:
        self.task_id = task_id
        self.caller = caller
        self._cancel = cancel
        self._calls = calls
        exchange = call.exchange
        self._accepts: tuple[str, ...] = () if exchange is None else exchange.accepts
        self._call = call if self._accepts else None  # None: its caller accepts no questions
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None  # ends the wait for answers; None while it waits for none
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        try:
            self._loop = weakref.ref(asyncio.get_running_loop())  # a program may end it long before the task
        except RuntimeError:
            pass

    def __repr__(self) -> str:
        return f"<TaskCall {self.task_id} {self.caller!r}>"

    @property
    def can_ask(self) -> bool:
        """Whether its caller accepts questions, and the call can be made again with the answers."""
        return self._call is not None and self._calls is not None

    def wait_for_input(self, expire: Callable[[], object]) -> None:
        """Calls a function where the call is neither stopped nor made again in time; to be called on its loop."""
        self._timer = asyncio.get_running_loop().call_later(INPUT_SECONDS, expire)

    def stop(self) -> None:
        """Cancels the call, if it runs."""
        cancel = self._cancel
        message = pb.ToolCancel(call_id=self.task_id, reason="the task was cancelled")

        def stop() -> None:
            self._stopped = True
            self._stop_timer()
            if cancel is not None:
                cancel(self.caller, [message], time.monotonic())

        self._soon(stop)

    def again(self, answers: Mapping[str, Any], state: str) -> None:
        """Makes the call again with the answers to its questions."""
        call, calls = self._call, self._calls
        if call is None or calls is None:
            return
        message = pb.ToolCall(
            call_id=self.task_id,
            name=call.entry.name,
            arguments_json=call.arguments_json,
            role=call.entry.table.role or "",
            timeout_seconds=call.timeout,
            context=call.context,
            accepts=self._accepts,
            input_responses_json=dump_json(answers),
            request_state=state,
        )

        def make() -> None:
            self._stop_timer()
            if not self._stopped:  # it may have been cancelled while its answers arrived
                calls(self.caller, [message], time.monotonic())

        self._soon(make)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _soon(self, act: Callable[[], object]) -> None:
        here = self._loop() if self._loop is not None else None
        if here is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, and its calls have ended
                here.call_soon_threadsafe(act)
