"""Maps the security schemes of a document to credentials of the operator: where each goes in a request.

Credentials are read when a request is sent. They are in no schema, log or error, and models never see them.
"""

from __future__ import annotations

import base64
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolbus.errors import SetupError
from toolbus.openapi.document import Document, DocumentFault
from toolbus.text import list_names, quote

log = logging.getLogger(__name__)

Secret: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A secret, or a function, plain or async, that returns it for each request."""

Auth: TypeAlias = Secret | Mapping[str, Secret | None] | None
"""Secrets by security scheme, or one; None in a mapping: requests need none there, whatever the document says."""

_TOKEN_TYPES = ("oauth2", "openIdConnect")  # an access token is sent as a bearer token


def env(name: str) -> Secret:
    """Returns a secret that is read from an environment variable for each request.

    Raises:
        SetupError: the variable is not set.
    """

    def read() -> str:
        if value := os.environ.get(name, ""):
            return value
        raise SetupError(
            f"the environment variable {name} is not set: set it, and hand it on with `toolbus run --env {name}` or "
            "--secrets"
        )

    read()
    return read


async def read_secret(secret: Secret) -> str:
    """Returns the value of a secret.

    Raises:
        SetupError: it has no usable value. The exception of a function goes to the log only: it may hold the secret.
    """
    try:
        value = secret() if callable(secret) else secret
        if inspect.isawaitable(value):
            value = await value
    except SetupError:
        raise
    except Exception as problem:
        log.exception("the function that returns a credential failed")
        raise SetupError(f"the function that returns a credential raised {type(problem).__name__}") from None
    text: object = value
    if not isinstance(text, str) or not text or not text.isprintable() or not text.isascii() or text != text.strip():
        raise SetupError(
            "a credential is not a text of printable ASCII characters, without blanks around it: correct auth="
        )
    return text


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one credential goes.

    Attributes:
        location: `header`, `query` or `cookie`.
        name: of the header, query parameter or cookie.
        kind: `bearer`, `basic` or `` for the value as it is.
        secret: what is sent.
    """

    location: str
    name: str
    kind: str
    secret: Secret = field(repr=False)

    async def value(self) -> tuple[str, str]:
        """Returns the text to send, and the secret in it, which no error may show."""
        secret = await read_secret(self.secret)
        if self.kind == "basic":
            return f"Basic {base64.b64encode(secret.encode()).decode()}", secret
        return (f"Bearer {secret}" if self.kind == "bearer" else secret), secret


class Credentials:
    """The credentials for one document.

    Args:
        auth: secrets by the name of their security scheme; a single secret is for the document's only scheme, or a
            bearer token where it has none.
        headers: the names of headers that each request has anyway.

    Raises:
        SetupError: a name is not a scheme of the document, or a scheme cannot be used.
    """

    def __init__(self, document: Document, auth: Auth, headers: Mapping[str, Secret]):
        components = document.content.get("components")
        declared = components.get("securitySchemes") if isinstance(components, Mapping) else None
        self._schemes: dict[str, Any] = dict(declared) if isinstance(declared, Mapping) else {}
        self._document = document
        self._headers = {name.lower() for name in headers}
        self._default = document.content.get("security")
        self._given: dict[str, Placement | None] = {}
        if auth is None:
            return
        if not isinstance(auth, Mapping):
            if len(self._schemes) > 1:
                raise SetupError(
                    f"{document.name} has the security schemes {list_names(self._schemes)}: say which one the "
                    f"credential is for, auth={{{next(iter(self._schemes))!r}: …}}"
                )
            auth = {next(iter(self._schemes), "bearer"): auth}
        for name, secret in auth.items():
            self._given[name] = None if secret is None else self._placement(name, secret)

    def _placement(self, name: str, secret: Secret) -> Placement:
        if not self._schemes:
            return Placement("header", "Authorization", "bearer", secret)
        if name not in self._schemes:
            raise SetupError(
                f"auth names {quote(name)}, and the security schemes of {self._document.name} are "
                f"{list_names(self._schemes)}: use one of these names"
            )
        location, header, kind = self._place(name)
        if not location:
            raise SetupError(
                f"the security scheme {quote(name)} of {self._document.name} is of a kind that is not supported "
                "(apiKey, http bearer and basic, oauth2 and openIdConnect are): pass headers= instead"
            )
        return Placement(location, header, kind, secret)

    def _place(self, name: str) -> tuple[str, str, str]:
        """Returns location, name and kind of a scheme; no location where it cannot be used."""
        try:
            scheme = self._document.resolve(self._schemes.get(name))
        except DocumentFault:
            scheme = None
        if not isinstance(scheme, Mapping):
            return "", "", ""
        if scheme.get("type") == "apiKey" and scheme.get("in") in ("header", "query", "cookie"):
            return str(scheme["in"]), str(scheme.get("name", "")), ""
        kind = str(scheme.get("scheme", "")).lower() if scheme.get("type") == "http" else ""
        if scheme.get("type") in _TOKEN_TYPES:
            kind = "bearer"
        return ("header", "Authorization", kind) if kind in ("bearer", "basic") else ("", "", "")

    def is_secret(self, location: str, name: str) -> bool:
        """Tells whether a parameter is where a credential goes: documents often list it as both."""
        places = (self._place(scheme)[:2] for scheme in self._schemes)
        fold = str.lower if location == "header" else str
        return any(place == location and fold(key) == fold(name) for place, key in places) or (
            location == "header" and name.lower() in self._headers
        )

    def of_operation(self, content: Mapping[str, Any]) -> tuple[Placement, ...]:
        """Returns the credentials that an operation gets.

        Raises:
            DocumentFault: it needs one that was not given.
        """
        security = content.get("security", self._default)
        if not isinstance(security, list):
            return tuple(filter(None, self._given.values()))  # the document does not say
        if not security:
            return ()
        choices = [list(choice) for choice in security if isinstance(choice, Mapping)]
        for choice in sorted(choices, key=len, reverse=True):  # rather with a credential than without
            if all(self._has(name) for name in choice):
                return tuple(filter(None, map(self._given.get, choice)))
        needed = " or ".join(" and ".join(map(quote, choice)) for choice in choices[:4])
        raise DocumentFault(f"it needs the credential {needed}: pass auth=")

    def _has(self, name: str) -> bool:
        location, header, _ = self._place(name)
        return name in self._given or (location == "header" and header.lower() in self._headers)
