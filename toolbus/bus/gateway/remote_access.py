"""Admits HTTPS requests of other machines: by key, by scope, and no page of another site.

Each request needs a key. When a key ends, its open requests end too: a stream of events would otherwise go on.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.access.identity import ANONYMOUS, LOCAL, Identity
from toolbus.bus.gateway.http_connection import CERTIFICATE, PROBE_PATHS, peer_of
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.loopback import is_own_origin, mask
from toolbus.bus.web_paths import Cookies, WebPaths
from toolbus.common.text import quote
from toolbus.errors import NotOffered, NotPermitted, Unauthenticated

# Checks the scopes of an identity for each HTTP path; a path without a rule does not exist for it.
#
# A rule names the verb that a path needs. The user of a request, and the tools that it lists or calls, are checked
# where its parameters are known. Programs of this machine need no rule.

ANY = ""  # every identity may use it, and sees there what its scopes reach

# Method, path as the application declares it, and the verb of the scope `administer` that it needs.
RULES: tuple[tuple[str, str, str], ...] = (
    ("GET", "/healthz", ANY),
    ("GET", "/metrics", "metrics"),
    ("GET", "/readyz", ANY),
    ("GET", "/api/tools", ANY),
    ("GET", "/api/tools/events", ANY),
    ("GET", "/api/tools/export", ANY),
    ("GET", "/api/tools/search", ANY),
    ("POST", "/api/tools/invoke", ANY),
    ("POST", "/api/tools/unregister", "catalog"),
    ("POST", "/api/tools/clear", "catalog"),
    ("GET", "/api/tasks", ANY),
    ("GET", "/api/tasks/events", ANY),
    ("GET", "/api/tasks/{task_id}", ANY),
    ("GET", "/api/tasks/{task_id}/await", ANY),
    ("DELETE", "/api/tasks/{task_id}", ANY),
    ("GET", "/api/notifications", ANY),
    ("GET", "/api/calls", "calls"),
    # The dispatcher checks the verb of the tool that is called.
    ("POST", "/api/bus/{name}", ANY),
    # A council calls tools in the bus's own name.
    ("GET", "/api/council", "council"),
    ("GET", "/api/council/tools", "council"),
    ("GET", "/api/council/events", "council"),
    ("GET", "/api/council/runs", "council"),
    ("GET", "/api/council/runs/{run_id}", "council"),
    ("POST", "/api/council/run", "council"),
    ("POST", "/api/council/retry", "council"),
    ("POST", "/api/council/inline", "council"),
    ("POST", "/api/council/inline/invoke", "council"),
    ("GET", "/api/console/me", ANY),
    ("GET", "/api/console/stream", "calls"),
    ("POST", "/api/console/code", "calls"),
    # The profile and the scopes decide which tools it lists and calls there.
    ("POST", "/mcp", ANY),
    ("GET", "/mcp", ANY),
    ("DELETE", "/mcp", ANY),
    ("POST", "/mcp/{profile}", ANY),
    ("GET", "/mcp/{profile}", ANY),
    ("DELETE", "/mcp/{profile}", ANY),
    ("GET", "/docs", ANY),
    ("GET", "/openapi.json", ANY),
    ("GET", "/static-offline-docs/{file}", ANY),
)
# Paths without a key: files of the package, which hold nothing of the bus, and the login of browsers.
NO_KEY: tuple[tuple[str, str], ...] = (
    ("GET", "/"),  # leads to the console
    ("GET", "/console"),
    ("GET", "/console/"),
    ("GET", "/console/{file:rest}"),
    ("POST", "/api/console/login"),
    ("GET", "/mcp-login/{page}"),
)
# Paths that only programs of this machine may use, and why.
LOCAL_ONLY = {
    "/api/tools/register": "callback URLs are of the bus's own machine: register over gRPC, in a session",
    "/api/tasks/{task_id}/redirect": "results are posted to URLs of the bus's own machine: follow /api/tasks/events",
    "/api/llm-tools/callback/{plugin_id}/{tool_name:rest}": "it is for a main server on the bus's own machine",
}


def _pattern(path: str) -> re.Pattern[str]:
    part = ".+" if path.endswith(":rest}") else "[^/]+"
    return re.compile(part.join(map(re.escape, re.split(r"\{[^}]*\}", path))), re.DOTALL)


_RULES = [(method, _pattern(path), verb) for method, path, verb in RULES]
_NO_KEY = [(method, _pattern(path)) for method, path in NO_KEY]
_LOCAL_ONLY = [(_pattern(path), why) for path, why in LOCAL_ONLY.items()]


def needs_key(method: str, path: str) -> bool:
    """Tells whether a request needs a key."""
    method = "GET" if method == "HEAD" else method
    return not any(each == method and pattern.fullmatch(path) for each, pattern in _NO_KEY)


def check_path(identity: Identity, method: str, path: str) -> None:
    """Checks a request of an identity.

    Raises:
        NotPermitted: its scopes lack what the path needs, or the path is for this machine only.
        NotOffered: no rule names the path.
    """
    if identity.scopes is None:
        return
    for pattern, why in _LOCAL_ONLY:
        if pattern.fullmatch(path):
            raise NotPermitted(f"{path} is not served beyond the bus's own machine: {why}")
    verb = _verb_of(_RULES, "GET" if method == "HEAD" else method, path)
    if verb is None:
        raise NotOffered(f"there is no {method} {path}")
    if verb:
        identity.check_verb(verb, f"{method} {path}")


def _verb_of(rules: Iterable[tuple[str, re.Pattern[str], str]], method: str, path: str) -> str | None:
    # The first rule wins: /api/tasks/events is not a task.
    return next((verb for each, pattern, verb in rules if each == method and pattern.fullmatch(path)), None)


# Shows MCP clients of other machines where they get a token for `/mcp` (RFC 9728): from the configured issuers.
#
# The document needs no key: a client without a token reads it. It holds the names of the issuers, and the address that
# the client used.

WELL_KNOWN = "/.well-known/oauth-protected-resource"
RESOURCE = "/mcp"
_PLAIN_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)


class ResourceMetadata:
    """Describes `/mcp` as a resource that tokens of issuers open.

    Args:
        issuers: their names; those that are not https URLs are left out, since clients cannot use them.
    """

    def __init__(self, issuers: Sequence[str]) -> None:
        self._issuers = [each for each in issuers if each.startswith("https://")]

    def response(self, scope: Scope) -> JSONResponse | None:
        """Returns the document for a request; None for another path, or without issuers."""
        path: str = scope["path"]
        resource = path.removeprefix(WELL_KNOWN)
        if resource == path or not _is_resource(resource) or scope["method"] not in ("GET", "HEAD"):
            return None
        origin = self._origin(scope)
        if origin is None:
            return None
        document = {
            "resource": origin + resource,
            "authorization_servers": self._issuers,
            "bearer_methods_supported": ["header"],
            "resource_name": "toolbus",
        }
        return JSONResponse(document, headers={"Cache-Control": "no-store"})

    def challenge(self, scope: Scope) -> str:
        """Returns the WWW-Authenticate header of a 401."""
        path: str = scope["path"]
        origin = self._origin(scope) if _is_resource(path) else None
        return "Bearer" if origin is None else f'Bearer resource_metadata="{origin}{WELL_KNOWN}{path}"'

    def _origin(self, scope: Scope) -> str | None:
        """Returns the address under which the client reached this listener; None without issuers or a plain host."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not self._issuers or len(hosts) != 1 or not _PLAIN_HOST.fullmatch(hosts[0]):
            return None
        return f"https://{hosts[0]}"


