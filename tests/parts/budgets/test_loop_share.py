"""Turns of peers that are trusted less, on a clock of the tests' own."""

from __future__ import annotations

import asyncio

import pytest

from toolbus.parts.budgets.loop_share import BURST_SECONDS, LONG_SECONDS, SHARE, LoopShare


class Time:
    """A clock that moves while somebody works or sleeps."""

    def __init__(self) -> None:
        self.now = self.worked = 100.0
        self.own_calls = True
        self.share = LoopShare(lambda: self.own_calls, lambda: self.now, lambda: self.worked, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def work(self, seconds: float) -> float:
        began = self.now
        self.now += seconds
        self.worked += seconds
        return began


async def test_peers_have_a_part_of_the_loop_while_own_programs_call() -> None:
    time = Time()
    for _ in range(100):
        await time.share.run("a", lambda: time.work(0.01))
    assert time.now - 100.0 == pytest.approx(1.0 / SHARE, abs=1.0 / SHARE / 10)
    assert time.share.waits["a"] >= 98


async def test_peers_have_all_of_the_loop_while_no_own_program_calls() -> None:
    time = Time()
    time.own_calls = False
    for _ in range(100):
        await time.share.run("a", lambda: time.work(0.01))
    assert time.now - 100.0 == pytest.approx(1.0)
    assert not time.share.waits


async def test_short_work_after_a_rest_waits_for_nothing() -> None:
    time = Time()
    assert await time.share.run("a", lambda: time.work(BURST_SECONDS * SHARE)) == 100.0
    assert await time.share.run("a", lambda: time.work(0.0)) == 100.0 + BURST_SECONDS * SHARE
    assert not time.share.waits


async def test_accounts_take_turns_however_much_one_of_them_sends() -> None:
    time, order = Time(), []

    def piece(account: str) -> None:
        order.append(account)
        time.work(0.02)

    greedy = [asyncio.create_task(time.share.run("greedy", lambda: piece("greedy"))) for _ in range(20)]
    await asyncio.sleep(0)
    await time.share.run("modest", lambda: piece("modest"))
    assert order.index("modest") <= 3
    await asyncio.gather(*greedy)
    assert len(order) == 21


async def test_work_that_fails_counts_and_its_error_is_the_peers() -> None:
    time = Time()

    def fail() -> None:
        time.work(1.0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await time.share.run("a", fail)
    async with time.share.turn("b"):
        assert time.now == pytest.approx(100.0 + 1.0 / SHARE, abs=2 * BURST_SECONDS)


async def test_a_peer_that_gives_up_while_it_waits_keeps_no_other_waiting() -> None:
    time = Time()
    time.share.spent(1.0)
    waiting = asyncio.create_task(time.share.run("a", lambda: time.work(1.0)))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.wait_for(time.share.run("b", lambda: "done"), 10) == "done"


async def test_no_other_account_uses_the_loop_while_a_thread_works_for_one() -> None:
    time = Time()
    async with time.share.turn("a"):
        other = asyncio.create_task(time.share.run("b", lambda: "done"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not other.done()
    assert await asyncio.wait_for(other, 10) == "done"


async def test_a_long_wait_is_logged_once_in_a_while_with_the_account(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    for _ in range(3):
        time.share.spent(2 * LONG_SECONDS)
        async with time.share.turn("identity loud"):
            pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("identity loud waited")
