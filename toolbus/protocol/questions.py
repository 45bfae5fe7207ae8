"""Reads the questions that a tool asks in the middle of a call: what a caller must accept for them, and their text.

A tool that needs an answer ends its call with questions (`ToolResult.input_requests_json`), and the caller makes the
same call again with the answers. Questions are written as the Model Context Protocol has them since 2026-07-28: an
object with `method` and `params` for each key. Nothing here knows calls or connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolbus.common.text import clean_line, parse_json, quote, shorten
from toolbus.protocol.limits import Limits

ELICITATION = "elicitation/create"
SAMPLING = "sampling/createMessage"
ROOTS = "roots/list"
FORM, URL = "elicitation.form", "elicitation.url"
ACCEPTED_BY = {SAMPLING: "sampling", ROOTS: "roots"}
"""The words of ToolCall.accepts, by the method of a question; elicitation has two modes."""
ACCEPTS = (FORM, URL, *ACCEPTED_BY.values())
"""All words of ToolCall.accepts; later versions may add some."""
NEEDS_INPUT = "needs_input"  # `CallError.reason` of calls whose questions the caller could not answer

INPUT_REQUIRED = -1  # in the place of an error code: how a call ended that has questions, for records
INPUT_REQUIRED_OUTCOME = "INPUT_REQUIRED"

MAX_NEEDS, MAX_NEED = 16, 64  # words of what a call accepts or a tool needs, and characters of each
_MAX_KEY = 128  # characters of the key of a question
_SHOWN = 300  # characters of one question in an error text
_NO_OBJECT: Mapping[str, Any] = {}
ACTIONS = ("accept", "decline", "cancel")
_TYPES: Mapping[str, tuple[type, ...]] = {  # of a form's fields
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
}


class QuestionFault(ValueError):
    """The questions of a tool break a rule; the text names it.

    Attributes:
        limit: the name and the value of the limit that was hit; None where it is another rule.
    """

    def __init__(self, text: str, limit: tuple[str, float] | None = None) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a tool.

    Attributes:
        key: its name among the questions of its result.
        method: `ELICITATION` for a person, `SAMPLING` for a model, `ROOTS` for folders, or another.
        params: the parameters of the method.
    """

    key: str
    method: str
    params: Mapping[str, Any]

    @property
    def needs(self) -> str:
        """The word that a caller must accept for this question."""
        if self.method == ELICITATION:
            return URL if self.params.get("mode") == "url" else FORM
        return ACCEPTED_BY.get(self.method, self.method)

    @property
    def message(self) -> str:
        """The text for a person; "" where the question is not for one."""
        message = self.params.get("message")
        return message if isinstance(message, str) else ""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON Schema of the form that a person fills in; empty without a form."""
        schema = self.params.get("requestedSchema")
        return schema if isinstance(schema, Mapping) else _NO_OBJECT

    @property
    def url(self) -> str:
        """The address that a person is to open; "" without one."""
        url = self.params.get("url")
        return url if isinstance(url, str) else ""

    def __str__(self) -> str:
        """Returns the question as a model or a person can read it."""
        if self.method == ELICITATION:
            fields = ", ".join(_described(name, field) for name, field in _fields(self.schema))
            text = (
                quote(self.message, _SHOWN) + (f" ({fields})" if fields else "") + (f" {self.url}" if self.url else "")
            )
        elif self.method == SAMPLING:
            text = "an answer of a language model"
        elif self.method == ROOTS:
            text = "the folders that the user works in"
        else:
            text = quote(self.method)
        return shorten(clean_line(text), _SHOWN)

    def to_json(self) -> dict[str, Any]:
        """Returns the question without its key, as a result has it."""
        return {"method": self.method, "params": dict(self.params)}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a person.

    Attributes:
        action: `accept`, `decline` (said no) or `cancel` (made no choice).
        content: the fields of the form that was filled in; empty where it was not accepted, and for URLs.
    """

    action: str = "accept"
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the person agreed."""
        return self.action == "accept"

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as a call carries it."""
        return {"action": self.action, "content": dict(self.content)} if self.accepted else {"action": self.action}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """Reads an answer in which `fault_of_answer` finds no fault."""
        return cls(value["action"], value.get("content") or {})


DECLINED, CANCELLED = Answer("decline"), Answer("cancel")


