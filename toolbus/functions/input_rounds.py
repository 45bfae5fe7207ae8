"""Answers the questions of tools for a program that calls them: asks it, and makes the same call again.

Each round is a call of its own, with its own timeout. `answered` is for programs on asyncio, `answered_sync` for those
that block.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_options import Inputs
from toolbus.questions import CANCELLED, ELICITATION, NEEDS_INPUT, Answer, Question, explain_questions, read_questions
from toolbus.tool import CallError, Result

MAX_ROUNDS = 10  # a function that asks something new at every run would ask for ever

Given = Answer | Mapping[str, Any] | None
OnInput = Callable[[Question], Given | Awaitable[Given]]
"""Answers a question: an `Answer`, the fields of a form (accepted) or what else the method returns; None: no answer."""
OnInputSync = Callable[[Question], Given]


async def answered(
    call: Callable[..., Awaitable[Result]],
    name: str,
    arguments_json: str,
    on_input: OnInput,
    inputs: Inputs | None,
    **options: Any,
) -> Result:
    """Makes a call, answers what its tool asks, and makes it again until it is done.

    Args:
        call: makes the call; gets the name, the arguments, ``inputs`` as a keyword and the options.
        inputs: what the first call says; None accepts forms.
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
    return _asks_for_ever(name)


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
    return _asks_for_ever(name)


def _answer(question: Question, given: Given) -> Mapping[str, Any] | None:
    """Returns an answer as the call carries it; None where there is none."""
    if question.method != ELICITATION:
        return given.to_json() if isinstance(given, Answer) else given
    if given is None:
        given = CANCELLED
    return (given if isinstance(given, Answer) else Answer(content=given)).to_json()


def _unanswered(name: str, result: Result) -> Result:
    text = explain_questions(f"tool {name!r}", result.input_requests_json)
    return _failure(result.call_id, text)


def _asks_for_ever(name: str) -> Result:
    text = (
        f"tool {name!r} asked for input {MAX_ROUNDS} times in a row, which is as often as it gets answers: its author "
        "has it ask the same question in the same words (or with a key), and all that it needs at once"
    )
    return _failure("", text)


def _failure(call_id: str, text: str) -> Result:
    return Result(call_id, is_error=True, error=CallError(Code.TOOL, text, Stage.ACCEPTED, reason=NEEDS_INPUT))
