"""Runs the connection's loop in turns of the program's own loop, and on a thread whenever the program blocks its loop.

A switch of threads costs more than a call: a wake-up each way, and two threads that wait for one interpreter lock. So a
program on asyncio lends its loop (`join`): the callbacks that are ready in the connection's loop then run in one turn
of the program's, on the program's thread; a turn in which nothing but data waits reads it without a run of the loop.
Every `GUARD_SECONDS` the connection's thread, the guard, checks whether a callback is due and does not run because the
program computes or blocks. It then runs the loop itself, until the program's loop requests it again. So heartbeats are
answered whatever the program does.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

from toolbus.errors import PeerLost
from toolbus.functions.workers import submit_to

T = TypeVar("T")

CLOSED = "this connection is closed: make a new one"
GUARD_SECONDS = 0.1  # the guard notices a blocked loop after one to two of these: far below a stall

LOOK_EVERY = 8  # turns that read: one of so many runs the loop, for what else waits there
READ_BYTES = 65_536  # at once: a message of 32 small items has 3 kB, and memory for more would come from the system
UNSENT_BYTES = 65_536  # that may wait for the other end before the writer pauses, as with asyncio's sockets

_CAN_SHARE = hasattr(selectors.DefaultSelector, "fileno")  # epoll and kqueue: another loop can wait for its events


class _TurnSelector(selectors.DefaultSelector):
    """Waits for events while the loop runs on its thread; in a turn of a program it ends the turn instead."""

    def __init__(self) -> None:
        super().__init__()
        self.end_turn: Callable[[], None] | None = None  # None while the loop runs on its thread
        self.looks = False  # whether this turn has yet to look for ready events: only once, or it might never end
        self.pause: float | None = None  # how long the loop would have waited when its turn ended; None is for ever

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.end_turn is None:
            return super().select(timeout)
        if self.looks:
            self.looks = False
            if ready := super().select(0):
                return ready
        if timeout is None or timeout > 0:
            self.pause = timeout
            self.end_turn()
        return []

    def anything_ready(self) -> bool:
        """Tells, on any thread, whether something can be read or written."""
        return bool(super().select(0))


class TurnLoop(asyncio.SelectorEventLoop):
    """Notes what is scheduled, so that a turn after which nothing waits needs no run of the loop, which costs 20 µs.

    Attributes:
        streams: the sockets that a turn may read itself.
        waits: whether a callback waits for a run.
        nearest: the earliest timer since the last run, by the loop's clock.
        at_end: functions for the end of a turn without a run; None outside of one.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self.streams: dict[SocketStream, None] = {}
        self.waits = False
        self.nearest = math.inf
        self.at_end: list[Callable[[], object]] | None = None
        self._made_by = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._made_by:  # in a fork it would take its pipe out of the epoll that both have
            super().__del__()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """Schedules as every loop does."""
        self.waits = True
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules as every loop does."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self.waits = True  # now: a run that began before may have taken it, one that begins later must
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules as every loop does."""
        self.nearest = min(self.nearest, when)
        return super().call_at(when, callback, *args, context=context)

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Calls a function, which raises nothing, at the end of this turn, or soon; again if that was interrupted."""
        if self.at_end is None:
            self.call_soon(function)
        else:
            self.at_end.append(function)

    def read_streams(self, _: None) -> bool:
        """Reads what has arrived on the sockets; returns False where nothing had."""
        return True in [stream.read() for stream in tuple(self.streams)]


