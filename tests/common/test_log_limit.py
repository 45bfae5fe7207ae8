"""Tests how many lines a second one source may put into a log."""

from collections.abc import Callable

from toolbus.common.log_limit import LogLimit


def test_lines_beyond_the_limit_are_withheld_and_their_number_is_said_once() -> None:
    now, withheld = 100.0, list[int]()
    timers: list[tuple[float, Callable[[], None]]] = []
    limit = LogLimit(2, withheld.append, lambda seconds, tell: timers.append((seconds, tell)), lambda: now)
    assert [limit.passes() for _ in range(5)] == [True, True, False, False, False]
    now = 101.0
    assert limit.passes()
    ((seconds, tell),) = timers
    tell()
    assert (seconds, withheld) == (1.0, [3])
    assert [limit.passes() for _ in range(2)] == [True, False]
    assert len(timers) == 2
