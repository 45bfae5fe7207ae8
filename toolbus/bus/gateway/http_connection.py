"""Reads HTTP connections within bounds of bytes and time, and puts the security headers on every answer.

This includes the answers to requests that the application never sees: those that are not HTTP, too slow or too large,
or beyond the limit of connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from toolbus.common.local_users import Address
from toolbus.common.log_limit import LogLimit

# Clients offer HTTP/2 with a first request in the clear: Java's default client and ``curl --http2``. The parser
# beneath takes whatever follows such a head for another protocol, and the body would be lost. So a request that
# offers an upgrade is parsed twice: once to its end of head, then anew from a head without the offer.

_OFFER = {b"upgrade", b"http2-settings"}  # tokens of Connection; without the first, an Upgrade header means nothing


class RequestParser:
    """The part of `httptools.HttpRequestParser` that uvicorn uses.

    Args:
        events: gets the parser's events.
    """

    __slots__ = ("_events", "_parser", "get_http_version", "get_method", "should_keep_alive", "should_upgrade")

    def __init__(self, events: HttpToolsProtocol) -> None:
        self._events = events
        self._begin()

    def _begin(self) -> None:
        """Takes a new parser: one that has ended a request with ``Connection: close`` reads nothing more."""
        self._parser = parser = httptools.HttpRequestParser(self._events)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: it answers the first of a pipeline
        self.get_http_version, self.get_method = parser.get_http_version, parser.get_method
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade

    @property
    def is_offer(self) -> bool:
        """Whether the head that has just ended offers an upgrade, so that it comes once more."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parses a chunk.

        Raises:
            httptools.HttpParserError: it is not HTTP.
            httptools.HttpParserUpgrade: it is a CONNECT.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.is_offer:
                    raise
                rest = rest[upgrade.args[0] :]
                head = self._head_without_offer()
                self._begin()
                self._parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._events.url, self.get_http_version().encode())]
        for name, value in self._events.headers:
            if name == b"connection":
                others = [token for token in value.split(b",") if token.strip().lower() not in _OFFER]
                value = b",".join(others)
            lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])


MAX_HEAD_BYTES = 64 * 1024
LINES_PER_SECOND = 10  # of the log that clients of one listener can cause
IDLE_SECONDS = 75  # how long a connection may stay open without a byte after an answer
UID = "toolbus.uid"  # extension of a request's scope: the uid of its peer, None where the system does not say it
CERTIFICATE = "toolbus.certificate"  # where the ASGI scope of a request holds the client's certificate
CONNECTION = "toolbus.connection"  # where the ASGI scope of a request holds its `BoundedProtocol`
PROBE_PATHS = frozenset({"/healthz", "/readyz"})  # of health probes, which show nothing but that the bus runs

_PROBES = frozenset(path.encode() for path in PROBE_PATHS)

# An answer that is not a web page may load nothing, may not be framed, and may send no form.
NO_PAGE = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_POLICY = "content-security-policy"
_TOO_LARGE = f"The request line and headers have more than {MAX_HEAD_BYTES} bytes."
_HEADERS = (
    ("x-frame-options", "DENY"),  # for browsers that do not know frame-ancestors
    ("x-content-type-options", "nosniff"),  # no tool's output is taken for a page or a script
    ("cross-origin-resource-policy", "same-origin"),  # no page of another origin can embed an answer
    ("cross-origin-opener-policy", "same-origin"),  # nor hold on to a window that it opened
)


def peer_of(scope: Scope) -> str:
    """Returns the address of a request's client, for the log and the audit."""
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}"


class LimitedLog(logging.LoggerAdapter[logging.Logger]):
    """The log of uvicorn, in which clients of one listener can cause only some lines a second."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("uvicorn.error"))
        self._limit = LogLimit(LINES_PER_SECOND, self._log_more, log_later)

    @property
    def level(self) -> int:
        """The level, for which uvicorn asks."""
        return self.logger.level

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs what a client did, unless too many lines came before in this second."""
        if self._limit.passes():
            self.logger.warning(msg, *args, **kwargs)

    def _log_more(self, lines: int) -> None:
        self.logger.warning("and %d more requests that are not HTTP, or beyond the limit of connections", lines)


