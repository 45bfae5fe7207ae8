"""SharedLoop: a connection's loop in turns of the program's, and on a thread where the program holds its own up."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS, within
from toolbus.errors import PeerLost
from toolbus.sdk.shared_loop import SharedLoop, SocketStream, TurnLoop


@pytest.fixture(name="shared")
async def started() -> AsyncIterator[SharedLoop]:
    loop = SharedLoop("shared")
    loop.start()
    yield loop
    await asyncio.to_thread(loop.stop)
    assert not loop.alive


async def thread_of(shared: SharedLoop) -> int:
    """Returns the thread that runs the loop now."""

    async def look() -> int:
        return threading.get_ident()

    return await within(asyncio.wrap_future(shared.submit(look())))


async def lent(shared: SharedLoop) -> None:
    """Waits until the running loop runs the other one."""

    async def wait() -> None:
        while await thread_of(shared) != threading.get_ident():
            await asyncio.sleep(0.005)

    shared.join(asyncio.get_running_loop())
    await within(wait())


async def test_without_a_program_the_loop_runs_on_its_thread(shared: SharedLoop) -> None:
    assert await thread_of(shared) != threading.get_ident()


async def test_a_program_runs_the_loop_in_its_turns_and_both_loops_know_which_one_runs(shared: SharedLoop) -> None:
    await lent(shared)
    program = asyncio.get_running_loop()
    seen: list[Any] = []

    def look(argument: str) -> None:
        seen.append((argument, asyncio.get_running_loop(), shared.in_turn_of, threading.get_ident()))

    assert shared.turn(program, look, "at once")
    assert seen == [("at once", shared.loop, program, threading.get_ident())]
    assert asyncio.get_running_loop() is program
    assert shared.in_turn_of is None


async def test_timers_and_sockets_of_the_loop_go_on_in_the_turns_of_the_program(shared: SharedLoop) -> None:
    await lent(shared)

    async def work() -> list[int]:
        threads = []
        reads, writes = os.pipe()
        try:
            for _ in range(3):
                readable = asyncio.Event()
                asyncio.get_running_loop().add_reader(reads, readable.set)
                asyncio.get_running_loop().call_later(0.01, os.write, writes, b"x")
                await readable.wait()
                os.read(reads, 1)
                threads.append(threading.get_ident())
        finally:
            asyncio.get_running_loop().remove_reader(reads)
            os.close(reads)
            os.close(writes)
        return threads

    threads = await within(asyncio.wrap_future(shared.submit(work())))
    assert threads == [threading.get_ident()] * 3


async def test_a_program_that_blocks_does_not_hold_up_the_loop_and_gets_it_back_afterwards(shared: SharedLoop) -> None:
    for _ in range(2):
        await lent(shared)
        ticked = threading.Event()
        threads: list[int] = []

        def tick(ticked: threading.Event = ticked, threads: list[int] = threads) -> None:
            threads.append(threading.get_ident())
            if len(threads) < 3:
                shared.loop.call_later(0.01, tick)
            else:
                ticked.set()

        shared.loop.call_soon_threadsafe(tick)
        assert ticked.wait(WAIT_SECONDS)  # blocks the program's loop
        assert threading.get_ident() not in threads


async def test_while_the_thread_has_the_loop_a_turn_of_the_program_is_refused(shared: SharedLoop) -> None:
    await lent(shared)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(WAIT_SECONDS)

    shared.loop.call_soon_threadsafe(hold)
    assert held.wait(WAIT_SECONDS)
    ran: list[int] = []
    assert not shared.turn(asyncio.get_running_loop(), ran.append, 1)
    release.set()
    await lent(shared)
    assert not ran
    assert shared.turn(asyncio.get_running_loop(), ran.append, 2)
    assert ran == [2]


async def test_a_stream_that_is_always_ready_leaves_the_program_its_turns(shared: SharedLoop) -> None:
    await lent(shared)
    reads, writes = os.pipe()
    os.write(writes, b"x")  # never read
    seen = [0]

    def note() -> None:
        seen[0] += 1

    shared.turn(asyncio.get_running_loop(), lambda _: shared.loop.add_reader(reads, note), None)
    while seen[0] < 5:
        before = seen[0]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen[0] <= before + 2
    shared.turn(asyncio.get_running_loop(), lambda _: shared.loop.remove_reader(reads), None)
    os.close(reads)
    os.close(writes)


class Received(asyncio.Protocol):
    """Notes what a stream passes on, and in which order it pauses, goes on and ends."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.threads: set[int] = set()
        self.events: list[str] = []
        self.stream: SocketStream | None = None
        self.complete = threading.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketStream)
        self.stream = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.threads.add(threading.get_ident())
        if self.data.endswith(b"thread"):
            self.complete.set()

    def pause_writing(self) -> None:
        self.events.append("paused")

    def resume_writing(self) -> None:
        self.events.append("resumed")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append("lost")


