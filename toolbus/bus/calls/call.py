"""Declares a call in flight, and what the dispatcher expects of its caller and of what takes it over as a task.

A call is *active* until its caller has its result. One that ended early (deadline, cancel) is *stuck* until its
handler confirms the end. The handler, which runs the call, is declared in catalog/entry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from toolbus.bus.access.budgets import Budgets
from toolbus.bus.access.identity import Identity, Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call_records import Row
from toolbus.bus.catalog.entry import CompiledTool, Declaration, Entry, Handler, read_tool
from toolbus.bus.catalog.policy import Pinning
from toolbus.errors import CallError
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

TRACE_BYTES = 64  # of a message, for a traceparent


@dataclass(slots=True, init=False, eq=False, repr=False)
class Trace:
    """The trace of one call. Plain slots, set by `CallTraces.begin`: it is made on the hot path.

    Attributes:
        traceparent: the span that the call's handler goes on from: the bus's own, or the caller's where it makes none.
        parent_id: the span that the call came from; "" where the trace begins here.
        tracestate: beside `traceparent`; may be empty.
        trace_id: 32 digits; "" where the trace is not sampled.
        recorded: whether the bus makes a span.
        sent: when the call was passed to its handler's connection, by the bus's clock; 0 before.
        first_sign: when the first progress came; 0 where none did.
    """

    traceparent: str
    parent_id: str
    tracestate: str
    trace_id: str
    recorded: bool
    sent: float
    first_sign: float

    def __repr__(self) -> str:
        return f"<Trace {self.traceparent}{' recorded' if self.recorded else ''}>"

    def fill(self, message: pb.ToolCall) -> None:
        """Sets the trace in a message towards a handler."""
        message.traceparent = self.traceparent
        if self.tracestate:
            message.tracestate = self.tracestate


SpanRow: TypeAlias = tuple[Trace, Row, str, bool, CallError | None]
"""A span as the hot path makes it, for `Span.of`: trace, the call's record, session, mcp, error."""


