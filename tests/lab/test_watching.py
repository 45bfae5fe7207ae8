"""The benchmark of a watched bus measures what it says: whole calls through the core, scrapes, and quantiles."""

from __future__ import annotations

import pytest

from lab.benchmarks import busy_bus, span_exports, watching
from lab.benchmarks.contest import Plan
from lab.benchmarks.core_frames import STATES, Frames
from lab.stage import Stage
from toolbus.protocol.limits import Timings

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("size", [1, 5])
def test_frames_carry_every_call_there_and_back(state: str, size: int) -> None:
    frames = Frames(size, state)
    assert [frames.run() for _ in range(3)] == [size, 2 * size, 3 * size]


def test_quantiles_of_the_benchmark_are_within_a_bucket() -> None:
    with Stage() as stage:
        facts = watching.quantile_error(stage, Plan(), 1, calls=20_000)
    assert len(facts) == 3
    assert all(fact.median <= 1.0 for fact in facts)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a busy bus measured in short windows."""
    monkeypatch.setattr(busy_bus, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(busy_bus, "SETTLE_SECONDS", 0.1)


@pytest.mark.usefixtures("briefly")
def test_what_the_exporter_costs_is_measured_by_the_clocks_of_the_bus_and_of_its_thread() -> None:
    often = {"trace_ratio": 0.1, "trace_most": 1_000_000, "timings": Timings(span_seconds=0.02)}
    with Stage() as stage:
        plain, _, sampled, ratio, of_thread = span_exports.exporter(stage, Plan(), 1, **often)
    assert ratio.median == sampled.median / plain.median > 0
    assert 0 < of_thread.median < 100


@pytest.mark.usefixtures("briefly")
def test_what_watchers_of_the_console_cost_is_measured_while_each_of_them_reads_digests() -> None:
    with Stage() as stage:
        alone, _, watched, ratio = watching.console_watchers(stage, Plan(), 1)
    assert ratio.median == watched.median / alone.median > 0
