"""Defines a conversation without any provider's format: messages, a model's turns with their calls, and the results.

A host keeps these records and each dialect writes them in its provider's format, so a conversation can continue with
another provider. They hold only text that UTF-8 can carry, because a request that holds anything else cannot be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from toolbus.common.text import join_surrogates, join_surrogates_in_json
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

Json: TypeAlias = dict[str, Any]

Ending: TypeAlias = Literal["complete", "cut", "refused", "failed", "paused"]
"""How an answer ended: it is whole; no more tokens were allowed; the model or a filter of its provider refused to
answer; the provider could not complete it, or the model wrote a call that cannot be read; the provider waits for the
same conversation again, and then continues."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call that a model requests.

    Attributes:
        id: the provider's, or one that the dialect generated.
        name: the tool's name on the bus, or the name that the model invented.
        arguments_json: as the model wrote them; not checked, may be invalid JSON or "".
        known: whether the name was offered. An unknown call must not be made: the bus may have a tool of that name
            that this model was never offered.
        wire_name: the name as the model wrote it.
        extra: values to echo with the call (Gemini's thought_signature), by the provider's key.
        response: which response of a realtime session requests it; "" elsewhere.
        whole: False if the answer ended in the middle of its arguments, or `fault` says why: it must not be made.
        fault: why a call must not be made that the answer did not cut, for the model; "" if it may be.
    """

    id: str
    name: str
    arguments_json: str = ""
    known: bool = True
    wire_name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    response: str = ""
    whole: bool = True
    fault: str = ""

    def __setstate__(self, state: Sequence[object]) -> None:
        _restore(self, state)


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer, or of several; `+` adds.

    Attributes:
        input_tokens: of the request, cached ones included.
        output_tokens: of the answer, reasoning included.
        cached_tokens: those of the request that the provider read from its cache; None if not reported.
        reasoning_tokens: those of the answer that are reasoning; None if not reported.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            add_counts(self.cached_tokens, other.cached_tokens),
            add_counts(self.reasoning_tokens, other.reasoning_tokens),
        )


def _restore(record: Any, state: Sequence[object]) -> None:
    """Fills a record that is unpickled. Fields that are newer than the pickle get their default."""
    for place, each in enumerate(fields(record)):
        object.__setattr__(record, each.name, state[place] if place < len(state) else each.default)


def add_counts(first: int | None, second: int | None) -> int | None:
    """Returns the sum of the known counts; None if none is known."""
    return None if first is None and second is None else (first or 0) + (second or 0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a model.

    A stream may split a surrogate pair between two chunks, and an answer that was cut may end in half of one. Halves
    are joined or replaced here, for all dialects.

    Attributes:
        text: the answer's text.
        calls: the calls that it requests, in its order.
        reasoning: the model's reasoning, if the provider shows it.
        dialect: which dialect it came in; the history of another dialect is rebuilt from text and calls.
        raw: the provider's own message or items, to be echoed in the history exactly.
        stop: the provider's stop reason; may be "".
        ending: how it ended, read from the stop reason.
        reason: details of that ending in addition to the stop reason, for people; may be "".
        usage: None if the provider does not report it.
        retry: whether the same request is likely to be answered, because the model wrote nothing, or something that its
            provider could not read.
    """

    text: str = ""
    calls: tuple[ModelCall, ...] = ()
    reasoning: str = ""
    dialect: str = ""
    raw: tuple[Json, ...] = ()
    stop: str = ""
    ending: Ending = "complete"
    reason: str = ""
    usage: Usage | None = None
    retry: bool = False

    def __setstate__(self, state: Sequence[object]) -> None:
        _restore(self, state)

    def __post_init__(self) -> None:
        for name in ("text", "reasoning"):
            object.__setattr__(self, name, join_surrogates_in_json(getattr(self, name)))
        object.__setattr__(self, "raw", tuple(map(join_surrogates_in_json, self.raw)))

    @property
    def cut(self) -> bool:
        """Whether the answer was truncated because no more tokens were allowed."""
        return self.ending == "cut"


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer: ``text`` or ``reasoning``."""

    kind: Literal["text", "reasoning"]
    text: str


def text_of_kind(deltas: Iterable[Delta], kind: Literal["text", "reasoning"]) -> str:
    """Returns the whole text of one kind."""
    return "".join(delta.text for delta in deltas if delta.kind == kind)


class SurrogateJoiner:
    """Makes every piece of streamed text printable: a piece may end in the middle of a surrogate pair.

    The first half waits and becomes the start of the next piece of its kind.
    """

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}  # first halves that wait for the second, by kind

    def join(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Returns pieces without halves of surrogate pairs, and without empty pieces."""
        whole = ((delta, self._text(delta)) for delta in deltas)
        return [delta if delta.text == text else Delta(delta.kind, text) for delta, text in whole if text]

    def _text(self, delta: Delta) -> str:
        if delta.text.isascii() and not self._pending:
            return delta.text
        text = self._pending.pop(delta.kind, "") + delta.text
        if "\ud800" <= text[-1:] <= "\udbff":
            self._pending[delta.kind], text = text[-1], text[:-1]
        return join_surrogates(text)


@dataclass(frozen=True, slots=True)
class Message:
    """A message without calls, from ``system``, ``user`` or ``assistant``."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A call with its result."""

    call: ModelCall
    result: Result


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of the previous turn's calls, one for every call, in the order of the calls."""

    answered: tuple[Answered, ...]


HistoryItem: TypeAlias = Message | Turn | Answers | Mapping[str, Any]
"""One step of a conversation. A mapping is a message in the provider's own format and is passed through."""


def model_call(names: NameTable, call_id: str, wire_name: str, arguments_json: str, **extra: Any) -> ModelCall:
    """Returns a call with its name on the bus looked up, in texts that UTF-8 can carry."""
    call_id, wire_name, arguments_json = map(join_surrogates, (call_id, wire_name, arguments_json))
    name = names.to_bus.get(wire_name)
    return ModelCall(call_id, wire_name if name is None else name, arguments_json, name is not None, wire_name, extra)