def fault_of_answer(question: Question, answer: object) -> str:
    """Returns what is wrong with an answer; "" where it fits the question."""
    if not isinstance(answer, Mapping):
        return "it is not an object"
    if question.method != ELICITATION:
        return ""
    if answer.get("action") not in ACTIONS:
        return f"its action is not one of {', '.join(ACTIONS)}"
    if answer["action"] != "accept" or question.needs == URL:
        return ""
    content = answer.get("content") or {}
    if not isinstance(content, Mapping):
        return "its content is not an object"
    required = question.schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and content.get(name) is None:
            return f"field {quote(name)} is missing"
    for name, form in _fields(question.schema):
        value, types, choices = content.get(name), _TYPES.get(str(form.get("type"))), form.get("enum")
        if value is None:
            continue
        if types is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            return f"field {quote(name)} is not of the type {form['type']}"
        if isinstance(choices, list) and value not in choices:
            return f"field {quote(name)} is not one of {', '.join(map(str, choices))}"
    return ""


def read_questions(text: str, limits: Limits = Limits()) -> tuple[Question, ...]:  # noqa: B008  # frozen
    """Reads the questions of a result.

    Raises:
        QuestionFault: they break a rule or a limit.
    """
    size = len(text) if text.isascii() else len(text.encode())
    if size > limits.input_requests_bytes:
        limit = limits.input_requests_bytes
        raise QuestionFault(
            f"its questions have {size} bytes, more than the limit input_requests_bytes = {limit}: ask less at once",
            ("input_requests_bytes", limit),
        )
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as problem:
        raise QuestionFault(f"input_requests_json is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise QuestionFault("input_requests_json must be a JSON object: a key for each question")
    if len(value) > limits.input_requests:
        limit = limits.input_requests
        raise QuestionFault(
            f"it asks {len(value)} questions, more than the limit input_requests = {limit}: ask fewer at once",
            ("input_requests", limit),
        )
    return tuple(_question(key, each) for key, each in value.items())


def read_answers(text: str) -> dict[str, Any]:
    """Reads the answers to questions, by key.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        value = parse_json(text) if text else {}
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("input_responses_json must be a JSON object: the answer to each question under its key")
    return value


def explain_questions(name: str, text: str) -> str:
    """Returns the questions of a result as the error text of a call whose questions have no answers."""
    try:
        questions = read_questions(text)
    except QuestionFault as fault:
        return f"{name} needs input before it can go on, and its questions cannot be read: {fault}"
    return f"{name} needs input before it can go on: {'; '.join(map(str, questions))}. No answer was given"


def unaccepted(needs: Iterable[str], accepts: Sequence[str]) -> tuple[str, ...]:
    """Returns the needs that are not accepted, each word once."""
    return tuple(dict.fromkeys(need for need in needs if need not in accepts))


def explain_unaccepted(name: str, questions: Iterable[Question], missing: Sequence[str]) -> str:
    """Returns the error text of a call whose caller does not accept the questions, for a model or its host."""
    texts = "; ".join(map(str, questions))
    return (
        f"tool {name!r} needs input before it can go on: {texts}. This caller cannot be asked. Find out the answer and "
        f"call again with it in the arguments if they have a place for it; a program that can answer says so in the "
        f"call (accepts {', '.join(missing)}; Host.call takes on_input)"
    )


def explain_needs(name: str, missing: Sequence[str]) -> str:
    """Returns the error text of a call whose caller does not accept what the tool is declared to need."""
    return (
        f"tool {name!r} needs input during its calls, and this caller does not accept {', '.join(missing)}: use "
        "another tool, or call from a program that answers and says so in the call (ToolCall.accepts; Host.call takes "
        "on_input)"
    )


def words(given: Iterable[str]) -> tuple[str, ...]:
    """Returns the first of the words that a call accepts, without those that are too long."""
    return tuple(word for word, _ in zip(given, range(MAX_NEEDS), strict=False) if 0 < len(word) <= MAX_NEED)


def _question(key: str, value: Any) -> Question:
    if not 0 < len(key) <= _MAX_KEY:
        raise QuestionFault(f"a question has the key {quote(key)}: give it 1 to {_MAX_KEY} characters")
    method = value.get("method") if isinstance(value, dict) else None
    params = value.get("params", {}) if isinstance(value, dict) else None
    if not isinstance(method, str) or not method or not isinstance(params, dict):
        raise QuestionFault(
            f"question {quote(key)} must be an object with the text method ({ELICITATION}, {SAMPLING}, {ROOTS}) and "
            "the object params"
        )
    return Question(key, method, params)


def _fields(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    return [(name, field) for name, field in properties.items() if isinstance(field, dict)]


def _described(name: str, field: Mapping[str, Any]) -> str:
    kind, choices = field.get("type"), field.get("enum")
    text = f"{name}: {kind}" if isinstance(kind, str) else name
    return f"{text}, one of {', '.join(map(str, choices))}" if isinstance(choices, list) else text
