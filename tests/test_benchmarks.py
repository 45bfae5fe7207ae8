"""The suites of `make bench`: what they name is there, and what all hosts pay for is measured to the last cell."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest

from benchmarks import catalogue, exports, local_calls, searches, turns
from benchmarks.children import Nursery, environment
from benchmarks.contest import Outcome, Plan
from benchmarks.fact import Fact
from benchmarks.report import Report
from benchmarks.suite import SUITES
from benchmarks.table import compared
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.offer import prepare
from toolbus.tool import Limits

BRIEFLY = Plan(rounds=1)
Measure = Callable[[Nursery, Plan, int], tuple[Fact, ...]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    """Has everything measured with few tools and few calls."""
    for module, name, value in (
        *((exports, "TOOLS", 80), (searches, "SIZES", (80,)), (searches, "QUERIES", 1), (turns, "OFFERED", 3)),
        *((turns, "TURNS", 1), (local_calls, "CALLS", 1), (local_calls, "TASKS", 3)),
    ):
        monkeypatch.setattr(module, name, value)
    with Nursery(environment(experiments=False)) as nursery:
        yield nursery


def reported(facts: tuple[Fact, ...]) -> Report:
    return Report(SUITES["hosts"], BRIEFLY, Outcome({}, {}, []), facts, {}, "python -m benchmarks hosts", 1)


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_names_only_facts_that_can_be_measured(suite: str) -> None:
    for name, module in SUITES[suite].facts.items():
        assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), name))


def test_the_catalogue_is_the_same_each_time_and_a_bus_takes_all_of_it() -> None:
    tools = catalogue.tools(200)
    assert tools == catalogue.tools(200)
    assert len({tool.name for tool in tools}) == 200
    assert len(prepare(tools, Limits())) == 200
    assert find_dialect("anthropic").export(tools).left_out
    assert find_dialect("gemini").export(tools).losses


@pytest.mark.parametrize(
    ("measure", "lines"),
    [
        (exports.export, len(DIALECTS)),
        (exports.served_export, len(exports.SERVED)),
        (turns.loop, 4),
        (searches.search, 1),
        (local_calls.calls, len(local_calls.WAYS)),
        (local_calls.dispatch, 5),
        (local_calls.tasks, 2),
    ],
)
def test_every_cell_of_a_table_is_measured(small: Nursery, measure: Measure, lines: int) -> None:
    report = reported(measure(small, BRIEFLY, 2))
    (table,) = report.sections()
    assert len(table.rows) == lines
    assert all(len(row) == len(table.columns) and all(row) for row in table.rows)
    assert measure.__name__ in SUITES["hosts"].facts
    assert f"repeat with `python -m benchmarks hosts --only {measure.__name__} --repeats 1 --rounds 1" in (
        report.to_markdown()
    )


def test_a_cell_shows_three_digits_and_how_far_its_samples_lie_apart() -> None:
    samples = {"far": (1234.5, 1300.25, 1250.4), "near": (0.01234, 0.0125, 0.0124), "one": (7.0,), "zero": (0.0,)}
    facts = tuple(Fact("export", "takes", "ms", None, seen, "Times", line) for line, seen in samples.items())
    (table,) = reported(facts).sections()
    assert table.columns == ("what", "takes, ms")
    assert [row[1] for row in table.rows] == ["1,250 (1,234 to 1,300)", "0.0124 (0.0123 to 0.0125)", "7", "0"]


def test_a_line_is_compared_with_another_sample_by_sample() -> None:
    facts = tuple(
        Fact("calls", "a call", "µs", None, seen, "Calls", line)
        for line, seen in {"alone": (1.0, 2.0), "far": (10.0, 30.0)}.items()
    )
    times = [fact.samples for fact in compared(facts, "alone", "times") if fact.unit == "×"]
    assert times == [(1.0, 1.0), (10.0, 15.0)]
