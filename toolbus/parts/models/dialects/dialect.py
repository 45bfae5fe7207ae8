"""Defines dialects: pure readers and writers of one provider's JSON, as Python dicts.

A dialect has no connection. The program that talks to the provider (the tool loop, another host) passes in the received
JSON and sends the returned JSON. In a realtime dialect that is a session, a socket that stays open, whose events a
parser converts into the few kinds that all providers have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from toolbus.common.text import quote
from toolbus.errors import InvalidRequest, ToolBusError
from toolbus.parts.models.dialects.conversation import (
    Answered,
    Delta,
    Ending,
    HistoryItem,
    Json,
    ModelCall,
    SurrogateJoiner,
    Turn,
    Usage,
)
from toolbus.parts.models.dialects.export import Export, ToolWriter
from toolbus.parts.models.dialects.wire_names import NameTable

ToolChoice: TypeAlias = str
"""How a model uses the offered tools: ``auto``: it decides; ``none``: it answers in text;
``required``: it calls at least one; or the name of an exported tool on the bus, which it calls. A tool that is itself
called ``auto``, ``none`` or ``required`` cannot be chosen."""


class EndpointError(ToolBusError):
    """A provider reported an error instead of an answer, or in the middle of one; or its answer broke off.

    Attributes:
        message: the provider's error message.
        raw: its own error, unchanged; for an answer that broke off, the `Turn` so far.
    """

    def __init__(self, message: str, raw: Any = None) -> None:
        self.message = message
        self.raw = raw
        super().__init__(message, raw)

    def __str__(self) -> str:
        return f"the model's endpoint failed: {self.message}"

    @classmethod
    def of(cls, raw: Any) -> EndpointError:
        """Reads an error in any form of the providers: a text, or an object with one."""
        inner = raw
        while isinstance(inner, Mapping) and isinstance(inner.get("error"), (Mapping, str)):
            inner = inner["error"]
        if isinstance(inner, Mapping):
            inner = inner.get("message") or inner.get("code") or inner.get("type")
        return cls(str(inner) if inner else "it gave no reason", raw)


class NoObject(EndpointError, TypeError):
    """A provider sent something in the place of an answer, or of an event of one, that is not an object."""


class TurnStream(ABC):
    """Assembles one streamed answer. Feed it each event of the provider, in order, then call `finish`.

    Class attributes:
        end_mark: the end of every complete answer of the provider, in words for an error.
    """

    end_mark: ClassVar[str]

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._joiner = SurrogateJoiner()

    def feed(self, event: Any) -> list[Delta]:
        """Takes one event, a mapping or an object of the provider's SDK. Returns the pieces to show."""
        return self._joiner.join(self.read(event))

    @abstractmethod
    def read(self, event: Any) -> list[Delta]:
        """Takes one event for `feed`. Pieces may be empty, and end in the middle of a surrogate pair."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the answer's end has arrived. Without it the answer broke off, even if the stream ended cleanly."""

    @abstractmethod
    def finish(self) -> Turn:
        """Returns the answer so far."""


class Dialect(ToolWriter):
    """How one provider writes tools, calls and results."""

    def parse(self, answer: Any, names: NameTable) -> Turn:
        """Reads a whole answer: a mapping, or an object of the provider's SDK. By default it is as one event."""
        stream = self.stream(names)
        stream.feed(answer)
        return stream.finish()

    @abstractmethod
    def stream(self, names: NameTable) -> TurnStream:
        """Returns the assembler of a streamed answer."""

    @abstractmethod
    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        """Returns the messages that carry results back to the model, in the order of the calls."""

    @abstractmethod
    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        """Returns a conversation as the provider's messages. System messages may be left to `request`."""

    @abstractmethod
    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns the keys of a request that concern conversation and tools.

        Args:
            export: the tools to offer; None, or one without tools, writes no tools.
            tools: ``none`` requests an answer in text; if a provider requires declared tools for a conversation with
                calls, they are declared and forbidden.

        Raises:
            InvalidRequest: ``tools`` names a tool that is not exported, or a choice that the provider does not have.
        """


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns JSON of a provider as a mapping: one already, or an object of an SDK, which is converted.

    Raises:
        NoObject: it is neither.
    """
    if isinstance(value, Mapping):
        return value
    for method in ("model_dump", "to_dict"):
        write = getattr(value, method, None)
        if callable(write):
            try:
                # Servers that bend the format are common; their SDK need not warn of each.
                dump = write(exclude_none=True, warnings=False) if method == "model_dump" else write()
            except TypeError:
                dump = write()
            if isinstance(dump, Mapping):
                return dump
    what = f"it sent {quote(str(value))}, a {type(value).__name__}"
    raise NoObject(f"{what}, in the place of an answer: give a mapping or an object of its SDK", value)


# What is wrong in a part of an answer costs this part alone, so that calls beside it are made.


def string(message: Mapping[str, Any], key: str) -> str:
    """Returns a text of a message; "" if it is missing."""
    value = message.get(key)
    return value if isinstance(value, str) else ""


def mapping(message: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object of a message, also one of an SDK; an empty one if it is missing."""
    value = message.get(key)
    if value is None or isinstance(value, Mapping):
        return value or {}
    try:
        return as_mapping(value)
    except NoObject:
        return {}


def objects(value: Any) -> list[Json]:
    """Returns the objects in a list, also those of an SDK; none of any other value."""
    found: list[Json] = []
    for each in value if isinstance(value, list | tuple) else ():
        with suppress(NoObject):
            found.append(dict(as_mapping(each)))
    return found


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
