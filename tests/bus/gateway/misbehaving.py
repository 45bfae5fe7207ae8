"""A legacy plugin that does whatever it likes with a connection: bytes on a socket, without an HTTP library.

The last part of a request's path names the behaviour: ``/reset``, ``/endless-body``. ``/good`` answers with the
arguments that it got, so that an answer which leaked from another call is seen. Everything that arrives is kept.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.faults.raw_peer import RawPeer
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

BODY_LIMIT = 10_000  # bytes of an answer; the bus under test has to be told
PAUSE = 0.02  # between pieces that must not arrive as one


@dataclass(slots=True)
class Request:
    """One request as it arrived: the first line, the headers by lower-case name, and the body's bytes."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def call(self) -> dict[str, Any]:
        """The body, parsed."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


@dataclass(slots=True)
class Peer:
    """A connection and the request that came over it."""

    writer: asyncio.StreamWriter
    plugin: Misbehaving
    request: Request = field(default_factory=lambda: Request("", {}, b""))

    async def say(self, data: bytes) -> None:
        """Writes bytes that are to arrive by themselves."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Ends the connection with an RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Act = Callable[[Peer], Awaitable[bool | None]]  # True: the connection stays open for the next request


def answer(body: bytes | str = b"", status: str = "200 OK", *headers: str, version: str = "1.1") -> bytes:
    """Builds a whole answer; the length is added unless a header speaks of it."""
    data = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/{version} {status}", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def says(*pieces: bytes, stays: bool = True) -> Act:
    """Says pieces one after the other, so that each arrives by itself."""

    async def act(peer: Peer) -> bool:
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(PAUSE)
            await peer.say(piece)
        return stays

    return act


def for_ever(begin: bytes, piece: bytes, pause: float = 0.0) -> Act:
    """Begins an answer and goes on until nobody listens."""

    async def act(peer: Peer) -> None:
        await peer.say(begin)
        while not peer.writer.is_closing():
            await peer.say(piece)
            await asyncio.sleep(pause)

    return act


async def good(peer: Peer) -> bool:
    """Answers with the arguments."""
    await peer.say(answer(json.dumps({"output": peer.request.call["arguments"]})))
    return True


async def held(peer: Peer) -> bool:
    """Answers when the test says so."""
    peer.plugin.holding += 1
    await asyncio.wait_for(peer.plugin.let_go.wait(), 2 * WAIT_SECONDS)
    return await good(peer)


async def silent(peer: Peer) -> None:
    """Never answers."""
    await peer.plugin.let_go.wait()


async def reset(peer: Peer) -> None:
    """Resets the connection."""
    peer.reset()


async def good_then_gone(peer: Peer) -> bool:
    """Answers and closes, without having said so."""
    await good(peer)
    return False


async def redirect_to_itself(peer: Peer) -> bool:
    """Sends the caller back to where it is."""
    path = peer.request.line.split(" ")[1]
    await peer.say(answer("moved", "307 Temporary Redirect", f"Location: {path}"))
    return True


async def redirect_to_the_trap(peer: Peer) -> bool:
    """Sends the caller to another port."""
    await peer.say(answer("", "302 Found", f"Location: {peer.plugin.elsewhere}"))
    return True


_CHUNKED = "Transfer-Encoding: chunked"
_TEXT = "Content-Type: text/plain; charset="
_OUTPUT = b'{"output": "fine"}'

