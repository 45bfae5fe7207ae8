"""The language model beside a conversation: its settings, and what answers a council's questions.

`model_of` asks any provider through an endpoint of `toolbus.loop`, with the provider's own client. `sidecar_model`
needs no client: five settings name a server that speaks OpenAI's chat completions, and httpx, loaded only then,
reaches it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from toolbus.council.endpoint_model import EndpointModel
from toolbus.council.language_model import LanguageModel
from toolbus.dialects.conversation import Json
from toolbus.dialects.dialect import EndpointError
from toolbus.dialects.openai_chat import OpenAIChat
from toolbus.errors import SetupError
from toolbus.loop.endpoint import Endpoint
from toolbus.reader import Keys, Read, Reader, UnknownKey, list_unknown, snake_case
from toolbus.tool import KIB, MIB

log = logging.getLogger("toolbus.extension")

DEFAULT_TIMEOUT_SECONDS = 120.0  # of one question; a council has a shorter one of its own
_CONNECT_SECONDS = 10.0
_MAX_ANSWER = 4 * MIB
_MAX_SHOWN = 500  # characters of what a server says about a fault

API_KEY_VARIABLE = "TOOLBUS_SIDECAR_API_KEY"
WHERE_KEYS_GO = f"set {API_KEY_VARIABLE} in the environment (or, in Python, give sidecar_model an api_key)"
_NOT_BARE = (
    "sidecar.connection is a URL with a user, a query or a fragment, which may hold a key: leave them out, and "
    + WHERE_KEYS_GO
)

_SUBJECT = "sidecar"
_KEYS = {"api_key", "apiKey", "api-key", "key"}


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Which model answers, and how.

    Attributes:
        connection: the base URL of an OpenAI-compatible server (`http://127.0.0.1:8080/v1`), or the name of one.
        model: by the server's name for it.
        temperature: 0 to 2.
        top_p: 0 to 1.
        max_tokens: of one answer, 1 or more.

    Raises:
        SetupError: from the constructor, where one breaks its rule.
    """

    connection: str = ""
    model: str = ""
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, read in _RULES.items():
            object.__setattr__(self, name, read(Reader(getattr(self, name), path=f"{_SUBJECT}.{name}")))

    @classmethod
    def read(cls, settings: object) -> SidecarSettings:
        """Reads a mapping, with names as here or in camelCase; what is missing or null keeps its default.

        Raises:
            SetupError: naming the value, the rule that it breaks and how to fix it.
        """
        unknown: list[UnknownKey] = []
        reader = Reader(settings, path=_SUBJECT, unknown=unknown)
        for key in reader.entries().keys() & _KEYS:
            raise SetupError(f"sidecar has {key}, but settings hold no key: take it out, and {WHERE_KEYS_GO}")
        values = reader.record(_SETTINGS, snake_case)
        if unknown:
            log.warning("%s: unknown keys are ignored: %s", _SUBJECT, list_unknown(unknown))
        return cls(**values)

    @property
    def unavailable(self) -> str:
        """Why there is no model behind these settings, a sentence; "" where there is one."""
        if not self.connection:
            return (
                "no sidecar model: the settings name no connection; set it to the base URL of an OpenAI-compatible "
                "server, for example http://127.0.0.1:8080/v1"
            )
        if not self.model:
            return (
                "no sidecar model: the settings name no model; set it to one that the server of the connection has, "
                "for example qwen3"
            )
        return ""


class SidecarError(EndpointError):
    """A sidecar's server gave no answer, or refused to.

    Attributes:
        status_code: the HTTP status; None where no answer came.
    """

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code

    def __str__(self) -> str:
        return f"the sidecar model failed: {self.message}"


def model_of(endpoint: Endpoint, *, sidecar: SidecarSettings | None = None) -> LanguageModel:
    """Returns the model of an endpoint as one that answers questions, whatever the provider.

    Args:
        sidecar: whose model is asked instead of the endpoint's; what else it says comes with each question.
    """
    return EndpointModel(endpoint, sidecar.model if sidecar is not None else "")


