from __future__ import annotations

import random

import pytest

from tests.parts.council.fake_tool_source import FixedRolls, member
from toolbus.parts.council.settings import participants, takes_part


@pytest.mark.parametrize(
    ("chance", "roll", "comes"),
    [
        *((100, None, True), (250, None, True), (0, None, False), (-5, None, False)),
        *((50, 0.4999, True), (50, 0.5, False), (0.5, 0.004, True), (0.5, 0.005, False), (99.9, 0.9999, False)),
    ],
)
def test_a_chance_is_compared_as_the_original_does(chance: float, roll: float | None, comes: bool) -> None:
    rolls = FixedRolls() if roll is None else FixedRolls(roll)
    assert takes_part(member("Ann", "look", chance=chance), rolls) is comes
    assert rolls.left == []


def test_a_member_without_tools_stays_away_and_costs_no_roll() -> None:
    assert participants([member("Ann"), member("Bob", "look", chance=50)], FixedRolls(0.1)) == (
        member("Bob", "look", chance=50),
    )


def test_a_chance_that_is_no_number_never_takes_part() -> None:
    assert not takes_part(member("Ann", "look", chance=float("nan")), FixedRolls(0.0))


def test_a_seeded_source_of_randomness_rolls_the_same_again() -> None:
    council = [member(f"M{number}", "look", chance=50) for number in range(20)]
    first = participants(council, random.Random(7))
    assert first == participants(council, random.Random(7))
    assert 0 < len(first) < 20
