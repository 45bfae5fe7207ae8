"""What happens while a loop runs, as it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from toolbus.dialects.conversation import ModelCall, Turn
from toolbus.dialects.export import Export
from toolbus.loop.turn_reply import CallDone, Reply
from toolbus.tool import Progress


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The model is about to be asked.

    Attributes:
        round: from 1.
        export: what it is offered; None where it takes no tools.
        forced: whether it has to answer in words now.
    """

    round: int
    export: Export | None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of what the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks, where its provider shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The model has spoken; its calls come next."""

    round: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class ToolsRefused:
    """The endpoint takes no tools: the model is asked again without them, and not offered any from now on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins. Round and order are those of `CallDone`."""

    call: ModelCall
    round: int
    order: int


@dataclass(frozen=True, slots=True)
class CallProgress:
    """A sign of life of a call."""

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


CallEvent: TypeAlias = CallStarted | CallProgress | CallEnded
LoopEvent: TypeAlias = RoundStarted | TextDelta | ReasoningDelta | RoundEnded | ToolsRefused | CallEvent | Finished
