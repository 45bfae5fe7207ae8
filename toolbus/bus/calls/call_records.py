"""Stores the records of the newest calls, and counts all that have ended."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from toolbus.bus.calls.call_record import CODES, CallRecord, Row, read_row
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.errors import Code
from toolbus.questions import INPUT_REQUIRED

MAX_RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Selects records; an empty field selects all.

    Attributes:
        source: whose tools were called.
        name: of the tool.
        caller: the source that called.
        user_id: for whom it was made.
        outcome: how it ended: ``OK``, ``INPUT_REQUIRED``, or a code such as ``TOOL``, in any case.
    """

    source: str = ""
    name: str = ""
    caller: str = ""
    user_id: str = ""
    outcome: str = ""

    def conditions(self) -> dict[str, str]:
        """Returns the values that a record's attributes must have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"outcome": self.outcome.upper()}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The records that a follower reads at once.

    Attributes:
        lost: how many records were overwritten before they were read: the first ones after the follower's number.
            Their contents are unknown, so they count whatever the filter says.
        records: the selected records that come next, oldest first.
        position: the number up to which everything is lost, read or not selected; the next batch begins after it.
    """

    lost: int
    records: list[CallRecord]
    position: int


class CallRecords:
    """The newest calls, and counts of all of them.

    Args:
        limit: how many are stored.
        contents: whether arguments and outputs are recorded too.
        began: added to times of the bus's clock, makes them seconds since the epoch.
    """

    def __init__(self, limit: int = MAX_RECORDS, *, contents: bool = False, began: float = 0.0) -> None:
        # Tuples, not records: on the hot path one costs 50 ns instead of 1.2 µs.
        self._rows: deque[Row] = deque(maxlen=limit)
        self._append: Callable[[Row], None] = self._rows.append
        self.keep: Callable[[Row], None] = self._append  # `add` without the count, once per frame by the caller
        self._on_next: list[Callable[[], object]] = []  # called at the next record
        self.contents = contents
        self.began = began
        self.outcomes: Counter[int] = Counter()  # calls ended, by code; 0 is success, an unknown one INTERNAL
        self.late = 0  # results that came after their call had ended for its caller
        self.unexpected = 0  # results and progress of unknown calls

    def add(self, row: Row) -> None:
        """Records a call that has ended."""
        self.keep(row)
        code = row[6]
        self.outcomes[code if code in CODES else Code.INTERNAL] += 1  # otherwise a plugin could fill memory with keys

    @property
    def ended(self) -> int:
        """How many calls have ended: the number of the newest record."""
        return self.outcomes.total()

    def __iter__(self) -> Iterator[CallRecord]:
        """Yields the newest first."""
        number = self.ended
        rows = tuple(self._rows)  # copied in one step: another thread may add
        for row in reversed(rows):
            yield read_row(row, number)
            number -= 1

    def __len__(self) -> int:
        return len(self._rows)

    def counts(self) -> dict[str, int]:
        """Returns how many calls have ended, by outcome as of `CallRecord`."""
        return {outcome_of(code): count for code, count in sorted(self.outcomes.items())}

    def newest(self, selection: RecordFilter, limit: int) -> list[CallRecord]:
        """Returns the newest of the selected records, newest first."""
        return list(itertools.islice(self._find(selection, -1), max(0, limit)))

    def after(self, selection: RecordFilter, number: int, limit: int) -> list[CallRecord]:
        """Returns the oldest of the selected records with a higher number, oldest first."""
        return list(self._find(selection, number))[::-1][: max(0, limit)]

    def batch(self, selection: RecordFilter, position: int, limit: int) -> RecordBatch:
        """Returns what a follower that has read up to a number reads next, and how much of it is lost.

        Args:
            position: the number up to which it has read.
            limit: at most this many records.
        """
        rows = tuple(self._rows)
        overwritten = self.ended - len(rows)  # the number of the newest record that is not there any more
        lost = max(0, overwritten - position)
        position += lost
        conditions = selection.conditions()
        records: list[CallRecord] = []
        for row in rows[position - overwritten :]:
            if len(records) >= limit:
                break
            position += 1
            record = read_row(row, position)
            if not conditions or _matches(record, conditions):
                records.append(record)
        return RecordBatch(lost, records, position)

    def latest(self, position: int, newest: int, failed: int) -> RecordBatch:
        """Returns the records after a number that a summary shows: the newest, and of the others those that failed.

        Args:
            newest: how many of all.
            failed: how many more of those that failed.

        Returns:
            A batch with the records newest first; what it leaves out is in its position all the same.
        """
        rows, number = tuple(self._rows), self.ended  # a row's code is its item 6
        lost = max(0, number - len(rows) - position)
        records: list[CallRecord] = []
        for row in itertools.islice(reversed(rows), number - position - lost):
            if newest > 0:
                newest -= 1
            elif failed > 0 and row[6] and row[6] != INPUT_REQUIRED:
                failed -= 1
            else:
                number -= 1
                continue
            records.append(read_row(row, number))
            number -= 1
        return RecordBatch(lost, records, self.ended)

    def recent(self, since: float) -> tuple[int, int, float]:
        """Counts the calls that ended after a moment of the bus's clock, as far as their records are there.

        Returns:
            How many calls, how many of them failed, and from which moment on they are counted.
        """
        rows = tuple(self._rows)  # item 5 of a row is its end, 6 its code
        if len(rows) == self._rows.maxlen:
            since = max(since, rows[0][5])
        ended = [row[6] for row in itertools.takewhile(lambda row: row[5] > since, reversed(rows))]
        return len(ended), sum(bool(code) and code != INPUT_REQUIRED for code in ended), since

    def on_next(self, listener: Callable[[], object]) -> None:
        """Calls a listener once, when the next call is recorded; without listeners a call costs nothing more."""
        self._on_next.append(listener)
        self.keep = self._keep_and_notify

    def pass_on(self, taker: Callable[[Row], object]) -> None:
        """Passes every further record on to a taker, which has to be fast: it runs within each call."""
        append = self._rows.append

        def append_and_pass_on(row: Row) -> None:
            append(row)
            taker(row)

        self._append = append_and_pass_on
        if not self._on_next:
            self.keep = self._append

    def _keep_and_notify(self, row: Row) -> None:
        self._append(row)
        self.keep = self._append
        listeners, self._on_next = self._on_next, []
        for listener in listeners:
            listener()

    def _find(self, selection: RecordFilter, number: int) -> Iterator[CallRecord]:
        conditions = selection.conditions()
        for record in self:
            if record.number <= number:
                return
            if _matches(record, conditions):
                yield record


def _matches(record: CallRecord, conditions: dict[str, str]) -> bool:
    return all(getattr(record, name) == value for name, value in conditions.items())
