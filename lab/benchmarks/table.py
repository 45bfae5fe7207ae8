"""Facts that belong together: a table whose lines are measured in turns, so that a busy machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from lab.benchmarks.fact import Fact

Column: TypeAlias = tuple[str, str]
"""What a column tells, and its unit."""
Measured: TypeAlias = Mapping[Column, Sequence[float]]
Line: TypeAlias = Callable[[], Awaitable[Measured]]
"""Measures one line for one round, all of it made anew."""


async def measured(name: str, title: str, lines: Mapping[str, Line], rounds: int) -> tuple[Fact, ...]:
    """Measures the lines of a table in every round and returns a fact for each of its cells."""
    samples: dict[tuple[str, Column], list[float]] = {}
    for number in range(rounds):
        turn = number % len(lines)  # each round begins with another line, so that none always follows the same one
        for line in (*[*lines][turn:], *[*lines][:turn]):
            for column, seen in (await lines[line]()).items():
                samples.setdefault((line, column), []).extend(seen)
    order = [*lines]
    found = sorted(samples.items(), key=lambda each: order.index(each[0][0]))
    return tuple(Fact(name, sentence, unit, None, tuple(seen), title, line) for (line, (sentence, unit)), seen in found)


def compared(facts: Sequence[Fact], to: str, sentence: str) -> tuple[Fact, ...]:
    """Returns facts, and behind each how often as large it is as that of the line `to`, sample by sample."""
    base = next(fact for fact in facts if fact.line == to)
    both: list[Fact] = []
    for fact in facts:
        times = tuple(mine / other for mine, other in zip(fact.samples, base.samples, strict=True))
        both += [fact, Fact(fact.name, sentence, "×", None, times, fact.table, fact.line)]
    return tuple(both)


def milliseconds(do: Callable[[], object], times: int) -> list[float]:
    """Times something so many times."""
    samples = []
    for _ in range(times):
        began_at = time.perf_counter()
        do()
        samples.append((time.perf_counter() - began_at) * 1e3)
    return samples


async def microseconds(do: Callable[[int], Awaitable[object]], times: int) -> float:
    """Returns how long one of so many takes, given its number, in the middle of them."""
    samples = []
    for number in range(times):
        began_at = time.perf_counter()
        await do(number)
        samples.append((time.perf_counter() - began_at) * 1e6)
    return statistics.median(samples)
