"""A conversation put in the order that providers insist on: each call with exactly one answer, right behind it.

Hosts keep histories that a provider would refuse: a turn whose calls were never answered since the user spoke first, an
answer whose turn was trimmed, two calls with one id because a server numbers them from zero in every turn. `steps`
mends that. What it makes depends only on what stands before it, so a history that grows keeps its beginning word for
word, and a provider's cache of it stays good.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from toolbus.dialects.names import NameRule, NameTable
from toolbus.dialects.shape import (
    Answered,
    Answers,
    Dialect,
    Export,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    Turn,
)
from toolbus.errors import Code, Stage
from toolbus.tool import CallError, Result

# Ids that every provider takes: OpenAI's chat allows 40 characters, Anthropic this alphabet.
_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}", re.ASCII)
_LONGEST_STEM = 34

LOST = Result(
    is_error=True,
    error=CallError(
        Code.CANCELLED,
        "no result of this call was kept, so it is not known whether it ran: ask for it again if it is still needed",
        Stage.UNKNOWN,
    ),
)


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """An answer that a history holds in the provider's own form.

    Attributes:
        call_id: which call it answers; "" where the provider has no ids, it is then the first one that is open.
        written: the form.
    """

    call_id: str
    written: Mapping[str, Any]


Answer: TypeAlias = Result | OwnAnswer


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of a model with the answers to its calls, in the order of the calls; no id occurs twice in a history."""

    turn: Turn
    answers: tuple[Answer, ...]


class _Draft:
    """A step whose answers are still being collected."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.answers: list[Answer | None] = [None] * len(turn.calls)  # by the place of the call; None: not yet

    def take(self, answer: Answer, fits: Callable[[ModelCall], bool]) -> bool:
        """Files an answer under the first call that fits and has none. Returns whether there was one."""
        for place, call in enumerate(self.turn.calls):
            if self.answers[place] is None and fits(call):
                self.answers[place] = answer
                return True
        return False


def steps(items: Iterable[HistoryItem | OwnAnswer], dialect: str) -> list[Message | Mapping[str, Any] | Step]:
    """Returns a conversation in which every call is followed by exactly one answer.

    An answer moves up to its call. An answer without a call gets the call written for it, a call without an answer gets
    `LOST`.

    Args:
        dialect: whose ids are kept as they are; those of others are made to fit.
    """
    written: list[Message | Mapping[str, Any] | _Draft] = []
    drafts: list[_Draft] = []  # newest first: where two turns have the same id, the newer one is meant
    for item in items:
        if isinstance(item, Turn):
            drafts.insert(0, _Draft(item))
            written.append(drafts[0])
        elif isinstance(item, Answers):
            orphans = [answered for answered in item.answered if not _filed(answered, drafts)]
            if orphans:
                draft = _Draft(Turn(calls=tuple(answered.call for answered in orphans)))
                draft.answers = [answered.result for answered in orphans]
                written.append(draft)
        elif isinstance(item, OwnAnswer):
            wanted = item.call_id
            if not any(draft.take(item, lambda call: wanted in ("", call.id)) for draft in drafts):  # noqa: B023
                written.append(item.written)
        else:
            written.append(item)
    ids = _Ids(dialect)
    return [ids.finished(entry) if isinstance(entry, _Draft) else entry for entry in written]


def _filed(answered: Answered, drafts: Sequence[_Draft]) -> bool:
    """Finds the open call of an answer: the very same call if there is one, else one of the same id."""
    return any(draft.take(answered.result, lambda call: call == answered.call) for draft in drafts) or any(
        draft.take(answered.result, lambda call: call.id == answered.call.id) for draft in drafts
    )


class _Ids:
    """Gives every call of a conversation an id of its own."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._seen: set[str] = set()

    def finished(self, draft: _Draft) -> Step:
        own = draft.turn.dialect == self._dialect
        calls = tuple(replace(call, id=self._unique(call.id, own)) for call in draft.turn.calls)
        return Step(replace(draft.turn, calls=calls), tuple(answer or LOST for answer in draft.answers))

    def _unique(self, call_id: str, own: bool) -> str:
        made = unique_id(call_id if own else fitting_id(call_id), self._seen)
        self._seen.add(made)
        return made


