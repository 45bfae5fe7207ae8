"""Asks a language model one question and returns its completion. Nothing here reaches a network."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.text import join_surrogates
from toolbus.parts.council.settings import ANSWER_TOKENS, TEMPERATURE, TOP_P
from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.loop.tool_refusal import STATUSES, refuses_tools, status_of, text_of_error

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


# Sets temperature, top_p, length and the forced function in a provider's request, without options that it refuses.
#
# Models differ in what they accept even behind one API: reasoning models refuse a temperature, older servers a forced
# function. A refused option is left out from then on; the question can be answered without it.

# Dialect → option → its place in a request. Anthropic's models refuse temperature and top_p together, and the
# newest both of them; Ollama cannot force a function.
_PLACES: dict[str, dict[str, str]] = {
    "openai": {
        "temperature": "temperature",
        "top_p": "top_p",
        "max_tokens": "max_tokens",
        "choice": "tool_choice",
    },
    "openai-responses": {
        "temperature": "temperature",
        "top_p": "top_p",
        "max_tokens": "max_output_tokens",
        "choice": "tool_choice",
    },
    "anthropic": {
        "temperature": "temperature",
        "max_tokens": "max_tokens",
        "choice": "tool_choice",
    },
    "gemini": {
        "temperature": "config.temperature",
        "top_p": "config.top_p",
        "max_tokens": "config.max_output_tokens",
        "choice": "config.tool_config",
    },
    "ollama": {
        "temperature": "options.temperature",
        "top_p": "options.top_p",
        "max_tokens": "options.num_predict",
    },
}

_FORCED: dict[str, Callable[[str], Json]] = {
    "openai": lambda name: {"type": "function", "function": {"name": name}},
    "openai-responses": lambda name: {"type": "function", "name": name},
    "anthropic": lambda name: {"type": "tool", "name": name},
    "gemini": lambda name: {"function_calling_config": {"mode": "ANY", "allowed_function_names": [name]}},
}

# The second place of an option whose first place was refused: OpenAI's newer models use another name for the length.
_SECOND_PLACES = {("openai", "max_tokens"): "max_completion_tokens"}

_REFUSES = re.compile(
    r"unsupported|not (?:currently )?(?:supported|permitted|allowed|available)|(?:do|does) ?n[o']t support|unrecognized"
    r"|unknown|deprecated|may not|cannot both|extra inputs|不支持",
    re.IGNORECASE,
)
_WORDS_OF_CHOICE = ("tool_choice", "tool_config", "function_calling_config", "tool choice")


def sampling_options(dialect: str, question: Question, function: str) -> dict[str, Any]:
    """Returns the values of a request's options; those without a place in the dialect are omitted.

    Args:
        function: the name, as the provider sees it, of the function to force; "" for none.
    """
    # Anthropic's scale ends at 1.
    temperature = min(question.temperature, 1.0) if dialect == "anthropic" else question.temperature
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_p": question.top_p,
        "max_tokens": question.max_tokens,
    }
    if function and dialect in _FORCED:
        options["choice"] = _FORCED[dialect](function)
    places = _PLACES.get(dialect, {})
    return {option: value for option, value in options.items() if option in places}


def left_to_endpoint(dialect: str, question: Question, own: Mapping[str, Any]) -> set[str]:
    """Returns the options that a question leaves at their defaults and that the endpoint's program has set itself.

    Args:
        own: the keys that the program sets in every request.
    """
    return {
        option
        for option in question.defaults & _PLACES.get(dialect, {}).keys()
        if any(_is_set(own, place) for place in _places(dialect, option))
    }


def _is_set(own: Mapping[str, Any], place: str) -> bool:
    branch, _, key = place.rpartition(".")
    holder = own.get(branch) if branch else own
    return isinstance(holder, Mapping) and holder.get(key) is not None


def _places(dialect: str, option: str) -> tuple[str, ...]:
    """Returns the places that an option may have in a request, the first choice first."""
    first, second = _PLACES[dialect][option], _SECOND_PLACES.get((dialect, option), "")
    return (first, second) if second else (first,)


def with_options(request: Json, dialect: str, options: dict[str, Any], refused: Iterable[str] = ()) -> Json:
    """Returns a request with options, without those that were refused.

    Args:
        refused: places that the endpoint refuses.
    """
    request = copy.copy(request)
    for option, value in options.items():
        place = place_of(dialect, option, refused)
        if not place:
            continue
        branch, _, key = place.rpartition(".")
        if branch:
            request[branch] = {**request.get(branch, {}), key: value}
        else:
            request[key] = value
    return request


def place_of(dialect: str, option: str, refused: Iterable[str]) -> str:
    """Returns the place of an option in a request, "" if all its places were refused."""
    return next((place for place in _places(dialect, option) if place not in refused), "")


def refused_places(error: BaseException, places: Iterable[str]) -> set[str]:
    """Returns the places of a request that an endpoint's error refuses; "tools" means that it refuses any tools."""
    places = set(places)
    if isinstance(error, TypeError):  # another version of the provider's client has this argument
        return {place for place in places if f"unexpected keyword argument '{place}'" in str(error)}
    status = status_of(error)
    if status not in STATUSES:
        return {"tools"} if "tools" in places and refuses_tools(error) else set()
    text = text_of_error(error)
    if not _REFUSES.search(text):
        return set()
    named = {place for place in places - {"tools"} if _names(text, place)}
    return named or ({"tools"} if "tools" in places and refuses_tools(error) else set())


def _names(text: str, place: str) -> bool:
    key = place.rpartition(".")[2]
    words = _WORDS_OF_CHOICE if key in _WORDS_OF_CHOICE else (key,)
    return any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in words)