def _is_resource(path: str) -> bool:
    """Tells whether a path is one of MCP clients that may stand in a header between quotes."""
    return re.fullmatch(RESOURCE + r"(?:/[A-Za-z0-9._~-]{1,100})?", path, re.ASCII) is not None


EVENTS = "text/event-stream"
BY_COOKIE = "toolbus.by_cookie"  # in an ASGI scope: the identity is that of a browser's login
_NO_STORE = (b"cache-control", b"no-store")  # an answer for one identity must not be cached on its way
_LOGIN_ENDED = "the login of this browser has ended: make a new one with `toolbus console --bus ADDRESS`"


@dataclass(slots=True)
class _Request:
    """A request that is being answered.

    Attributes:
        began: whether the answer has begun.
        streams: whether the answer is a stream of events.
        ended: why the bus has ended it; "" while it has not.
    """

    identity: Identity
    began: bool = False
    streams: bool = False
    ended: str = ""


def _check_own_page(headers: list[tuple[bytes, bytes]]) -> None:
    """Checks that a page of the bus makes a request; an Origin header has been checked before.

    Raises:
        NotPermitted: no header shows it.
    """
    sites = {value for name, value in headers if name == b"sec-fetch-site"}
    if sites != {b"same-origin"} and not any(name == b"origin" for name, _ in headers):
        raise NotPermitted(
            "the request carries the cookie of a login, and neither an Origin nor Sec-Fetch-Site: same-origin shows "
            "that a page of the bus makes it: a program sends a token instead"
        )