class Span(NamedTuple):
    """The span of one call that has ended. Times are seconds of the bus's monotonic clock.

    Attributes:
        traceparent: of the span itself, always sampled.
        parent_id: the span that made the call; "" where the trace begins with this one.
        name: of the tool, as listed; as the caller wrote it where the call was refused.
        source: whose tool it is; "" where the call was refused.
        id: the bus's own id of the call; "" where it was refused.
        session: that ran it; "" where its handler is not a session.
        mcp: whether the tool is a mounted MCP server's.
        sent, first_sign: as in `Trace`.
        error: None where it succeeded.
    """

    traceparent: str
    parent_id: str
    tracestate: str
    name: str
    source: str
    call_id: str
    id: str
    caller: str
    session: str
    mcp: bool
    started: float
    ended: float
    sent: float
    first_sign: float
    error: CallError | None

    @classmethod
    def of(cls, span_row: SpanRow) -> Span:
        """Builds the span from its row."""
        trace, row, session, mcp, error = span_row
        call_id, name, source, caller, started, ended, _, _, _, _, id, _ = row
        names = (name, source, call_id, id, caller, session)
        moments = (started, ended, trace.sent, trace.first_sign)
        return cls(trace.traceparent, trace.parent_id, trace.tracestate, *names, mcp, *moments, error)

    @property
    def trace_id(self) -> str:
        """The trace, 32 digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """The span itself, 16 digits."""
        return self.traceparent[36:52]


class ArgumentBudget:
    """Counts what the bus holds for the callers of one source."""

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held = 0  # bytes of arguments


class PolicySubject(Protocol):
    """The part of a caller that decides which tool a call reaches, and whether it may call."""

    principal: Principal  # who it is, for the policy
    allowed: set[Entry]  # cache: what the policy lets it call, see Caller.allowed_at

    @property
    def may_set_context(self) -> bool:
        """Whether it may set the context of a call."""


class Caller(PolicySubject, Protocol):
    """Makes calls: a stream, a program in this process, the gateway."""

    source: str  # the principal's
    budget: ArgumentBudget  # shared by the callers of a source, see Dispatcher.budget
    quota: Quota | None  # shared by the callers of an identity; None: its calls are not limited
    allowed_at: int  # the catalog's revision for which `allowed` is true
    max_in_flight: int
    in_flight: dict[str, Any]  # its active calls, by the call_id that it chose
    pending: dict[str, Any]  # calls that it runs as a handler; empty for one that only calls
    longest_timeout: float  # seconds; a call that requests more gets this
    max_item_bytes: int  # the largest result that it can receive

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        """Takes plain successful results: (call_id, output_json) of each."""

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        """Takes any other result; copies what it stores."""

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        """Takes progress; copies what it stores."""


CancelCalls = Callable[[Caller, Iterable[pb.ToolCancel], float], None]  # the caller, which of its calls, the time now
MakeCalls = Callable[[Caller, Sequence[pb.ToolCall], float], None]  # the caller, its calls, the time now


class Background(Protocol):
    """Takes over calls at their soft deadline, as tasks."""

    def adopt(self, call: Call, now: float, cancel: CancelCalls, calls: MakeCalls) -> tuple[Caller, str, Result] | None:
        """Takes a running call over.

        Args:
            cancel, calls: the dispatcher's `cancels`, by which the call can be cancelled, and `calls`, by which it
                can be made again with answers; on the dispatcher's loop only.

        Returns:
            The new caller, the call_id there, and the result that the first caller gets now; None: no task is free, so
            the caller goes on waiting.
        """


class Interceptor:
    """Stands around the calls of a bus for a part of it: every way in and every way back passes through it.

    Every method may be left as it is.

    A call that it takes over, in either direction, it first moves to a handler of its own (`CallsInFlight.hand_over`).
    """

    def before(self, calls: list[Call], now: float) -> list[Call]:
        """Returns which of some admitted calls are sent now; the others are taken over, or have ended."""
        return calls

    def after(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> Iterable[pb.ToolResult]:
        """Returns the results that are delivered now; those of calls that it takes over are left out."""
        return results

    def progress(self, call: Call, message: pb.ToolProgress) -> None:
        """Clears what the caller may not see of progress."""


class SecretCheck(Protocol):
    """Finds secrets in what untrusted sources say."""

    judged: dict[tuple[str, str | bytes], str | None]  # of a tool, a text or result: judged before

    def check(self, tool_name: str, output_json: str) -> str | None:
        """Returns why a text is blocked; None where it is not."""

    def check_result(self, tool_name: str, result: pb.ToolResult) -> str | None:
        """Does the same for a result."""

    def clear_progress(self, tool_name: str, progress: pb.ToolProgress) -> None:
        """Clears texts of progress that would be blocked."""


@dataclass(slots=True, eq=False)
class Seams:
    """What rooms put around the calls and declarations of a bus: each sets its fields, and all others read them here.

    Attributes:
        interceptors: stand around calls: the first is the first that sees a call, and the last that sees its result.
        background: takes calls over at their soft deadline; None: callers wait to the end.
        tripwire: blocks secrets in results of untrusted sources; None: nothing is blocked.
        expand: replaces what stands for something larger in arguments. Gets principal, user, declaration, text.
        why_absent: returns why a source offers nothing, as the end of a sentence.
        current: looks up the present identity of a caller whose call goes on as a task, as `Doorman.current` does.
        on_denied: is notified of each denied call with its reason.
        on_limited: is notified of calls that a quota refused: how many, and why.
        budgets: of peers that are trusted less than the bus's own programs.
        pins: compares the tools of pinned sources with the trusted ones.
        read: reads a declared tool.
    """

    interceptors: tuple[Interceptor, ...] = ()
    background: Background | None = None
    tripwire: SecretCheck | None = None
    expand: Callable[[Principal, str, Declaration, str], str] | None = None
    why_absent: Callable[[str], str] = lambda source: ""
    current: Callable[[Identity], Identity] = lambda identity: identity
    on_denied: Callable[[Principal, str, str], object] = lambda principal, name, why: None
    on_limited: Callable[[Principal, int, str], object] = lambda principal, count, why: None
    budgets: Budgets = field(default_factory=Budgets)
    pins: Pinning = field(default_factory=Pinning)
    read: Callable[..., CompiledTool] = read_tool


@dataclass(frozen=True, slots=True)
class InputExchange:
    """What the caller of one call accepts and answers where the tool asks questions.

    Attributes:
        accepts: the kinds of questions that the caller can answer.
        responses_json: its answers; "" where it has none.
        state: the request_state that came with the questions; "" where none came.
    """

    accepts: tuple[str, ...]
    responses_json: str = ""
    state: str = ""

    @property
    def size(self) -> int:
        """Characters of the answers and the state."""
        return len(self.responses_json) + len(self.state)

    def fill(self, message: pb.ToolCall) -> None:
        """Sets the exchange in the message that a handler gets."""
        message.accepts.extend(self.accepts)
        message.input_responses_json = self.responses_json
        message.request_state = self.state


@dataclass(slots=True, init=False, eq=False, repr=False)
class Call:
    """One call, from its admission until its handler has confirmed its end.

    Plain slots: a frozen record costs five times as much, and this is the hot path.
    """

    caller: Caller
    call_id: str  # the id that the caller chose
    handler: Handler
    id: str  # the bus's own id, which the handler gets
    entry: Entry
    declaration: Declaration
    role: str  # the role that the caller named, for itself and nested calls; "" where it named none
    arguments_json: str  # as the caller wrote them; "" stands for no arguments
    size: int  # bytes held for it
    context: pb.CallContext | None  # the root call's, for nested calls to share
    exchange: InputExchange | None  # what its caller accepts and answers; None for most calls, and for nested ones
    trace: Trace | None  # None where the caller has sent none, as for most calls
    parent: Call | None
    children: list[Call] | None
    depth: int
    started: float
    deadline: float
    timeout: float  # the limit behind the deadline
    idle_deadline: float  # set only where the tool has an idle timeout
    accepted: bool  # whether the handler has sent progress
    active: bool  # whether the caller still waits for the result
    freed_at: float  # when the slot of a stuck call is freed at the latest
    frame: int  # which frame of the handler's stream carries it

    def nest(self, parent: Call) -> None:
        """Makes the call a nested one of a parent: it ends no later and shares the parent's context."""
        if parent.deadline < self.deadline:
            self.deadline, self.timeout = parent.deadline, parent.timeout
        self.parent = parent
        self.depth = parent.depth + 1
        self.context = parent.context
        self.role = self.role or parent.role
        if parent.children is None:
            parent.children = []
        parent.children.append(self)

    def leave_parent(self) -> None:
        """Leaves the parent's list of nested calls, since the call has ended."""
        siblings = self.parent.children if self.parent is not None else None
        if siblings and self in siblings:
            siblings.remove(self)

    @property
    def root(self) -> Call:
        """The call that this one is part of in the end; one that is not nested is its own."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call

    def __repr__(self) -> str:
        state = "active" if self.active else "stuck"
        return f"<Call {self.call_id} {self.entry.name} {state} depth={self.depth}>"
