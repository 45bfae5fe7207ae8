"""What comes out of a turn: the reply, the calls that led to it, and the conversation to go on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from toolbus.dialects.conversation import Answers, HistoryItem, Message, ModelCall, Turn
from toolbus.dialects.result_text import text_of
from toolbus.errors import Code, InvalidRequest, Stage
from toolbus.tool import CallError, Result

Messages: TypeAlias = str | Sequence[HistoryItem]

Stopped: TypeAlias = Literal["answered", "direct_reply", "round_limit", "no_convergence", "no_summary"]
"""Why a turn ended: the model answered; a tool's own words are the reply; the model answered when it was told to, after
the last round; it wanted tools even then; it said nothing after it had used tools."""


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call of the turn, as it ended.

    Attributes:
        call: what the model asked for.
        result: how it ended.
        round: in which round; 0 for a call that a rule made before the model was asked.
        order: its place among the calls of the round, from 0.
        started, ended: seconds since the epoch.
    """

    call: ModelCall
    result: Result
    round: int
    order: int
    started: float
    ended: float

    @property
    def name(self) -> str:
        """The tool's name on the bus."""
        return self.call.name

    @property
    def outcome(self) -> str:
        """`ok`, or the code of the error in lower case: `tool`, `not_found`, `repeated` …."""
        if self.result.error is not None:
            return self.result.error.code.name.lower()
        return "tool" if self.result.is_error else "ok"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a turn came to.

    Attributes:
        text: what the user is to read.
        items: the conversation, with everything that came in this turn; append the user's next words to go on.
        calls: every call of the turn, in order.
        rounds: how often the model was asked.
        stopped: why the turn ended.
        cut: whether the model's last answer ended because no more tokens were allowed: its words, or the call that it
            was about to make, are not all there.
    """

    text: str
    items: tuple[HistoryItem, ...]
    calls: tuple[CallDone, ...]
    rounds: int
    stopped: Stopped
    cut: bool = False


def conversation(messages: Messages) -> list[HistoryItem]:
    """Returns what a program hands in as a conversation: a text is what a user says.

    Raises:
        InvalidRequest: there is nothing in it, or something that is no step of a conversation.
    """
    if isinstance(messages, str):
        return [Message("user", messages)]
    items = [_item(message) for message in messages]
    if not items:
        raise InvalidRequest("the conversation is empty: give at least what the user says")
    return items


def _item(message: Any) -> HistoryItem:
    if isinstance(message, Message | Turn | Answers):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"a {type(message).__name__} is no step of a conversation: give a text, "
            '{"role": …, "content": …}, or the items of a reply'
        )
    role, content = message.get("role"), message.get("content")
    said = isinstance(content, str) and message.keys() == {"role", "content"}
    if said and (role == "system" or role == "user" or role == "assistant"):
        return Message(role, str(content))
    return message


def last_words(items: Sequence[HistoryItem]) -> str:
    """Returns what the user said last; "" where it was not the user who spoke last, or in no words."""
    last = items[-1]
    if isinstance(last, Message):
        return last.text if last.role == "user" else ""
    if isinstance(last, Mapping) and last.get("role") == "user" and isinstance(last.get("content"), str):
        return str(last["content"])
    return ""


def without_calls(items: Iterable[HistoryItem]) -> list[HistoryItem]:
    """Returns a conversation for a model that takes no tools: what they returned is told in words.

    Users and assistants keep taking turns in it, which the templates of such models often insist on.
    """
    told: list[HistoryItem] = []
    for item in items:
        if isinstance(item, Turn):
            item = Message("assistant", item.text)
        elif isinstance(item, Answers):
            lines = (f"[{each.call.name} returned: {text_of(each.result)}]" for each in item.answered)
            item = Message("user", "\n".join(lines))
        before = told[-1] if told else None
        if not isinstance(item, Message):
            told.append(item)
        elif isinstance(before, Message) and before.role == item.role:
            told[-1] = Message(item.role, f"{before.text}\n\n{item.text}")
        elif item.text:
            told.append(item)
    return told


def refused(code: Code, sentence: str) -> Result:
    """Returns the answer to a call that was not made."""
    return Result(is_error=True, error=CallError(code, sentence, Stage.NOT_DISPATCHED))
