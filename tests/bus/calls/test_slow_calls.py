"""Calls that took long: which are noted, what is told about them, and that many of them do not flood the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.core_model import Core, PeerDouble, one_call, tool
from toolbus.bus.calls.call_observer import LINES_PER_SECOND, MAX_STORED
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS

Timers = list[tuple[float, Callable[[], None]]]


def _watched(seconds: float = 10.0) -> tuple[Core, PeerDouble, PeerDouble, Timers]:
    core, host, plugin = one_call(tool("t", timeout_seconds=300.0))
    timers: Timers = []
    core.dispatcher.slow_calls.watch(seconds, lambda after, function: timers.append((after, function)))
    return core, host, plugin, timers


def _takes(core: Core, host: PeerDouble, plugin: PeerDouble, seconds: float, **answer: Any) -> str:
    """Makes a call that takes so long; returns its id."""
    call_id = core.call(host, "t")
    core.now += seconds
    core.answer(plugin, **answer)
    return call_id


def test_a_call_that_took_longer_than_the_bound_is_noted_and_logged_by_its_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, host, plugin, _ = _watched()
    _takes(core, host, plugin, 9.9)
    slow = _takes(core, host, plugin, 12.5)
    (line,) = caplog.records
    fields = vars(line)
    assert (line.levelno, line.getMessage(), fields["call_id"]) == (logging.WARNING, "slow call", slow)
    assert (fields["tool"], fields["source"], fields["identity"]) == ("t", "plugin", "host")
    assert (fields["seconds"], fields["outcome"]) == (12.5, "OK")
    (noted,) = core.dispatcher.slow_calls.slowest(10)
    record = next(iter(core.dispatcher.records))
    assert (noted.id, noted.fields["call_id"], noted.ended) == (record.id, record.call_id, record.ended)
    assert noted.described(1000.0)["ended"] == round(1000.0 + core.now, 3)


@pytest.mark.parametrize("answer", [{"is_error": True}, {"output": '"' + "x" * 100_000 + '"'}])
def test_a_slow_call_is_noted_once_however_it_ended(answer: dict[str, Any]) -> None:
    core, host, plugin, _ = _watched()
    _takes(core, host, plugin, 20.0, **answer)
    assert core.dispatcher.slow_calls.count == 1


def test_a_call_that_met_its_deadline_is_noted_with_that_outcome() -> None:
    core, host, _, _ = _watched()
    core.call(host, "t", timeout_seconds=15.0)
    core.now += 15.1
    core.dispatcher.deadlines.sweep(core.now)
    (noted,) = core.dispatcher.slow_calls.slowest(10)
    assert noted.fields["outcome"] == "DEADLINE_EXCEEDED"


def test_nothing_is_noted_with_zero_seconds_nor_for_a_task_that_nobody_waits_for() -> None:
    core, host, plugin, _ = _watched(0.0)
    _takes(core, host, plugin, 200.0)
    assert core.dispatcher.slow_calls.count == 0
    core, host, plugin, _ = _watched()
    host.longest_timeout = MAX_TIMEOUT_SECONDS + 1.0
    _takes(core, host, plugin, 200.0)
    assert core.dispatcher.slow_calls.count == 0


def test_the_slowest_come_first_and_the_newest_are_kept() -> None:
    core, host, plugin, _ = _watched()
    for seconds in (11.0, 30.0, 20.0):
        _takes(core, host, plugin, seconds)
    slow = core.dispatcher.slow_calls
    assert [each.seconds for each in slow.slowest(2)] == [30.0, 20.0]
    assert [each.seconds for each in slow.slowest(9, since=core.now - 10.0)] == [20.0]
    for _ in range(MAX_STORED):
        _takes(core, host, plugin, 12.0)
    assert (len(slow.slowest(10_000)), slow.slowest(1)[0].seconds) == (MAX_STORED, 12.0)


def test_a_flood_of_slow_calls_is_ten_lines_a_second_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    core, host, plugin, timers = _watched()
    for _ in range(50):
        core.call(host, "t")
    core.now += 60.0
    for _ in range(50):
        core.answer(plugin)
    assert [line.getMessage() for line in caplog.records] == ["slow call"] * LINES_PER_SECOND
    ((_, tell),) = timers
    tell()
    assert "and 40 more slow calls" in caplog.records[-1].getMessage()
