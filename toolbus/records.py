"""The bounded record of calls: what was called, by whom, how it ended, how long it took; no arguments, no outputs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from toolbus.errors import Code

RECORDS_KEPT = 1_000
_CODES = frozenset(Code)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One ended call. Times are seconds of the bus's monotonic clock."""

    call_id: str
    name: str
    source: str
    caller: str
    started: float
    ended: float
    code: Code  # UNSPECIFIED: it succeeded

    @property
    def seconds(self) -> float:
        """How long the caller waited."""
        return self.ended - self.started


class Records:
    """The newest calls, and counts of all of them."""

    def __init__(self, keep: int = RECORDS_KEPT) -> None:
        # Tuples, not records: the hot path pays 50 ns for one instead of 1.2 µs (design.md 7).
        self._kept: deque[tuple[str, str, str, str, float, float, int]] = deque(maxlen=keep)
        self.keep = self._kept.append  # what `add` does, but for the count: the dispatcher counts once a frame
        self.outcomes: Counter[int] = Counter()  # calls ended, by code; 0 is success, an unknown one INTERNAL
        self.late = 0  # results that came after their call had ended for its caller
        self.unowed = 0  # results and progress for calls that nobody owed

    def add(self, call_id: str, name: str, source: str, caller: str, started: float, ended: float, code: int) -> None:
        """Notes a call that has ended."""
        self._kept.append((call_id, name, source, caller, started, ended, code))
        self.outcomes[code if code in _CODES else Code.INTERNAL] += 1  # else a plugin could fill memory with keys

    def __iter__(self) -> Iterator[CallRecord]:
        """Newest first."""
        for call_id, name, source, caller, started, ended, code in reversed(self._kept):
            known = Code(code) if code in _CODES else Code.INTERNAL  # a plugin may send one of a newer protocol
            yield CallRecord(call_id, name, source, caller, started, ended, known)

    def __len__(self) -> int:
        return len(self._kept)
