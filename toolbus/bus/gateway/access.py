"""Refuses HTTP requests that do not come from a program of this machine, web pages in a local browser included.

Checked before a request's body is read, for every path but ``/healthz`` (REST-20, REST-21). No header that claims where
a request came from is believed: the peer is the address of the socket. The limit of a request's body is enforced here
too, after that check: a client that is refused learns nothing else.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_peer, mask
from toolbus.text import quote

log = logging.getLogger("toolbus.http")

OPEN_PATHS = frozenset({"/healthz"})


class AccessGuard:
    """Refuses foreign clients with 403, a body whose length is ambiguous with 400 or 501, a large one with 413.

    Args:
        max_bytes: of a request's body (limit http_body_bytes).
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = "" if scope["path"] in OPEN_PATHS else _refusal(scope)
        if refusal:
            log.warning("refused method=%s path=%.80r why=%s", scope["method"], scope["path"], refusal)
            await JSONResponse({"detail": refusal}, status_code=403)(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            detail = "the request has a Transfer-Encoding other than chunked: send the body without one"
            await JSONResponse({"detail": detail}, 501, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and coding is not None:
            # A proxy that goes by the other header sees another request in the body (RFC 9112, section 6.3).
            detail = "the request has both Content-Length and Transfer-Encoding: send one of them"
            await JSONResponse({"detail": detail}, 400, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and int(length) > self._max_bytes:  # the parser accepts digits only
            await JSONResponse({"detail": self._too_long()}, 413)(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

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


def _refusal(scope: Scope) -> str:
    """Returns why a request is refused; empty where it is allowed."""
    client = scope.get("client")
    if client is None or not is_loopback_peer(client[0]):
        return "only programs on this machine may use the bus: connect over 127.0.0.1 or ::1"
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not is_allowed_host_header(hosts[0]):
        shown = quote(mask(", ".join(hosts))) if hosts else "missing"
        return (
            f"the Host header is {shown}: it must be 127.0.0.1, [::1] or localhost (another name that resolves to this "
            "machine could belong to a web page)"
        )
    for name, value in scope["headers"]:
        origin = value.decode("latin-1")
        if name == b"origin" and not is_allowed_origin(origin):
            return (
                f"the Origin header is {quote(mask(origin))}: only a web page that this machine served may use the bus"
            )
    return ""