class RemoteAccess:
    """Authenticates and authorizes requests over HTTPS.

    Args:
        metadata: shows MCP clients where they get a token.
        web: the paths that rooms serve.
        cookies: identifies browsers; None where they cannot log in.
    """

    def __init__(
        self, doorman: Doorman, metadata: ResourceMetadata, web: WebPaths, cookies: Cookies | None = None
    ) -> None:
        self.metadata = metadata
        self._cookies = cookies
        self._web = web
        self._doorman = doorman
        self._open: dict[asyncio.Task[Any], _Request] = {}  # those that are being answered

    async def admit(self, scope: Scope) -> Identity:
        """Returns who makes a request.

        Raises:
            Unauthenticated: no key proves an identity.
            NotPermitted: its scopes lack what the path needs, or a page of another site asks.
            NotOffered: the path does not exist for it.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        for name, value in headers:
            origin = value.decode("latin-1")
            if name == b"origin" and not (hosts and is_own_origin(origin, hosts[0], "https", scope["server"][1])):
                raise NotPermitted(
                    f"the Origin header is {quote(mask(origin))}, which is not the address of this listener: no page "
                    "of another site may use the bus; a program sends no Origin"
                )
        path, method = scope["path"], scope["method"]
        if path in PROBE_PATHS:
            return LOCAL
        if not needs_key(method, path) and self._web.find(path) is not None:
            return ANONYMOUS
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        if len(given) > 1:
            raise Unauthenticated("the request has two Authorization headers: send one")
        identity = None
        if not given and CERTIFICATE not in scope:
            identity = self._of_cookie(scope)
        if identity is None:
            credential = given[0] if given else None
            identity = await self._doorman.identify(credential, scope.get(CERTIFICATE), peer_of(scope))
        check_path(identity, method, path)
        return identity

    def _of_cookie(self, scope: Scope) -> Identity | None:
        """Returns the identity that the cookie of a browser proves; None without one.

        Raises:
            Unauthenticated: its login has ended.
            NotPermitted: a page of another site sends it.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        header = "; ".join(value.decode("latin-1") for name, value in headers if name == b"cookie")
        cookies = self._cookies
        identity = cookies.identity_in(header) if header and cookies is not None else None
        if identity is not None:
            # A browser adds the cookie to every request to the bus, also to those of other pages.
            _check_own_page(headers)
            scope[BY_COOKIE] = True
        return identity

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, identity: Identity) -> None:
        """Passes a request of an identity on, and ends it when its key ends."""
        task = asyncio.current_task()
        if task is None or identity.scopes is None or identity is ANONYMOUS:
            await app(scope, receive, send)
            return
        request = self._open[task] = _Request(identity)
        timer = None
        if scope.get(BY_COOKIE):  # the login may end before its key
            left = max(0.0, identity.expires - time.time())
            timer = asyncio.get_running_loop().call_later(left, self._end, task, request, _LOGIN_ENDED)

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.began = True
                headers = Headers(raw=message["headers"])
                request.streams = headers.get("content-type", "").startswith(EVENTS)
                if "cache-control" not in headers:
                    message = {**message, "headers": [*message["headers"], _NO_STORE]}
            await send(message)

        try:
            await app(scope, receive, begin)
        except asyncio.CancelledError:
            if not request.ended:
                raise
            if not request.began:
                answer = JSONResponse({"detail": request.ended}, 401, headers=self.headers_of_401(scope))
                await answer(scope, receive, send)
        finally:
            del self._open[task]
            if timer is not None:
                timer.cancel()

    def headers_of_401(self, scope: Scope) -> dict[str, str]:
        """Returns the headers of the refusal of a request without a valid key."""
        return {"WWW-Authenticate": self.metadata.challenge(scope)}

    def refresh(self) -> None:
        """Ends the requests of keys that are no longer in force, and the streams of those with other scopes.

        A stream shows the tools of the scopes with which it began. A call that was allowed goes on.
        """
        for task, request in list(self._open.items()):
            try:
                changed = self._doorman.current(request.identity).scopes is not request.identity.scopes
                why = f"the scopes of {request.identity.shown} have changed: connect again" if changed else ""
                ends = changed and request.streams
            except Unauthenticated as error:
                why, ends = str(error), True
            if ends:
                self._end(task, request, why)

    @staticmethod
    def _end(task: asyncio.Task[Any], request: _Request, why: str) -> None:
        if not request.ended:
            request.ended = why
            task.cancel()