def fitting_id(call_id: str) -> str:
    """Returns an id that every provider takes: the given one, or always the same one for it."""
    if not call_id or _ID.fullmatch(call_id):
        return call_id
    return "call_" + hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def unique_id(call_id: str, taken: set[str]) -> str:
    """Returns an id that is not taken: the given one, or one that is made of it."""
    made, count = call_id or "call_0", 1
    while made in taken:
        made = f"{(call_id or 'call')[:_LONGEST_STEM]}_{count}"
        count += 1
    return made


def unique_calls(calls: Iterable[ModelCall]) -> tuple[ModelCall, ...]:
    """Returns the calls of one turn with an id each; a server may have given two the same."""
    taken: set[str] = set()
    made = []
    for call in calls:
        made.append(replace(call, id=unique_id(call.id, taken)))
        taken.add(made[-1].id)
    return tuple(made)


def wire_name(call: ModelCall, names: NameTable, rule: NameRule) -> str:
    """Returns a call's name as a provider will accept it, also where the tool is not offered any more.

    What a model invented is not looked up: a tool may be called like that on the bus, which this one did not mean.
    """
    if call.known and call.name in names.to_wire:
        return names.to_wire[call.name]
    name = call.name if call.known else call.wire_name or call.name
    return NameTable.build([name], rule).wire(name)


def arguments_text(arguments_json: str) -> str:
    """Returns arguments as the text of a JSON object, which servers insist on in a history; "{}" for what is none.

    That the model wrote something else is not hidden from it: the call's answer is the error that says so.
    """
    try:
        parsed = json.loads(arguments_json, parse_constant=_refused)
    except (ValueError, RecursionError):
        return "{}"
    return arguments_json if isinstance(parsed, dict) else "{}"


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def written_arguments(arguments: Any) -> str:
    """Returns arguments as text: servers send text, or the object itself, or nothing."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def declared(export: Export | None, dialect: str) -> list[Json]:
    """Returns the tools of an export for a request.

    Raises:
        ValueError: it is the export of another dialect.
    """
    if export is None:
        return []
    if export.dialect != dialect:
        raise ValueError(
            f"these tools were exported for {export.dialect!r}, the request is for {dialect!r}: "
            "export them with the dialect that writes the request"
        )
    return list(export.tools)


def names_of(export: Export | None, rule: NameRule) -> NameTable:
    """Returns the names of an export; without one, a table in which every name is unknown."""
    return NameTable.empty(rule) if export is None else export.names


class PairedDialect(Dialect):
    """A dialect in which each call is answered by a message of its own behind the model's."""

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        written: list[Json] = []
        for step in steps(self.read(list(items), names), self.name):
            if isinstance(step, Message):
                written.append(self.write_message(step))
            elif isinstance(step, Step):
                written += self._write_step(step, names)
            else:
                written.append(dict(step))
        return written

    def _write_step(self, step: Step, names: NameTable) -> list[Json]:
        turn = step.turn
        rebuilt = [wire_name(call, names, self.name_rule) for call in turn.calls]
        written = self.echo(turn) if turn.dialect == self.name and turn.raw else None
        if written is None:
            wires, written = rebuilt, self.rebuild(turn, rebuilt)
        else:
            wires = [call.wire_name or wire for call, wire in zip(turn.calls, rebuilt, strict=True)]
        for call, wire, answer in zip(turn.calls, wires, step.answers, strict=True):
            if isinstance(answer, OwnAnswer):
                written.append(self.renamed(answer, call.id))
            else:
                written.append(self.write_result(call.id, wire, answer))
        return written

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        return [
            self.write_result(
                item.call.id, item.call.wire_name or wire_name(item.call, names, self.name_rule), item.result
            )
            for item in answered
        ]

    @abstractmethod
    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | OwnAnswer]:
        """Returns a conversation in which calls and answers in the provider's own form are `Turn` and `OwnAnswer`."""

    @abstractmethod
    def write_message(self, message: Message) -> Json:
        """Returns what somebody said."""

    @abstractmethod
    def echo(self, turn: Turn) -> list[Json] | None:
        """Returns a turn of this dialect as it came, under the calls' ids; None where it holds other calls."""

    @abstractmethod
    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        """Returns a turn written from its text and calls, whose names on the wire are given."""

    @abstractmethod
    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        """Returns the answer to one call."""

    @abstractmethod
    def renamed(self, answer: OwnAnswer, call_id: str) -> Json:
        """Returns an answer in the provider's own form under the id that its call has now."""
