"""Counts what a program of a soak did, and writes the counts once a second as a line of JSON, which `sample` reads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from lab.ledger import Ledger

LEDGER = "{}.jsonl"  # by the name of the program
MAX_FAULTS = 20  # sentences a second: the rest is counted


class Tally:
    """Counts of one program since its last line.

    Args:
        expected: by what was done, the codes in which it may end.
    """

    def __init__(self, folder: Path, name: str, expected: dict[str, frozenset[str]]) -> None:
        self._ledger = Ledger(folder / LEDGER.format(name))
        self._expected = expected
        self._counts: Counter[str] = Counter()  # by "what code"
        self._latencies: dict[str, list[float]] = {}  # milliseconds, by what was called
        self._faults: list[str] = []
        self._fault_count = 0

    def note(self, what: str, code: str, milliseconds: float | None = None, why: str = "") -> None:
        """Notes how something ended; a code that is not expected is a fault.

        Args:
            milliseconds: from the moment at which it was due; None where it depends on more than the bus.
            why: the error's message.
        """
        self._counts[f"{what} {code}"] += 1
        if code not in self._expected[what]:
            self.fault(f"{what} ended in {code}: {why}")
        elif milliseconds is not None:
            self._latencies.setdefault(what, []).append(milliseconds)

    def fault(self, sentence: str) -> None:
        """Notes what must never be."""
        self._fault_count += 1
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(sentence[:500])

    def write(self) -> None:
        """Writes the line, and begins a new one."""
        self._ledger.write(
            kinds=sorted(self._expected),
            counts=dict(self._counts),
            latencies={what: [round(each, 3) for each in times] for what, times in self._latencies.items()},
            faults=self._faults,
            fault_count=self._fault_count,
            second=time.monotonic(),
        )
        self._counts.clear()
        self._latencies.clear()
        self._faults, self._fault_count = [], 0

    async def write_every_second(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.write()
