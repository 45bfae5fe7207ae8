"""Repairs conversations into the order that providers insist on: each call followed by exactly one result.

Hosts keep histories that a provider would refuse: a turn whose calls were never answered because the user spoke first,
a result whose turn was trimmed, two calls with one id because a server numbers them from zero in every turn.
`pair_calls` repairs that. Its output depends only on what stands before, so a history that grows keeps its beginning
unchanged, and the provider's prompt cache stays valid.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from toolbus.common.text import parse_json
from toolbus.errors import Code, Stage
from toolbus.parts.models.dialects.call_arguments import portable_id, short_id, unique_id
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.export import Export, ToolWriter
from toolbus.parts.models.dialects.wire_names import NameRule, NameTable
from toolbus.protocol.tool import CallError, Result

LOST_RESULT = Result(
    is_error=True,
    error=CallError(
        Code.CANCELLED,
        "the result of this call was not recorded, so it is unknown whether the call ran: "
        "call the tool again if you still need the result",
        Stage.UNKNOWN,
    ),
)


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """An answer to a call in a history, in the provider's own format.

    Attributes:
        call_id: which call it answers; "" if the provider has no ids: it then answers the first open call.
        message: the provider's message or item.
    """

    call_id: str
    message: Mapping[str, Any]


Answer: TypeAlias = Result | ProviderAnswer


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn with the answers to its calls, in the order of the calls; no id occurs twice in a history."""

    turn: Turn
    answers: tuple[Answer, ...]


class _OpenTurn:
    """A turn whose answers are still being collected."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.answers: list[Answer | None] = [None] * len(turn.calls)  # by the place of the call; None: not yet

    def take(self, answer: Answer, matches: Callable[[ModelCall], bool]) -> bool:
        """Assigns an answer to the first open call that matches. Returns whether there was one."""
        for place, call in enumerate(self.turn.calls):
            if self.answers[place] is None and matches(call):
                self.answers[place] = answer
                return True
        return False


def pair_calls(
    items: Iterable[HistoryItem | ProviderAnswer], dialect: str, *, short_ids: bool = False
) -> list[Message | Mapping[str, Any] | AnsweredTurn]:
    """Returns a conversation in which every call is followed by exactly one answer.

    An answer moves up to its call. An answer without a call gets a call generated for it, a call without an answer gets
    `LOST_RESULT`.

    Args:
        dialect: turns of this dialect keep their ids; ids of other dialects are made portable.
        short_ids: whether all ids have nine letters and digits, those of this dialect too.
    """
    entries: list[Message | Mapping[str, Any] | _OpenTurn] = []
    turns: list[_OpenTurn] = []  # newest first: if two turns have the same id, the newer one is answered
    for item in items:
        if isinstance(item, Turn):
            turns.insert(0, _OpenTurn(item))
            entries.append(turns[0])
        elif isinstance(item, Answers):
            orphans = [answered for answered in item.answered if not _assign(answered, turns)]
            if orphans:
                turn = _OpenTurn(Turn(calls=tuple(answered.call for answered in orphans)))
                turn.answers = [answered.result for answered in orphans]
                entries.append(turn)
        elif isinstance(item, ProviderAnswer):
            call_id = item.call_id
            if not any(turn.take(item, lambda call: call_id in ("", call.id)) for turn in turns):  # noqa: B023
                entries.append(item.message)
        else:
            entries.append(item)
    taken: set[str] = set()  # ids of calls: each gets one that no other call has

    def closed(entry: _OpenTurn) -> AnsweredTurn:
        calls = []
        for call in entry.turn.calls:
            wanted = call.id if short_ids or entry.turn.dialect == dialect else portable_id(call.id)
            calls.append(replace(call, id=(short_id if short_ids else unique_id)(wanted, taken)))
            taken.add(calls[-1].id)
        turn = replace(entry.turn, calls=tuple(calls))
        return AnsweredTurn(turn, tuple(answer or LOST_RESULT for answer in entry.answers))

    return [closed(entry) if isinstance(entry, _OpenTurn) else entry for entry in entries]


def _assign(answered: Answered, turns: Sequence[_OpenTurn]) -> bool:
    """Assigns a result to its open call: the identical call if there is one, else a call with the same id."""
    return any(turn.take(answered.result, lambda call: call == answered.call) for turn in turns) or any(
        turn.take(answered.result, lambda call: call.id == answered.call.id) for turn in turns
    )


def call_wire_name(call: ModelCall, names: NameTable, rule: NameRule) -> str:
    """Returns a call's name as a provider accepts it, also if the tool is no longer offered.

    A name that the model invented is not looked up: it may be the name of a tool on the bus that the model did not
    mean.
    """
    if call.known and call.name in names.to_wire:
        return names.to_wire[call.name]
    name = call.name if call.known else call.wire_name or call.name
    return NameTable.build([name], rule).wire(name)


def valid_arguments_text(arguments_json: str) -> str:
    """Returns arguments as the text of a JSON object, which servers require in a history; "{}" for anything else.

    The model still learns that it wrote something else: the call's result is the error that says so.
    """
    try:
        arguments = parse_json(arguments_json)
    except (ValueError, RecursionError):
        return "{}"
    return arguments_json if isinstance(arguments, dict) else "{}"


def arguments_text(arguments: Any) -> str:
    """Returns arguments as text: servers send text, or the object itself, or nothing."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def offered(export: Export | None, dialect: ToolWriter) -> tuple[list[Json], NameTable]:
    """Returns the declarations of an export for a request, and their names; without one, every name is unknown.

    Raises:
        ValueError: it is the export of another dialect.
    """
    if export is None:
        return [], NameTable.empty(dialect.name_rule)
    if export.dialect != dialect.name:
        raise ValueError(
            f"these tools were exported for {export.dialect!r}, the request is for {dialect.name!r}: "
            "export them with the dialect that writes the request"
        )
    return list(export.tools), export.names


