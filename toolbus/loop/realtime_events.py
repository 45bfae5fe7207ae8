"""Defines the events of a realtime session beside those of every loop, and the outcomes of its `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from toolbus.dialects.conversation import Ending, Usage
from toolbus.dialects.export import Export
from toolbus.loop.loop_events import CallEvent, ReasoningDelta, TextDelta
from toolbus.loop.turn_reply import CallDone


class Sync(Enum):
    """The outcome of `RealtimeSession.sync`."""

    UNCHANGED = "the session has these tools already"
    SENT = "the session has them now"
    NEW_SESSION = "its tools were fixed when it opened: only a new session can have them"
    CLOSED = "the session is closed"


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A call was not made: its tool is not offered, or there were too many calls."""

    done: CallDone


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response of the model is over.

    Attributes:
        ending: `complete`; `cut` if the token limit was reached or the user interrupted; `refused`; `failed`.
        reason: the provider's reason for an ending that is not `complete`; else "".
        usage: its tokens; None if the provider does not report them.
    """

    ending: Ending
    reason: str
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class ToolsSent:
    """The session has these tools now; `export.left_out` and `export.losses` report what could not be expressed."""

    export: Export


@dataclass(frozen=True, slots=True)
class NewSessionNeeded:
    """The tools have changed, and the provider fixes them when a session opens."""

    export: Export


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Answers or tools could not be sent, or the catalog is no longer followed. The next `sync` sends tools again."""

    error: Exception


SessionEvent: TypeAlias = (
    TextDelta | ReasoningDelta | CallEvent | CallRefused | ResponseDone | ToolsSent | NewSessionNeeded | SendFailed
)
