"""Checks the settings of an operator for an API; decides which operations become tools, and where requests go.

Requests go to one origin (scheme, host and port), which the operator named: that of ``base_url``, or that of the
document's own URL. Other servers that a document names get no request: they could be the way into a private network, or
out of it with a credential.
"""

from __future__ import annotations

import base64
import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urldefrag, urljoin, urlsplit

from toolbus.common.reader import Reader
from toolbus.common.text import list_names, quote, shorten
from toolbus.errors import SetupError
from toolbus.parts.openapi.document import Document, DocumentFault
from toolbus.parts.openapi.operations import HEADER_NAME, SAFE_METHODS, FoundOperation
from toolbus.protocol.limits import MIB
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, SOURCE

# Credentials are read when a request is sent. They are in no schema, log or error, and models never see them.

log = logging.getLogger("toolbus.openapi.api_settings")

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


MAX_TOOLS = 128  # what several providers take in one request
TIMEOUT_SECONDS = 30.0
MAX_RESPONSE_BYTES = 1 * MIB
MAX_IN_FLIGHT = 16
_PORTS = {"http": 80, "https": 443}
_MAX_BYTES = 8 * MIB  # a message of the bus has 16, and JSON text may double

Patterns = str | Collection[str]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The settings of an operator for an API.

    Attributes:
        base_url: where requests go; "" means as the document says, at its own origin.
        allow: patterns of the operations that become tools; None means those that only read (GET and HEAD).
        deny: patterns of operations that never become tools; they win.
        auth: see `Auth`.
        headers: sent with each request.
        prefix: begins the name of each tool.
        max_tools: how many tools there may be.
        timeout: seconds that a request may take, from connecting to the last byte.
        max_response_bytes: of the body of a response.
        slashes: whether a model may write slashes into a value of the path.
        output_schemas: whether tools promise the response's schema.

    Raises:
        SetupError: from the constructor; a setting breaks its rule.
    """

    base_url: str = ""
    allow: Patterns | None = None
    deny: Patterns = ()
    auth: Auth = field(default=None, repr=False)
    headers: Mapping[str, Secret] = field(default_factory=dict, repr=False)
    prefix: str = ""
    max_tools: int = MAX_TOOLS
    timeout: float = TIMEOUT_SECONDS
    max_response_bytes: int = MAX_RESPONSE_BYTES
    slashes: bool = False
    output_schemas: bool = False

    def __post_init__(self) -> None:
        if self.base_url:
            check_url(self.base_url, "base_url")
            if urlsplit(self.base_url).query or urlsplit(self.base_url).fragment:
                raise SetupError(f"base_url {quote(self.base_url)} has a query or fragment: leave it out")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{0,32}", self.prefix):
            raise SetupError(f"prefix {quote(self.prefix)} breaks the rule [A-Za-z0-9_.-]{{0,32}}: choose another")
        Reader(self.max_tools, "max_tools").whole(1, 10_000)
        Reader(self.timeout, "timeout").number(0.001, MAX_TIMEOUT_SECONDS - 1)
        Reader(self.max_response_bytes, "max_response_bytes").whole(1, _MAX_BYTES)
        for name, value in self.headers.items():
            if not HEADER_NAME.fullmatch(name) or (isinstance(value, str) and not value.isprintable()):
                raise SetupError(f"the header {quote(name)} cannot be sent: headers= takes names and printable texts")


def check_url(url: str, what: str) -> None:
    """Refuses what is not a plain http or https URL.

    Raises:
        SetupError: naming it.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not url.isprintable() or " " in url or "\\" in url:
        raise SetupError(f"{what} {quote(_without_user(url), 200)} is not a URL: write https://HOST/PATH")
    if "@" in urlsplit(url).netloc:
        raise SetupError(f"{what} {quote(_without_user(url), 200)} holds a user or password: pass auth= instead")


def _without_user(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url)


def origin_of(url: str) -> tuple[str, str, int]:
    """Returns scheme, host and port of a URL; empty ones where it has none."""
    try:
        parts = urlsplit(url)
        return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", "", 0


