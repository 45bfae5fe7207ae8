"""Samples a soak every second: the bus's process from outside, and what the programs round it counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lab.ledger import LedgerReader
from lab.load.workload import quantile
from lab.soak.calls import NAME as CALLS
from lab.soak.tally import LEDGER
from lab.soak.visits import NAME as VISITS

TIMED = ("stream", "rest", "callback")
MAX_FAULTS = 50  # sentences


@dataclass(frozen=True, slots=True)
class Sample:
    """One second. Latencies are those of a tool that answers at once, over the stream; 0 where there was no call.

    Attributes:
        at: seconds from the beginning of the load.
        rss_mb, pss_mb, uss_mb: resident memory; the same with shared pages shared out; what is the bus's alone.
        cpu: of one core, 1.0 being all of it.
    """

    at: float
    rss_mb: float
    pss_mb: float
    uss_mb: float
    files: int
    threads: int
    cpu: float
    calls: int = 0
    visits: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0
    rest_p50_ms: float = 0.0
    callback_p50_ms: float = 0.0

    @property
    def visits_times_10(self) -> int:
        return self.visits * 10

    @property
    def cpu_us_per_call(self) -> float:
        """Processor time of the bus over the calls of this second, visits included."""
        return self.cpu * 1e6 / self.calls if self.calls else 0.0


@dataclass(slots=True)
class Record:
    """What is left of a soak.

    Attributes:
        before, after: what the bus counted before the load, and once all programs had disconnected.
        codes: how calls and visits ended, by "what code".
        kinds: the calls and visits that were planned.
        faults: the first sentences about what must never be; fault_count is how often it was.
    """

    seconds_planned: float
    samples: list[Sample] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0

    @property
    def seconds(self) -> float:
        """How long it lasted, which is less than planned where it was ended early."""
        return self.samples[-1].at if self.samples else 0.0

    @property
    def never(self) -> list[str]:
        """The kinds of calls and visits that have not been yet."""
        return sorted(self.kinds - {ending.rpartition(" ")[0] for ending in self.codes})

    def fault(self, sentence: str, *, cause: bool = False) -> None:
        """Notes what must never be; what may be the cause of the others comes first."""
        self.faults.insert(0 if cause else len(self.faults), sentence)
        self.fault_count += 1


class Sampler:
    """Samples the bus's process, and takes what the programs round it write into the record."""

    def __init__(self, pid: int, folder: Path, record: Record) -> None:
        self._bus = psutil.Process(pid)
        self._record = record
        self._ledgers = {name: LedgerReader(folder / LEDGER.format(name)) for name in (CALLS, VISITS)}
        self._written: set[str] = set()  # the programs that have written something
        self._cpu = self._at = 0.0  # processor time of the bus at the last sample, and when that was

    def have_all_begun(self) -> bool:
        self.read()
        return self._written >= set(self._ledgers)

    def sample(self, at: float) -> Sample:
        with self._bus.oneshot():
            memory, times = self._bus.memory_full_info(), self._bus.cpu_times()
            files, threads = self._bus.num_fds(), self._bus.num_threads()
        spent = times.user + times.system
        cpu = (spent - self._cpu) / (at - self._at) if at > self._at and self._cpu else 0.0
        self._cpu, self._at = spent, at
        calls, visits = self._new_lines(CALLS), self._new_lines(VISITS)
        latencies = {
            kind: [each for line in calls for each in line["latencies"].get(kind, ())] or [0.0] for kind in TIMED
        }
        stream = latencies["stream"]
        return Sample(
            at=round(at, 3),
            rss_mb=memory.rss / 1e6,
            pss_mb=getattr(memory, "pss", 0) / 1e6,
            uss_mb=memory.uss / 1e6,
            files=files,
            threads=threads,
            cpu=cpu,
            calls=sum(sum(line["counts"].values()) for line in calls),
            visits=sum(sum(line["counts"].values()) for line in visits),
            p50_ms=quantile(stream, 0.5),
            p99_ms=quantile(stream, 0.99),
            longest_ms=quantile(stream, 1.0),
            rest_p50_ms=quantile(latencies["rest"], 0.5),
            callback_p50_ms=quantile(latencies["callback"], 0.5),
        )

    def read(self) -> None:
        """Reads what was written since the last sample, without a sample."""
        for name in self._ledgers:
            self._new_lines(name)

    def _new_lines(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines that a program has written since the last sample."""
        record, lines = self._record, [*self._ledgers[name].new_lines()]
        for line in lines:
            self._written.add(name)
            record.codes.update(line["counts"])
            record.kinds.update(line["kinds"])
            record.faults += line["faults"][: max(0, MAX_FAULTS - len(record.faults))]
            record.fault_count += line["fault_count"]
        return lines
