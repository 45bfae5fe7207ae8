"""Tests how a count grew."""

from hypothesis import given
from hypothesis import strategies as st

from toolbus.parts.console.top.bus_state import BARS, STEP, WINDOW, Trail


def test_one_moment_has_no_rate() -> None:
    assert Trail(100.0, 7).rate(100.0) is None


def test_a_rate_is_that_of_the_last_seconds() -> None:
    trail = Trail(100.0, 1_000)
    trail.add(100.5, 1_050)
    assert trail.rate(100.5) == 100.0
    for half in range(2, 41):
        trail.add(100 + half / 2, 1_000 + 5 * half)
    assert trail.rate(120.0) == 10.0
    assert trail.rate(120.0 + WINDOW) == 0.0


def test_a_course_is_what_came_in_each_step_of_the_last_minute() -> None:
    start = 300.0
    trail = Trail(start, 0)
    trail.add(start + STEP, 6)
    trail.add(start + 3 * STEP, 7)
    course = trail.course(start + 4 * STEP)
    assert course == [*[0.0] * (BARS - 4), 6.0, 0.0, 1.0, 0.0]


@given(st.lists(st.integers(0, 50), max_size=400))
def test_a_trail_stays_small_and_its_course_adds_up(growth: list[int]) -> None:
    trail, count = Trail(0.0, 0), 0
    for number, more in enumerate(growth, 1):
        count += more
        trail.add(number / 2, count)
    assert len(trail) <= 80
    assert 0 <= sum(trail.course(len(growth) / 2)) <= count
