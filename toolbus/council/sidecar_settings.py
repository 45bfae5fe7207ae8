"""Defines the settings of the sidecar model: its server, its name and its sampling options.

Settings never have an API key, since every client can read them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from toolbus.council.council_limits import ANSWER_TOKENS, TEMPERATURE, TOP_P
from toolbus.errors import SetupError
from toolbus.reader import Keys, Read, Reader, UnknownKey, list_unknown, snake_case

log = logging.getLogger("toolbus.extension")

API_KEY_VARIABLE = "TOOLBUS_SIDECAR_API_KEY"
WHERE_KEYS_GO = f"set {API_KEY_VARIABLE} in the environment (or, in Python, give sidecar_model an api_key)"
NOT_BARE = (
    "sidecar.connection is a URL with a user, a query or a fragment, which may hold a key: leave them out, and "
    + WHERE_KEYS_GO
)

SAMPLING: Mapping[str, float] = {"temperature": TEMPERATURE, "top_p": TOP_P, "max_tokens": ANSWER_TOKENS}
_SUBJECT = "sidecar"
_KEYS = {"api_key", "apiKey", "api-key", "key"}


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """The model beside the conversation, and its sampling options.

    Attributes:
        connection: the base URL of an OpenAI-compatible server (`http://127.0.0.1:8080/v1`), or a connection's name.
        model: by the server's name for it.
        temperature: 0 to 2.
        top_p: 0 to 1.
        max_tokens: of one answer, at least 1.

    Raises:
        SetupError: from the constructor, if one breaks its rule.
    """

    connection: str = ""
    model: str = ""
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    max_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        for name, read in _RULES.items():
            object.__setattr__(self, name, read(Reader(getattr(self, name), path=f"{_SUBJECT}.{name}")))

    @classmethod
    def read(cls, settings: object) -> SidecarSettings:
        """Reads a mapping, with names as here or in camelCase; missing or null values get their defaults.

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
    def defaults(self) -> frozenset[str]:
        """The sampling options that are at their default: those that the program gave to an endpoint go before them."""
        return frozenset(name for name, value in SAMPLING.items() if getattr(self, name) == value)

    @property
    def unavailable(self) -> str:
        """Why these settings have no model, a sentence; "" if they have one."""
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


def _connection(reader: Reader) -> str:
    """Refuses a URL that may hold a password or a key, without showing it: every client that asks is shown settings."""
    connection = reader.text()
    _, scheme, rest = connection.partition("://")
    if scheme and any(sign in rest for sign in "@?#"):
        raise SetupError(NOT_BARE)
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
