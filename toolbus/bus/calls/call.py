"""A call in flight, and the two sides it stands between: whoever asks and whoever runs.

A call is *active* until its caller has its result. One that ended early (deadline, cancel) is *stuck* until its
handler confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from toolbus.bus.catalog.entry import Declaration, Entry
from toolbus.bus.catalog.handler import Handler
from toolbus.bus.catalog.policy import Principal
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb


class Budget:
    """What the bus holds for the callers of one source."""

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held = 0  # bytes of arguments


class Caller(Protocol):
    """Whoever asks for calls: a stream, a program in this process, the gateway."""

    source: str  # the principal's
    principal: Principal  # who it is, for the policy
    budget: Budget  # shared by the callers of a source: Dispatcher.budget
    allowed: set[Entry]  # what the policy lets it call, as of the revision allowed_at
    allowed_at: int
    max_in_flight: int
    in_flight: dict[str, Any]  # its active calls, by its own call_id
    pending: dict[str, Any]  # calls that it owes as a handler; empty for one that only asks
    longest_timeout: float  # seconds; a call that asks for more gets this
    max_item_bytes: int  # the largest result that it can receive

    @property
    def may_set_context(self) -> bool:
        """Whether it may say what the context of a call is."""

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        """Takes plain successful results: (call_id, output_json) of each."""

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        """Takes any other result; copies what it keeps."""

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        """Takes a sign of life; copies what it keeps."""


CancelCalls = Callable[[Caller, Iterable[pb.ToolCancel], float], None]  # whose calls, which of them, the time now


class Background(Protocol):
    """Whoever keeps calls that outlive the patience of their caller."""

    def adopt(self, call: Call, now: float, cancel: CancelCalls) -> tuple[Caller, str, Result] | None:
        """Takes a running call over.

        Args:
            cancel: the dispatcher's `cancels`, by which the call can be cancelled; on the dispatcher's loop only.

        Returns:
            Who has asked for it from now on, under which call_id, and the result that its caller gets now; None: there
            is no room, the caller goes on waiting.
        """


class Call:
    """One call, from the moment it was accepted until its handler has let go of it.

    Plain slots: a frozen record costs five times as much, and this is the hot path (design.md 7).
    """

    __slots__ = (
        "accepted",
        "active",
        "arguments_json",
        "call_id",
        "caller",
        "children",
        "context",
        "deadline",
        "declaration",
        "depth",
        "entry",
        "frame",
        "freed_at",
        "handler",
        "id",
        "idle_deadline",
        "parent",
        "size",
        "started",
        "timeout",
    )

    caller: Caller
    call_id: str  # what the caller calls it
    handler: Handler
    id: str  # what the handler calls it: the bus's own id
    entry: Entry
    declaration: Declaration
    arguments_json: str  # as the caller wrote it; "" stands for no arguments
    size: int  # bytes held for it
    context: pb.CallContext | None  # the root call's, for nested calls to share
    parent: Call | None
    children: list[Call] | None
    depth: int
    started: float
    deadline: float
    timeout: float  # the limit behind the deadline
    idle_deadline: float  # set only where the tool has an idle timeout
    accepted: bool  # whether the handler has shown a sign of life
    active: bool  # whether the caller still waits
    freed_at: float  # when a stuck call's slot is taken back at the latest
    frame: int  # which frame of the handler's stream carries it

    def nest(self, parent: Call) -> None:
        """Ties the call to the one that its caller is answering: it ends no later and shares its context."""
        if parent.deadline < self.deadline:
            self.deadline, self.timeout = parent.deadline, parent.timeout
        self.parent = parent
        self.depth = parent.depth + 1
        self.context = parent.context
        if parent.children is None:
            parent.children = []
        parent.children.append(self)

    def leave_parent(self) -> None:
        """The call has ended: its parent need not end it."""
        siblings = self.parent.children if self.parent is not None else None
        if siblings and self in siblings:
            siblings.remove(self)

    def __repr__(self) -> str:
        state = "active" if self.active else "stuck"
        return f"<Call {self.call_id} {self.entry.name} {state} depth={self.depth}>"