def log_later(seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
    """Calls a function of a log limit after so many seconds, on the running loop."""
    return asyncio.get_running_loop().call_later(seconds, function)


class BoundedConfig(uvicorn.Config):
    """What every connection of a server shares.

    Args:
        connections: how many may be open.
        head_seconds: as in `Timings`.
        page_policies: the Content-Security-Policy of each path that is a web page.
        uid_of: returns the uid of a peer, by its address and ours; None where the system does not say.
        tls: serves HTTPS with this; None serves HTTP.
    """

    def __init__(
        self,
        application: ASGIApp,
        *,
        connections: int,
        head_seconds: float,
        page_policies: Mapping[str, str],
        uid_of: Callable[[Address, Address], int | None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            application,
            http=BoundedProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # REST-20: it would believe X-Forwarded-For of a loopback peer
            timeout_keep_alive=IDLE_SECONDS,
            limit_concurrency=connections + 1,  # uvicorn refuses from this number on
            headers=[*_HEADERS, (_POLICY, NO_PAGE)],
            ssl_context_factory=(lambda config, default: tls) if tls is not None else None,
        )
        self.log = LimitedLog()
        self.head_seconds = head_seconds
        self.uid_of = uid_of
        self.page_policies = {path: policy.encode() for path, policy in page_policies.items()}


class BoundedProtocol(HttpToolsProtocol):
    """Limits the bytes and the time until a body, which the parser does not, and answers every health probe.

    The head of a request has `head_seconds`, from the connect or from its first byte on; a request that is answered
    before its body has ended shares them with the head of the next. Between two requests a connection may be idle.

    Attributes:
        on_lost: called when the connection is lost; None where no request needs it.
    """

    parser: RequestParser  # type: ignore[assignment]  # uvicorn names the class that it replaces

    def __init__(self, config: BoundedConfig, *parts: Any, **more: Any) -> None:
        super().__init__(config, *parts, **more)
        self._bounds = config
        self.logger = config.log  # type: ignore[assignment]
        self.parser = None  # type: ignore[assignment]  # until the first chunk: there may never be one
        self._uid: int | None = None  # of the peer; None until connected, and where the system does not say
        self._head_bytes = 0  # of a request line and headers that are not complete, about
        self._chunk_bytes = 0  # of the chunk that is being read; 0 until the first
        self._head_too_large = False  # whether a head that is complete has too many bytes
        self._in_head = True  # whether the body has not begun yet
        self._head_begun = False  # whether the first byte of a head that is not complete was read
        self._request_ended = False  # whether the chunk that is being read ended a request
        self.on_lost: Callable[[], None] | None = None
        self._certificate: bytes | None = None  # what the client of a TLS connection proved to have, as DER
        self._head_timer: asyncio.TimerHandle | None = None  # None while no head is due, and until connected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Looks up the user of the connection, once for all of its requests, and starts the time of the first head."""
        super().connection_made(transport)
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._uid = self._bounds.uid_of(peer, own) if peer and own else None
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self._certificate = tls.getpeercert(True)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the time, and notifies the request that is being answered."""
        self._stop_head_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset
        if self.on_lost is not None:
            self.on_lost()
        # These refer to it: lost connections would be left to the garbage collection, which holds the loop for long.
        self.pipeline.clear()
        self.on_lost = self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Reads a chunk."""
        self._request_ended = False
        if not self._chunk_bytes:
            self.parser = RequestParser(self)
        self._chunk_bytes = len(data)
        super().data_received(data)
        if self._head_timer is None and self.cycle.response_complete:
            self._start_head_timer()  # the chunk did not bring a whole head
        if not self._in_head or self._request_ended or self._head_too_large:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, or a head that is too large."""
        super().send_400_response(_TOO_LARGE if self._head_too_large else msg)

    def on_message_begin(self) -> None:
        """Notes that a head begins, and the user of its connection."""
        self._head_begun = True
        super().on_message_begin()
        self.scope["extensions"] = {UID: {"uid": self._uid}}
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """Notes that the body begins.

        Raises:
            ValueError: the head is too large; the parser takes it for bytes that are not HTTP.
        """
        if self.parser.is_offer:  # it comes again, without the upgrade
            return
        if self._head_bytes + self._chunk_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise ValueError(_TOO_LARGE)
        self._in_head = self._head_begun = False
        self._head_bytes = 0
        # A health probe must not fail because many other connections are open.
        self.limit_concurrency = None if self.url in _PROBES else self.config.limit_concurrency
        super().on_headers_complete()
        self._stop_head_timer()
        if self._certificate is not None:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]
        policy = self._bounds.page_policies.get(self.scope["path"])
        if policy is not None:
            others = [(name, value) for name, value in self.cycle.default_headers if name != _POLICY.encode()]
            self.cycle.default_headers = [*others, (_POLICY.encode(), policy)]

    def on_message_complete(self) -> None:
        """Notes that the next request begins."""
        if self.parser.is_offer:
            return
        self._in_head = self._request_ended = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Starts the time for the rest of the bytes that the client has begun to send: a head, or an unread body."""
        super().on_response_complete()
        if self.transport.is_closing():  # perhaps lost: the answer to a request with others behind it goes on
            return
        if (self._head_begun or not self._in_head) and self.cycle.response_complete:
            self._start_head_timer()

    def _head_size(self) -> int:
        """Returns how many bytes the head that is complete has, without blanks that mean nothing."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        line = len(method) + len(self.url) + len(f"  HTTP/{version}\r\n\r\n")
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing for a CONNECT: uvicorn would advise to install a WebSocket library."""

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._bounds.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        """Closes the connection, with an answer where a request has begun."""
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():  # the client does not read either: closing would wait for it
            self.transport.abort()
            return
        if self._head_begun:  # a program that only holds a connection ready expects no answer
            self.transport.write(self._late_answer())
        self.transport.close()

    def _late_answer(self) -> bytes:
        detail = (
            f"the request line and headers took longer than {self._bounds.head_seconds:g} s: send them without a pause"
        )
        body = json.dumps({"detail": detail}, separators=(",", ":")).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        return STATUS_LINE[408] + b"".join(b"%b: %b\r\n" % each for each in headers) + b"\r\n" + body
