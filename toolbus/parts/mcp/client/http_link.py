"""Makes HTTP requests to one MCP server: with its headers, with a token if it requires one, and only to its origin.

It does not know the meaning of answers. A 401, and a 403 for missing scopes, are repeated with a new token at most
three times. Redirects to another origin are refused, since headers and tokens are for the server that the operator
wrote. A connection to an address that is not public is opened only if the operator wrote that address: the owner of a
public name could otherwise point it at this machine or the network around it. Proxies, cookies and decompression are
off. Server-sent events are parsed here too, within a limit.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from toolbus.bus.outbound import KEEP_ALIVE_SECONDS, MAX_HEAD_BYTES, Connector
from toolbus.common.text import quote, shorten
from toolbus.common.version import VERSION
from toolbus.errors import Stage
from toolbus.parts.mcp.client.transport import Challenge, Lost, NeedsLogin

MAX_ROUNDS = 3  # new tokens for one request
MAX_REDIRECTS = 3
MAX_ERROR_BYTES = 64 * 1024  # of the body of a refusal
MAX_EVENT_BYTES = 16 * 1024 * 1024  # of an event, and of an answer that is not a stream
EVENTS = "text/event-stream"


class Authorization(Protocol):
    """Provides the token for one server."""

    async def header(self) -> str:
        """Returns the Authorization header; "" without a token.

        Raises:
            NeedsLogin: there must be one, and it cannot be had.
        """

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
            token = await self._authorization.header() if self._authorization is not None else ""
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
                    tuple((str(name), value) for name, value in response.headers.items()),  # of aiohttp's own class
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
                f"server {self._name!r} answered 401{detail}: log in with `toolbus mounts add {self._name} --url "
                f"{self._url} --login`, or write its Authorization into the headers of the mount",
                challenge,
            )
        text = f"server {self._name!r} answered 403{detail}: ask its operator for permission to do this"
        raise Lost(text, Stage.NOT_DISPATCHED)

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


def stage_of(error: BaseException) -> Stage:
    """Returns the stage of a request that failed before its answer began."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)):
        return Stage.NOT_DISPATCHED
    return Stage.DISPATCHED


# -- connections -------------------------------------------------------------------------------------------------------

CONNECT_SECONDS = 10.0
# Suffixes that public name services do not answer, so the operator who wrote one meant the local network.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".intranet", ".corp", ".home")


def open_session(urls: Collection[str], *, trusts_private: bool = False) -> aiohttp.ClientSession:
    """Returns a session for the running loop; the caller closes it.

    Args:
        urls: as the operator wrote them; private addresses in them are allowed.
        trusts_private: whether every private address is allowed.
    """
    resolver = None if trusts_private else PublicResolver(frozenset(urlsplit(url).hostname or "" for url in urls))
    return aiohttp.ClientSession(
        connector=Connector(None, limit=0, resolver=resolver, ttl_dns_cache=10, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"toolbus/{VERSION}", "Accept-Encoding": "identity"},
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        trust_env=False,
    )


def origin_of(url: str) -> tuple[str, str, int]:
    """Returns scheme, host and port of a URL, for comparison."""
    parts = urlsplit(url)
    port = parts.port if parts.port is not None else {"https": 443, "http": 80}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def is_private_host(host: str) -> bool:
    """Tells whether a host's own text shows that it is not public."""
    host = host.lower().rstrip(".")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_SUFFIXES)


class PublicResolver(AbstractResolver):
    """Resolves names, and drops the addresses that are not public unless the operator wrote a private name.

    Args:
        written: hosts as the operator wrote them.
        system: resolves the names; None: the system's name service.
    """

    def __init__(self, written: frozenset[str], system: AbstractResolver | None = None) -> None:
        self._may_be_private = frozenset(host for host in written if is_private_host(host))
        self._system = system or aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._system.resolve(host, port, family)
        if host.lower() in self._may_be_private:
            return addresses
        public = [each for each in addresses if ipaddress.ip_address(each["host"]).is_global]
        if not public:
            where = f"{quote(host)} is at {addresses[0]['host']}, which is not public"
            raise OSError(None, f"{where}: write the address itself into the url of the mount if you mean it")
        return public

    async def close(self) -> None:
        await self._system.close()


# -- server-sent events, by the WHATWG standard (HTML, section 9.2.6) --------------------------------------------------

_LINE_ENDS = re.compile(rb"\r\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event of a stream exceeds the limit, with all of its lines; the rest of the stream cannot be read."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        data: its lines of data; empty if the event has only an id.
        id: its own, or the last earlier one of the stream; "" before the first.
        kind: "message" if the event names none.
    """

    data: bytes
    id: str
    kind: str = "message"


class SseParser:
    """Turns the chunks of one stream into events.

    Args:
        max_bytes: of one event, with comments and all fields.

    Attributes:
        last_id: the id from which the stream can be resumed; "" if it cannot.
        retry_seconds: the server's pause before a resume; None if it sent none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.last_id = ""
        self.retry_seconds: float | None = None
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []  # of a line that has not ended
        self._size = 0  # bytes of the event that has not ended
        self._data: list[bytes] = []  # lines of data of that event
        self._kind = ""
        self._has_id = False  # whether that event has an id of its own
        self._after_cr = False  # whether a line feed would belong to the line before
        self._at_start = True

    def restarted(self) -> SseParser:
        """Returns a parser for the resumed stream."""
        parser = SseParser(self._max_bytes)
        parser.last_id, parser.retry_seconds = self.last_id, self.retry_seconds
        return parser

    def feed(self, chunk: bytes) -> list[Event]:
        """Takes a chunk; returns the events that are complete with it.

        Raises:
            EventTooLong: the parser must not be used again.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        self._after_cr = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = _LINE_ENDS.sub(b"\n", chunk)
        first, *lines = chunk.split(b"\n")
        self._pieces.append(first)
        if not lines:
            self._grow(len(first))
            return []
        events: list[Event] = []
        self._end_line(b"".join(self._pieces) if len(self._pieces) > 1 else first, len(first), events)
        for line in lines[:-1]:
            self._end_line(line, len(line), events)
        self._pieces = [lines[-1]]
        self._grow(len(lines[-1]))
        return events

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            self._pieces, self._data = [], []
            raise EventTooLong(f"an event has more than {self._max_bytes} bytes")

    def _end_line(self, line: bytes, size: int, events: list[Event]) -> None:
        self._grow(size)
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if line:
            self._take_field(line)
            return
        if self._data or self._has_id:
            events.append(Event(b"\n".join(self._data), self.last_id, self._kind or "message"))
        self._data, self._kind, self._has_id, self._size = [], "", False, 0

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
            self._has_id = True
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) < 16:
            self.retry_seconds = int(value) / 1000
