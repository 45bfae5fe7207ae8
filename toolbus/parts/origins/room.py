"""Answers what browsers ask before a page of another origin may talk to the bus (CORS, Fetch standard)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room
from toolbus.parts.origins.settings import OriginSettings

if TYPE_CHECKING:  # a bus without HTTP does not load it
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What hosts use. Registrations, the bus's own tools and the console stay closed to pages.
HOST_PATHS = re.compile(
    r"/api/tools(?:/(?:invoke|events|export|search))?|/api/tasks(?:/(?!.*/redirect$).+)?|/api/notifications|/healthz|/readyz"
)
METHODS = "GET, POST, DELETE"
HEADERS = "authorization, content-type, last-event-id"
MAX_AGE_SECONDS = 600  # how long a browser need not ask again
_CLAIMS = (b"origin", b"sec-fetch-site")  # by which the bus tells pages from programs


class OriginsRoom(Room):
    """The pages that may be hosts of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._origins = frozenset(core.config.part(OriginSettings).http_origins)

    def provides(self) -> Iterable[object]:
        """Returns itself, a layer around the HTTP application, where an origin is named."""
        return [self] if self._origins else []

    def around(self, application: ASGIApp) -> ASGIApp:
        """Returns the application with its answers shown to pages of the named origins.

        To it their requests are those of a program; who the browser runs as, and the key over HTTPS, count as always.
        """

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            origin = self._origin(scope)
            if origin is None or not HOST_PATHS.fullmatch(scope["path"]):
                await application(scope, receive, send)
                return
            headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            if scope["method"] == "OPTIONS":
                await _preflight(scope, origin)(scope, receive, send)
                return

            async def shown(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)

            claims = [(name, value) for name, value in scope["headers"] if name not in _CLAIMS]
            await application({**scope, "headers": claims}, receive, shown)

        return serve

    def _origin(self, scope: Scope) -> bytes | None:
        """Returns the origin of a request if it is one of those that are named."""
        if scope["type"] != "http":
            return None
        origins: list[bytes] = [value for name, value in scope["headers"] if name == b"origin"]
        named = len(origins) == 1 and origins[0].decode("latin-1") in self._origins
        return origins[0] if named else None


def _preflight(scope: Scope, origin: bytes) -> Response:
    from starlette.responses import Response

    headers = {
        "Access-Control-Allow-Origin": origin.decode("latin-1"),
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": HEADERS,
        "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
        "Vary": "Origin",
    }
    if any(name == b"access-control-request-private-network" for name, _ in scope["headers"]):
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=headers)
