"""The bounded record of calls: what was called, by whom and for whom, how it ended, how long it took, how large it was.

Arguments and outputs are kept only where the bus was told to, cut, and with everything that looks like a secret taken
out (redaction.py).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from toolbus.bus.calls.redaction import redacted
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.errors import Code
from toolbus.v1 import tool_pb2 as pb

RECORDS_KEPT = 1_000
CONTENT_KEPT = 4_096  # characters of arguments or output
MAX_TEXT = 128  # characters of a name or id that somebody else chose
READER = f"{BUS_SOURCE}:calls"  # the tool that reads them; its own calls are not kept, or followers would fill them
_CODES = frozenset(Code)

Origin: TypeAlias = tuple[str, int, int]
"""User, round and order of a call, as its context says."""
Content: TypeAlias = tuple[str, str]
"""Arguments and output."""
_Kept: TypeAlias = tuple[str, str, str, str, float, float, int, int, int, Origin | None, Content | None]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One ended call. Times are seconds of the bus's monotonic clock.

    Attributes:
        number: which ended call of this bus it was, from 1.
        code: UNSPECIFIED where it succeeded.
        arguments_size, output_size: characters of their JSON.
        user_id: for whom; "" where nobody said.
        round: of a turn, from 1; 0 where nobody said, or a rule made the call before the model was asked.
        order: its place among the calls of the round, from 0.
        arguments, output: None unless the bus keeps them.
    """

    call_id: str
    name: str
    source: str
    caller: str
    started: float
    ended: float
    code: Code
    number: int = 0
    arguments_size: int = 0
    output_size: int = 0
    user_id: str = ""
    round: int = 0
    order: int = 0
    arguments: str | None = None
    output: str | None = None

    @property
    def seconds(self) -> float:
        """How long the caller waited."""
        return self.ended - self.started

    @property
    def outcome(self) -> str:
        """``OK``, or the name of its code."""
        return self.code.name if self.code else "OK"

    def described(self, began: float) -> dict[str, Any]:
        """Returns the record as JSON shows it.

        Args:
            began: what turns its moments into seconds since the epoch.
        """
        line = {
            "number": self.number,
            "call_id": self.call_id,
            "name": self.name,
            "source": self.source,
            "caller": self.caller,
            "user_id": self.user_id,
            "round": self.round,
            "order": self.order,
            "started": round(began + self.started, 6),
            "ended": round(began + self.ended, 6),
            "seconds": round(self.seconds, 6),
            "outcome": self.outcome,
            "arguments_size": self.arguments_size,
            "output_size": self.output_size,
        }
        return line if self.arguments is None else line | {"arguments": self.arguments, "output": self.output}


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records somebody asks for; what is empty is not asked about.

    Attributes:
        source: whose tools were called.
        name: of the tool.
        caller: the source that called.
        user_id: for whom.
        outcome: how it ended: ``OK``, or a code such as ``TOOL``, in any case.
    """

    source: str = ""
    name: str = ""
    caller: str = ""
    user_id: str = ""
    outcome: str = ""

    def conditions(self) -> dict[str, str]:
        """Returns what a record's attributes have to be."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)} | {"outcome": self.outcome.upper()}
        return {name: value for name, value in asked.items() if value}


class CallRecords:
    """The newest calls, and counts of all of them.

    Args:
        contents: whether arguments and outputs are kept too.
        began: what makes moments of the bus's clock into seconds since the epoch, for people who read records.
    """

    def __init__(self, keep: int = RECORDS_KEPT, *, contents: bool = False, began: float = 0.0) -> None:
        # Tuples, not records: the hot path pays 50 ns for one instead of 1.2 µs (design.md 7).
        self._kept: deque[_Kept] = deque(maxlen=keep)
        self.keep = self._kept.append  # what `add` does, but for the count: the dispatcher counts once a frame
        self.contents = contents
        self.began = began
        self.outcomes: Counter[int] = Counter()  # calls ended, by code; 0 is success, an unknown one INTERNAL
        self.late = 0  # results that came after their call had ended for its caller
        self.unexpected = 0  # results and progress for calls that nobody owed

    def add(
        self,
        call_id: str,
        name: str,
        source: str,
        caller: str,
        started: float,
        ended: float,
        code: int,
        sizes: tuple[int, int] = (0, 0),
        origin: Origin | None = None,
        content: Content | None = None,
    ) -> None:
        """Notes a call that has ended."""
        self._kept.append((call_id, name, source, caller, started, ended, code, *sizes, origin, content))
        self.outcomes[code if code in _CODES else Code.INTERNAL] += 1  # else a plugin could fill memory with keys

    @property
    def ended(self) -> int:
        """How many calls have ended: the number of the newest record."""
        return self.outcomes.total()

    def __iter__(self) -> Iterator[CallRecord]:
        """Newest first."""
        number = self.ended
        kept = tuple(self._kept)  # copied in one step: another thread may add
        for call_id, name, source, caller, started, ended, code, given, got, origin, content in reversed(kept):
            known = Code(code) if code in _CODES else Code.INTERNAL  # a plugin may send one of a newer protocol
            yield CallRecord(
                *(call_id, name, source, caller, started, ended, known, number, given, got),
                *(origin or ("", 0, 0)),
                *(content or (None, None)),
            )
            number -= 1

    def __len__(self) -> int:
        return len(self._kept)

    def counts(self) -> dict[str, int]:
        """Returns how many calls ended how: by ``OK`` or the name of the code."""
        return {Code(code).name if code else "OK": count for code, count in sorted(self.outcomes.items())}

    def newest(self, wanted: RecordFilter, limit: int) -> list[CallRecord]:
        """Returns the newest records of those wanted, newest first."""
        return list(itertools.islice(self._find(wanted, -1), max(0, limit)))

    def after(self, wanted: RecordFilter, number: int, limit: int) -> list[CallRecord]:
        """Returns the oldest records of those wanted that have a higher number, oldest first."""
        return list(self._find(wanted, number))[::-1][: max(0, limit)]

    def _find(self, wanted: RecordFilter, number: int) -> Iterator[CallRecord]:
        conditions = wanted.conditions()
        for record in self:
            if record.number <= number:
                return
            if all(getattr(record, name) == value for name, value in conditions.items()):
                yield record


def origin_of(context: pb.CallContext) -> Origin:
    """Returns what a record says about where a call came from."""
    user_id, said = context.user_id[:MAX_TEXT], context.attributes
    if not said:
        return user_id, 0, 0
    return user_id, _number(said.get("round")), _number(said.get("order"))


def content_of(arguments_json: str, output_json: str) -> Content:
    """Returns arguments and output as a record may hold them: cut, without secrets."""
    return redacted(arguments_json, CONTENT_KEPT), redacted(output_json, CONTENT_KEPT)


def _number(text: str | None) -> int:
    return int(text) if text and len(text) < 7 and text.isascii() and text.isdecimal() else 0
