"""Admits HTTPS requests of other machines: by key, by scope, and no page of another site.

Each request needs a key. When a key ends, its open requests end too: a stream of events would otherwise go on.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.access.identity import ANONYMOUS, LOCAL, Identity
from toolbus.bus.gateway.http_connection import CERTIFICATE, PROBE_PATHS, peer_of
from toolbus.bus.gateway.resource_metadata import ResourceMetadata
from toolbus.bus.gateway.scope_guard import check_path, needs_key
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.loopback import is_own_origin, mask
from toolbus.bus.web_paths import WebPaths
from toolbus.errors import NotPermitted, Unauthenticated
from toolbus.text import quote

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
        web: identifies browsers by their cookies.
    """

    def __init__(self, doorman: Doorman, metadata: ResourceMetadata, web: WebPaths) -> None:
        self.metadata = metadata
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
        cookies = self._web.cookies
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