ACTS: dict[str, Act] = {
    "good": good,
    "held": held,
    # whole answers, each kind of body
    "output": says(answer('{"output": {"f": 5.0, "i": 123456789012345678901234567890}, "is_error": false}')),
    "no-output": says(answer('{"temperature": 3, "error": null}')),
    "error-true": says(answer('{"output": {"near": "Tula"}, "is_error": true, "error": "no such city"}')),
    "error-without-word": says(answer('{"output": null, "is_error": true}')),
    "error-is-text": says(answer('{"output": "o", "is_error": "false", "error": "e"}')),
    "error-is-1": says(answer('{"output": "o", "is_error": 1, "error": {"why": 1}}')),
    "error-is-0": says(answer('{"output": "o", "is_error": 0, "error": "e"}')),
    "error-is-null": says(answer('{"output": "o", "is_error": null}')),
    "error-alone": says(answer('{"output": "o", "error": "not meant"}')),
    "list": says(answer("[1, 2.0]")),
    "text": says(answer('"sunny"')),
    "number": says(answer("-0.5e3")),
    "null": says(answer("null")),
    "not-json": says(answer("sunny, 23°", "200 OK", f"{_TEXT}utf-8")),
    "nan": says(answer('{"output": NaN}')),
    "empty": says(answer()),
    "204": says(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "bom": says(answer(b"\xef\xbb\xbf" + _OUTPUT)),
    "utf-16": says(answer('{"output": "晴"}'.encode("utf-16"), "200 OK", "Content-Type: application/json")),
    "latin-1": says(answer("Größe".encode("latin-1"), "200 OK", f"{_TEXT}iso-8859-1")),
    "unknown-charset": says(answer("Größe", "200 OK", f"{_TEXT}klingon")),
    "invalid-utf-8": says(answer(b"a\xff\xfeb")),
    "201": says(answer(_OUTPUT, "201 Created")),
    "chunked": says(answer(b'7\r\n{"outpu\r\nb\r\nt": "fine"}\r\n0\r\n\r\n', "200 OK", _CHUNKED)),
    "in-pieces": says(*(answer(_OUTPUT)[at : at + 24] for at in range(0, len(answer(_OUTPUT)), 24))),
    "below-limit": says(answer(json.dumps("x" * (BODY_LIMIT - 2)))),
    # statuses
    "redirect-to-itself": redirect_to_itself,
    "redirect-elsewhere": redirect_to_the_trap,
    "304": says(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "400": says(answer("bad city", "400 Bad Request")),
    "404-empty": says(answer("", "404 Not Found")),
    "500-long": says(answer("é" * 5000, "500 Internal Server Error")),
    "503-binary": says(answer(bytes(range(128, 256)), "503 Service Unavailable")),
    "500-with-output": says(answer('{"output": "o", "is_error": false}', "500 Internal Server Error")),
    "100-continue": says(b"HTTP/1.1 100 Continue\r\n\r\n", answer(_OUTPUT)),
    "103-hints": says(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(_OUTPUT)),
    "status-999": says(answer("what", "999 Strange")),
    "status-42": says(answer("what", "42 Low")),
    # connections
    "reset": reset,
    "close": says(stays=False),
    "close-in-headers": says(b"HTTP/1.1 200 OK\r\nContent-Le", stays=False),
    "close-in-body": says(answer(_OUTPUT, "200 OK", "Content-Length: 500"), stays=False),
    "broken-chunk": says(answer(b"zz\r\nwhat\r\n0\r\n\r\n", "200 OK", _CHUNKED)),
    "close-in-chunk": says(answer(b"500\r\n{", "200 OK", _CHUNKED), stays=False),
    "garbage": says(b"\x00\x01\x02 SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "two-lengths": says(answer(_OUTPUT, "200 OK", "Content-Length: 18", "Content-Length: 3")),
    "negative-length": says(answer(_OUTPUT, "200 OK", "Content-Length: -1")),
    "endless-header": for_ever(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 4096),
    "endless-headers": for_ever(b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n" * 50),
    "endless-body": for_ever(answer(b"", "200 OK", _CHUNKED), b"400\r\n" + b"x" * 1024 + b"\r\n"),
    "endless-length": for_ever(answer(b"", "200 OK", "Content-Length: 99999999999"), b"x" * 4096),
    "above-limit": says(answer(json.dumps("x" * (BODY_LIMIT - 1)))),
    "trickle": for_ever(answer(b"", "200 OK", _CHUNKED), b"1\r\nx\r\n", 0.1),
    "trickle-headers": for_ever(b"HTTP/1.1 200 OK\r\n", b"X: 1\r\n", 0.1),
    "endless-hints": for_ever(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.01),
    "silent": silent,
    "gzip": says(answer(gzip.compress(_OUTPUT), "200 OK", "Content-Encoding: gzip")),
    "deflate": says(answer(zlib.compress(_OUTPUT), "200 OK", "Content-Encoding: deflate")),
    "gzip-cut": says(answer(gzip.compress(_OUTPUT)[:-9], "200 OK", "Content-Encoding: gzip")),
    "gzip-bomb": says(answer(gzip.compress(b"x" * 1_000_000), "200 OK", "Content-Encoding: gzip")),
    "brotli": says(answer(_OUTPUT, "200 OK", "Content-Encoding: br")),
    "long-header": says(answer(_OUTPUT, "200 OK", f"X-Long: {'x' * 60_000}")),
    "good-then-gone": good_then_gone,
    "connection-close": says(answer(_OUTPUT, "200 OK", "Connection: close"), stays=False),
    "http-1.0": says(answer(_OUTPUT, version="1.0"), stays=False),
    "until-close": says(b"HTTP/1.0 200 OK\r\n\r\n" + _OUTPUT, stays=False),
    "one-too-many": says(answer(_OUTPUT) + answer('{"output": "leaked"}')),
    "one-too-many-later": says(answer(_OUTPUT), answer('{"output": "leaked"}')),
    "rest-too-many": says(answer(_OUTPUT) + b"}}} more than was said"),
}


class Misbehaving:
    """The plugin's server on a port of its own, which it keeps while it is away.

    Args:
        there: whether anyone accepts connections from the start.

    Attributes:
        connections: how many were accepted in all.
        opened: how many are open now.
        requests: what was posted, oldest first.
        acted: how many requests have been dealt with to the end.
        holding: how many requests of ``/held`` have come.
        let_go: lets those be answered.
        first: what a new connection meets before its request is read; None: its request is read.
        elsewhere: where redirects lead.
    """

    def __init__(self, *, host: str = "127.0.0.1", there: bool = True) -> None:
        self.connections = 0
        self.requests: list[Request] = []
        self.acted = 0
        self.holding = 0
        self.let_go = asyncio.Event()
        self.first: Act | None = None
        self.elsewhere = ""
        self._host = host
        self._there = there
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None  # None while nobody accepts
        self._place = self._bound(0)  # holds the port: bound and not listening, it refuses connections
        self.port: int = self._place.getsockname()[1]

    def __repr__(self) -> str:
        return f"<Misbehaving {self.port} connections={self.connections} open={self.opened}>"

    async def __aenter__(self) -> Self:
        if self._there:
            await self.come()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go.set()
        self.leave()
        self._place.close()
        await until(lambda: not self._open, "connections to end")

    @property
    def opened(self) -> int:
        return len(self._open)

    def url(self, behaviour: str = "good", host: str = "", user: str = "") -> str:
        """The callback URL of a behaviour."""
        named = host or (f"[{self._host}]" if ":" in self._host else self._host)
        return f"http://{user}{named}:{self.port}/{behaviour}"

    async def come(self) -> None:
        """Accepts connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._place, limit=1 << 20, backlog=1024)

    def leave(self) -> None:
        """Accepts nothing any more and ends what is open; the port stays its own."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._place = self._bound(self.port)
        for writer in self._open:
            writer.transport.abort()

    def _bound(self, port: int) -> socket.socket:
        place = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((self._host, port))
        return place

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        peer = Peer(writer, self)
        try:
            if self.first is not None and not await self.first(peer):
                return
            while await self._next(reader, peer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _next(self, reader: asyncio.StreamReader, peer: Peer) -> bool:
        """Reads a request and does what it names; whoever hangs up meanwhile ends it."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        peer.request = Request(lines[0], headers, body)
        self.requests.append(peer.request)
        acting = asyncio.ensure_future(ACTS[lines[0].split(" ")[1].rpartition("/")[2]](peer))
        hanging_up = asyncio.ensure_future(reader.read(1))  # nothing may come before the answer has gone
        await asyncio.wait((acting, hanging_up), return_when=asyncio.FIRST_COMPLETED)
        for task in (acting, hanging_up):
            task.cancel()
        await asyncio.wait((acting, hanging_up))
        self.acted += 1
        return not acting.cancelled() and bool(acting.result())


async def offer(bus: Bus, urls: dict[str, str], source: str = "plugin:old") -> None:
    """Registers tools by name and callback URL, unchecked as those that come by REST, but without an HTTP server."""
    async with RawPeer(bus.grpc_addresses[0]) as peer:
        tools = [pb.Tool(name=name, callback_url=url, validate=False) for name, url in urls.items()]
        await peer.stub.Register(wire.RegisterRequest(source=source, tools=tools))
