"""Defines a realtime dialect: how a provider's session, a socket that stays open, offers tools and answers calls.

Its parser converts the provider's events into the few kinds that a session uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from toolbus.common.text import quote
from toolbus.errors import InvalidRequest
from toolbus.parts.models.dialects.conversation import Answered, Delta, Ending, Json, ModelCall, SurrogateJoiner, Usage
from toolbus.parts.models.dialects.dialect import ToolChoice
from toolbus.parts.models.dialects.export import Export, ToolWriter
from toolbus.parts.models.dialects.wire_names import NameTable


@dataclass(frozen=True, slots=True)
class ResponseBegan:
    """The model began a response. Until it has ended, a provider may refuse a request for another one."""

    id: str


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """A response is over, whether complete or not: no more of its calls will come.

    Attributes:
        ending, reason, usage: as in `Turn`. A response that was interrupted is `cut`.
    """

    id: str
    ending: Ending = "complete"
    reason: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class CallsCancelled:
    """The user interrupted the response that requested these calls.

    Attributes:
        ids: of the calls.
        answers: whether the provider still takes answers to them.
    """

    ids: tuple[str, ...]
    answers: bool = True


@dataclass(frozen=True, slots=True)
class ResponseRefused:
    """The provider refused a request for a response, because another response was in progress."""


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    """The user speaks; the provider answers by itself at the end of the speech."""


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The user has stopped speaking, or the audio buffer was cleared."""


RealtimeEvent: TypeAlias = (
    Delta | ModelCall | ResponseBegan | ResponseEnded | ResponseRefused | CallsCancelled | SpeechBegan | SpeechEnded
)


class RealtimeParser(ABC):
    """Reads the events of one realtime session. It holds calls that are still arriving.

    Attributes:
        names: the tool names of the session; the session replaces them when its tools change. A response that has
            begun keeps the names that it began with.
    """

    def __init__(self, names: NameTable) -> None:
        self.names = names
        self.joiner = SurrogateJoiner()  # for the deltas of the current response

    @abstractmethod
    def feed(self, event: Any) -> list[RealtimeEvent]:
        """Takes one event, a mapping or an object of the provider's SDK.

        Returns what it means: text that can be shown now, calls that are complete, beginnings and ends. An event that
        is unknown or malformed is ignored.
        """


class RealtimeDialect(ToolWriter):
    """How one provider's realtime sessions offer tools and answer calls.

    Class attributes:
        fixed_at_connect: whether tools can only be set when the session opens; a change then needs a new session.
    """

    fixed_at_connect: ClassVar[bool] = False

    @abstractmethod
    def session_update(self, export: Export) -> Json:
        """Returns the event that sets the tools of an open session; with `fixed_at_connect`, its setup message."""

    @abstractmethod
    def parser(self, names: NameTable) -> RealtimeParser:
        """Returns the reader of the session's events."""

    @abstractmethod
    def answers(self, answered: Sequence[Answered], names: NameTable, *, go_on: bool = True) -> list[Json]:
        """Returns the events that carry results back, in the order to be sent.

        Args:
            go_on: whether they request a response to the results; a provider that always responds ignores it.
        """

    def request(self, export: Export | None = None, tools: ToolChoice = "auto") -> list[Json]:
        """Returns the events that request a response; empty if the provider always responds by itself.

        Args:
            export: the tools of the session, for a choice that names or requires one.
            tools: the choice for this response.

        Raises:
            InvalidRequest: the tool is unknown, or the provider has no choice for a response.
        """
        if tools != "auto":
            raise InvalidRequest(
                f"tool_choice is {quote(tools)}, and sessions of {self.name} have no choice: use 'auto'"
            )
        return []