class PairedDialect(Dialect):
    """A dialect in which a separate message after the model's answers each call.

    Attributes:
        short_ids: see `pair_calls`.
    """

    short_ids = False

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        messages: list[Json] = []
        for step in pair_calls(self.read(list(items), names), self.name, short_ids=self.short_ids):
            if isinstance(step, Message):
                messages.append(self.write_message(step))
            elif isinstance(step, AnsweredTurn):
                messages += self._write_turn(step, names)
            else:
                messages.append(dict(step))
        return messages

    def _write_turn(self, step: AnsweredTurn, names: NameTable) -> list[Json]:
        turn = step.turn
        current_names = [call_wire_name(call, names, self.name_rule) for call in turn.calls]
        messages = self.echo(turn) if turn.dialect == self.name and turn.raw else None
        if messages is None:
            wires, messages = current_names, self.rebuild(turn, current_names)
        else:
            wires = [call.wire_name or wire for call, wire in zip(turn.calls, current_names, strict=True)]
        named_results: list[tuple[str, Result]] = []
        for call, wire, answer in zip(turn.calls, wires, step.answers, strict=True):
            if isinstance(answer, ProviderAnswer):
                messages.append(self.with_call_id(answer, call.id))
            else:
                messages.append(self.write_result(call.id, wire, answer))
                named_results.append((wire, answer))
        return messages + self.write_images(named_results)

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        named = [(each.call.wire_name or call_wire_name(each.call, names, self.name_rule), each) for each in answered]
        messages = [self.write_result(each.call.id, wire, each.result) for wire, each in named]
        return messages + self.write_images([(wire, each.result) for wire, each in named])

    def write_images(self, named_results: Sequence[tuple[str, Result]]) -> list[Json]:
        """Returns messages with the images of results, if they cannot be in the answers to the calls.

        Args:
            named_results: each result with the name of its tool on the wire.
        """
        return []

    @abstractmethod
    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        """Returns a conversation in which the provider's own calls and answers are `Turn` and `ProviderAnswer`."""

    @abstractmethod
    def write_message(self, message: Message) -> Json:
        """Returns a message without calls."""

    @abstractmethod
    def echo(self, turn: Turn) -> list[Json] | None:
        """Returns a turn of this dialect unchanged but for the calls' current ids; None if its calls differ."""

    @abstractmethod
    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        """Returns a turn rebuilt from its text and calls.

        Args:
            wires: the calls' names on the wire.
        """

    @abstractmethod
    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        """Returns the answer to one call."""

    @abstractmethod
    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        """Returns an answer in the provider's own format under the current id of its call."""


# The user's message before a conversation that the model begins (a greeting, or a history that was cut): such providers
# require the first message to be the user's, with some text.
OPENING = "."


def alternating(messages: Iterable[Json], key: str, parts_of: Callable[[Any], list[Json]], opening: Json) -> list[Json]:
    """Returns messages with neighbors of one role joined, without empty messages.

    Args:
        key: the key of a message's parts.
        parts_of: returns the value of that key as parts, without those that the provider refuses.
        opening: the first message if the conversation does not begin with the user.
    """
    joined: list[Json] = []
    for message in messages:
        parts = parts_of(message.get(key))
        if not parts:
            continue
        if joined and joined[-1].get("role") == message.get("role"):
            joined[-1] = {**joined[-1], key: parts_of([*parts_of(joined[-1].get(key)), *parts])}
        else:
            joined.append(message if isinstance(message.get(key), str) else {**message, key: parts})
    if joined and joined[0].get("role") in ("assistant", "model"):
        joined.insert(0, opening)
    return joined


def system_text(items: Iterable[HistoryItem]) -> str:
    """Returns the text of all system messages of a conversation; may be ""."""
    texts = (item.text for item in items if isinstance(item, Message) and item.role == "system")
    return "\n\n".join(text for text in texts if text.strip())
