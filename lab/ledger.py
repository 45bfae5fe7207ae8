"""Records what each process of a run did, in files: lines of JSON, and columns of numbers.

The standard library only: a copy of this file lies beside chaos's drop-in tool, whose sandbox reads nothing else.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNS = "runs.jsonl"  # what chaos's plugins began and ended
CALLS = "calls.jsonl"  # what chaos's hosts called, and with which result
ONE_IN = 20  # calls of which a broken program treats one badly

OK = 0
NEVER_SENT = -1  # the host's own window was full until the call's time was over
UNANSWERED = -2
_FIELDS = 7  # of an answer


class Ledger:
    """A file that many processes append lines to. A line is written at once or not at all, whenever one is killed."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        """Appends a line with this moment, by the clock that all processes of a machine share."""
        os.write(self._file, (json.dumps({**line, "at": time.monotonic(), "pid": os.getpid()}) + "\n").encode())


class LedgerReader:
    """Reads a ledger line by line while others still write it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._position = 0  # in bytes

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines written since the last time; none where the file does not exist yet."""
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        yield from map(json.loads, complete.splitlines())


class Runs:
    """The runs of one plugin process.

    Args:
        part: the name of the plugin in the cast.
        broken: how the plugin misbehaves, which the run must notice: ``twice``, ``unwritten``, ``stranger`` or
            ``kept``. Empty: not at all.
    """

    def __init__(self, folder: Path, part: str, broken: str = "") -> None:
        self._ledger = Ledger(folder / RUNS)
        self._part = part
        self._broken = broken
        self._count = 0
        self._previous = ""  # the token of the previous call

    def begin(self, token: str) -> bool:
        """Writes down that a call's run begins; returns whether its result may be returned."""
        self._count += 1
        bad = self._broken if self._count % ONE_IN == 0 else ""
        for _ in range({"unwritten": 0, "twice": 2}.get(bad, 1)):
            self._ledger.write(began=token, part=self._part)
        return bad != "kept"

    def end(self, token: str) -> dict[str, str]:
        """Writes down that it has ended; returns the call's output."""
        self._ledger.write(ended=token, part=self._part)
        previous, self._previous = self._previous, token
        is_foreign = self._broken == "stranger" and self._count % ONE_IN == 0
        return {"ran": previous if is_foreign else token, "part": self._part}


@dataclass(frozen=True, slots=True)
class Answer:
    """How one call of a schedule ended.

    Attributes:
        number: which call of which host it is.
        due, sent, ended: moments, in seconds from the beginning of the schedule.
        code: OK, the bus's error code, or one of ours below 0.
        hint: seconds after which to call again, where a refusal has all that it must have; 0 where it lacks something.
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

    def __init__(self, numbers: array[float] | None = None) -> None:
        self._numbers = array("d") if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers) // _FIELDS

    def __iter__(self) -> Iterator[Answer]:
        numbers = self._numbers
        for place in range(0, len(numbers), _FIELDS):
            number, due, sent, ended, code, hint, calls = numbers[place : place + _FIELDS]
            yield Answer(int(number), due, sent, ended, int(code), hint, int(calls))

    def add(self, answer: Answer) -> None:
        of = answer
        self._numbers.extend((of.number, of.due, of.sent, of.ended, of.code, of.hint, of.calls))

    def write(self, file: Path) -> None:
        write_numbers(file, self._numbers)

    @classmethod
    def read(cls, file: Path) -> Answers:
        """Reads what `write` wrote."""
        return cls(read_numbers(file))


def write_numbers(file: Path, numbers: array[float]) -> None:
    """Writes numbers to a file that exists only once it is complete."""
    part = file.with_suffix(".part")
    with part.open("wb") as to:
        numbers.tofile(to)
    part.rename(file)


def read_numbers(file: Path) -> array[float]:
    """Reads what `write_numbers` wrote."""
    numbers = array("d")
    numbers.frombytes(file.read_bytes())
    return numbers
