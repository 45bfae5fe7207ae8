from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.functions.workers import ChangeSignal, Workers


def test_jobs_that_wait_for_each_other_are_all_at_work_together() -> None:
    workers = Workers(32, "test")
    meeting, met = threading.Barrier(32), threading.Semaphore(0)

    def meet(_: int) -> None:
        meeting.wait(WAIT_SECONDS)
        met.release()

    workers.put_all(meet, range(32))
    assert all(met.acquire(timeout=WAIT_SECONDS) for _ in range(32))
    workers.stop()


@pytest.mark.parametrize("together", [True, False])
def test_a_job_behind_one_that_blocks_runs_on_another_thread(together: bool) -> None:
    workers = Workers(2, "test")
    ran, released = threading.Event(), threading.Event()

    def run(number: int) -> None:
        if number == 0:
            ran.wait(WAIT_SECONDS)
            released.set()
        else:
            ran.set()

    if together:
        workers.put_all(run, range(2))
    else:
        workers.put(run, 0)
        workers.put(run, 1)
    assert released.wait(WAIT_SECONDS)
    assert ran.is_set()
    workers.stop()


def test_one_thread_runs_all_jobs_in_order_and_what_ended_does_not_wait_for_those_behind_it() -> None:
    workers = Workers(1, "test")
    began: list[int] = []
    rested, ended = threading.Event(), threading.Event()
    workers.at_rest = lambda: rested.set() if began else None

    def run(number: int) -> None:
        began.append(number)
        if number == 1:
            assert rested.wait(WAIT_SECONDS)  # the first job has ended: what it left must be sent now
        elif number == 2:
            ended.set()

    workers.put_all(run, range(3))
    assert ended.wait(WAIT_SECONDS)
    assert began == [0, 1, 2]
    workers.stop()


def test_a_job_that_was_put_while_all_threads_were_busy_runs_once_one_is_free() -> None:
    workers = Workers(2, "test")
    busy, go, ran = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def block(_: int) -> None:
        busy.release()
        go.wait(WAIT_SECONDS)

    workers.put_all(block, range(2))
    assert all(busy.acquire(timeout=WAIT_SECONDS) for _ in range(2))
    workers.put_all(lambda _: ran.release(), range(3))
    go.set()
    assert all(ran.acquire(timeout=WAIT_SECONDS) for _ in range(3))
    workers.stop()


async def test_workers_that_are_stopped_end_after_their_last_job() -> None:
    workers = Workers(4, "ends")
    ran = threading.Semaphore(0)
    workers.put_all(lambda _: ran.release(), range(8))
    workers.stop()
    assert all(ran.acquire(timeout=WAIT_SECONDS) for _ in range(8))
    await until(lambda: not any(thread.name.startswith("ends") for thread in threading.enumerate()))


def test_workers_without_a_job_keep_none_alive() -> None:
    workers = Workers(1, "test")
    rested = threading.Event()
    workers.at_rest = rested.set

    class Argument:
        pass

    argument = Argument()
    reference = weakref.ref(argument)
    workers.put(lambda _: None, argument)
    del argument
    assert rested.wait(WAIT_SECONDS)
    assert reference() is None
    workers.stop()


def test_what_a_thread_leaves_to_a_watch_that_is_just_ending_is_sent() -> None:
    left, sent = threading.Event(), threading.Event()

    class Ending(Workers):
        """A watch that ends at the moment in which a job is put and taken."""

        @property
        def _watching(self) -> bool:
            return self._is_watching

        @_watching.setter
        def _watching(self, watching: bool) -> None:
            if not watching and threading.current_thread().name.endswith("-watch") and not left.is_set():
                left.set()
                self._watch_jobs()  # as `put` does it: the watch seems to be there
            self._is_watching = watching

    workers = Ending(1, "test")
    workers.at_rest = lambda: sent.set() if left.is_set() else None
    workers._watch_jobs()
    assert sent.wait(WAIT_SECONDS)
    workers.stop()


async def test_who_gives_up_waiting_for_a_change_leaves_nothing_behind() -> None:
    signal = ChangeSignal()
    waiting = asyncio.create_task(signal.next())
    await until(lambda: signal.is_awaited, "it waits")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not signal.is_awaited
