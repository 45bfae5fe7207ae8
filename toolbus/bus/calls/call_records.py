"""Stores the records of the newest calls, and counts all that have ended."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

from toolbus.bus.catalog.argument_repair import Repair
from toolbus.bus.catalog.entry import Entry, is_operators
from toolbus.bus.loopback import mask
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.common.text import repair_utf8, shorten
from toolbus.errors import CallError, Code, Stage
from toolbus.protocol.questions import INPUT_REQUIRED
from toolbus.v1 import tool_pb2 as pb

# Redacts secrets in texts that are recorded or shown.
#
# A value is judged by the name of its key; in texts that are not JSON, by the word before it. It is a best effort for
# texts that people read, and decides nothing: tripwire.py blocks results.

HIDDEN = "[hidden]"
MAX_PARSED = 16_384  # characters, 6 ms at worst: a longer text is not searched, so none of it is shown
MAX_DEPTH = 32

_WORD = (
    r"pass(?:word|wd|phrase|code|key)?s?|pwd|secrets?|tokens?|credentials?|creds?|auth|authori[sz]ation|oauth|bearer"
    r"|(?:api|private|access|ssh|signing|encryption|master|account)[-_ ]?keys?|cookies?|session[-_ ]?ids?|signature|pin"
    r"|t?otp|jwt|(?:mfa|recovery|backup)[-_ ]?codes?"
)
# A whole word of the key: `clientSecret` and `x-api-key` match, `author` and `spin` do not.
_KEY = re.compile(rf"(?:^|[-_ .]){'(?:' + _WORD + ')'}[0-9]*(?:$|[-_ .])", re.IGNORECASE)
_HINT = re.compile(_WORD)  # quick test on the lower-case key: most keys do not match
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_COUNTS = re.compile(
    r"(?:^|[-_ .])(?:max|min|num|count|total|limit|used|usage|per|n|prompt|completion|input|output|cached|reasoning)"
    r"(?:$|[-_ .])",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"tokens?", re.IGNORECASE)
# Possessive, and starting at a word only: any text is read once, in linear time.
_KEYED = re.compile(r"""(?<![\w.-])(?P<key>[\w.-]++(?: [\w.-]++)?)\\*["']?\s*+[:=]+>?\s*+""")
_VALUE = re.compile(  # in quotes; an object or array to the end of the text; one word
    r"""(?P<quote>\\*["']).*?(?:(?<!\\)(?P=quote)|$)|[\[{].*|(?:(?:bearer|basic|digest|token)\s+)?\S+""",
    re.IGNORECASE | re.DOTALL,
)
# Formats of well-known secrets.
_BARE = re.compile(
    r"\b(?:(?:sk|pk|rk)[-_]|gh[opsur]_|github_pat_|tbk_|xox[abprs]-|AKIA|eyJ)[-_A-Za-z0-9.]{12,}"
    r"|(?<=\bbearer )\S+|(?<=\bbasic )[A-Za-z0-9+/]{16,}=*",
    re.IGNORECASE,
)
# Quick test: without a match, neither `mask` nor the expressions above find anything.
_SUSPECT = re.compile(r"[:=]|[-_A-Za-z0-9.]{15}|bearer |basic ", re.IGNORECASE)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # creating one takes as long as encoding


def is_secret_name(key: str) -> bool:
    """Tells whether a key names a secret: `password`, `clientSecret`, `x-api-key`; not `author`, `max_tokens`."""
    if key.isascii() and _HINT.search(key.lower()) is None:
        return False
    name = parted(key)
    if _COUNTS.search(name):
        name = _TOKENS.sub("", name)
    return _KEY.search(name) is not None


def parted(key: str) -> str:
    """Separates the parts of a key: `clientSecret` becomes `client_Secret`."""
    return _HUMP.sub("_", key)


def redacted(text: str, limit: int) -> str:
    """Returns JSON or any other text without its secrets, shortened to ``limit`` characters."""
    if len(text) > MAX_PARSED:
        return f"[{len(text)} characters]"
    try:
        shown = _ENCODER.encode(_redacted(json.loads(text), 0))
    except (ValueError, RecursionError):
        shown = _plain(text)
    return shorten(repair_utf8(shown), limit)


