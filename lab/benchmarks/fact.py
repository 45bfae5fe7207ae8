"""A measured fact beside its aim: how long something takes, or how much of something there is."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: every sample taken, in one unit, and the most that it may be (None: it has no aim).

    Attributes:
        name: what measures it.
        table, line: the table that it is a cell of, and of what it tells there; its sentence heads the column. A fact
            without a table has a line of its own among all others.
    """

    name: str
    sentence: str
    unit: str
    aim: float | None
    samples: tuple[float, ...]
    table: str = ""
    line: str = ""

    @property
    def label(self) -> str:
        """What it is called while it is being measured."""
        return f"{self.name}, {self.line}: {self.sentence}" if self.table else self.name

    @property
    def median(self) -> float:
        """The sample in the middle."""
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """The smallest sample."""
        return min(self.samples)

    @property
    def worst(self) -> float:
        """The largest sample."""
        return max(self.samples)

    @property
    def met(self) -> bool:
        """Whether every sample is within the aim."""
        return self.aim is None or self.worst <= self.aim
