"""Defines the record of one call: tool, caller and user, how it ended, how long it took, how large it was.

Arguments and outputs are recorded only if the bus is configured to, shortened, and with everything that looks like a
secret redacted (redaction.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from toolbus.bus.calls.redaction import redacted
from toolbus.bus.catalog.argument_repair import Repair
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.handler import is_operators
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.errors import CallError, Code, Stage
from toolbus.questions import INPUT_REQUIRED
from toolbus.text import shorten
from toolbus.v1 import tool_pb2 as pb

MAX_CONTENT = 4_096  # characters of recorded arguments or output
MAX_REPAIRS_SHOWN = 20  # of one call
MAX_TEXT = 128  # characters of a name or id of a refused call
MAX_MESSAGE = 500  # characters of the message of a failure
# The tools by which operators look and follow: their calls are not recorded, or followers would fill the records.
READERS = frozenset(
    (
        *("all_tasks", "approvals", "calls", "digest", "keys", "plugin_logs", "plugins", "slow_calls", "stats"),
        *("tail", "this_bus"),
    )
)
CODES = frozenset((*Code, INPUT_REQUIRED))
# Codes whose messages may repeat arguments or outputs: they are recorded as contents are.
_REVEALING = frozenset((Code.TOOL, Code.INVALID_ARGUMENTS))

Origin: TypeAlias = tuple[str, int, int]
"""User, round and order of a call, as its context says."""
Content: TypeAlias = tuple[str, str]
"""Arguments and output."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call failed.

    Attributes:
        message: for people; "" where it could repeat arguments or an output, unless the bus records these.
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
    """

    content: Content | None = None
    repairs: Sequence[Repair] = ()
    parent: str = ""
    trace_id: str = ""
    failure: Failure | None = None


Row: TypeAlias = tuple[str, str, str, str, float, float, int, int, int, Origin | None, str, More | str | None]
"""A record as the hot path makes it: the first fields of `CallRecord` without the number, then origin, own id, more.

Where a call has only its trace beside the plain fields, the id of the trace stands there.
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
        parent, trace_id: as in `More`.
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
        line = {
            "number": self.number,
            "id": self.id,
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
        if self.repairs:
            line["repairs"] = [repair.described() for repair in self.repairs]
        if self.parent:
            line["parent"] = self.parent
        if self.trace_id:
            line["trace_id"] = self.trace_id
        if self.failure is not None:
            line["failure"] = self.failure.described()
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


def failure_of(error: CallError, *, contents: bool) -> Failure:
    """Returns an error as a record has it.

    Args:
        contents: whether arguments and outputs are recorded.
    """
    limit, value = error.limit or ("", 0.0)
    message = (
        shorten(redacted(error.message, MAX_CONTENT), MAX_MESSAGE) if contents or error.code not in _REVEALING else ""
    )
    return Failure(message, error.stage, error.retry_safe, shorten(limit, MAX_TEXT), value)


def read_row(row: Row, number: int) -> CallRecord:
    """Returns a row as a record."""
    call_id, name, source, caller, started, ended, code, arguments_size, output_size, origin, id, more = row
    if not isinstance(more, More):
        more = More(trace_id=more or "")
    content, repairs, parent, trace_id, failure = more
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
    )


def _number(text: str | None) -> int:
    return int(text) if text and len(text) < 7 and text.isascii() and text.isdecimal() else 0
