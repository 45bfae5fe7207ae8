"""The common shape of all dialects: what is exported, what a model asked for, what goes back to it.

A dialect is pure: it reads and writes the JSON of one provider, as Python dicts, and knows no connection. Whoever
speaks to the provider (the tool loop, a realtime session, a program of its own) hands it what arrived and sends what it
returns. A conversation is kept in the neutral words of this module, so it can go on with another provider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from toolbus.dialects.names import NameRule, NameTable
from toolbus.dialects.result_text import utf8, utf8_json
from toolbus.dialects.schemas.subset import Inexpressible, Loss, SchemaRules, convert
from toolbus.errors import ToolBusError
from toolbus.tool import Result, Tool

Json: TypeAlias = dict[str, Any]
ToolChoice: TypeAlias = Literal["auto", "none"]

# What providers call it when an answer ends because no more tokens were allowed, in small letters.
CUT = frozenset(("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"))
CONVERTED_KEPT = 500  # schemas that a dialect remembers at least; 3 MB at 1 kB of JSON each


# -- out: tools ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that the dialect cannot express, and why, as a sentence."""

    tool: str
    why: str


@dataclass(frozen=True, slots=True)
class Export:
    """Tools as one dialect offers them.

    Attributes:
        dialect: whose.
        tools: what goes into a request, in the order of the catalog; not to be changed, it is shared.
        names: the way from the names on the wire back to those of the bus, and forth.
        hashes: the schema_hash of each exported tool, by its name on the bus; a call carries it, so that a tool that
            has changed since is not run with old arguments.
        losses: what schemas lost.
        left_out: tools that are not in `tools`.
        kept: the exported tools themselves, by their name on the bus.
    """

    dialect: str
    tools: tuple[Json, ...]
    names: NameTable
    hashes: Mapping[str, str]
    losses: tuple[Loss, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    kept: Mapping[str, Tool] = field(default_factory=dict)


class EndpointError(ToolBusError):
    """A provider reported a fault instead of an answer, or in the middle of one; or its answer broke off.

    Attributes:
        message: what it said.
        raw: its own error, as it came; of an answer that broke off the `Turn`, as far as it came.
    """

    def __init__(self, message: str, raw: Any = None) -> None:
        self.message = message
        self.raw = raw
        super().__init__(message, raw)

    def __str__(self) -> str:
        return f"the model's endpoint failed: {self.message}"

    @classmethod
    def of(cls, raw: Any) -> EndpointError:
        """Reads an error in any of the forms that providers give it: a text, or an object that holds one."""
        inner = raw
        while isinstance(inner, Mapping) and isinstance(inner.get("error"), (Mapping, str)):
            inner = inner["error"]
        if isinstance(inner, Mapping):
            inner = inner.get("message") or inner.get("code") or inner.get("type")
        return cls(str(inner) if inner else "it gave no reason", raw)


# -- in: what a model said -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call that a model asks for.

    Attributes:
        id: the provider's, or one that was made where it gives none.
        name: the tool's name on the bus; where the model invented a name, that name.
        arguments_json: as the model wrote them; not checked, may be no JSON. "" where it wrote nothing.
        known: whether the name is one that was offered. A call that is not known must not be made: the bus may have a
            tool of that name that this model was never offered.
        wire_name: the name as the model wrote it.
        extra: what has to be echoed with the call (Gemini's thought_signature), by the provider's key.
        response: which response of a realtime session asks for it; "" elsewhere.
    """

    id: str
    name: str
    arguments_json: str = ""
    known: bool = True
    wire_name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    response: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a model.

    A character may come in two halves, in chunks of a stream, and an answer that was cut may end in one. Halves are
    joined or replaced here, for all dialects: a request that holds one cannot be sent.

    Attributes:
        text: what it said.
        calls: what it asks for, in its order.
        reasoning: what it thought, where the provider shows it.
        dialect: which dialect it came in; the history of another one is written anew from text and calls.
        raw: the provider's own message or items, to be echoed in the history exactly.
        stop: why it ended, in the provider's word; "" where it did not say.
    """

    text: str = ""
    calls: tuple[ModelCall, ...] = ()
    reasoning: str = ""
    dialect: str = ""
    raw: tuple[Json, ...] = ()
    stop: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "reasoning"):
            object.__setattr__(self, name, utf8_json(getattr(self, name)))
        object.__setattr__(self, "raw", tuple(map(utf8_json, self.raw)))

    @property
    def cut(self) -> bool:
        """Whether it ended because no more tokens were allowed: what it says is not all it had to say."""
        return self.stop.lower() in CUT


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that is being streamed: ``text`` or ``reasoning``."""

    kind: Literal["text", "reasoning"]
    text: str


class WholeCharacters:
    """Makes pieces of text such that each can be printed: UTF-8 cannot carry one half of a character.

    A piece that ends in the first half of a character is handed on without it; the next one of its kind begins with it.
    """

    def __init__(self) -> None:
        self._held: dict[str, str] = {}  # first halves that wait for the second, by kind

    def of(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Returns pieces without halves of characters, and without those that are empty."""
        whole = ((delta, self._text(delta)) for delta in deltas)
        return [delta if delta.text == text else Delta(delta.kind, text) for delta, text in whole if text]

    def _text(self, delta: Delta) -> str:
        if delta.text.isascii() and not self._held:
            return delta.text
        text = self._held.pop(delta.kind, "") + delta.text
        if "\ud800" <= text[-1:] <= "\udbff":
            self._held[delta.kind], text = text[-1], text[:-1]
        return utf8(text)


# -- a conversation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """What somebody said: ``system``, ``user`` or ``assistant``."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A call and how it ended."""

    call: ModelCall
    result: Result


@dataclass(frozen=True, slots=True)
class Answers:
    """How the calls of the turn before ended, in the order of the calls: every one of them is answered."""

    answered: tuple[Answered, ...]


HistoryItem: TypeAlias = Message | Turn | Answers | Mapping[str, Any]
"""One step of a conversation. A mapping is the provider's own form and is passed on as it is."""


# -- dialects --------------------------------------------------------------------------------------------------------


class TurnStream(ABC):
    """Puts one streamed answer together. Feed it each event of the provider, in order, then ask for the turn.

    Class attributes:
        end_mark: what ends every whole answer of the provider, in words for an error.
    """

    end_mark: ClassVar[str]

    def __init__(self) -> None:
        self._characters = WholeCharacters()

    def feed(self, event: Any) -> list[Delta]:
        """Takes one event, a mapping or an object of the provider's SDK. Returns what can be shown now."""
        return self._characters.of(self.read(event))

    @abstractmethod
    def read(self, event: Any) -> list[Delta]:
        """Takes one event for `feed`. Pieces may be empty, and end in half of a character."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the answer has come to its end. A stream that ends before it broke off, however orderly it ended."""

    @abstractmethod
    def finish(self) -> Turn:
        """Returns the whole answer, as far as it came."""


class ToolWriter(ABC):
    """How one provider writes tools, in a request or in a session. Instances hold caches only; threads may share them.

    Class attributes:
        name: what users call it (`openai`, `anthropic` …).
        name_rule: which function names it accepts.
        schema_rules: which part of JSON Schema it accepts.
    """

    name: ClassVar[str]
    name_rule: ClassVar[NameRule]
    schema_rules: ClassVar[SchemaRules]

    def __init__(self) -> None:
        # Converted schemas by the tool they came from, so that a change of one tool converts one tool.
        self._converted: dict[Tool, tuple[Json, tuple[Loss, ...]] | LeftOut] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def export(self, tools: Iterable[Tool]) -> Export:
        """Returns tools as this dialect offers them, in the given order.

        A tool that cannot be expressed is left out, with the reason in `Export.left_out`; it never breaks a request.
        """
        wanted = list({tool.name: tool for tool in tools}.values())
        fresh: dict[Tool, tuple[Json, tuple[Loss, ...]] | LeftOut] = {}
        for tool in wanted:
            known = self._converted.get(tool)
            fresh[tool] = known if known is not None else self._convert(tool)
        # Users with different rights and conversations with different choices take turns: what is gone may come back.
        kept_too = self._converted | fresh
        self._converted = kept_too if len(kept_too) <= max(CONVERTED_KEPT, 2 * len(fresh)) else fresh
        kept = [tool for tool in wanted if not isinstance(fresh[tool], LeftOut)]
        names = NameTable.build((tool.name for tool in kept), self.name_rule)
        written: list[Json] = []
        losses: list[Loss] = []
        for tool in kept:
            converted = fresh[tool]
            assert not isinstance(converted, LeftOut)
            schema, lost = converted
            written.append(self.write_tool(names.to_wire[tool.name], tool, schema))
            losses.extend(lost)
        return Export(
            dialect=self.name,
            tools=tuple(written),
            names=names,
            hashes={tool.name: tool.schema_hash for tool in kept},
            losses=tuple(losses),
            left_out=tuple(item for item in fresh.values() if isinstance(item, LeftOut)),
            kept={tool.name: tool for tool in kept},
        )

    def _convert(self, tool: Tool) -> tuple[Json, tuple[Loss, ...]] | LeftOut:
        try:
            schema, losses = convert(tool.parameters, self.schema_rules, tool.name)
        except Inexpressible as why:
            return LeftOut(tool.name, str(why))
        return schema, tuple(losses)

    @abstractmethod
    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        """Returns one tool as it stands in a request, around a schema that is not to be changed: exports share it."""


class Dialect(ToolWriter):
    """How one provider writes tools, calls and results."""

    @abstractmethod
    def parse(self, answer: Any, names: NameTable) -> Turn:
        """Reads a whole answer: a mapping, or an object of the provider's SDK."""

    @abstractmethod
    def stream(self, names: NameTable) -> TurnStream:
        """Returns what puts a streamed answer together."""

    @abstractmethod
    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        """Returns what carries results back to the model, in the order of the calls."""

    @abstractmethod
    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        """Returns a conversation as the provider's messages. System messages may be left to `request`."""

    @abstractmethod
    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns the keys of a request that concern conversation and tools.

        Args:
            export: what to offer; None, or one without tools, writes no tools at all.
            tools: ``none`` asks for an answer in words; where a provider insists on declared tools whenever the
                conversation holds calls, they are declared and forbidden.
        """


# -- realtime --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseBegan:
    """The model began a response: until it has ended, a provider may refuse to be asked for another one."""

    id: str


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """A response is over, whether complete or not: no more calls of it will come."""

    id: str


@dataclass(frozen=True, slots=True)
class CallsCancelled:
    """The user interrupted the response that asked for these calls.

    Attributes:
        ids: of the calls.
        answers: whether the provider still takes answers to them.
    """

    ids: tuple[str, ...]
    answers: bool = True


@dataclass(frozen=True, slots=True)
class ResponseRefused:
    """The provider began no response although it was asked to, because another one was under way."""


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    """The user speaks: the provider answers by itself when that is over."""


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The user has stopped, or what was said is thrown away."""


RealtimeEvent: TypeAlias = (
    Delta | ModelCall | ResponseBegan | ResponseEnded | ResponseRefused | CallsCancelled | SpeechBegan | SpeechEnded
)


class RealtimeParser(ABC):
    """Reads the events of one realtime session. It remembers calls that are still arriving.

    Attributes:
        names: what the session offers now; to be replaced when that changes. A response that has begun keeps the
            names that it began with.
    """

    def __init__(self, names: NameTable) -> None:
        self.names = names
        self.characters = WholeCharacters()  # of what is being said; for parsers

    @abstractmethod
    def feed(self, event: Any) -> list[RealtimeEvent]:
        """Takes one event, a mapping or an object of the provider's SDK.

        Returns what it says: text that can be shown now, calls that are complete, beginnings and ends. An event that
        is unknown or malformed says nothing.
        """


class RealtimeDialect(ToolWriter):
    """How a realtime session (a socket that stays open) offers tools and answers calls.

    Class attributes:
        fixed_at_connect: whether tools can only be set when the session opens; a change then needs a new session.
    """

    fixed_at_connect: ClassVar[bool] = False

    @abstractmethod
    def session_update(self, export: Export) -> Json:
        """Returns the event that sets the tools of an open session; of one that is fixed, its setup."""

    @abstractmethod
    def parser(self, names: NameTable) -> RealtimeParser:
        """Returns what reads the session's events."""

    @abstractmethod
    def answers(self, answered: Sequence[Answered], names: NameTable, *, go_on: bool = True) -> list[Json]:
        """Returns the events that carry results back, in the order to be sent.

        Args:
            go_on: whether they have the model go on; a provider whose model always does ignores it.
        """

    def request(self) -> list[Json]:
        """Returns the events that have the model go on after answers which did not; none where it always does."""
        return []


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns JSON of a provider as a mapping: one already, or an object of an SDK, which is written out.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, Mapping):
        return value
    for method in ("model_dump", "to_dict"):
        write = getattr(value, method, None)
        if callable(write):
            try:
                # Servers that bend the format are common; their SDK need not warn of each.
                written = write(exclude_none=True, warnings=False) if method == "model_dump" else write()
            except TypeError:
                written = write()
            if isinstance(written, Mapping):
                return written
    raise TypeError(f"a {type(value).__name__} is no answer of a model: give a mapping or an object of its SDK")


def model_call(names: NameTable, call_id: str, wire_name: str, arguments_json: str, **extra: Any) -> ModelCall:
    """Returns a call with its name on the bus looked up, in texts that UTF-8 can carry."""
    call_id, wire_name, arguments_json = utf8(call_id), utf8(wire_name), utf8(arguments_json)
    name = names.to_bus.get(wire_name)
    return ModelCall(call_id, wire_name if name is None else name, arguments_json, name is not None, wire_name, extra)
