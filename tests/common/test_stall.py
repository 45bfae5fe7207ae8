"""Tests when a process notices that it stood still, on clocks of the test's own."""

from __future__ import annotations

import math

from toolbus.common.stall import StallWatch, boot_time


class Clocks:
    """A machine's clocks, and a watch that ticks every half second."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asleep = 50.0
        self.seen: list[str] = []
        self.watch = StallWatch(0.5, 0.5, clock=lambda: self.now, awake_clock=lambda: self.now - self.asleep)
        self.watch.listen(lambda: self.seen.append("stall"), lambda: self.seen.append("settled"))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.watch.tick()


def test_a_process_that_ticks_in_time_never_stood_still() -> None:
    clocks = Clocks()
    assert clocks.watch.due == math.inf
    clocks.watch.tick()
    clocks.run(60)
    clocks.now += 0.99  # late, by less than counts
    assert clocks.now <= clocks.watch.due
    clocks.watch.tick()
    assert (clocks.seen, clocks.watch.unsettled) == ([], False)


def test_a_late_tick_is_a_stall_that_began_at_the_last_one_and_settles_at_the_second_in_time() -> None:
    clocks = Clocks()
    clocks.run(2)
    clocks.now += 30.0
    clocks.watch.tick()
    assert (clocks.seen, clocks.watch.unsettled, clocks.watch.suspended) == (["stall"], True, False)
    assert clocks.watch.since == 1_002.0
    clocks.run(0.5)
    assert clocks.watch.unsettled
    clocks.run(0.5)
    assert (clocks.seen, clocks.watch.unsettled) == (["stall", "settled"], False)


def test_the_first_reader_notices_a_stall_before_the_tick_and_once() -> None:
    clocks = Clocks()
    clocks.run(2)
    clocks.now += 30.0
    assert clocks.now > clocks.watch.due
    clocks.watch.notice()
    assert clocks.now <= clocks.watch.due
    clocks.watch.tick()
    assert clocks.seen == ["stall"]


def test_a_second_stall_before_the_first_has_settled_has_the_age_of_both() -> None:
    clocks = Clocks()
    clocks.run(2)
    for _ in range(3):
        clocks.now += 5.0
        clocks.watch.tick()
        clocks.run(0.5)
    assert clocks.seen == ["stall"] * 3
    assert clocks.watch.since == 1_002.0


def test_a_suspended_machine_is_told_from_a_stopped_process() -> None:
    clocks = Clocks()
    clocks.run(2)
    clocks.now += 600.0
    clocks.asleep += 600.0
    clocks.watch.notice()
    assert clocks.watch.suspended
    clocks.run(2)
    clocks.now += 30.0
    clocks.watch.tick()
    assert not clocks.watch.suspended


def test_the_clock_never_goes_back() -> None:
    assert boot_time() <= boot_time()