def connected(shared: SharedLoop) -> tuple[Received, socket.socket]:
    """Returns what one end of a connection receives on the loop, and the other end, which blocks."""
    ours, other = socket.socketpair()
    ours.setblocking(False)
    other.settimeout(WAIT_SECONDS)
    received, loop = Received(), shared.loop
    assert isinstance(loop, TurnLoop)
    assert shared.turn(asyncio.get_running_loop(), lambda _: SocketStream(loop, ours, received), None)
    return received, other


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await within(wait())


async def test_a_stream_is_read_in_turns_and_by_the_thread_while_the_program_blocks(shared: SharedLoop) -> None:
    await lent(shared)
    received, other = connected(shared)
    with other:
        other.sendall(b"in a turn")
        await until(lambda: received.data == b"in a turn")
        assert received.threads == {threading.get_ident()}
        other.sendall(b", on the thread")
        assert received.complete.wait(WAIT_SECONDS)  # blocks the program's loop
        assert received.data == b"in a turn, on the thread"
        await lent(shared)
        other.shutdown(socket.SHUT_WR)
        await until(lambda: received.events == ["lost"])


async def test_a_stream_pauses_its_writer_while_the_other_end_does_not_read_and_loses_nothing(
    shared: SharedLoop,
) -> None:
    await lent(shared)
    received, other = connected(shared)
    stream, program = received.stream, asyncio.get_running_loop()
    assert stream is not None
    pieces = [bytes([number]) * 400_000 for number in range(5)]
    with other:
        for piece in pieces:
            assert shared.turn(program, stream.write, piece)
        assert received.events == ["paused"]
        read = bytearray()
        while len(read) < 2_000_000:
            read += await asyncio.to_thread(other.recv, 1 << 20)
        assert read == b"".join(pieces)
        await until(lambda: received.events == ["paused", "resumed"])
        shared.turn(program, lambda _: stream.abort(), None)
        await until(lambda: received.events[-1] == "lost")
        shared.turn(program, stream.write, b"nothing")  # is over: says nothing
        assert await asyncio.to_thread(other.recv, 10) == b""


async def test_a_stream_whose_protocol_fails_ends_and_the_program_goes_on(shared: SharedLoop) -> None:
    await lent(shared)
    shared.loop.set_exception_handler(lambda loop, context: None)
    received, other = connected(shared)
    received.data = None  # type: ignore[assignment]  # what arrives cannot be added to it
    with other:
        other.sendall(b"anything")
        await until(lambda: received.events == ["lost"])
        assert await asyncio.to_thread(other.recv, 10) == b""


async def test_what_another_thread_or_an_earlier_turn_left_runs_before_the_next_turn(shared: SharedLoop) -> None:
    await lent(shared)
    program, order = asyncio.get_running_loop(), list[str]()
    shared.loop.call_soon_threadsafe(order.append, "scheduled")
    assert shared.turn(program, order.append, "turn")
    assert order == ["scheduled", "turn"]
    fired = asyncio.Event()
    assert shared.turn(program, lambda _: shared.loop.call_later(0.01, order.append, "timer"), None)
    assert shared.turn(program, lambda _: shared.loop.call_later(0.02, fired.set), None)
    await within(fired.wait())
    assert order == ["scheduled", "turn", "timer"]


