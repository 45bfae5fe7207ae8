"""What every load generator does beside sending: its command line, its beginning, and who waits in it.

A call that finds the host's own window full waits in the host until its patience is over, as in the SDK; then it was
never sent.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

from lab.overload.load import FOREIGN, NEVER_SENT, UNANSWERED, Answer, Answers, Schedule, read_schedule, write_numbers

BEAT_SECONDS = 0.01
LEFT_SECONDS = 5.0  # how long answers may still come after the last call
LATE = ".late"  # of the file that says how late a host was woken
BEGIN = "begin"  # the file that says what is offered from when on


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line that every load generator understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--place", type=int, default=0, help="among the hosts of a run")
    parser.add_argument("--window", type=int, default=1 << 30, help="calls in flight that the host keeps to")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds that a call waits in the host")
    parser.add_argument("--tool", default="forecast")
    return parser


class Pace:
    """Which calls are to be sent now, and what came of those that were."""

    def __init__(self, schedule: Schedule, begins_at: float, options: argparse.Namespace) -> None:
        self._schedule = schedule
        self._begins_at = begins_at
        self._first = options.place * FOREIGN
        self._patience: float = options.patience
        self._next = 0  # the number of the call that is sent next
        self._sent: dict[int, tuple[float, float]] = {}  # number → (due, sent)
        self._late = array("d")  # (when, how late this process was woken), one after the other
        self.window: int = options.window
        self.answers = Answers()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begins_at

    @property
    def is_over(self) -> bool:
        """Whether everything was sent and answered, or has had its time."""
        left = self._next < self._schedule.count or self._sent
        return not left or self.now > self._schedule.seconds + LEFT_SECONDS

    @property
    def free(self) -> int:
        """How many calls the window still takes."""
        return self.window - len(self._sent)

    def to_send(self, room: int) -> list[int]:
        """Returns the calls that are sent now, at most so many."""
        now = self.now
        gone = self._schedule.due_by(now - self._patience)
        if gone > self._next:
            due = self._schedule.due_at(self._next)
            number, calls = self._first + self._next, gone - self._next
            self.answers.add(Answer(number, due, due, now, NEVER_SENT, 0.0, calls))
            self._next = gone
        upto = min(self._schedule.due_by(now), self._next + max(0, min(room, self.free)))
        numbers = list(range(self._next, upto))
        for place in numbers:
            self._sent[self._first + place] = (self._schedule.due_at(place), now)
        self._next = upto
        return [self._first + place for place in numbers]

    def ended(self, number: int, code: int, hint: float = 0.0) -> None:
        """Notes what came of a call."""
        due, sent = self._sent.pop(number)
        self.answers.add(Answer(number, due, sent, self.now, code, hint))

    async def beat(self) -> None:
        """Waits until it is time to look again, and notes how much later the machine let this process run."""
        began = self.now
        await asyncio.sleep(BEAT_SECONDS)
        self._late.extend((began, max(self.now - began - BEAT_SECONDS, 0.0)))

    def close(self, file: Path) -> None:
        """Writes everything down."""
        write_numbers(file.with_suffix(LATE), self._late)
        for number in list(self._sent):
            self.ended(number, UNANSWERED)
        self.answers.write(file)


async def told(options: argparse.Namespace) -> str:
    """Says that this program is ready, waits for the word to begin, and returns it."""
    print("ready", flush=True)
    file: Path = options.folder / f"{options.name}.{BEGIN}"
    while not file.exists():  # noqa: ASYNC240  # of a local folder, and nothing else runs yet
        await asyncio.sleep(BEAT_SECONDS)
    return file.read_text()  # noqa: ASYNC240


async def begin(options: argparse.Namespace) -> Pace:
    """Waits for the schedule."""
    begins_at, _, text = (await told(options)).partition(" ")
    return Pace(read_schedule(text), float(begins_at), options)


async def drive(options: argparse.Namespace, ask: Callable[[Pace, int], Awaitable[None]]) -> None:
    """Calls as scheduled, each in a task of its own, then writes down what came of it."""
    pace = await begin(options)
    asking: set[asyncio.Future[None]] = set()
    while not pace.is_over:
        for number in pace.to_send(pace.free):
            task = asyncio.ensure_future(ask(pace, number))
            asking.add(task)
            task.add_done_callback(asking.discard)
        await pace.beat()
    for unanswered in asking:
        unanswered.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    pace.close(options.folder / f"{options.name}.answers")
