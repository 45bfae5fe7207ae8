"""Runs the scripts of one scope in QuickJS, on a thread of its own: one turn after the other, each with limits.

A script and this process exchange JSON texts and nothing else: no Python object, no function and no module can be
reached from JavaScript. QuickJS itself brings no files, no network and no processes.

A *turn* is what one message leads to, with the jobs that it starts. It may compute for a limited time; then it is
interrupted, and the scope goes on with the next message. What cannot be stopped that way (a flood of jobs, a heap that
stays full) ends the engine. The turns of its timers and answers count for a call too, and are limited together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import itertools
import json
import logging
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.common.text import parse_json
from toolbus.errors import SetupError
from toolbus.protocol.tool import MIB

log = logging.getLogger("toolbus.dropin.javascript.engine")

EXTRA = "pip install 'toolbus[javascript]'"
_HERE = Path(__file__).parent
_STACK_BYTES = 768 * 1024  # of JavaScript; the threads of a sandboxed process have 2 MiB
_THREAD_STACK_BYTES = 8 * MIB  # outside of one, where the default of a C library may be smaller than that of QuickJS
_MAX_INTERRUPTED = 3  # jobs of one turn that may be interrupted, before the turn counts as one without end
_DRAIN_SECONDS = 5.0  # for turning what a turn has left into text
_WATCH_SECONDS = 0.25  # between two looks at a turn that runs
_QUESTIONS, _ANSWERS = ("ask", "call"), ("answered", "called")  # of scripts, and of this process; each has a number
_IDLE_SECONDS = 60.0  # how often what no call waits for gets its processor time anew
_FULL = 0.9  # of the heap: with less than this share in use after a collection, a script that ran out of memory goes on


class ScriptError(Exception):
    """A script failed: it threw, was interrupted, or does not run any more.

    Attributes:
        message: what was thrown, without the name of its class.
        stack: where, for the log; empty if unknown.
        fatal: whether the engine has ended.
        lost: whether the call was lost with the engine, and is not at fault itself.
        began: whether it had begun by then.
    """

    def __init__(
        self,
        text: str,
        message: str | None = None,
        stack: str = "",
        *,
        fatal: bool = False,
        lost: bool = False,
        began: bool = True,
    ) -> None:
        super().__init__(text)
        self.lost = lost
        self.began = began
        self.message = text if message is None else message
        self.stack = stack
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the scripts of a scope may use.

    Attributes:
        heap_bytes: memory of JavaScript.
        turn_seconds: processor time of one turn, so between two `await`s that wait for something.
        load_seconds: the same, for loading one file.
        call_seconds: processor time of all turns of a call; of what was started outside of calls, in a minute.
    """

    heap_bytes: int = 256 * MIB
    turn_seconds: float = 10.0
    load_seconds: float = 10.0
    call_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class SyntaxFault:
    """Why a text is not JavaScript, and in which line; 0 where that is unknown."""

    reason: str
    line: int


def syntax_fault(text: str, *, module: bool) -> SyntaxFault | None:
    """Parses a script and runs nothing of it; returns None if it has no fault, or if the engine is not installed."""
    try:
        import quickjs
    except ImportError:
        return None
    if text.startswith("#!"):  # a comment at the beginning of a file only
        text = f"//{text}"
    context = quickjs.Context()
    context.set_memory_limit(EngineLimits().heap_bytes)
    try:
        (context.module if module else context.eval)(f"throw 'parsed';{text}")  # so that nothing after it runs
    except quickjs.JSException as error:
        reason, _, stack = str(error).partition("\n")
        line = re.search(r"<input>:(\d+)", stack)
        if reason.startswith("SyntaxError: "):
            return SyntaxFault(reason.removeprefix("SyntaxError: "), int(line[1]) if line else 0)
    return None


def random_key() -> list[int]:
    """Returns the key of a scope's random numbers, for ``web.js``."""
    return list(struct.unpack("8I", os.urandom(32)))


