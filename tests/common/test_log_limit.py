"""Tests how many lines a second one source may put into a log."""

import logging
from collections.abc import Callable

import pytest

from toolbus.common.log_limit import LINES_OF_KIND, LINES_OF_ONE, LineBudget, LogLimit


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


def line(text: str, *values: object, name: str = "toolbus.sessions", level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord(name, level, "file", 1, text, values, None)


def test_lines_that_one_source_causes_are_limited_and_counted_and_those_of_others_pass() -> None:
    now = [100.0]
    budget = LineBudget(("toolbus.sessions",), lambda: now[0])
    passed = [budget.filter(line("attached source=%s", "flood")) for _ in range(1_000)]
    assert passed == [True] * LINES_OF_ONE + [False] * (1_000 - LINES_OF_ONE)
    assert budget.filter(line("lost source=%s", "flood"))
    for source, more in (("other", " (980 lines of this kind were left out)"), ("flood", "")):
        record = line("attached source=%s", source)
        assert budget.filter(record)
        assert record.getMessage() == f"attached source={source}{more}"
        now[0] += 1


def test_lines_with_ever_new_values_are_limited_together() -> None:
    budget = LineBudget(("toolbus.sessions",), lambda: 7.5)
    assert sum(budget.filter(line("warning tool=%r", f"t{number}")) for number in range(10_000)) == LINES_OF_KIND


@pytest.mark.parametrize(
    "record",
    [
        line("attached source=%s", "flood", level=logging.DEBUG),
        line("call %s", "tool", name="toolbus.calls"),
        line("no values"),
    ],
)
def test_lines_for_debugging_and_of_other_loggers_are_not_limited(record: logging.LogRecord) -> None:
    budget = LineBudget(("toolbus.sessions",), lambda: 7.5)
    count = sum(budget.filter(record) for _ in range(1_000))
    assert count == (LINES_OF_ONE if record.msg == "no values" else 1_000)
