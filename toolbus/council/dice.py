"""Who takes part in a run: each member with tools rolls against its chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from toolbus.council.member import Member


class Randomness(Protocol):
    """Where the numbers come from: `random.Random`, or what a test has instead."""

    def random(self) -> float:
        """Returns a number from 0 up to, but not including, 1."""


def takes_part(member: Member, randomness: Randomness) -> bool:
    """Rolls for one member; only a chance between never and always costs a number."""
    if not member.tools or member.chance <= 0:
        return False
    return member.chance >= 100 or randomness.random() * 100 < member.chance


def rolled(members: Iterable[Member], randomness: Randomness) -> tuple[Member, ...]:
    """Returns the members that take part, in their order."""
    return tuple(member for member in members if takes_part(member, randomness))