async def test_a_stream_on_which_data_never_ends_leaves_other_sockets_their_turns(shared: SharedLoop) -> None:
    await lent(shared)
    received, other = connected(shared)
    reads, writes = os.pipe()
    seen = asyncio.Event()
    shared.turn(asyncio.get_running_loop(), lambda _: shared.loop.add_reader(reads, seen.set), None)
    with other:
        os.write(writes, b"x")

        async def flood() -> None:
            while not seen.is_set():
                other.send(b"y" * 10)
                await asyncio.sleep(0)

        await within(flood())
        shared.turn(asyncio.get_running_loop(), lambda _: shared.loop.remove_reader(reads), None)
        stream = received.stream
        assert stream is not None
        shared.turn(asyncio.get_running_loop(), lambda _: stream.abort(), None)
        await until(lambda: received.events == ["lost"])
    os.close(reads)
    os.close(writes)


async def test_what_raises_in_the_loop_does_not_reach_the_program(shared: SharedLoop) -> None:
    await lent(shared)
    problems: list[Any] = []
    shared.loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))

    def fail(_: Any) -> None:
        raise ValueError("broken")

    assert shared.turn(asyncio.get_running_loop(), fail, None)
    assert [str(problem) for problem in problems] == ["broken"]
    await lent(shared)


async def test_what_an_interrupted_turn_had_scheduled_runs_all_the_same(shared: SharedLoop) -> None:
    await lent(shared)
    ran, fired = asyncio.Event(), asyncio.Event()

    def interrupted(scheduled: Callable[[], object]) -> None:
        scheduled()
        raise KeyboardInterrupt

    for schedule in (lambda: shared.loop.call_soon(ran.set), lambda: shared.loop.call_later(0.01, fired.set)):
        with pytest.raises(KeyboardInterrupt):
            shared.turn(asyncio.get_running_loop(), interrupted, schedule)
    await within(ran.wait())
    await within(fired.wait())
    loop, ended, written = shared.loop, asyncio.Event(), asyncio.Event()
    assert isinstance(loop, TurnLoop)

    def interrupted_once() -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.turn(asyncio.get_running_loop(), loop.call_at_end, interrupted_once)
    loop.call_soon_threadsafe(loop.call_at_end, written.set)
    await within(written.wait())


async def test_nothing_in_a_turn_sees_a_variable_of_its_caller(shared: SharedLoop) -> None:
    await lent(shared)
    user, seen = ContextVar("user", default="nobody"), list[str]()
    user.set("a caller")
    loop = shared.loop
    assert isinstance(loop, TurnLoop)

    def look() -> None:
        seen.append(user.get())

    def turn(_: Any) -> None:
        look()
        loop.call_soon(look)
        loop.call_at_end(look)
        loop.call_at_end(lambda: loop.call_soon(look))

    assert shared.turn(asyncio.get_running_loop(), turn, None)
    assert seen == ["nobody"] * 4


def in_a_loop_of_its_own(shared: SharedLoop, then: Callable[[], None] = lambda: None) -> None:
    """Lends a loop that ends without a word."""

    async def program() -> None:
        await lent(shared)
        then()

    asyncio.run(program())


async def test_after_a_program_whose_loop_has_ended_the_thread_goes_on_until_another_joins(shared: SharedLoop) -> None:
    await asyncio.to_thread(in_a_loop_of_its_own, shared)
    assert await thread_of(shared) != threading.get_ident()
    await lent(shared)


