"""Values as people read them."""

import pytest

from toolbus.parts.console.top import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.0, "0.0 ms"), (0.00012, "0.1 ms"), (0.0099, "9.9 ms"), (0.0123, "12 ms"), (0.4, "400 ms"),
        (0.9996, "1.0 s"), (3.21, "3.2 s"), (59.4, "59 s"), (59.7, "1 min"), (245, "4 min 5 s"), (3_600, "1 h"),
        (183_600, "2 d 3 h"), (-1.0, "0.0 ms"),
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_in_which_it_is_short(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.01, "0"), (0.24, "0.2"), (9.94, "9.9"), (9.96, "10"), (12_300.4, "12,300")]
)
def test_a_rate_has_a_decimal_only_where_it_is_small(value: float | None, text: str) -> None:
    assert units.rate(value) == text


def test_sizes_and_counts_are_short() -> None:
    assert [units.size(each) for each in (None, 12, 2048, 5 << 20, 3 << 30)] == [
        "–",
        "12 B",
        "2.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [units.count(each) for each in (None, 0, 12_345)] == ["–", "0", "12,345"]
    assert units.clock(None) == "–"


def test_a_sparkline_shows_that_something_was_even_beside_a_peak() -> None:
    assert units.sparkline([0, 1, 1000], 5) == "  ▁▂█"
    assert units.sparkline([0, 0], 3) == " ▁▁"
    assert units.sparkline([1, 2, 3], 2) == "▆█"
    assert units.sparkline([], 3) == "   "
