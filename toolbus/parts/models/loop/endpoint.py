"""Connects a loop to a model: an endpoint is a provider's dialect and a function that sends a request.

The provider's own client makes the connection; an endpoint only knows how to call it. No client is imported here: a
program brings the ones that it uses.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.parts.models.dialects.conversation import Delta, Json, Turn
from toolbus.parts.models.dialects.dialect import Dialect, EndpointError
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.tool_refusal import STATUSES, status_of, text_of_error

log = logging.getLogger("toolbus.loop")

Ask = Callable[[Json], Any]

MAX_TOKENS = 4096  # of an answer of Anthropic's, if the program sets no number
# The keys of requests that a loop writes itself, in the terms of all providers.
_LOOP_KEYS = frozenset(
    (
        *("model", "messages", "input", "contents", "config", "tools", "tool_choice", "tool_config"),
        *("functions", "function_call"),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A model behind a connection; a program may create one from a dialect and any function that reaches a model.

    Attributes:
        dialect: the format of its requests and answers.
        ask: takes a request. Returns a whole answer or an async iterator of its events, or an awaitable of either.
        name: for errors and logs.
        options: the keys that its program sets in every request; councils do not change them.
    """

    dialect: Dialect
    ask: Ask
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Endpoint {self.name or 'of a function'} {self.dialect.name}>"

    async def answer(self, request: Json, names: NameTable) -> AsyncGenerator[Delta | Turn, None]:
        """Sends a request. Yields the answer's pieces as they come, and the whole turn last.

        Errors of the client are passed on.

        Raises:
            EndpointError: the provider reported an error, or its answer broke off.
        """
        answer = self.ask(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if not hasattr(answer, "__aiter__"):
            turn = self.dialect.parse(answer, names)
            if turn.reasoning:
                yield Delta("reasoning", turn.reasoning)
            if turn.text:
                yield Delta("text", turn.text)
            yield turn
            return
        stream = self.dialect.stream(names)
        try:
            async for event in answer:
                for delta in stream.feed(event):
                    yield delta
        finally:
            await _close(answer)
        turn = stream.finish()
        if not stream.complete:
            raise EndpointError(
                f"the answer broke off after {len(turn.text)} characters of text: its stream ended without "
                f"{stream.end_mark}. None of its calls was made: ask again",
                turn,
            )
        if not turn.stop:
            log.info("%r gave no stop reason for an answer, which is treated as complete", self)
        yield turn


def openai_endpoint(
    client: Any, model: str, *, stream: bool = True, strict: bool | None = None, grammar: bool = False, **options: Any
) -> Endpoint:
    """Returns a model behind chat completions.

    Args:
        client: an `openai.AsyncOpenAI`, with the base_url of any server with the same API.
        stream: False for a server that cannot stream calls.
        strict: whether the server enforces schemas (`OpenAIChat`). None: OpenAI's own does for schemas that qualify
            unchanged, other servers do not, since some refuse the key.
        grammar: whether the server turns schemas into grammars, as vLLM does. Otherwise the loop writes a schema so
            after the server has refused it.
        options: further keys of every request (temperature …). Requests for streamed answers also request a count of
            tokens, unless `stream_options` is set; None sends no `stream_options`.

    Raises:
        SetupError: an option is one that the loop writes.
    """
    from toolbus.parts.models.dialects.openai_chat import OpenAIChat, OpenAIGrammar

    _check(client, "openai")
    fixed = _fixed(options) | {"model": model, "stream": stream}
    if strict is None and not _is_of(client, "api.openai.com"):
        strict = False
    kind = OpenAIGrammar if grammar else OpenAIChat
    dialect = kind(strict=strict, short_ids=_is_of(client, "mistral.ai"))
    if fixed.get("stream_options", ()) is None:
        del fixed["stream_options"]
    elif stream and "stream_options" not in fixed:
        return Endpoint(dialect, _CountedChat(client, fixed).ask, f"openai {model}", options)

    def ask(request: Json) -> Any:
        return client.chat.completions.create(**fixed | request)

    return Endpoint(dialect, ask, f"openai {model}", options)


class _CountedChat:
    """Requests a count of tokens for streamed answers, until the server refuses it.

    Most servers count only on request; some refuse keys that they do not know. One refused request costs less than to
    have no counts at all.
    """

    def __init__(self, client: Any, fixed: Json) -> None:
        self._client = client
        self._fixed = fixed
        self._options: Json = {"stream_options": {"include_usage": True}}  # empty once the server has refused them

    async def ask(self, request: Json) -> Any:
        if not self._options:
            return await self._send(request)
        try:
            return await self._send(request | self._options)
        except Exception as error:
            if status_of(error) not in STATUSES or "stream_options" not in text_of_error(error):
                raise
        answer = await self._send(request)
        self._options = {}
        return answer

    async def _send(self, request: Json) -> Any:
        answer = self._client.chat.completions.create(**self._fixed | request)
        return await answer if inspect.isawaitable(answer) else answer


def responses_endpoint(
    client: Any, model: str, *, stream: bool = True, strict: bool | None = None, **options: Any
) -> Endpoint:
    """Returns a model behind OpenAI's Responses; arguments as for `openai_endpoint`, but `strict` holds anywhere."""
    from toolbus.parts.models.dialects.openai_responses import OpenAIResponses

    _check(client, "openai")
    fixed = _fixed(options) | {"model": model, "stream": stream}
    dialect = OpenAIResponses(strict=strict)
    name = f"responses {model}"
    return Endpoint(dialect, lambda request: client.responses.create(**fixed | request), name, options)


def anthropic_endpoint(
    client: Any, model: str, *, max_tokens: int | None = None, stream: bool = True, **options: Any
) -> Endpoint:
    """Returns a model of Anthropic.

    Args:
        client: an `anthropic.AsyncAnthropic`.
        max_tokens: of one answer; 4,096 by default, since this provider requires a number.
        options: as for `openai_endpoint`.
    """
    from toolbus.parts.models.dialects.anthropic import Anthropic

    _check(client, "anthropic")
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    fixed = {"max_tokens": MAX_TOKENS} | _fixed(options) | {"model": model, "stream": stream}
    name = f"anthropic {model}"
    return Endpoint(Anthropic(), lambda request: client.messages.create(**fixed | request), name, options)


def gemini_endpoint(client: Any, model: str, *, stream: bool = True, **options: Any) -> Endpoint:
    """Returns a model of Gemini.

    Args:
        client: a `google.genai.Client`, or its `aio`.
        options: fields of the GenerateContentConfig of every request.
    """
    from toolbus.parts.models.dialects.gemini import Gemini

    _check(client, "google")
    models = getattr(client, "aio", client).models
    send = models.generate_content_stream if stream else models.generate_content
    fixed = _fixed(options)

    def ask(request: Json) -> Any:
        config = fixed | request["config"]
        return send(model=request.get("model", model), contents=request["contents"], config=config)

    return Endpoint(Gemini(), ask, f"gemini {model}", {"config": options})


def ollama_endpoint(client: Any, model: str, *, stream: bool = True, **options: Any) -> Endpoint:
    """Returns a model of Ollama.

    Args:
        client: an `ollama.AsyncClient`.
        options: further keys of every request (think, keep_alive, options …).
    """
    from toolbus.parts.models.dialects.ollama import Ollama

    _check(client, "ollama")
    fixed = _fixed(options) | {"model": model, "stream": stream}

    def ask(request: Json) -> Any:
        if "options" in request:  # temperature and length of one request; the program's other options stay
            request = request | {"options": {**dict(fixed.get("options") or {}), **request["options"]}}
        return client.chat(**fixed | request)

    return Endpoint(Ollama(), ask, f"ollama {model}", options)


# The first package of a client's class → its endpoint, and the class that does not block.
_CLIENTS: dict[str, tuple[Callable[..., Endpoint], str]] = {
    "openai": (openai_endpoint, "openai.AsyncOpenAI"),
    "anthropic": (anthropic_endpoint, "anthropic.AsyncAnthropic"),
    "google": (gemini_endpoint, "google.genai.Client"),
    "ollama": (ollama_endpoint, "ollama.AsyncClient"),
}


def endpoint_of(client: Any, model: str, **options: Any) -> Endpoint:
    """Returns the endpoint for a client of openai (chat completions), anthropic, google-genai or ollama.

    Raises:
        SetupError: it is not one of these, or it blocks.
    """
    package = _package(client)
    if package:
        make, _ = _CLIENTS[package]
        return make(client, model, **options)
    raise SetupError(
        f"a {type(client).__module__}.{type(client).__name__} is not a known client: give one of "
        f"{', '.join(async_class for _, async_class in _CLIENTS.values())}, or create an Endpoint from a dialect and a "
        "function"
    )


def check_endpoint(endpoint: Endpoint) -> Endpoint:
    """Returns the endpoint of a program, which may be the client of a provider by mistake.

    Raises:
        SetupError: it is not an endpoint.
    """
    if not isinstance(endpoint, Endpoint):
        raise SetupError(
            f"{quote(repr(endpoint))} is not an endpoint: give openai_endpoint(client, model), or the result of "
            "another endpoint function of toolbus.loop"
        )
    return endpoint


def _package(client: Any) -> str:
    """Returns the package of a provider's client, which may be of a program's own subclass; "" if unknown."""
    packages = (kind.__module__.partition(".")[0] for kind in type(client).__mro__)
    return next((package for package in packages if package in _CLIENTS), "")


def _check(client: Any, package: str) -> None:
    """Checks a known client; a program may also give its own object with the same methods.

    Raises:
        SetupError: it is one of another provider, or it blocks.
    """
    found = _package(client)
    if not found:
        return
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(client).__mro__ if kind.__module__.startswith(found)]
    make, async_class = _CLIENTS[found]
    if found != package:
        raise SetupError(f"a {names[0]} is a client of another provider: give it to {make.__name__}")
    if "Async" not in names[0] and not hasattr(client, "aio"):
        raise SetupError(f"a {names[0]} blocks the event loop: give a {async_class}")


def _is_of(client: Any, domain: str) -> bool:
    """Tells whether a client sends its requests to a server of this domain."""
    host = urlsplit(str(getattr(client, "base_url", ""))).hostname or ""
    return host == domain or host.endswith(f".{domain}")


def _fixed(options: Json) -> Json:
    """Returns the options of every request.

    Raises:
        SetupError: the loop writes one of them itself.
    """
    reserved = sorted(options.keys() & _LOOP_KEYS)
    if reserved:
        raise SetupError(f"the loop writes {', '.join(reserved)} into every request: leave it out of the options")
    return dict(options)


async def _close(answer: Any) -> None:
    """Closes a stream, so that the provider stops generating an answer that is not read."""
    close = getattr(answer, "aclose", None) or getattr(answer, "close", None)
    if close is None:
        return
    with contextlib.suppress(Exception):  # the connection is already closed
        closing = close()
        if inspect.isawaitable(closing):
            await closing
