"""Who may ask over HTTP: programs of this machine, and no web page that a browser of this machine shows.

Checked before a request's body is read, for every path but ``/healthz`` (REST-20, REST-21). Nothing that a request says
about where it came from is believed: the peer is what the socket says. The limit of a request's body is held here too,
after that check: who may not ask learns nothing else.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_peer, mask

log = logging.getLogger("toolbus.http")

OPEN_PATHS = frozenset({"/healthz"})


class AccessGuard:
    """Refuses with 403 whoever may not ask, with 400 or 501 a body whose end is doubtful, with 413 one too long.

    Args:
        max_bytes: of a request's body (limit http_body_bytes).
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        why = "" if scope["path"] in OPEN_PATHS else _refusal(scope)
        if why:
            log.warning("refused method=%s path=%.80r why=%s", scope["method"], scope["path"], why)
            await JSONResponse({"detail": why}, status_code=403)(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            why = "the request has a Transfer-Encoding other than chunked: send the body as it is"
            await JSONResponse({"detail": why}, status_code=501, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and coding is not None:
            # Whoever reads the other one sees another request in the body (RFC 9112, section 6.3).
            why = "the request has both Content-Length and Transfer-Encoding: send one of them"
            await JSONResponse({"detail": why}, status_code=400, headers={"Connection": "close"})(scope, receive, send)
        elif length is not None and int(length) > self._max_bytes:  # the parser takes digits only
            await JSONResponse({"detail": self._too_long()}, status_code=413)(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise HTTPException(413, self._too_long())
            return message

        return counted

    def _too_long(self) -> str:
        return f"the body is longer than the limit http_body_bytes = {self._max_bytes}: send less"


def _refusal(scope: Scope) -> str:
    """Says why a request is refused; empty where it is not."""
    client = scope.get("client")
    if client is None or not is_loopback_peer(client[0]):
        return "only programs on this machine may ask: connect over 127.0.0.1 or ::1"
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not is_allowed_host_header(hosts[0]):
        shown = repr(mask(", ".join(hosts))[:80]) if hosts else "missing"
        return (
            f"the Host header is {shown}: it must name this machine as 127.0.0.1, [::1] or localhost (a name that "
            "leads here by DNS could belong to a web page)"
        )
    for name, value in scope["headers"]:
        origin = value.decode("latin-1")
        if name == b"origin" and not is_allowed_origin(origin):
            return f"the Origin header is {mask(origin)[:80]!r}: a web page may ask only where this machine served it"
    return ""
