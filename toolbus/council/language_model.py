"""What a council asks of a language model: one question, one answer. Nothing here reaches a network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolbus.council.cancellation import being_cancelled
from toolbus.text import join_surrogates

# What thinking models write before their answer where the server does not set it apart; some leave out how it begins.
_THOUGHT = re.compile(r".*?</think(?:ing)?>|\s*<think(?:ing)?>.*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model.

    Attributes:
        messages: the conversation, oldest first, each with `role` (system, user, assistant) and `content`, a text.
        function: the function that the model has to call, with `name`, `description` and `parameters`; None where it
            is to answer in words.
        temperature, top_p: as providers understand them.
        max_tokens: of the answer.
        model: which one, by the provider's name; "" leaves it to whoever asks.
    """

    messages: Sequence[Mapping[str, str]]
    function: Mapping[str, Any] | None = None
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 1024
    model: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model answered.

    Attributes:
        text: its words; "" where it only called.
        arguments: of the function that it called, a mapping or JSON text; None where it called none.
    """

    text: str = ""
    arguments: Mapping[str, Any] | str | None = None


class LanguageModel(Protocol):
    """Any async callable that answers a question; whatever it raises fails the one tool that asked."""

    def __call__(self, question: Question, /) -> Awaitable[Completion | str]: ...


async def asked(model: LanguageModel, question: Question) -> Completion:
    """Asks a model, and returns what it answered.

    Raises:
        CancelledError: this task is being cancelled, also where the model kept that to itself: it is not to be asked
            again. Besides, a model may raise anything.
    """
    try:
        return completed(await model(question))
    finally:
        if being_cancelled():
            raise asyncio.CancelledError


def completed(answer: object) -> Completion:
    """Returns an answer as a record, its words without what the model thought aloud.

    Raises:
        TypeError: it is neither a completion nor a text.
    """
    if isinstance(answer, str):
        answer = Completion(answer)
    if not isinstance(answer, Completion):
        raise TypeError(f"a model answered with a {type(answer).__name__}: it has to return a Completion or a text")
    text = str(answer.text or "")  # programs hand on what a provider said, which may be null
    thought = _THOUGHT.match(text)
    return Completion(join_surrogates(text[thought.end() :] if thought else text).strip(), answer.arguments)