def base_url_of(document: Document, settings: ApiSettings) -> str:
    """Returns where requests go, without a slash at its end.

    Raises:
        SetupError: the operator has not named the origin, so that the document would choose it.
    """
    if settings.base_url:
        return settings.base_url.rstrip("/")
    servers = list(servers_of(document.content, document.url))
    if document.url:
        servers = servers or [urljoin(document.url, "/")]
        own = next((url for url in servers if origin_of(url) == origin_of(document.url)), "")
        if own:
            return own.rstrip("/")
    named = f"names the server {quote(shorten(servers[0], 200))}" if servers else "names no server"
    fitting = servers[0] if servers and origin_of(servers[0])[1] else "https://HOST/PATH"
    raise SetupError(
        f"{document.name} {named}, and requests go only to where you say, or to where the document came from: pass "
        f"base_url={fitting!r:.300} (--base-url) if that is right"
    )


def servers_of(content: Mapping[str, Any], url: str) -> Iterator[str]:
    """Yields the URLs of the servers that a document, path or operation names.

    Args:
        url: what relative ones are read against.
    """
    servers = content.get("servers")
    for server in servers if isinstance(servers, list) else ():
        template = server.get("url") if isinstance(server, Mapping) else None
        if not isinstance(template, str):
            continue
        variables = server.get("variables")
        for name, variable in variables.items() if isinstance(variables, Mapping) else ():
            if isinstance(variable, Mapping) and "default" in variable:
                template = template.replace(f"{{{name}}}", str(variable["default"]))
        try:
            yield urldefrag(urljoin(url, template or "/"))[0].partition("?")[0]
        except ValueError:  # brackets that are not an IPv6 address
            continue


class OperationFilter:
    """Decides which operations become tools.

    A pattern is the id or the tool name of an operation (`get*`), its method and path (`GET /pets/*`, `* /pets`), or
    `tag:NAME`; `*` stands for any characters, slashes too.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._allow = None if settings.allow is None else _patterns("allow", settings.allow)
        self._deny = _patterns("deny", settings.deny)
        self.unused = {*(self._allow or ()), *self._deny}
        """Patterns that no operation has matched so far: mistyped, perhaps."""

    def refusal(self, found: FoundOperation) -> str:
        """Returns why an operation does not become a tool; "" where it does."""
        denied = self._matches(self._deny, found)
        allowed = found.method in SAFE_METHODS if self._allow is None else self._matches(self._allow, found)
        if denied:
            return "denied"
        if allowed:
            return ""
        return "not allowed" if self._allow is not None else f"{found.method} may change something: name it in allow"

    def _matches(self, patterns: Sequence[str], found: FoundOperation) -> bool:
        matching = [pattern for pattern in patterns if _matches(pattern, found)]
        self.unused.difference_update(matching)
        return bool(matching)


def _patterns(name: str, patterns: Patterns) -> tuple[str, ...]:
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    texts = tuple(Reader(pattern, name).text().strip() for pattern in listed)
    if not all(texts):
        raise SetupError(f"{name} holds an empty text, it must hold patterns such as 'get*' or 'GET /pets/*'")
    return texts


def _matches(pattern: str, found: FoundOperation) -> bool:
    if pattern.startswith("tag:"):
        return any(_fits(pattern[4:], tag) for tag in found.tags)
    method, blank, path = pattern.partition(" ")
    if blank:
        return _fits(method.upper(), found.method) and _fits(path.strip(), found.path)
    return _fits(pattern, found.id) or _fits(pattern, found.name)


def _fits(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, re.split(r"\*+", pattern))), text, re.DOTALL) is not None


def source_of(document: Document) -> str:
    """Returns a source for the tools of a document: its title, in the characters that a source may have."""
    info = document.content.get("info")
    title = info.get("title") if isinstance(info, Mapping) else ""
    plain = re.sub(r"[^a-z0-9]+", "-", str(title or "").lower()).strip("-")[:64]
    return plain if SOURCE.fullmatch(plain) else "openapi"