class Engine:
    """One scope. `request` and `notify` may be used from any thread.

    Args:
        take: gets what scripts post apart from the ends of calls, its kind first; on the engine's thread.
        ended: called when the engine has ended by itself, with the reason; on the engine's thread.

    Raises:
        SetupError: QuickJS is not installed.
    """

    def __init__(
        self,
        take: Callable[[list[Any]], object],
        limits: EngineLimits | None = None,
        ended: Callable[[str], object] = lambda reason: None,
    ) -> None:
        try:
            import quickjs
        except ImportError:
            raise SetupError(f"JavaScript needs QuickJS, which is not installed: {EXTRA}") from None
        self._quickjs = quickjs
        self._take = take
        self._limits = limits or EngineLimits()
        self._ended = ended
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}  # in flight; touched on the engine's thread only
        self._timers: list[tuple[float, int, int]] = []  # when each is due, its id, and the call that set it: a heap
        self._context: Any = None  # of QuickJS, which only the engine's thread may touch; None before the start
        self._host: Any = None  # the one function of the scope that this side calls
        self._current = 0  # the number of the message whose turn it is, or of the call whose timer it is
        self._asked: dict[int, int] = {}  # the call of each question that is answered, by the question's number
        self._spent: dict[int, float] = {}  # processor time of each call so far
        self._renewed = 0.0  # when those of no call in flight were last forgotten
        self._has_job = False  # whether another job of the scope may wait
        self.end_reason = ""  # why it has ended; empty while it runs
        self._busy = threading.Event()  # set while a turn runs
        self._step_limit = 0.0  # of processor time of the thread, after which a step does not come back
        self._closing = threading.Lock()  # held while a message is put in, and while it ends: so none is lost
        stack = threading.stack_size()
        if not stack:
            threading.stack_size(_THREAD_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="toolbus javascript", daemon=True)
            self._thread.start()
            if hasattr(time, "pthread_getcpuclockid"):
                threading.Thread(target=self._watch, name="toolbus javascript watch", daemon=True).start()
        finally:
            threading.stack_size(stack)

    def __repr__(self) -> str:
        return f"<Engine calls={len(self._calls)} timers={len(self._timers)} {self.end_reason or 'running'}>"

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs, or a message waits for one."""
        return self._busy.is_set() or not self._inbox.empty()

    def install(self, file: str, *arguments: Any) -> None:
        """Runs a file of this package that makes globals; its function gets the host's side and these arguments."""
        code = (_HERE / file).read_text("utf-8")
        self._submit(_Message("install", {"code": code, "arguments": arguments})).result()

    def load(self, text: str, *, module: bool = False) -> concurrent.futures.Future[Any]:
        """Runs the text of a file in the scope, as a script whose names stay, or as a module."""
        return self._submit(_Message("load", {"text": text, "module": module}))

    def request(
        self, kind: str, fields: Mapping[str, Any], *, deadline: float | None = None
    ) -> concurrent.futures.Future[Any]:
        """Has the scope answer a message; cancelling the future drops the answer.

        Args:
            deadline: when the caller stops waiting, by `time.monotonic()`.
        """
        return self._submit(_Message(kind, dict(fields), deadline))

    def notify(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Passes a message that has no answer."""
        self._inbox.put(_Message(kind, dict(fields), answered=False))

    def drop(self, future: concurrent.futures.Future[Any]) -> None:
        """Forgets a request whose caller has stopped waiting; what it computes goes on to its limit."""
        future.cancel()
        self._inbox.put(_Message("drop", {"future": future}, answered=False))

    def close(self) -> None:
        """Ends the engine and its thread; calls in flight fail."""
        self._inbox.put(None)

    def _submit(self, message: _Message) -> concurrent.futures.Future[Any]:
        with self._closing:
            if self.end_reason:
                message.future.set_exception(_lost(self.end_reason, began=False))
            else:
                self._inbox.put(message)
        return message.future

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._context = self._quickjs.Context()
        self._context.set_memory_limit(self._limits.heap_bytes)
        self._context.set_max_stack_size(_STACK_BYTES)
        self._host = self._context.eval((_HERE / "engine.js").read_text("utf-8"))
        while not self.end_reason:
            message = self._next()
            if message is None:
                self._end("the scope was closed")
            elif message.kind == "drop":
                dropped = message.fields["future"]
                self._calls = {number: each for number, each in self._calls.items() if each is not dropped}
            elif not message.answered or message.future.set_running_or_notify_cancel():
                self._turn(message)

    def _next(self) -> _Message | None:
        """Waits for the next message, or the next timer."""
        while True:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            try:
                return self._inbox.get(timeout=wait)
            except queue.Empty:
                _, timer, number = heapq.heappop(self._timers)
                return _Message("timer", {"id": timer}, answered=False, number=number)

    def _turn(self, message: _Message) -> None:
        """Does what one message leads to, within its limits."""
        limit = self._limits.load_seconds if message.kind in ("load", "install") else self._limits.turn_seconds
        if message.deadline is not None:
            limit = min(limit, max(0.05, message.deadline - time.monotonic()))
        answers = self._asked.pop(message.fields["id"], 0) if message.kind in _ANSWERS else 0
        if message.kind in _ANSWERS and not answers:  # what asked was stopped
            return
        number = self._current = message.number or answers or next(self._numbers)
        if message.answered:
            self._calls[number] = message.future
        self._busy.set()
        begin = time.thread_time()
        self._context.set_time_limit(limit)
        error = self._attempt(lambda: self._start(message, number), limit)
        job_error = self._run_jobs(limit)
        error = error or job_error
        self._deliver()
        if error is not None:
            self._blame(message, number, error, limit)
        elif message.kind in ("load", "install") and not message.fields.get("module"):
            self._settle(number, None)  # once all that it posted was taken
        goes_on = number in self._calls or message.kind in ("timer", *_ANSWERS)
        self._charge(number, time.thread_time() - begin, goes_on=goes_on)
        self._busy.clear()

    def _charge(self, number: int, seconds: float, *, goes_on: bool) -> None:
        """Counts processor time of a call; one that has used up its own ends, and its timers and questions with it."""
        if (now := time.monotonic()) - self._renewed > _IDLE_SECONDS:
            self._renewed = now
            self._spent = {each: spent for each, spent in self._spent.items() if each in self._calls}
        spent = self._spent.pop(number, 0.0) + seconds
        limit = self._limits.call_seconds
        if spent <= limit:
            if goes_on:
                self._spent[number] = spent
            return
        for _, timer, owner in self._timers:
            if owner == number:
                self.notify("stop_timer", {"id": timer})
        self._asked = {question: owner for question, owner in self._asked.items() if owner != number}
        self._fail(number, ScriptError(f"the script computed for more than {limit:.3g} s in all, so it was stopped"))

    def _watch(self) -> None:
        """Ends the engine if one step of a turn never comes back, so that nothing can interrupt it."""
        clock = time.pthread_getcpuclockid(self._thread.ident or 0)
        while self._thread.is_alive() and not self.end_reason:
            self._busy.wait()
            time.sleep(_WATCH_SECONDS)
            with contextlib.suppress(OSError):  # the thread has ended
                if self._busy.is_set() and time.clock_gettime(clock) > self._step_limit:
                    self._give_up("a script computed without end in one step, which nothing can interrupt")

    def _start(self, message: _Message, number: int) -> None:
        fields = message.fields
        match message.kind:
            case "install":
                self._host("install", self._context.eval(fields["code"]), json.dumps(fields["arguments"]))
            case "load" if fields["module"]:
                self._host("watch", number, self._context.module(fields["text"]))
            case "load":
                self._context.eval(fields["text"])
            case _:
                self._host("receive", json.dumps({**fields, "kind": message.kind, "id": fields.get("id", number)}))

    def _run_jobs(self, limit: float) -> ScriptError | None:
        """Runs the jobs of a turn, as many as fit into its time; returns what the first failure was, None without."""
        error: ScriptError | None = None
        begin, interrupted = time.thread_time(), 0
        while not self.end_reason:
            job_error = self._attempt(self._job, limit)
            error = error or job_error
            if job_error is None and not self._has_job:
                break
            if job_error is not None and time.thread_time() - begin > limit and interrupted < _MAX_INTERRUPTED:
                begin, interrupted = time.thread_time(), interrupted + 1  # those that wait behind it get their time
            elif time.thread_time() - begin > limit:
                self._deliver()
                self._give_up(f"a script started jobs without end, for more than {limit:.3g} s of processor time")
        return error

    def _job(self) -> None:
        self._has_job = True  # also if this one raises
        self._has_job = self._context.execute_pending_job()

    def _attempt(self, step: Callable[[], None], limit: float) -> ScriptError | None:
        """Runs a step in JavaScript, which the engine interrupts at its limit; returns what it failed with, or None."""
        self._step_limit = time.thread_time() + 2 * limit + _WATCH_SECONDS
        try:
            step()
        except self._quickjs.JSException as error:
            text, _, stack = str(error).partition("\n")
            return ScriptError(text, text.partition(": ")[2], stack)
        except (ValueError, TypeError) as error:  # a text or value that cannot cross the border
            return ScriptError(f"{type(error).__name__}: {error}")
        return None

    def _blame(self, message: _Message, number: int, error: ScriptError, limit: float) -> None:
        """Ends the call that a failure belongs to; a failure in a timer ends the timer."""
        text = str(error)
        if "InternalError: interrupted" in text:
            text = f"the script computed for more than {limit:.3g} s without a pause, so it was interrupted"
            error = ScriptError(text, stack=error.stack)
            if message.kind == "timer":
                self.notify("stop_timer", message.fields)
        elif _is_out_of_memory(text):
            error = self._out_of_memory(text, error.stack)
        self._fail(number, error)

    def _fail(self, number: int, error: ScriptError) -> None:
        if number in self._calls:
            self._settle(number, error)
        else:
            self._pass_on(["log", 3, f"{error}\n{error.stack}"])

    def _out_of_memory(self, thrown: str, stack: str) -> ScriptError:
        """Returns the error of a script that ran out of memory; ends the engine if the scope keeps what fills it."""
        self._context.gc()
        limit = self._limits.heap_bytes
        text = f"the scripts of this scope reached their limit of {limit // MIB} MiB of memory: hold less at once"
        if self._context.memory()["malloc_size"] > _FULL * limit:
            self._give_up(text)
        elif thrown == "null":
            text = f"null was thrown, by the script or since {text}"
        return ScriptError(text, stack=stack, fatal=bool(self.end_reason))

    def _deliver(self) -> None:
        """Takes what the scripts have posted."""
        self._context.set_time_limit(_DRAIN_SECONDS)
        texts: list[str] = []
        error = self._attempt(lambda: texts.append(self._host("drain")), _DRAIN_SECONDS)
        if error is not None:
            self._attempt(lambda: self._host("forget"), _DRAIN_SECONDS)
            self._give_up(f"what the scripts posted could not be taken: {error}")
            return
        for entry in parse_json(texts[0]) if texts[0] else ():
            match entry:
                case ["done", number, text]:
                    self._settle(number, _value(text))
                case ["failed", number, text, message, stack] if _is_out_of_memory(text):
                    self._current = number
                    self._settle(number, self._out_of_memory(text, stack))
                case ["failed", number, text, message, stack]:
                    self._settle(number, ScriptError(text, message, stack))
                case ["timer", timer, milliseconds]:
                    due = time.monotonic() + milliseconds / 1000
                    heapq.heappush(self._timers, (due, timer, self._current))
                case _:
                    if entry[0] in _QUESTIONS:
                        self._asked[entry[1]] = self._current
                    self._pass_on(entry)

    def _pass_on(self, entry: list[Any]) -> None:
        """Passes an entry on; an exception of the receiver is logged, and the scope goes on."""
        try:
            self._take(entry)
        except Exception:
            log.exception("%r of a script could not be taken", entry[:1])

    def _settle(self, number: int, value: Any) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the watch has ended it at the same time
            if isinstance(value, ScriptError):
                future.set_exception(value)
            else:
                future.set_result(value)

    def _give_up(self, reason: str) -> None:
        self._end(reason, self._current, self._ended)

    def _end(self, reason: str, culprit: int = 0, ended: Callable[[str], object] = lambda reason: None) -> None:
        with self._closing:
            if self.end_reason:
                return
            self.end_reason = reason
        ended(reason)  # before its calls end: a file that is being loaded has to be blamed
        self._settle(culprit, ScriptError(reason, fatal=True))
        for number in list(self._calls):
            self._settle(number, _lost(reason))
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None and message.future.set_running_or_notify_cancel():
                message.future.set_exception(_lost(reason, began=False))


def _lost(reason: str, *, began: bool = True) -> ScriptError:
    return ScriptError(reason, fatal=True, lost=True, began=began)


def _is_out_of_memory(text: str) -> bool:
    """Tells whether an error is that of a full heap; where not even that error fits, QuickJS throws null."""
    return text == "null" or "InternalError: out of memory" in text


def _value(text: str) -> Any:
    """Returns the value of a JSON text; an error if Python cannot read what JavaScript could write."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        return ScriptError(f"the result cannot be read: {type(error).__name__}: return less nested data")


class _Message:
    """One message to an engine."""

    __slots__ = ("answered", "deadline", "fields", "future", "kind", "number")

    def __init__(
        self,
        kind: str,
        fields: dict[str, Any],
        deadline: float | None = None,
        *,
        answered: bool = True,
        number: int = 0,
    ) -> None:
        self.kind = kind
        self.fields = fields
        self.deadline = deadline
        self.answered = answered
        self.number = number  # of the call that it goes on with; 0: it begins
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
