"""Creates the language model beside a conversation, which answers a council's questions.

`model_of` asks any provider through an endpoint of `toolbus.loop`, with the provider's own client. `sidecar_model`
needs no client: its settings name a server with OpenAI's chat completions, which it reaches with httpx, loaded only
then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from toolbus.common.text import shorten
from toolbus.errors import SetupError
from toolbus.parts.council.language_model import (
    Completion,
    LanguageModel,
    Question,
    ask,
    left_to_endpoint,
    place_of,
    refused_places,
    sampling_options,
    with_options,
)
from toolbus.parts.council.settings import COUNCIL_TIMINGS, NOT_BARE, WHERE_KEYS_GO, SidecarSettings
from toolbus.parts.models.dialects.conversation import HistoryItem, Json, Message, Turn
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.parts.models.dialects.endings import end_text
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.endpoint import Endpoint, check_endpoint
from toolbus.protocol.tool import KIB, MIB, Tool
from toolbus.sdk.generation import Generate, GenerationRequest


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
        except self._httpx.HTTPError as error:
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
