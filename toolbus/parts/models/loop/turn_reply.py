"""Defines the outcome of a turn: the reply, its calls, and the conversation to continue with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from toolbus.errors import Code, InvalidRequest, Stage
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall, Turn, Usage
from toolbus.parts.models.dialects.provider_results import answer_text
from toolbus.parts.models.loop.result_cut import with_edit
from toolbus.protocol.tool import CallError, Result

Messages: TypeAlias = str | Sequence[HistoryItem]

Stopped: TypeAlias = Literal[
    "answered", "direct_reply", "round_limit", "no_convergence", "no_summary", "cut", "refused", "failed", "paused"
]
"""Why a turn ended: the model answered; a tool's result is the reply; the model answered in the forced answer after the
last round; it requested tools even then; its answer was empty after it had used tools. An incomplete answer has its
`Ending` instead."""


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call of the turn that has ended.

    Attributes:
        call: the model's request.
        result: its result.
        round: in which round; 0 for a call that a rule made before the first request to the model.
        order: its place among the calls of the round, from 0.
        started, ended: seconds since the epoch; the time that an approval took is between them.
        edited_json: the arguments that it ran with, if the program's approval changed them; else "".
    """

    call: ModelCall
    result: Result
    round: int
    order: int
    started: float
    ended: float
    edited_json: str = ""

    @property
    def answered(self) -> Answered:
        """The call and its result for the conversation, with a note for the model if its arguments were changed."""
        return Answered(self.call, with_edit(self.result, self.edited_json) if self.edited_json else self.result)

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
    """The outcome of a turn.

    Attributes:
        text: the reply to the user.
        items: the conversation with all items of this turn; append the user's next message to continue.
        calls: every call of the turn, in order.
        rounds: the number of requests to the model.
        stopped: why the turn ended.
        cut: whether the token limit truncated the model's last answer: its text, or its last call, is incomplete.
        reason: why the turn was refused, failed, cut or paused: the provider's stop reason and its details; "" after
            any other end.
        usage: the tokens of all requests of the turn; None if the provider does not report them.
        output: the answer as a value of the `output_type` of the turn; None without one.
    """

    text: str
    items: tuple[HistoryItem, ...]
    calls: tuple[CallDone, ...]
    rounds: int
    stopped: Stopped
    cut: bool = False
    reason: str = ""
    usage: Usage | None = None
    output: Any = None


def conversation(messages: Messages) -> list[HistoryItem]:
    """Returns a program's messages as a conversation: a text is a user's message.

    Raises:
        InvalidRequest: it is empty, or holds something that is not a message.
    """
    if isinstance(messages, str):
        return [Message("user", messages)]
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"a {type(messages).__name__} is not a conversation: give a text, or a list of messages, "
            '[{"role": "user", "content": …}]'
        )
    items = [_item(message) for message in messages]
    if not items:
        raise InvalidRequest("the conversation is empty: give at least the user's message")
    return items


def _item(message: Any) -> HistoryItem:
    if isinstance(message, Message | Turn | Answers):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"a {type(message).__name__} is not a message of a conversation: give a text, "
            '{"role": …, "content": …}, or the items of a reply'
        )
    role, content = message.get("role"), message.get("content")
    is_text = isinstance(content, str) and message.keys() == {"role", "content"}
    if is_text and (role == "system" or role == "user" or role == "assistant"):
        return Message(role, str(content))
    return message


def user_text(item: HistoryItem) -> str:
    """Returns the text of a user's message; "" for any other item."""
    if isinstance(item, Message):
        return item.text if item.role == "user" else ""
    if isinstance(item, Mapping) and item.get("role") == "user" and isinstance(item.get("content"), str):
        return str(item["content"])
    return ""


def without_calls(items: Iterable[HistoryItem]) -> list[HistoryItem]:
    """Returns a conversation for a model that takes no tools: results become text.

    User and assistant still alternate in it, which the templates of such models often require.
    """
    rewritten: list[HistoryItem] = []
    for item in items:
        if isinstance(item, Turn):
            item = Message("assistant", item.text)
        elif isinstance(item, Answers):
            lines = (f"[{each.call.name} returned: {answer_text(each.result)}]" for each in item.answered)
            item = Message("user", "\n".join(lines))
        previous = rewritten[-1] if rewritten else None
        if not isinstance(item, Message):
            rewritten.append(item)
        elif isinstance(previous, Message) and previous.role == item.role:
            rewritten[-1] = Message(item.role, f"{previous.text}\n\n{item.text}")
        elif item.text:
            rewritten.append(item)
    return rewritten


def refusal(code: Code, text: str, stage: Stage = Stage.NOT_DISPATCHED) -> Result:
    """Returns the result of a call that was not made; with another stage, of one that may have been."""
    return Result(is_error=True, error=CallError(code, text, stage))
