"""Who may ask over HTTP: programs of this machine, and no web page that a browser of this machine shows.

Checked before a request's body is read, for every path but ``/healthz`` (REST-20, REST-21). Nothing that a request says
about where it came from is believed: the peer is what the socket says.
"""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from toolbus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_peer

log = logging.getLogger("toolbus.http")

OPEN_PATHS = frozenset({"/healthz"})


class Guard:
    """Refuses with 403 whoever may not ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            why = _refusal(scope)
            if why:
                log.warning("refused method=%s path=%.80r why=%s", scope["method"], scope["path"], why)
                await JSONResponse({"detail": why}, status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> str:
    """Says why a request is refused; empty where it is not."""
    client = scope.get("client")
    if client is None or not is_loopback_peer(client[0]):
        return "only programs on this machine may ask: connect over 127.0.0.1 or ::1"
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not is_allowed_host_header(hosts[0]):
        shown = ", ".join(hosts)[:80] if hosts else "missing"
        return (
            f"the Host header is {shown!r}: it must name this machine as 127.0.0.1, [::1] or localhost (a name that "
            "leads here by DNS could belong to a web page)"
        )
    for name, value in scope["headers"]:
        if name == b"origin" and not is_allowed_origin(value.decode("latin-1")):
            return (
                f"the Origin header is {value.decode('latin-1')[:80]!r}: a web page may ask only where it was served "
                "by this machine"
            )
    return ""