def _redacted(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {
            _plain(key): HIDDEN
            if is_secret_name(key) and each not in (None, "", False, True)
            else _redacted(each, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_redacted(each, depth + 1) for each in value]
    return _plain(value) if isinstance(value, str) else value


def _plain(text: str) -> str:
    if _SUSPECT.search(text) is None:
        return text
    text = mask(text)
    parts, end = [], 0  # what may be shown so far, and where in the text it ends
    for match in _KEYED.finditer(text):
        # `api key` is a name of two words; in `n token` the first word does not belong to the name.
        names = (match["key"], match["key"].rpartition(" ")[2])
        if match.start() < end or not any(map(is_secret_name, names)):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None:
            parts += [text[end : match.end()], HIDDEN]
            end = value.end()
    return _BARE.sub(HIDDEN, "".join(parts) + text[end:])


MAX_CONTENT = 4_096  # characters of recorded arguments or output
MAX_REPAIRS_SHOWN = 20  # of one call
MAX_TEXT = 128  # characters of a name or id of a refused call
MAX_MESSAGE = 500  # characters of the message of a failure
# The tools by which operators look and follow: their calls are not recorded, or followers would fill the records.
READERS = frozenset(
    (
        *("all_tasks", "approvals", "calls", "digest", "keys", "plugin_logs", "plugins", "slow_calls", "stats"),
        *("tail", "this_bus", "record_calls", "held_calls", "permissions", "explain", "log_level", "mounts"),
        "mount_logs",
    )
)
CODES = frozenset((*Code, INPUT_REQUIRED))
# What every record shows, in this order.
_SHOWN = ("number", "id", "call_id", "name", "source", "caller", "user_id", "round", "order")
# Codes whose messages may repeat arguments or outputs.
_REVEALING = frozenset((Code.TOOL, Code.INVALID_ARGUMENTS))

Origin: TypeAlias = tuple[str, int, int]
"""User, round and order of a call, as its context says."""
Content: TypeAlias = tuple[str, str]
"""Arguments and output."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call failed.

    Attributes:
        message: for people; "" where it could repeat arguments or an output, unless the bus records texts of errors.
        stage: how far the call had got.
        retry_safe: whether a retry repeats nothing.
        limit: the name of the limit that was exceeded, "" for none.
        limit_value: its value, in its own unit.
    """

    message: str
    stage: Stage
    retry_safe: bool
    limit: str = ""
    limit_value: float = 0.0

    def described(self) -> dict[str, Any]:
        """Returns the failure as a JSON object."""
        limit = {"name": self.limit, "value": self.limit_value} if self.limit else None
        return {
            "message": self.message,
            "stage": self.stage.name.lower(),
            "retry_safe": self.retry_safe,
            "limit": limit,
        }


class More(NamedTuple):
    """The parts that few records have.

    Attributes:
        parent: the bus's own id of the call that made it; "" for a call that is not nested.
        trace_id: of the trace that it belongs to, 32 hexadecimal digits; "" where it is not sampled.
        notes: what parts of the bus did with the call, such as the verdicts of guards.
    """

    content: Content | None = None
    repairs: Sequence[Repair] = ()
    parent: str = ""
    trace_id: str = ""
    failure: Failure | None = None
    notes: tuple[str, ...] = ()


Row: TypeAlias = tuple[str, str, str, str, float, float, int, int, int, Origin | None, str, More | str | None]
"""A record as the hot path makes it: the first fields of `CallRecord` without the number, then origin, own id, more.

Where a call has only its trace besides the plain fields, the id of the trace stands there.
"""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One ended call. Times are seconds of the bus's monotonic clock.

    Attributes:
        number: of the call among all that have ended on this bus, from 1.
        code: UNSPECIFIED where it succeeded, or ended with questions.
        has_questions: whether the tool ended it with questions.
        arguments_size, output_size: characters of their JSON.
        user_id: the user for whom it was made; "" where the context names none.
        round: of a turn, from 1; 0 where the context names none, or a rule made the call before the model answered.
        order: its position among the calls of the round, from 0.
        arguments, output: None unless the bus records them. The arguments are those that the tool got.
        repairs: what the bus did to the arguments, the first ones: where, from which type, to which; no values.
        id: the bus's own id, which the tool's handler got; "" where the call was refused.
        parent, trace_id, notes: as in `More`.
        failure: None where the call succeeded, or ended with questions.
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
    repairs: tuple[Repair, ...] = ()
    has_questions: bool = False
    id: str = ""
    parent: str = ""
    trace_id: str = ""
    failure: Failure | None = None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long the caller waited, in seconds."""
        return self.ended - self.started

    @property
    def outcome(self) -> str:
        """``OK``, ``INPUT_REQUIRED`` where it ended with questions, or the name of its code."""
        return outcome_of(INPUT_REQUIRED if self.has_questions else self.code)

    def described(self, began: float) -> dict[str, Any]:
        """Returns the record as a JSON object.

        Args:
            began: added to its times, makes them seconds since the epoch.
        """
        always = {name: getattr(self, name) for name in _SHOWN} | {
            "started": round(began + self.started, 6),
            "ended": round(began + self.ended, 6),
            "seconds": round(self.seconds, 6),
            "outcome": self.outcome,
            "arguments_size": self.arguments_size,
            "output_size": self.output_size,
        }
        rare = {
            "repairs": [repair.described() for repair in self.repairs],
            "notes": list(self.notes),
            "parent": self.parent,
            "trace_id": self.trace_id,
            "failure": self.failure and self.failure.described(),
        }
        line = always | {name: value for name, value in rare.items() if value}
        return line if self.arguments is None else line | {"arguments": self.arguments, "output": self.output}


def only_reads(entry: Entry) -> bool:
    """Tells whether a tool is one by which operators look or follow: its calls are neither recorded nor shown."""
    return entry.bare_name in READERS and is_operators(entry.source)


def origin_of(context: pb.CallContext) -> Origin:
    """Returns the user, round and order of a call for its record."""
    user_id, attributes = context.user_id[:MAX_TEXT], context.attributes
    if not attributes:
        return user_id, 0, 0
    return user_id, _number(attributes.get("round")), _number(attributes.get("order"))


def content_of(arguments_json: str, output_json: str) -> Content:
    """Returns arguments and output for a record: shortened, without secrets."""
    return redacted(arguments_json, MAX_CONTENT), redacted(output_json, MAX_CONTENT)


def failure_of(error: CallError, *, texts: bool) -> Failure:
    """Returns an error as a record has it.

    Args:
        texts: whether messages that may repeat arguments or outputs are recorded.
    """
    limit, value = error.limit or ("", 0.0)
    message = (
        shorten(redacted(error.message, MAX_CONTENT), MAX_MESSAGE) if texts or error.code not in _REVEALING else ""
    )
    return Failure(message, error.stage, error.retry_safe, shorten(limit, MAX_TEXT), value)


def read_row(row: Row, number: int) -> CallRecord:
    """Returns a row as a record."""
    call_id, name, source, caller, started, ended, code, arguments_size, output_size, origin, id, more = row
    if not isinstance(more, More):
        more = More(trace_id=more or "")
    content, repairs, parent, trace_id, failure, notes = more
    has_questions = code == INPUT_REQUIRED
    known = Code.INTERNAL  # for a code of a newer protocol, which a plugin may send
    if code in CODES:
        known = Code(0 if has_questions else code)
    arguments, output = content or (None, None)
    return CallRecord(
        *(call_id, name, source, caller, started, ended, known, number, arguments_size, output_size),
        *(origin or ("", 0, 0)),
        arguments=arguments,
        output=output,
        repairs=tuple(repairs[:MAX_REPAIRS_SHOWN]),
        has_questions=has_questions,
        id=id,
        parent=parent,
        trace_id=trace_id,
        failure=failure,
        notes=notes,
    )


def _number(text: str | None) -> int:
    return int(text) if text and len(text) < 7 and text.isascii() and text.isdecimal() else 0


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
        texts: whether all messages of errors are, also those that may repeat arguments or outputs.
        began: added to times of the bus's clock, makes them seconds since the epoch.
    """

    def __init__(
        self, limit: int = MAX_RECORDS, *, contents: bool = False, texts: bool = False, began: float = 0.0
    ) -> None:
        # Tuples, not records: on the hot path one costs 50 ns instead of 1.2 µs.
        self._rows: deque[Row] = deque(maxlen=limit)
        self._append: Callable[[Row], None] = self._rows.append
        self.keep: Callable[[Row], None] = self._append  # `add` without the count, once per frame by the caller
        self._on_next: dict[Callable[[], object], None] = {}  # called at the next record
        self.contents = contents
        self.texts = texts or contents
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
        self._on_next[listener] = None  # once, however often it asks before that call comes
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
        listeners, self._on_next = self._on_next, {}
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