async def test_a_program_whose_loop_ended_before_it_got_the_loop_leaves_it_to_the_next(
    shared: SharedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    first = asyncio.new_event_loop()
    pass_on = first.call_soon_threadsafe

    def note(*arguments: Any, **options: Any) -> Any:
        try:
            return pass_on(*arguments, **options)
        finally:
            asked.set()

    monkeypatch.setattr(first, "call_soon_threadsafe", note)
    shared.join(first)
    assert await asyncio.to_thread(asked.wait, WAIT_SECONDS)  # the loop is offered
    first.close()
    await lent(shared)


async def test_a_program_whose_loop_cannot_wait_for_files_leaves_the_loop_on_its_thread(
    shared: SharedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, asked = asyncio.get_running_loop(), asyncio.Event()

    def refuse(*_: Any) -> None:
        asked.set()
        raise NotImplementedError

    monkeypatch.setattr(program, "add_reader", refuse)
    monkeypatch.setattr(program, "remove_reader", refuse)
    shared.join(program)
    await within(asked.wait())
    for _ in range(2):
        assert not shared.turn(program, print, None)
        assert await thread_of(shared) != threading.get_ident()


async def test_only_the_first_of_two_loops_lends_its_turns(shared: SharedLoop) -> None:
    await lent(shared)

    async def other() -> bool:
        shared.join(asyncio.get_running_loop())
        return shared.turn(asyncio.get_running_loop(), print, None)

    assert not await asyncio.to_thread(asyncio.run, other())
    await lent(shared)


@pytest.mark.parametrize("ends", ["running", "ended"])
def test_a_stopped_loop_leaves_neither_tasks_nor_files_open(ends: str) -> None:
    files = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0
    cancelled: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("task")
            raise

    async def program() -> None:
        shared.start()
        await lent(shared)
        shared.submit(forever())
        await thread_of(shared)
        if ends == "running":
            await asyncio.to_thread(shared.stop)
            while not shared.loop.is_closed():
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the program's turn to let go
            assert not shared.turn(asyncio.get_running_loop(), print, None)

    shared = SharedLoop("shared")
    asyncio.run(program())
    shared.stop()
    assert not shared.alive
    assert cancelled == ["task"]
    if files:
        assert len([*Path("/proc/self/fd").iterdir()]) <= files


async def test_a_loop_may_be_stopped_from_within(shared: SharedLoop) -> None:
    await lent(shared)
    shared.turn(asyncio.get_running_loop(), lambda _: shared.stop(), None)

    async def ended() -> None:
        while shared.alive:
            await asyncio.sleep(0.005)

    await within(ended())
    assert shared.loop.is_closed()


async def test_what_the_end_of_the_loop_cuts_off_says_so_and_nothing_waits_for_ever() -> None:
    shared = SharedLoop("ends")
    shared.start()
    busy = threading.Event()

    async def wait() -> None:
        await asyncio.Event().wait()

    running = shared.submit(wait())
    shared.loop.call_soon_threadsafe(busy.wait, WAIT_SECONDS)
    queued = [shared.submit(wait()) for _ in range(20)]  # their tasks are not made yet
    cancelled = shared.submit(wait())
    cancelled.cancel()
    shared.stop(wait=0)
    queued.append(shared.submit(wait()))
    busy.set()
    for each in (running, *queued):
        with pytest.raises(PeerLost, match="closed: make a new one"):
            await within(asyncio.wrap_future(each))
    assert cancelled.cancelled()
    await asyncio.to_thread(shared.stop)
    with pytest.raises(PeerLost, match="closed: make a new one"):
        shared.submit(wait())


async def test_whoever_submits_while_the_loop_ends_gets_an_answer() -> None:
    async def step() -> int:
        await asyncio.sleep(0)
        return 1

    for _ in range(20):
        shared = SharedLoop("ends")
        shared.start()
        outcomes: list[Any] = []

        def submit(shared: SharedLoop = shared, outcomes: list[Any] = outcomes) -> None:
            while True:
                try:
                    outcomes.append(shared.submit(step()))
                    time.sleep(0)
                except PeerLost:
                    return

        thread = threading.Thread(target=submit)
        thread.start()
        await asyncio.sleep(0.002)
        await asyncio.to_thread(shared.stop)
        await asyncio.to_thread(thread.join, WAIT_SECONDS)
        results = await within(asyncio.gather(*map(asyncio.wrap_future, outcomes), return_exceptions=True))
        assert {type(each) for each in results} <= {int, PeerLost}
