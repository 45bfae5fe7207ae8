"""Holds the paths that rooms serve over HTTP in addition to the gateway's own endpoints.

A room adds an ASGI application when it opens. The gateway passes admitted requests to it: the access guard
knows who makes the request, and the body is limited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol, runtime_checkable

from toolbus.bus.access.identity import Identity

# As ASGI has it; the types of a web framework say the same.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_API = "api/"


async def disconnected(receive: Receive) -> None:
    """Waits until the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(scope: Message, send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Sends a response; to HEAD without its body."""
    if status != 304:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


@runtime_checkable
class Cookies(Protocol):
    """Knows which identity the cookie of a browser proves."""

    def identity_in(self, header: str) -> Identity | None:
        """Returns the identity that a Cookie header proves; None where it holds no cookie of the bus.

        Raises:
            Unauthenticated: the cookie does not prove an identity any more.
        """


class WebPaths:
    """Which application serves which path.

    Attributes:
        policies: the Content-Security-Policy of each path that is a web page.
    """

    def __init__(self) -> None:
        # By the first part of the path, with its slash; below /api by the first two.
        self._applications: dict[str, Application] = {}
        self.policies: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<WebPaths {' '.join(self._applications)}>"

    def add(self, path: str, application: Application) -> None:
        """Has an application serve a path of one part (``/mcp``) or one below ``/api``, and all below it.

        Raises:
            ValueError: the path has several parts, or another application serves it.
        """
        if not path.startswith("/") or "/" in path[1:].removeprefix(_API) or path in ("/", f"/{_API}"):
            raise ValueError(f"{path!r} is not a path of one part: write it as /name or /{_API}name")
        if path in self._applications:
            raise ValueError(f"{path} is served already: choose another path")
        self._applications[path] = application

    def find(self, path: str) -> Application | None:
        """Returns the application that serves the path of a request; None where it is not a room's."""
        end = path.find("/", 1)
        if end == len(_API) and path.startswith(_API, 1):
            end = path.find("/", end + 1)
        return self._applications.get(path if end < 0 else path[:end])


def quality_of(parameters: str) -> float:
    """Returns how much a client likes a media type of its Accept header, by what follows the type; 0.0: not at all."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