def sidecar_model(
    sidecar: SidecarSettings,
    *,
    api_key: str | None = None,
    client: Any = None,
    connections: Mapping[str, str] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> LanguageModel | None:
    """Returns the model that the settings name; None where they name none, `sidecar.unavailable` then says why.

    Args:
        api_key: sent as a bearer token; None sends none.
        client: an `httpx.AsyncClient` to use, which stays the caller's; None opens a connection for each question.
        connections: base URLs by the names that settings may use.
        timeout_seconds: for one question in all.

    Raises:
        SetupError: httpx is not installed, or the connection is neither a URL nor a name that is known.
    """
    if sidecar.unavailable:
        return None
    if not timeout_seconds > 0:
        raise SetupError(f"timeout_seconds is {timeout_seconds:g}, it must be above 0")
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
                "give the council another model (toolbus.council.model_of takes the endpoint of any client)"
            ) from None
        self._httpx = httpx
        self._url = url
        self._key = key
        self._client = client  # None: one for each question
        self._timeout = timeout_seconds

    async def ask(self, request: Json) -> Json:
        """Sends a request. Returns the server's answer.

        Raises:
            SidecarError: there was none, or it is a fault.
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
        except self._httpx.HTTPError as problem:
            why = self._shown(str(problem) or type(problem).__name__)
            raise SidecarError(f"{self._url} cannot be reached: {why}: is the server running?") from None
        return self._read(status, body)

    async def _post(self, client: Any, request: Json) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = self._httpx.Timeout(self._timeout, connect=min(self._timeout, _CONNECT_SECONDS))
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
            told = isinstance(answer, dict) and answer.keys() & {"error", "message"}
            said = EndpointError.of(answer).message if told else body.decode("utf-8", "replace")
            cure = f": check the API key, or {WHERE_KEYS_GO}" if status in (401, 403) else ""
            raise SidecarError(f"{self._url} answered {status}: {self._shown(said)}{cure}", status)
        if status != 200 or not isinstance(answer, dict):
            raise SidecarError(
                f"{self._url} answered {status} with what is no JSON object: is the connection the base URL of an "
                "OpenAI-compatible server, with its /v1?",
                status,
            )
        return answer

    def _shown(self, said: str) -> str:
        """Returns what a server or library said, on one short line and without the key."""
        if self._key:
            said = said.replace(self._key, "[hidden]")
        said = " ".join(said.split()) or "no reason given"
        return said if len(said) <= _MAX_SHOWN else said[: _MAX_SHOWN - 3] + "..."


# -- rules -----------------------------------------------------------------------------------------------------------


def _connection(reader: Reader) -> str:
    """Refuses a URL that may hold a password or a key, without showing it: every client that asks is shown settings."""
    connection = reader.text()
    _, scheme, rest = connection.partition("://")
    if scheme and any(sign in rest for sign in "@?#"):
        raise SetupError(_NOT_BARE)
    return connection


_RULES: Mapping[str, Read] = {
    "connection": _connection,
    "model": Reader.text,
    "temperature": partial(Reader.number, least=0, most=2),
    "top_p": partial(Reader.number, least=0, most=1),
    "max_tokens": partial(Reader.whole, least=1),
}
_SETTINGS: Keys = {
    **{name: (name, read) for name, read in _RULES.items()},
    "connection_profile_id": ("connection", _connection),
}


def _base_url(text: str, connections: Mapping[str, str] | None) -> str:
    """Returns the base URL of a connection without a slash at its end.

    Raises:
        SetupError: it is none. A text that could hold a password is not shown.
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
            f"http://127.0.0.1:8080/v1, or the name of a connection (there are: {names})"
        )
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise SetupError(_NOT_BARE)
    return text.rstrip("/").removesuffix("/chat/completions")


def _key(api_key: str | None) -> str:
    """Returns a key as it is sent.

    Raises:
        SetupError: a header cannot carry it. It is not shown.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and all(character.isprintable() and character != " " for character in key)):
        rule = "holds a space, a line end or a character that is not ASCII"
        raise SetupError(f"the API key {rule}: copy it again, and {WHERE_KEYS_GO}")
    return key
