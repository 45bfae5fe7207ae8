"""Holds measured facts, and measures the lines of a table in turns, so that a busy machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import uvloop

Column: TypeAlias = tuple[str, str]
"""What a column shows, and its unit."""
Measured: TypeAlias = Mapping[Column, Sequence[float]]
Line: TypeAlias = Callable[[], Awaitable[Measured]]
"""Measures one line for one round, all of it made anew."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: every sample taken, in one unit.

    Attributes:
        name: what measures it.
        aim: the most that a sample should be; None: it has no aim.
        table, line: the table that it is a cell of, and its line there; its sentence heads the column. A fact without a
            table has a line of its own among all others.
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
        """Its name while it is being measured."""
        return f"{self.name}, {self.line}: {self.sentence}" if self.table else self.name

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def worst(self) -> float:
        return max(self.samples)


def measured(name: str, title: str, lines: Mapping[str, Line], rounds: int) -> tuple[Fact, ...]:
    """Measures the lines of a table on a loop of its own; see `measured_here`."""
    return uvloop.run(measured_here(name, title, lines, rounds))


async def measured_here(name: str, title: str, lines: Mapping[str, Line], rounds: int) -> tuple[Fact, ...]:
    """Measures the lines of a table in every round, and returns a fact for each of its cells."""
    samples: dict[tuple[str, Column], list[float]] = {}
    for number in range(rounds):
        turn = number % len(lines)  # each round begins with another line, so that none always follows the same one
        for line in (*[*lines][turn:], *[*lines][:turn]):
            for column, figures in (await lines[line]()).items():
                samples.setdefault((line, column), []).extend(figures)
    order = [*lines]
    cells = sorted(samples.items(), key=lambda each: order.index(each[0][0]))
    return tuple(
        Fact(name, sentence, unit, None, tuple(figures), title, line) for (line, (sentence, unit)), figures in cells
    )


def compared(facts: Sequence[Fact], to: str, sentence: str) -> tuple[Fact, ...]:
    """Returns facts, and behind each of the column that the line `to` has its ratio to that, sample by sample."""
    base = next(fact for fact in facts if fact.line == to)
    both: list[Fact] = []
    for fact in facts:
        if fact.sentence != base.sentence:
            both.append(fact)
            continue
        times = tuple(mine / other for mine, other in zip(fact.samples, base.samples, strict=True))
        both += [fact, Fact(fact.name, sentence, "×", None, times, fact.table, fact.line)]
    return tuple(both)


async def microseconds(do: Callable[[int], Awaitable[object]], times: int) -> float:
    """Returns the median time of one of so many, each of which gets its number."""
    samples = []
    for number in range(times):
        began_at = time.perf_counter()
        await do(number)
        samples.append((time.perf_counter() - began_at) * 1e6)
    return statistics.median(samples)
