"""Decides which call is due when, and which calls a host sends now: an open loop in phases.

When a call is due depends on the schedule alone, and its time runs from then, whatever became of the calls before it. A
call that finds the host's own window full waits in the host until its time is over, as in the SDK; then it was never
sent.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.ledger import NEVER_SENT, UNANSWERED, Answer, Answers
from lab.load.callers import InFlight

FOREIGN = 10**9  # the numbers of one host: its place times this, plus the number of the call
BEAT_SECONDS = 0.01
LAST_ANSWER_SECONDS = 30.0  # how long answers may still come after the last call, on a slow machine too
BEGIN = "begin"  # of the file with the schedule and its beginning


@dataclass(frozen=True, slots=True)
class Phase:
    """So many calls a second for so long."""

    rate: float
    seconds: float

    @property
    def count(self) -> int:
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


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line of every program that waits for its moment to begin."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--place", type=int, default=0, help="among the hosts of a run")
    parser.add_argument("--window", type=int, default=1 << 30, help="calls in flight that the host keeps to")
    parser.add_argument("--max-wait", type=float, default=1.0, help="seconds that a call waits in the host")
    return parser


class Pace:
    """Decides which calls are sent now, and collects the answers to those that were."""

    def __init__(self, schedule: Schedule, begins_at: float, options: argparse.Namespace) -> None:
        self._schedule = schedule
        self._begins_at = begins_at
        self._first = options.place * FOREIGN
        self._max_wait: float = options.max_wait
        self._next = 0  # the number of the call that is sent next
        self._sent: dict[int, tuple[float, float]] = {}  # number → (due, sent)
        self.window: int = options.window
        self.answers = Answers()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begins_at

    @property
    def is_over(self) -> bool:
        """Whether every call was sent and answered, or has had its time."""
        remains = self._next < self._schedule.count or self._sent
        return not remains or self.now > self._schedule.seconds + LAST_ANSWER_SECONDS

    @property
    def free(self) -> int:
        """How many calls the window still takes."""
        return self.window - len(self._sent)

    def to_send(self, room: int) -> list[int]:
        """Returns the calls that are sent now, at most so many."""
        now = self.now
        expired = self._schedule.due_by(now - self._max_wait)
        if expired > self._next:
            due = self._schedule.due_at(self._next)
            number, calls = self._first + self._next, expired - self._next
            self.answers.add(Answer(number, due, due, now, NEVER_SENT, 0.0, calls))
            self._next = expired
        upto = min(self._schedule.due_by(now), self._next + max(0, min(room, self.free)))
        numbers = list(range(self._next, upto))
        for place in numbers:
            self._sent[self._first + place] = (self._schedule.due_at(place), now)
        self._next = upto
        return [self._first + place for place in numbers]

    def ended(self, number: int, code: int, hint: float = 0.0) -> None:
        due, sent = self._sent.pop(number)
        self.answers.add(Answer(number, due, sent, self.now, code, hint))

    def close(self, file: Path) -> None:
        """Writes all answers to a file, those that never came included."""
        for number in list(self._sent):
            self.ended(number, UNANSWERED)
        self.answers.write(file)


def let_begin(folder: Path, name: str, text: str = "") -> None:
    """Writes the file that a program waits for."""
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / f"{name}.{BEGIN}")


async def wait_to_begin(options: argparse.Namespace) -> str:
    """Prints that this program is ready, waits for the file that lets it begin, and returns its text."""
    print("ready", flush=True)
    file: Path = options.folder / f"{options.name}.{BEGIN}"
    while not file.exists():  # noqa: ASYNC240  # of a local folder, and nothing else runs yet
        await asyncio.sleep(BEAT_SECONDS)
    return file.read_text()  # noqa: ASYNC240


async def begin(options: argparse.Namespace) -> Pace:
    begins_at, _, text = (await wait_to_begin(options)).partition(" ")
    return Pace(read_schedule(text), float(begins_at), options)


async def drive(options: argparse.Namespace, ask: Callable[[Pace, int], Coroutine[Any, Any, None]]) -> None:
    """Calls as scheduled, each in a task of its own, then writes down the answers."""
    pace, calling = await begin(options), InFlight()
    while not pace.is_over:
        for number in pace.to_send(pace.free):
            calling.begin(ask(pace, number))
        await asyncio.sleep(BEAT_SECONDS)
    await calling.finish(0.0)
    pace.close(options.folder / f"{options.name}.answers")
