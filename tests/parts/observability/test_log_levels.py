"""Levels of the log at run time: changed for a while, back by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from toolbus.errors import InvalidRequest
from toolbus.parts.observability.logs_room import Later, LogLevels
from toolbus.testing import running_bus

LOGGER = "toolbus.calls"


class _Timer:
    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.seconds, self.function, self.cancelled = seconds, function, False

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def timers() -> list[_Timer]:
    return []


@pytest.fixture
def later(timers: list[_Timer]) -> Later:
    def later(seconds: float, function: Callable[[], None]) -> _Timer:
        timers.append(_Timer(seconds, function))
        return timers[-1]

    return later


@pytest.fixture
def levels(later: Later) -> Iterator[LogLevels]:
    levels = LogLevels(later)
    yield levels
    levels.close()


def test_a_changed_level_holds_for_its_time_and_then_goes_back(levels: LogLevels, timers: list[_Timer]) -> None:
    before = logging.getLogger(LOGGER).getEffectiveLevel()
    levels.set(LOGGER, "debug", 60.0)
    assert logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)
    shown = levels.show()
    assert shown["levels"][LOGGER] == "debug"
    assert 0.0 < shown["changed"][LOGGER]["seconds"] <= 60.0
    timers[0].function()
    assert logging.getLogger(LOGGER).getEffectiveLevel() == before
    assert levels.show()["changed"] == {}


@pytest.mark.parametrize("first", [0, 1], ids=["the first ends first", "the second ends first"])
def test_of_two_buses_in_a_process_the_newest_change_holds_and_the_last_end_puts_the_level_back(
    levels: LogLevels, later: Later, timers: list[_Timer], first: int
) -> None:
    logger, others = logging.getLogger(LOGGER), LogLevels(later)
    before = logger.level
    levels.set(LOGGER, "debug", 60.0)
    others.set(LOGGER, "error", 60.0)
    assert logger.level == logging.ERROR
    timers[first].function()
    assert logger.level == (logging.ERROR, logging.DEBUG)[first]
    assert [bool(each.show()["changed"]) for each in (levels, others)] == [first == 1, first == 0]
    timers[1 - first].function()
    assert logger.level == before


def test_a_level_that_is_changed_twice_goes_back_to_the_first(levels: LogLevels, timers: list[_Timer]) -> None:
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    try:
        levels.set(LOGGER, "debug", 60.0)
        levels.set(LOGGER, "info", 5.0)
        assert timers[0].cancelled
        assert levels.show()["changed"][LOGGER]["before"] == "error"
        levels.set(LOGGER, "")
        assert logging.getLogger(LOGGER).level == logging.ERROR
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("logger", "level", "seconds", "why"),
    [
        ("toolbus.callz", "debug", 1.0, "similar: toolbus.calls"),
        ("aiohttp.client", "debug", 1.0, "is not a logger of toolbus"),
        ("", "debug", 1.0, "is not a logger of toolbus"),
        (LOGGER, "verbose", 1.0, "must be one of debug, info, warning, error"),
        (LOGGER, "debug", 0.0, "more than 0 and at most 86400"),
        (LOGGER, "debug", float("nan"), "more than 0 and at most 86400"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(
    levels: LogLevels, logger: str, level: str, seconds: float, why: str
) -> None:
    names = list(logging.root.manager.loggerDict)
    with pytest.raises(InvalidRequest, match=why):
        levels.set(logger, level, seconds)
    assert list(logging.root.manager.loggerDict) == names
    assert levels.show()["changed"] == {}


async def test_a_bus_that_stops_restores_the_levels_that_it_changed() -> None:
    before = logging.getLogger("toolbus").level
    async with running_bus() as bus:
        shown = (await bus.call("toolbus:log_level", {"logger": "toolbus", "level": "debug"})).output
        assert shown["levels"]["toolbus"] == "debug"
        assert logging.getLogger("toolbus").level == logging.DEBUG
        assert (await bus.call("toolbus:log_level")).output["changed"].keys() == {"toolbus"}
    assert logging.getLogger("toolbus").level == before