class SocketStream(asyncio.Transport):
    """A connected socket for a protocol, which a run of its loop reads, or a turn without one.

    asyncio's own takes 256 KiB of the system's memory for each read, and gives it back.
    """

    def __init__(self, loop: TurnLoop, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._socket = connection
        self._protocol = protocol
        self._unsent = bytearray()
        self._paused = False  # whether the protocol was told to write no more
        self._over = False
        loop.streams[self] = None
        loop.add_reader(connection, self.read)
        protocol.connection_made(self)

    def read(self) -> bool:
        """Passes on what has arrived; returns False where nothing had."""
        try:
            if self._over or not (data := self._socket.recv(READ_BYTES)):
                self.abort()
                return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.abort()
            return True
        try:
            self._protocol.data_received(data)
        except Exception as error:  # as with asyncio's sockets: a protocol that failed gets no more
            self._loop.call_exception_handler({"message": f"{self._protocol!r} failed", "exception": error})
            self.abort()
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Writes now what the socket takes, and the rest when it takes more."""
        if self._over:
            return
        if not self._unsent:
            try:
                sent = self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.abort()
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._socket, self._write_on)
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def _write_on(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)
        if self._paused and len(self._unsent) <= UNSENT_BYTES // 4:
            self._paused = False
            self._protocol.resume_writing()

    def abort(self) -> None:
        """Ends the connection at once."""
        if not self._over:
            self._over = True
            del self._loop.streams[self]
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._loop.call_soon(self._protocol.connection_lost, None)


class SharedLoop:
    """An asyncio loop with a daemon thread of its own, which another loop may run instead.

    Attributes:
        in_turn_of: the loop in a turn of which it runs just now; None while it does not, or runs on its thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = _TurnSelector()
        self._turns_of = TurnLoop(self._selector) if _CAN_SHARE else None
        self.loop: asyncio.AbstractEventLoop = self._turns_of or asyncio.new_event_loop()
        self.in_turn_of: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()  # held by the thread that runs the loop
        self._joining = threading.Lock()  # programs on several threads may make their first calls at once
        self._program: asyncio.AbstractEventLoop | None = None  # the loop that lends its turns; None while none does
        self._fd = -1  # readable while an event is ready; a duplicate for the program, which may outlive the loop
        self._lent = False  # whether the program runs the loop; read and written on the program's thread
        self._requested = False  # whether the program has requested the loop and does not have it yet
        self._timer: asyncio.TimerHandle | None = None  # the program's, for the nearest timer of the loop
        self._timer_at = 0.0  # when that fires, by `time.monotonic()`
        self._due = 0.0  # when a turn is due at the latest, by the same clock
        self._turns = 0  # so far; the guard sees by them that the program's loop runs
        self._looks = 0  # how often the program's loop saw that something is ready
        self._stopped = threading.Event()
        self._submitted: dict[Future[Any], Coroutine[Any, Any, Any]] = {}  # what has not ended yet
        self._finishing = False  # whether the loop only runs its last tasks
        self._context = Context()  # of the program's turns, without any variable of a caller

    def start(self) -> None:
        """Starts the thread; connections that share it start it once."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop; any other thread may wait for the future.

        Raises:
            PeerLost: the loop is closed; the future raises it too where the loop's end cut the coroutine off, or came
                before it began: whoever waits was not cancelled, and is not left waiting.
        """
        if self._finishing:
            coroutine.close()
            raise PeerLost(CLOSED)
        try:
            inner, outer = submit_to(self.loop, coroutine), Future[T]()
        except RuntimeError:
            raise PeerLost(CLOSED) from None
        self._submitted[inner] = coroutine
        inner.add_done_callback(functools.partial(self._hand_over, outer))
        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        if self.loop.is_closed():  # just now: nothing runs it any more
            self._cut_off()
        return outer

    def _hand_over(self, outer: Future[T], inner: Future[T]) -> None:
        """Passes on how a submitted coroutine ended."""
        self._submitted.pop(inner, None)
        if not outer.set_running_or_notify_cancel():
            return
        if inner.cancelled():
            outer.set_exception(PeerLost(CLOSED))
        elif problem := inner.exception():
            outer.set_exception(problem)
        else:
            outer.set_result(inner.result())

    def join(self, program: asyncio.AbstractEventLoop) -> None:
        """Lets the running loop run this one in its turns; only the first loop that joins, until it is closed."""
        with self._joining:
            if not _CAN_SHARE or self._stopped.is_set():
                return
            if self._program is not None:
                if not self._program.is_closed():
                    return
                self._forget_program()
            self._program = program
            self._fd = os.dup(self._selector.fileno())
        self._request_loop()

    def turn(self, program: asyncio.AbstractEventLoop, function: Callable[[Any], object], argument: Any) -> bool:
        """Runs a function of one argument at once, in a turn of the loop that calls this.

        Returns:
            False if it did not, because the loop runs elsewhere now.
        """
        if program is not self._program or self.in_turn_of is not None or not self._may_run():
            return False
        try:
            self._run_one(program, function, argument)
        finally:
            self._lock.release()
        return True

    def stop(self, wait: float = 5.0) -> None:
        """Ends the loop and waits for the thread; in the loop itself it only ends the loop."""
        self._stopped.set()
        try:
            self.loop.call_soon_threadsafe(self._interrupt)
        except RuntimeError:
            return
        if asyncio._get_running_loop() is not self.loop and self._thread.is_alive():
            self._thread.join(wait)

    # -- on the program's thread ---------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        """Takes the lock; if the guard has it, requests the loop from the guard."""
        if self._lent and self._lock.acquire(blocking=False):
            if not self._stopped.is_set():
                return True
            self._lock.release()
        self._request_loop()
        return False

    def _run_one(self, program: asyncio.AbstractEventLoop, function: Callable[[Any], T], argument: Any) -> T | None:
        """Runs a function, and the loop only where something waits there; returns what the function did."""
        loop = self._turns_of
        assert loop is not None  # only such a loop is lent
        if loop.waits:
            self._run_turn(program, looks=False)  # what came before goes first
        at_end, result = list[Callable[[], object]](), None
        loop.at_end, self.in_turn_of = at_end, program
        try:
            asyncio._set_running_loop(loop)
            try:
                result = self._context.run(function, argument)
            except Exception as error:
                loop.call_exception_handler({"message": f"{function!r} raised in a turn", "exception": error})
            for each in at_end:
                self._context.run(each)
        except BaseException:  # such as KeyboardInterrupt, which a program may survive: all that waits runs soon
            for each in at_end:
                loop.call_soon(each)
            self._plan(program, 0.0)
            raise
        finally:
            loop.at_end = None
            asyncio._set_running_loop(program)
            self.in_turn_of = None
            self._turns += 1
        if loop.waits:
            self._run_turn(program, looks=False)
        elif loop.nearest < self._due:
            self._plan(program, loop.nearest - time.monotonic())
        return result

    def _run_turn(self, program: asyncio.AbstractEventLoop, *, looks: bool) -> None:
        """Runs the loop until it would wait."""
        selector, loop = self._selector, self._turns_of
        assert loop is not None  # only such a loop is lent
        loop.waits, loop.nearest = False, math.inf
        selector.looks, selector.pause = looks, 0.0
        self.in_turn_of = program
        asyncio._set_running_loop(None)  # else the loop refuses to run inside the other
        try:
            self.loop.run_forever()
        finally:
            asyncio._set_running_loop(program)
            self.in_turn_of = None
            self._turns += 1
            self._plan(program, selector.pause)

    def _plan(self, program: asyncio.AbstractEventLoop, pause: float | None) -> None:
        """Plans a turn for the loop's next timer, or soon if the turn was interrupted."""
        if pause is None:
            self._due = math.inf
            return
        self._due = due = time.monotonic() + pause
        if self._timer is not None:
            if self._timer_at <= due:
                return  # it fires earlier, and plans again
            self._timer.cancel()
        self._timer_at = due
        self._timer = program.call_later(pause, self._timer_fires)

    def _timer_fires(self) -> None:
        self._timer = None
        self._look()

    def _look(self) -> None:
        """Reads what has arrived, or runs the callbacks that are ready."""
        program, loop = self._program, self._turns_of
        if program is not None and loop is not None and self._may_run():
            try:
                self._looks += 1
                runs = loop.waits or self._looks % LOOK_EVERY == 0 or time.monotonic() >= self._due
                if runs or not self._run_one(program, loop.read_streams, None):
                    self._run_turn(program, looks=True)
            finally:
                self._lock.release()

    def _request_loop(self) -> None:
        self._stop_reading()
        if not self._requested and not self._stopped.is_set():
            self._requested = True
            with suppress(RuntimeError):  # it was closed just now
                self.loop.call_soon_threadsafe(self._interrupt)

    def _take_loop(self) -> None:
        """Takes the loop over from the guard."""
        if self._program is not None and self._fd >= 0 and not self._stopped.is_set():
            try:
                self._program.add_reader(self._fd, self._look)
            except NotImplementedError:  # the program's loop cannot wait for files: the thread runs this one for good
                return
            self._requested, self._lent = False, True
            self._look()

    def _stop_reading(self) -> None:
        if self._lent and self._program is not None:
            self._lent = False
            self._program.remove_reader(self._fd)

    def _forget_program(self) -> None:
        """Ends the lending; on the program's thread, or once its loop is closed."""
        if self._program is not None and not self._program.is_closed():
            self._stop_reading()
            if self._timer is not None:
                self._timer.cancel()
        self._lent, self._requested, self._program, self._timer = False, False, None, None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                self._run_alone()
            if not self._stopped.is_set():
                self._lend()
        with self._lock:
            self._finish()
        program = self._program
        try:
            if program is not None:
                program.call_soon_threadsafe(self._forget_program)
        except RuntimeError:  # it is closed
            self._forget_program()

    def _run_alone(self) -> None:
        """Runs the loop until the program requests it, or until the end."""
        self._selector.end_turn = None
        asyncio.set_event_loop(self.loop)
        try:
            while not self._stopped.is_set():
                self.loop.run_forever()
                if self._requested:
                    break
        finally:
            asyncio.set_event_loop(None)
        self._due = 0.0  # callbacks may wait already
        self._selector.end_turn = self.loop.stop

    def _lend(self) -> None:
        """Gives the loop to the program; returns when a callback is due and the program does not run it."""
        program = self._program
        try:
            if program is not None:
                program.call_soon_threadsafe(self._take_loop)
        except RuntimeError:  # it is closed
            self._requested = False
            return
        turns = -1
        while not self._stopped.wait(GUARD_SECONDS):
            if turns == self._turns and (time.monotonic() >= self._due or self._selector.anything_ready()):
                return
            turns = self._turns

    def _interrupt(self) -> None:
        """Ends the run of the loop, so that its thread checks what to do next; the last tasks are not interrupted."""
        if not self._finishing:
            self.loop.stop()

    def _finish(self) -> None:
        self._finishing = True
        self._selector.end_turn = None
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(asyncio.sleep(0))  # what was submitted last may begin
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            self._cut_off()

    def _cut_off(self) -> None:
        """Ends what was submitted and never began."""
        while self._submitted:
            with suppress(KeyError):  # another thread took it
                inner, coroutine = self._submitted.popitem()
                coroutine.close()
                inner.cancel()
