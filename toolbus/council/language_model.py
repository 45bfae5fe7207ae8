"""Asks a language model one question and returns its completion. Nothing here reaches a network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolbus.cancellation import is_being_cancelled
from toolbus.council.council_limits import ANSWER_TOKENS, TEMPERATURE, TOP_P
from toolbus.text import join_surrogates

# The thoughts before an answer, if the server does not separate them; some models omit the opening tag.
_THOUGHT = re.compile(r".*?</think(?:ing)?>|\s*<think(?:ing)?>.*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model.

    Attributes:
        messages: the conversation, oldest first, each with `role` (system, user, assistant) and `content`, a text.
        function: the function that the model must call, with `name`, `description` and `parameters`; None for an
            answer in text.
        temperature, top_p: as providers define them.
        max_tokens: of the answer.
        model: by the provider's name; "" means the default of the `LanguageModel`.
        defaults: which of `temperature`, `top_p` and `max_tokens` are defaults: a model with its own options uses those
            instead.
    """

    messages: Sequence[Mapping[str, str]]
    function: Mapping[str, Any] | None = None
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    max_tokens: int = ANSWER_TOKENS
    model: str = ""
    defaults: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer of a model.

    Attributes:
        text: "" if the model only called the function.
        arguments: of the call, a mapping or JSON text; None if the model did not call the function.
    """

    text: str = ""
    arguments: Mapping[str, Any] | str | None = None


class LanguageModel(Protocol):
    """Any async callable that answers a question; an exception fails only the tool that asked."""

    def __call__(self, question: Question, /) -> Awaitable[Completion | str]: ...


async def ask(model: LanguageModel, question: Question) -> Completion:
    """Asks a model and returns its completion.

    Raises:
        CancelledError: this task is being cancelled, even if the model suppressed that, so that it gets no further
            question. Apart from that, a model may raise anything.
    """
    try:
        return completion_of(await model(question))
    finally:
        if is_being_cancelled():
            raise asyncio.CancelledError


def completion_of(answer: object) -> Completion:
    """Returns an answer as a completion, without the model's thoughts.

    Raises:
        TypeError: it is neither a completion nor text.
    """
    if isinstance(answer, str):
        answer = Completion(answer)
    if not isinstance(answer, Completion):
        raise TypeError(f"a model answered with a {type(answer).__name__}: it must return a Completion or text")
    text = str(answer.text or "")  # programs pass on the provider's text, which may be null
    thought = _THOUGHT.match(text)
    return Completion(join_surrogates(text[thought.end() :] if thought else text).strip(), answer.arguments)
