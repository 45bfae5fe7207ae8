"""The benchmark of a watched bus measures what it says: whole calls through the core, scrapes, and quantiles."""

from __future__ import annotations

import pytest

from lab.benchmarks import watching
from lab.benchmarks.contest import Plan
from lab.benchmarks.core_frames import STATES, Frames
from lab.stage import Stage

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
