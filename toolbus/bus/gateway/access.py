"""Refuses HTTP requests of other machines, of users who may not use the bus, and of web pages in a local browser.

Over HTTPS other machines need a key: `remote_access` admits them. Everything is checked before a request's body is
read, for every path but the probes (REST-20 to REST-24). Headers that claim where a request came from are ignored: the
peer is the address of the socket. The limit of a request's body is enforced after these checks.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.access.budgets import REFUSAL_SECONDS, REFUSED, REQUEST_SECONDS
from toolbus.bus.access.identity import LOCAL, Principal
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call import Seams
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.gateway.http_connection import LINES_PER_SECOND, PROBE_PATHS, UID, log_later, peer_of
from toolbus.bus.gateway.remote_access import RemoteAccess
from toolbus.bus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_peer, is_own_origin, mask
from toolbus.common.log_limit import LogLimit
from toolbus.common.text import quote
from toolbus.errors import ToolBusError, http_status

log = logging.getLogger("toolbus.http")

OPEN_PATHS = frozenset({"/healthz"})
OPERATOR_PATHS = ("/api/bus/", "/api/console/")  # prefixes of the paths that only pages of the listener itself may use
READING = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing, here as everywhere
_JSON_TYPE = re.compile(r"application/(?:[^\s;,/]+\+)?json\s*(?:;.*)?", re.ASCII | re.IGNORECASE)  # as in REST-10


class AccessGuard:
    """Refuses foreign clients with 403, and some bodies before the application reads them.

    A body of a page of another server whose type is not JSON gets 415, one of ambiguous length 400 or 501, a large one
    413.

    Args:
        max_bytes: of a request's body (limit http_body_bytes).
        neighbours: which users of this machine may use the bus.
        remote: admits requests over HTTPS.
        audit: records refusals.
        seams: of the bus, for the budgets of whom it refuses, and of other machines.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, neighbours: Neighbours, remote: RemoteAccess, audit: Audit, seams: Seams
    ) -> None:
        self._seams = seams
        self._app = app
        self._audit = audit
        self._neighbours = neighbours
        self._remote = remote
        self._max_bytes = max_bytes
        self._log_limit = LogLimit(LINES_PER_SECOND, _log_more, log_later)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["scheme"] != "https" and scope["path"] not in PROBE_PATHS:
            why = self._neighbours.refusal(_uid(scope))
            if why:
                self._record(scope, why)
                await self._seams.budgets.spend(REFUSED, REFUSAL_SECONDS)
                await JSONResponse({"detail": why}, 403, headers={"Connection": "close"})(scope, receive, send)
                return
        if scope["scheme"] == "https" and (document := self._remote.metadata.response(scope)) is not None:
            await document(scope, receive, send)
            return
        refusal = await self._admit(scope)
        if refusal is not None:
            status, why = refusal
            self._record(scope, why)
            if self._log_limit.passes():
                log.warning("refused method=%s path=%.80r why=%s", scope["method"], scope["path"], why)
            await self._seams.budgets.spend(REFUSED, REFUSAL_SECONDS)
            more = self._remote.headers_of_401(scope) if status == 401 else None
            await JSONResponse({"detail": why}, status, headers=more)(scope, receive, send)
            return
        identity = scope[IDENTITY]
        if identity.scopes is not None or _site_refusal(scope):  # a browser sends what a page asks it to
            account = REFUSED if identity.scopes is None else Principal(identity=identity).account
            await self._seams.budgets.spend(account, REQUEST_SECONDS)
        length = coding = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = value
            elif name == b"transfer-encoding" and coding is None:
                coding = value
        if coding is not None and coding.lower() != b"chunked":
            detail = "the request has a Transfer-Encoding other than chunked: send the body without one"
            await JSONResponse({"detail": detail}, 501, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and coding is not None:
            # A proxy that goes by the other header sees another request in the body (RFC 9112, section 6.3).
            detail = "the request has both Content-Length and Transfer-Encoding: send one of them"
            await JSONResponse({"detail": detail}, 400, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and int(length) > self._max_bytes:  # the parser accepts digits only
            await JSONResponse({"detail": self._too_long()}, 413)(scope, receive, send)
        else:
            await self._remote.serve(self._app, scope, self._limited(receive), send, identity)

    def _record(self, scope: Scope, why: str) -> None:
        self._audit.refuse(peer_of(scope), f"{scope['method']} {scope['path']}", why)

    async def _admit(self, scope: Scope) -> tuple[int, str] | None:
        """Notes who makes a request. Returns the status and the reason of a refusal; None where it is admitted."""
        if scope["scheme"] != "https":
            scope[IDENTITY] = LOCAL
            return None if scope["path"] in OPEN_PATHS else _refusal(scope)
        try:
            scope[IDENTITY] = await self._remote.admit(scope)
        except ToolBusError as error:
            return http_status(error), str(error)
        return None

    def _limited(self, receive: Receive) -> Receive:
        received = 0  # bytes of the body

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._too_long())
            return message

        return limited

    def _too_long(self) -> str:
        return f"the body is longer than the limit http_body_bytes = {self._max_bytes}: send less"


def _log_more(lines: int) -> None:
    log.warning("refused %d more requests", lines)


def _uid(scope: Scope) -> int | None:
    uid: int | None = scope.get("extensions", {}).get(UID, {}).get("uid")
    return uid


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Returns the status and the reason of a refusal; None where a request is allowed."""
    client = scope.get("client")
    if client is None or not is_loopback_peer(client[0]):
        return 403, "only programs on this machine may use the bus: connect over 127.0.0.1 or ::1"
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or not is_allowed_host_header(hosts[0]):
        shown = quote(mask(", ".join(hosts))) if hosts else "missing"
        return 403, (
            f"the Host header is {shown}: it must be 127.0.0.1, [::1] or localhost (another name that resolves to this "
            "machine could belong to a web page)"
        )
    origins = _values(scope, b"origin")
    for origin in origins:
        if not is_allowed_origin(origin):
            return 403, (
                f"the Origin header is {quote(mask(origin))}: only a web page that this machine served may use the bus"
            )
    for origin in origins:
        if not is_own_origin(origin, hosts[0], scope["scheme"], scope["server"][1]):
            return _page_refusal(scope, origin)
    if not origins and scope["path"].startswith(OPERATOR_PATHS):
        return _site_refusal(scope)
    return None


def _site_refusal(scope: Scope) -> tuple[int, str] | None:
    """Refuses requests of pages of other servers, by a header that only browsers send."""
    for site in _values(scope, b"sec-fetch-site"):
        if site not in ("same-origin", "none"):
            return 403, (
                f"the Sec-Fetch-Site header is {quote(site)}: no page of another server may administer the bus; use a "
                "program, which sends none"
            )
    return None


def _page_refusal(scope: Scope, origin: str) -> tuple[int, str] | None:
    """Refuses requests of pages of other servers of this machine that a browser sends without a preflight.

    A browser sends some requests of any page to any address, and only hides the answers from the page. For a body
    of type JSON it sends a preflight first, which is never granted.
    """
    what = f"the Origin header is {quote(origin)}, which is not the address of this listener"
    if scope["path"].startswith(OPERATOR_PATHS):
        return 403, f"{what}: no page of another server may administer the bus; use a program, which sends no Origin"
    kinds = _values(scope, b"content-type")
    if scope["method"] in READING or (len(kinds) == 1 and _JSON_TYPE.fullmatch(kinds[0])):
        return None
    shown = quote(", ".join(kinds)) if kinds else "missing"
    return 415, f"{what}, and Content-Type is {shown}: send Content-Type: application/json, or no Origin header"


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


# A request costs the loop about half a millisecond. Where five hundred start in one pass of the loop, frames of gRPC
# streams and health probes wait for all of them, in each of the several passes that they need. So a burst is admitted
# one request per pass, in the order of arrival; health probes never wait. A few requests start together, because
# calls that start together also travel to plugins together, which costs less. This is backpressure by delay: no
# request is refused.

MAX_TOGETHER = 64  # requests that may start in one pass of the loop; where more wait, they are a burst


class Admission:
    """ASGI middleware that admits a burst of requests one by one.

    Args:
        together: how many may start in one pass of the loop.
    """

    def __init__(self, app: ASGIApp, together: int = MAX_TOGETHER) -> None:
        self._app = app
        self._together = together
        self._free = together  # requests that may still start in this pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False  # whether `_next_pass` is going to run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request once it is admitted."""
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            await self._admitted()
        await self._app(scope, receive, send)

    async def _admitted(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_pass)
        if self._free:  # then no request waits
            self._free -= 1
            return
        admitted = loop.create_future()
        self._waiting.append(admitted)
        await admitted

    def _next_pass(self) -> None:
        """Admits the requests that may start in this pass of the loop."""
        burst = len(self._waiting) > self._together
        free = 1 if burst else self._together
        while free and self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():  # else its client has disconnected
                admitted.set_result(None)
                free -= 1
        self._free = 0 if burst else free
        self._scheduled = self._free < self._together
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_pass)
