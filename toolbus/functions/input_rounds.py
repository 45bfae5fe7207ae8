"""Answers the questions of a tool: passes them to the program's ``on_input``, and makes the same call again.

Each round is a call of its own, with its own timeout. `answered` is for programs on asyncio, `answered_sync` for those
that block.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_context import Inputs
from toolbus.protocol.questions import (
    CANCELLED,
    ELICITATION,
    NEEDS_INPUT,
    Answer,
    Question,
    explain_questions,
    read_questions,
)
from toolbus.protocol.tool import CallError, Result

MAX_ROUNDS = 10  # a function that asks a new question in every run would never end

Given = Answer | Mapping[str, Any] | None
OnInput = Callable[[Question], Given | Awaitable[Given]]
"""Answers a question: an `Answer`, the fields of a form (accepted) or another method's result; None is no answer."""
OnInputSync = Callable[[Question], Given]


async def answered(
    call: Callable[..., Awaitable[Result]],
    name: str,
    arguments_json: str,
    on_input: OnInput,
    inputs: Inputs | None,
    **options: Any,
) -> Result:
    """Makes a call, answers the questions of its tool, and makes it again until the tool has its result.

    Args:
        call: makes the call; gets the name, the arguments, ``inputs`` as a keyword and the options.
        inputs: of the first call; None accepts forms.
    """
    inputs = inputs or Inputs()
    for _ in range(MAX_ROUNDS):
        result = await call(name, arguments_json, inputs=inputs, **options)
        if not result.asks:
            return result
        answers = {}
        for question in read_questions(result.input_requests_json):
            given = on_input(question)
            answers[question.key] = _answer(question, await given if inspect.isawaitable(given) else given)
        if None in answers.values():
            return _unanswered(name, result)
        inputs = Inputs(inputs.accepts, answers, result.request_state)
    return _too_many_rounds(name)


def answered_sync(
    call: Callable[..., Result],
    name: str,
    arguments_json: str,
    on_input: OnInputSync,
    inputs: Inputs | None,
    **options: Any,
) -> Result:
    """Does what `answered` does, and blocks the thread."""
    inputs = inputs or Inputs()
    for _ in range(MAX_ROUNDS):
        result = call(name, arguments_json, inputs=inputs, **options)
        if not result.asks:
            return result
        questions = read_questions(result.input_requests_json)
        answers = {question.key: _answer(question, on_input(question)) for question in questions}
        if None in answers.values():
            return _unanswered(name, result)
        inputs = Inputs(inputs.accepts, answers, result.request_state)
    return _too_many_rounds(name)


def _answer(question: Question, given: Given) -> Mapping[str, Any] | None:
    """Returns an answer in the form of the call; None without one."""
    if question.method != ELICITATION:
        return given.to_json() if isinstance(given, Answer) else given
    if given is None:
        given = CANCELLED
    return (given if isinstance(given, Answer) else Answer(content=given)).to_json()


def _unanswered(name: str, result: Result) -> Result:
    text = explain_questions(f"tool {name!r}", result.input_requests_json)
    return _failure(result.call_id, text)


def _too_many_rounds(name: str) -> Result:
    text = (
        f"tool {name!r} asked for input {MAX_ROUNDS} times in a row, which is the limit: its author should ask all "
        "questions at once, and the same question always in the same words (or with a key)"
    )
    return _failure("", text)


def _failure(call_id: str, text: str) -> Result:
    return Result(call_id, is_error=True, error=CallError(Code.TOOL, text, Stage.ACCEPTED, reason=NEEDS_INPUT))
