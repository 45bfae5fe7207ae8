"""Defines and creates the language model beside a conversation, which answers a council's questions.

`model_of` asks any provider through an endpoint of `toolbus.loop`, with the provider's own client. `sidecar_model`
needs no client: its settings name a server with OpenAI's chat completions, which it reaches with httpx, loaded only
then.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.text import join_surrogates, shorten
from toolbus.errors import SetupError
from toolbus.parts.council.settings import (
    ANSWER_TOKENS,
    COUNCIL_TIMINGS,
    NOT_BARE,
    TEMPERATURE,
    TOP_P,
    WHERE_KEYS_GO,
    SidecarSettings,
)
from toolbus.parts.models.dialects.conversation import HistoryItem, Json, Message, Turn
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.parts.models.dialects.endings import end_text
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.endpoint import Endpoint, check_endpoint
from toolbus.parts.models.loop.tool_refusal import STATUSES, refuses_tools, status_of, text_of_error
from toolbus.protocol.tool import KIB, MIB, Tool
from toolbus.sdk.generation import Generate, GenerationRequest

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
    "openai": {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_tokens", "choice": "tool_choice"},
    "openai-responses": {
        **{each: each for each in ("temperature", "top_p")},
        "max_tokens": "max_output_tokens",
        "choice": "tool_choice",
    },
    "anthropic": {"temperature": "temperature", "max_tokens": "max_tokens", "choice": "tool_choice"},
    "gemini": {
        "temperature": "config.temperature",
        "top_p": "config.top_p",
        "max_tokens": "config.max_output_tokens",
        "choice": "config.tool_config",
    },
    "ollama": {"temperature": "options.temperature", "top_p": "options.top_p", "max_tokens": "options.num_predict"},
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
    options: dict[str, Any] = {"temperature": temperature, "top_p": question.top_p, "max_tokens": question.max_tokens}
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


class EndpointModel:
    """Answers questions with the model of an endpoint, and remembers the options that it refuses.

    Args:
        model: instead of the endpoint's own; "" for that one.
    """

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model  # "": the endpoint's own
        self._refused: set[str] = set()  # places of options that this endpoint refuses

    def __repr__(self) -> str:
        return f"<model of {self._endpoint!r}>"

    async def __call__(self, question: Question) -> Completion:
        dialect = self._endpoint.dialect
        items: list[HistoryItem] = [Message(each["role"], each["content"]) for each in question.messages]  # type: ignore[arg-type]
        while True:
            refused = frozenset(self._refused)  # another question may learn more while this one waits
            export = self._export(question)
            wire = next(iter(export.names.to_bus), "") if export is not None else ""
            options = sampling_options(dialect.name, question, wire)
            for option in left_to_endpoint(dialect.name, question, self._endpoint.options):
                del options[option]
            request = with_options(dialect.request(items, export), dialect.name, options, refused)
            if model := question.model or self._model:
                request["model"] = model
            try:
                return _completion(await self._turn(request, export))
            except Exception as error:
                places = {place_of(dialect.name, option, refused) for option in options} - {""}
                newly_refused = refused_places(error, places | ({"tools"} if wire else set()))
                if not newly_refused:
                    raise
                self._refused |= newly_refused  # grows each time, so the loop ends

    def _export(self, question: Question) -> Export | None:
        """Returns the function to force as the dialect exports it; None without one, or if tools are refused."""
        if question.function is None or "tools" in self._refused:
            return None
        schema = json.dumps(question.function.get("parameters") or {"type": "object"})
        description = question.function.get("description") or ""
        export = self._endpoint.dialect.export([Tool(question.function["name"], description, schema)])
        return export if export.tools else None

    async def _turn(self, request: Json, export: Export | None) -> Turn:
        turn = Turn()
        async for piece in self._endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
        return turn


def _completion(turn: Turn) -> Completion:
    """Returns a turn as a completion. Only one function was offered, so a call with any name means that one.

    Raises:
        EndpointError: the answer was refused, failed or cut before there was anything in it.
    """
    call = turn.calls[0] if turn.calls else None
    has_answer = call.whole if call is not None else bool(turn.text)
    if turn.ending != "complete" and not has_answer:
        raise EndpointError(f"its answer is {turn.ending}: {end_text(turn)}", turn)
    return Completion(turn.text, None if call is None else call.arguments_json)


log = logging.getLogger("toolbus.extension")

_MAX_ANSWER = 4 * MIB
_MAX_SHOWN = 500  # characters of a server's error text


class SidecarError(EndpointError):
    """The server of a sidecar model did not answer, or refused the request.

    Attributes:
        status_code: the HTTP status; None without an answer.
    """

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code

    def __str__(self) -> str:
        return f"the sidecar model failed: {self.message}"


def model_of(endpoint: Endpoint, *, sidecar: SidecarSettings | None = None) -> LanguageModel:
    """Returns the model of an endpoint as a `LanguageModel`, for every provider.

    What the program gave to its endpoint (`openai_endpoint(client, model, temperature=0)`) holds for every question;
    settings of the sidecar that are not at their default go before it.

    Args:
        sidecar: its model is used instead of the endpoint's; its other settings come with each question.

    Raises:
        SetupError: it is not an endpoint.
    """
    return EndpointModel(check_endpoint(endpoint), sidecar.model if sidecar is not None else "")


def lent(model: LanguageModel) -> Generate:
    """Returns a model as `Host.lend` takes it: ``await host.lend(lent(model_of(endpoint)))``."""

    async def generate(request: GenerationRequest) -> str:
        question = Question(
            request.messages,
            max_tokens=request.max_tokens,
            model=request.model,
            defaults=frozenset(("temperature", "top_p")),
        )
        if request.temperature is not None:
            question = replace(question, temperature=request.temperature, defaults=frozenset(("top_p",)))
        return (await ask(model, question)).text

    return generate


def sidecar_model(
    sidecar: SidecarSettings,
    *,
    api_key: str | None = None,
    client: Any = None,
    connections: Mapping[str, str] | None = None,
    timeout_seconds: float = COUNCIL_TIMINGS.answer_seconds,
) -> LanguageModel | None:
    """Returns the model of the settings; None without one, for the reason in `sidecar.unavailable`.

    Args:
        api_key: sent as a bearer token, if set.
        client: an `httpx.AsyncClient`, which the caller closes; None opens a connection for each question.
        connections: base URLs by connection name.
        timeout_seconds: for one question, from connecting to the end of the answer.

    Raises:
        SetupError: httpx is not installed, or the connection is neither a URL nor a known name.
    """
    if sidecar.unavailable:
        return None
    if not timeout_seconds > 0:
        raise SetupError(f"timeout_seconds is {timeout_seconds:g}, it must be greater than 0")
    url = _base_url((connections or {}).get(sidecar.connection, sidecar.connection), connections)
    server = _Server(f"{url}/chat/completions", _key(api_key), client, timeout_seconds)
    return model_of(Endpoint(OpenAIChat(), server.ask, f"sidecar {sidecar.model}"), sidecar=sidecar)


class _Server:
    """An OpenAI-compatible server, reached with httpx."""

    def __init__(self, url: str, key: str, client: Any, timeout_seconds: float) -> None:
        try:
            import httpx
        except ImportError:
            raise SetupError(
                "a sidecar connection needs httpx, which is not installed: run `pip install 'toolbus[council]'`, or "
                "give the council another model (toolbus.extension.model_of takes the endpoint of any client)"
            ) from None
        self._httpx = httpx
        self._url = url
        self._key = key
        self._client = client  # None: one for each question
        self._timeout = timeout_seconds

    async def ask(self, request: Json) -> Json:
        """Sends a request. Returns the server's answer.

        Raises:
            SidecarError: it did not answer, or answered with an error.
        """
        try:
            async with asyncio.timeout(self._timeout):
                if self._client is not None:
                    status, body = await self._post(self._client, request)
                else:
                    async with self._httpx.AsyncClient() as client:
                        status, body = await self._post(client, request)
        except (TimeoutError, self._httpx.TimeoutException):
            raise SidecarError(
                f"{self._url} gave no answer within {self._timeout:g} seconds: is the model still being loaded?"
            ) from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, UnicodeError) as error:  # the last two of names
            reason = self._shown(str(error) or type(error).__name__)
            raise SidecarError(f"{self._url} cannot be reached: {reason}: is the server running?") from None
        return self._read(status, body)

    async def _post(self, client: Any, request: Json) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = self._httpx.Timeout(self._timeout, connect=min(self._timeout, COUNCIL_TIMINGS.connect_seconds))
        body = b""
        async with client.stream("POST", self._url, json=request, headers=headers, timeout=timeout) as response:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _MAX_ANSWER:
                    raise SidecarError(
                        f"{self._url} answered with more than {_MAX_ANSWER // KIB} KiB: lower max_tokens"
                    )
            return response.status_code, body

    def _read(self, status: int, body: bytes) -> Json:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status >= 400 or (isinstance(answer, dict) and answer.get("error")):
            has_message = isinstance(answer, dict) and answer.keys() & {"error", "message"}
            text = EndpointError.of(answer).message if has_message else body.decode("utf-8", "replace")
            fix = f": check the API key, or {WHERE_KEYS_GO}" if status in (401, 403) else ""
            raise SidecarError(f"{self._url} answered {status}: {self._shown(text)}{fix}", status)
        if status != 200 or not isinstance(answer, dict):
            raise SidecarError(
                f"{self._url} answered {status} without a JSON object: is the connection the base URL of an "
                "OpenAI-compatible server, with its /v1?",
                status,
            )
        return answer

    def _shown(self, text: str) -> str:
        """Returns the text of a server or library on one short line, without the API key."""
        if self._key:
            text = text.replace(self._key, "[hidden]")
        return shorten(" ".join(text.split()) or "no reason given", _MAX_SHOWN)


def _base_url(text: str, connections: Mapping[str, str] | None) -> str:
    """Returns the base URL of a connection without a slash at its end.

    Raises:
        SetupError: it is not one. A text that could hold a password is not shown.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable and "@" not in text:
        names = ", ".join(sorted(connections or {})) or "none"
        raise SetupError(
            f"sidecar.connection is {text!r:.80}: give the base URL of an OpenAI-compatible server, for example "
            f"http://127.0.0.1:8080/v1, or the name of a connection (known: {names})"
        )
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise SetupError(NOT_BARE)
    return text.rstrip("/").removesuffix("/chat/completions")


def _key(api_key: str | None) -> str:
    """Returns a key as it is sent.

    Raises:
        SetupError: a header cannot carry it; the text does not show it.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and all(character.isprintable() and character != " " for character in key)):
        rule = "holds a space, a line end or a character that is not ASCII"
        raise SetupError(f"the API key {rule}: copy it again, and {WHERE_KEYS_GO}")
    return key
