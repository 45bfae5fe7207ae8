"""Parses HTTP requests, and ignores an upgrade: the request is served as if its client had not offered one (RFC 9110).

Clients offer HTTP/2 with a first request in the clear: Java's default client and ``curl --http2``. The parser beneath
takes whatever follows such a head for another protocol, and the body would be lost. So a request that offers an upgrade
is parsed twice: once to its end of head, then anew from a head without the offer.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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

    def __repr__(self) -> str:
        return f"<RequestParser of {self._events!r}>"

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
