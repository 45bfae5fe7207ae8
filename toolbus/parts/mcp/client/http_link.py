"""Makes HTTP requests to one MCP server: with its headers, with a token if it requires one, and only to its origin.

It does not know the meaning of answers. A 401, and a 403 for missing scopes, are repeated with a new token at most
three times. Redirects to another origin are refused, since headers and tokens are for the server that the operator
wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin

import aiohttp

from toolbus.common.text import quote, shorten
from toolbus.errors import Stage
from toolbus.parts.mcp.client.http_session import open_session, origin_of
from toolbus.parts.mcp.client.sse import EventTooLong, SseParser
from toolbus.parts.mcp.client.transport import Lost, NeedsLogin

MAX_ROUNDS = 3  # new tokens for one request
MAX_REDIRECTS = 3
MAX_ERROR_BYTES = 64 * 1024  # of the body of a refusal
MAX_EVENT_BYTES = 16 * 1024 * 1024  # of an event, and of an answer that is not a stream
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Challenge:
    """A refusal that requires another token.

    Attributes:
        status: 401 or 403.
        headers: of the answer, in order.
        used: the Authorization header of the request; "" without one.
        version: of the protocol, as in the request.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    used: str
    version: str = ""


class Authorization(Protocol):
    """Provides the token for one server."""

    def header(self) -> str:
        """Returns the Authorization header; "" without a token."""

    async def renew(self, challenge: Challenge) -> bool:
        """Gets another token after a refusal; False if the refusal does not ask for one.

        Raises:
            NeedsLogin: a user has to log in; the text says how.
        """

    async def close(self) -> None:
        """Ends an early renewal."""


class HttpLink:
    """The HTTP side of one server.

    Args:
        headers: those of the operator; sent to this server only.
        authorization: provides tokens; None: the operator's headers are enough.
    """

    def __init__(self, name: str, url: str, headers: Mapping[str, str], authorization: Authorization | None) -> None:
        self._name = name
        self._url = url
        self._headers = dict(headers)
        self._authorization = authorization
        self._session: aiohttp.ClientSession | None = None  # None before `open` and after `close`

    def open(self) -> None:
        """Prepares for requests; nothing is sent."""
        self._session = open_session([self._url])

    async def close(self) -> None:
        """Closes every connection."""
        session, self._session = self._session, None
        if self._authorization is not None:
            await self._authorization.close()
        if session is not None:
            await session.close()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, headers: Mapping[str, str], data: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Makes a request.

        Args:
            headers: override those of the operator.

        Yields:
            The response; its body is not read yet.

        Raises:
            NeedsLogin: a user has to log in.
            Lost: the server redirects to another origin, or the link is closed.
            aiohttp.ClientError, OSError: no answer came; `stage_of` tells how far the request got.
        """
        url, rounds, redirects = self._url, 0, 0
        while True:
            if self._session is None:
                raise Lost("the connection was closed", Stage.NOT_DISPATCHED)
            token = self._authorization.header() if self._authorization is not None else ""
            all_headers = {**self._headers, **headers}
            if token:
                all_headers["Authorization"] = token
            async with self._session.request(
                method, url, data=data, headers=all_headers, allow_redirects=False
            ) as response:
                if response.status in (307, 308) and redirects < MAX_REDIRECTS:
                    url, redirects = self._redirected(url, response), redirects + 1
                    continue
                if response.status not in (401, 403):
                    if 300 <= response.status < 400:
                        self._redirected(url, response)
                    yield response
                    return
                challenge = Challenge(
                    response.status,
                    tuple(response.headers.items()),
                    await read_body(response, MAX_ERROR_BYTES),
                    token,
                    headers.get("MCP-Protocol-Version", ""),
                )
                if self._authorization is None or rounds >= MAX_ROUNDS:
                    self._refuse(challenge)
            assert self._authorization is not None
            rounds += 1
            if not await self._authorization.renew(challenge):
                self._refuse(challenge)

    def _refuse(self, challenge: Challenge) -> None:
        shown = shorten(challenge.body.decode("utf-8", "replace"), 200)
        detail = f" ({quote(shown)})" if shown else ""
        if challenge.status == 401:
            raise NeedsLogin(
                f"server {self._name!r} answered 401{detail}: log in with `toolbus mount {self._name} --url "
                f"{self._url} --login`, or write its Authorization into the headers of the mount"
            )
        raise Lost(
            f"server {self._name!r} answered 403{detail}: ask its operator for permission to do this",
            Stage.NOT_DISPATCHED,
        )

    def _redirected(self, url: str, response: aiohttp.ClientResponse) -> str:
        target = urljoin(url, response.headers.get("Location", ""))
        if origin_of(target) != origin_of(self._url) or response.status not in (307, 308):
            raise Lost(
                f"server {self._name!r} redirects ({response.status}) to {quote(shorten(target, 200))}: nothing is "
                "sent there; if that is the server, write its url into the mount",
                Stage.NOT_DISPATCHED,
            )
        return target


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Returns the body of an answer, cut at the limit."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size >= limit:
            break
    return b"".join(chunks)[:limit]


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an answer.

    Raises:
        EventTooLong: it is longer than the limit of an event.
        Lost: the connection ended before the end of the body.
    """
    try:
        body = await read_body(response, MAX_EVENT_BYTES + 1)
    except (aiohttp.ClientError, OSError) as error:
        raise Lost(f"the server ended the connection within its answer ({error})", Stage.ACCEPTED) from None
    if len(body) > MAX_EVENT_BYTES:
        raise EventTooLong(f"an answer has more than {MAX_EVENT_BYTES} bytes")
    return body


async def first_message(response: aiohttp.ClientResponse) -> bytes:
    """Returns the only message of an answer, or the first of its stream; b"" if it has none."""
    if not response.headers.get("Content-Type", "").startswith(EVENTS):
        return await read_whole(response)
    parser = SseParser(MAX_EVENT_BYTES)
    async for chunk in response.content.iter_any():
        for event in parser.feed(chunk):
            if event.data:
                return event.data
    return b""


def stage_of(error: BaseException) -> Stage:
    """Returns the stage of a request that failed before its answer began."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)):
        return Stage.NOT_DISPATCHED
    return Stage.DISPATCHED
