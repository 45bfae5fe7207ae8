"""What is offered and what came of it: a schedule of calls in phases, and the answers as columns.

An open loop: when a call is due depends on the schedule alone, and its time runs from then, whatever became of the
calls before it. Knows no bus.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OK = 0
NEVER_SENT = -1  # the host's own window was full until the call's patience was over
UNANSWERED = -2
FOREIGN = 10**9  # the numbers of one host: its place times this, plus the number of the call
_FIELDS = 7


@dataclass(frozen=True, slots=True)
class Phase:
    """So many calls a second for so long."""

    rate: float
    seconds: float

    @property
    def count(self) -> int:
        """How many calls there are in it."""
        return math.ceil(self.rate * self.seconds)


class Schedule:
    """When which call is due, in seconds from the beginning."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self.count = sum(phase.count for phase in phases)
        self.seconds = sum(phase.seconds for phase in phases)

    def __str__(self) -> str:
        return ",".join(f"{phase.rate:g}x{phase.seconds:g}" for phase in self.phases)

    def _starts(self) -> Iterator[tuple[Phase, float, int]]:
        at, number = 0.0, 0
        for phase in self.phases:
            yield phase, at, number
            at += phase.seconds
            number += phase.count

    def due_by(self, at: float) -> int:
        """How many calls are due until a moment."""
        due = 0
        for phase, start, number in self._starts():
            if at >= start and phase.rate:
                due = number + min(phase.count, math.floor((at - start) * phase.rate) + 1)
        return due

    def due_at(self, number: int) -> float:
        """When a call is due."""
        for phase, start, first in self._starts():
            if number < first + phase.count:
                return start + (number - first) / phase.rate
        raise IndexError(number)


def read_schedule(text: str) -> Schedule:
    """Reads what ``str`` wrote of a schedule."""
    return Schedule([Phase(*map(float, each.split("x"))) for each in text.split(",")])


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call.

    Attributes:
        number: whose call it is and which.
        due, sent, ended: moments, in seconds from the beginning of the schedule.
        code: OK, the bus's error code, or one of ours below 0.
        hint: seconds after which to return, where a refusal says all that it should; 0 where it lacks something.
        calls: how many it stands for: those that were never sent are millions, and each would cost its host time.
            They are those from ``number`` on, and ``due`` is when the first of them was.
    """

    number: int
    due: float
    sent: float
    ended: float
    code: int
    hint: float
    calls: int = 1

    @property
    def seconds(self) -> float:
        """How long its caller waited since it was due."""
        return self.ended - self.due


class Answers:
    """The answers that one host got; a file of numbers, since there may be millions."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // _FIELDS

    def __iter__(self) -> Iterator[Answer]:
        numbers = self._numbers
        for place in range(0, len(numbers), _FIELDS):
            number, due, sent, ended, code, hint, calls = numbers[place : place + _FIELDS]
            yield Answer(int(number), due, sent, ended, int(code), hint, int(calls))

    def add(self, answer: Answer) -> None:
        """Keeps an answer."""
        of = answer
        self._numbers.extend((of.number, of.due, of.sent, of.ended, of.code, of.hint, of.calls))

    def write(self, file: Path) -> None:
        """Writes them all."""
        write_numbers(file, self._numbers)

    @classmethod
    def read(cls, file: Path) -> Answers:
        """Reads what `write` wrote."""
        answers = cls()
        answers._numbers = read_numbers(file)
        return answers


def write_numbers(file: Path, numbers: array[float]) -> None:
    """Writes numbers to a file that is there once it is whole."""
    part = file.with_suffix(".part")
    with part.open("wb") as to:
        numbers.tofile(to)
    part.rename(file)


def read_numbers(file: Path) -> array[float]:
    """Reads what `write_numbers` wrote."""
    numbers = array("d")
    numbers.frombytes(file.read_bytes())
    return numbers


def quantile(figures: Sequence[float], share: float) -> float:
    """Returns the figure below which such a share of them lies; NaN where there are none."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan
