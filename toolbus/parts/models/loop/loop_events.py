"""Defines the events of a loop's turn, in the order in which they happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from toolbus.parts.models.dialects.conversation import ModelCall, Turn
from toolbus.parts.models.dialects.export import Export, LeftOut
from toolbus.parts.models.loop.approval import ApprovalEvent
from toolbus.parts.models.loop.turn_reply import CallDone, Reply
from toolbus.protocol.tool import Progress


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """A request to the model is about to be sent.

    Attributes:
        round: from 1.
        export: the offered tools; None if the model takes no tools.
        forced: whether the model must answer in text now.
        hidden: how many tools of the catalog are not offered, but found with `search_tools`.
    """

    round: int
    export: Export | None
    forced: bool = False
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning, if its provider shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The model has answered; its calls come next."""

    round: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class RoundRetried:
    """The model's answer could not be read, or was empty: the round's request is sent once more.

    Attributes:
        turn: that answer. It is not part of the conversation. Its text was not shown, but its reasoning may have been.
    """

    round: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class ToolsRefused:
    """The endpoint takes no tools: the request is repeated without tools, and no later request offers tools."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ToolsLeftOut:
    """The endpoint refused some tools; it has answered without them, and the loop does not offer them again.

    Attributes:
        left_out: these tools with the reason; later they are in `RoundStarted.export.left_out`. Tools that it may
            refuse are offered again, to continue the search.
        error: its last refusal.
    """

    left_out: tuple[LeftOut, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins. Round and order are those of `CallDone`."""

    call: ModelCall
    round: int
    order: int


@dataclass(frozen=True, slots=True)
class CallProgress:
    """A progress notification of a call."""

    call: ModelCall
    progress: Progress
    round: int
    order: int


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call has ended; calls that run side by side end in any order."""

    done: CallDone


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is over; always the last event."""

    reply: Reply


CallEvent: TypeAlias = CallStarted | CallProgress | CallEnded | ApprovalEvent
LoopEvent: TypeAlias = (
    RoundStarted
    | TextDelta
    | ReasoningDelta
    | RoundEnded
    | RoundRetried
    | ToolsRefused
    | ToolsLeftOut
    | CallEvent
    | Finished
)
