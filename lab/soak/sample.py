"""What a second of a soak was like: the bus's process from outside, and what the programs round it counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lab.soak.calls import NAME as CALLS
from lab.soak.tally import SAID
from lab.soak.visits import NAME as VISITS


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
    def cpu_us_per_call(self) -> float:
        """Processor time of the bus over the calls of this second, visits included."""
        return self.cpu * 1e6 / self.calls if self.calls else 0.0


class Looker:
    """Looks at the bus's process, and reads what the programs round it say.

    Attributes:
        codes: how calls and visits ended so far, by "what code".
        faults: what should never have been, the first sentences of it.
        fault_count: how often.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        self._bus = psutil.Process(pid)
        self._files = {name: folder / SAID.format(name) for name in (CALLS, VISITS)}
        self._read = Counter[str]()  # bytes, by program
        self._cpu = 0.0  # processor time of the bus when it was last looked at
        self._at = 0.0
        self.codes: Counter[str] = Counter()
        self._kinds: set[str] = set()
        self.faults: list[str] = []
        self.fault_count = 0

    @property
    def never(self) -> list[str]:
        """Returns the kinds of calls and visits that no program has told of yet."""
        return sorted(self._kinds - {told.rpartition(" ")[0] for told in self.codes})

    def all_speak(self) -> bool:
        """Whether every program has said something."""
        return all(file.exists() and file.stat().st_size for file in self._files.values())

    def look(self, at: float) -> Sample:
        """Returns what happened since the last look."""
        with self._bus.oneshot():
            memory, times = self._bus.memory_full_info(), self._bus.cpu_times()
            files, threads = self._bus.num_fds(), self._bus.num_threads()
        spent = times.user + times.system
        cpu = (spent - self._cpu) / (at - self._at) if at > self._at and self._cpu else 0.0
        self._cpu, self._at = spent, at
        calls, visits = self._said(CALLS), self._said(VISITS)
        latencies = {kind: sorted(_joined(line["latencies"].get(kind, ()) for line in calls)) for kind in _TIMED}
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
            p50_ms=part(stream, 0.5),
            p99_ms=part(stream, 0.99),
            longest_ms=part(stream, 1.0),
            rest_p50_ms=part(latencies["rest"], 0.5),
            callback_p50_ms=part(latencies["callback"], 0.5),
        )

    def read(self) -> None:
        """Reads what was said since the last look, without a look."""
        for name in self._files:
            self._said(name)

    def _said(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines that a program has written since the last look."""
        try:
            with self._files[name].open("rb") as file:
                file.seek(self._read[name])
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read[name] += len(whole)
        lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        for line in lines:
            self.codes.update(line["counts"])
            self._kinds.update(line["kinds"])
            self.faults += line["faults"][: max(0, _FAULTS_KEPT - len(self.faults))]
            self.fault_count += line["fault_count"]
        return lines


_TIMED = ("stream", "rest", "callback")
_FAULTS_KEPT = 50


def part(ordered: Sequence[float], share: float) -> float:
    """Returns the value below which a share of ordered ones lies; 0 where there are none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _joined(lists: Iterable[Sequence[float]]) -> list[float]:
    return [each for found in lists for each in found]


@dataclass(slots=True)
class Record:
    """What is left of a soak.

    Attributes:
        before, after: what the bus counted before the load, and once everybody had gone.
        never: kinds of calls and visits that were planned and have not been.
        faults: what should never have been.
        fault_count: how often: only the first sentences are kept.
    """

    seconds_asked: float
    samples: list[Sample] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    never: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0

    @property
    def seconds(self) -> float:
        """How long it lasted, which is less than was asked for where it was ended early."""
        return self.samples[-1].at if self.samples else 0.0

    def fault(self, sentence: str, *, cause: bool = False) -> None:
        """Notes what should never be; what may be the cause of the others comes first."""
        self.faults.insert(0 if cause else len(self.faults), sentence)
        self.fault_count += 1
