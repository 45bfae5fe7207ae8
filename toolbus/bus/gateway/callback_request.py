"""Posts the bodies of calls to one callback URL, over the keep-alive connections of an aiohttp session.

It uses aiohttp's pool of connections and its parser of responses, without the work of its client for each request:
headers to merge, cookies, redirects, a timer, a task that writes the body. That was half of the processor time of a
call, and so many objects that the garbage collector took a fifth of the rest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, cast

import aiohttp
from aiohttp.connector import Connection
from aiohttp.helpers import parse_content_type
from multidict import CIMultiDictProxy
from yarl import URL

from toolbus.bus.outbound import MAX_HEAD_BYTES
from toolbus.protocol.limits import KIB

_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # in a header: RFC 9110 excludes them from field values
JOINED_BYTES = 64 * KIB  # a shorter body is copied behind its head: one write instead of two
_SWITCHING_PROTOCOLS = 101  # the only informational response that is the last one


class CallbackResponse:
    """A response whose head has arrived; `release` it after its body was read, or without reading it."""

    __slots__ = ("_connection", "_protocol", "content", "headers", "status")

    def __init__(self, connection: Connection, message: Any, content: aiohttp.StreamReader) -> None:
        self._connection = connection
        self._protocol = cast(Any, connection.protocol)
        self.status: int = message.code
        self.headers: CIMultiDictProxy[str] = message.headers
        self.content = content

    @property
    def charset(self) -> str:
        """The charset of its content type; empty where it names none."""
        content_type = self.headers.get("Content-Type")
        return parse_content_type(content_type)[1].get("charset", "") if content_type else ""

    def is_first_result(self) -> bool:
        """Tells whether no response over its connection was a result before, and notes that this one is."""
        is_first = not hasattr(self._protocol, "has_given_a_result")
        self._protocol.has_given_a_result = True
        return is_first

    def release(self) -> None:
        """Releases the connection; closes it where a part of the request or the response is still on its way."""
        if not _abort_unsent(self._connection):
            self._connection.release()


class CallbackRequest:
    """The common part of the requests to one callback URL: their target, and their head.

    Args:
        session: of the running loop; its headers are sent, too.
        headers: of every request.
    """

    __slots__ = ("_head", "_target")

    def __init__(self, session: aiohttp.ClientSession, url: URL, headers: Mapping[str, str]) -> None:
        all_headers = {**session.headers, **headers}
        loop = asyncio.get_running_loop()
        self._target = aiohttp.ClientRequest("POST", url, headers=all_headers, loop=loop)  # never sent: a pool's key
        sent = {name: value for name, value in self._target.headers.items() if name != "Content-Length"}
        self._head = f"POST {self._target.url.raw_path_qs} HTTP/1.1\r\n{_lines(sent)}"

    async def send(
        self, session: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str] | None = None
    ) -> CallbackResponse:
        """Posts a body and returns the response.

        Args:
            headers: of this request only.

        Raises:
            aiohttp.ClientConnectorError: no program accepts a connection; nothing was sent.
            aiohttp.ClientError, OSError: the connection broke.
            aiohttp.http_exceptions.HttpProcessingError: the answer is not an HTTP response.
            ValueError: a header has a control character.
        """
        head = f"{self._head}{_lines(headers) if headers else ''}Content-Length: {len(body)}\r\n\r\n".encode()
        connector: Any = session.connector
        connection = await connector.connect(self._target, [], session.timeout)
        try:
            protocol = connection.protocol
            protocol.set_response_params(
                read_until_eof=True, auto_decompress=False, max_line_size=MAX_HEAD_BYTES, max_field_size=MAX_HEAD_BYTES
            )
            transport = protocol.transport
            if transport is None or transport.is_closing():
                raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
            # The transport takes all of it at once, so that an early response is read while the rest is on its way.
            if len(body) < JOINED_BYTES:
                transport.write(head + body)
            else:
                transport.write(head)
                transport.write(body)
            while True:
                message, content = await protocol.read()
                if not 100 <= message.code < 200 or message.code == _SWITCHING_PROTOCOLS:
                    return CallbackResponse(connection, message, content)
        except BaseException:
            if not _abort_unsent(connection):
                connection.close()
            raise


def _abort_unsent(connection: Connection) -> bool:
    """Ends a connection over which a part of its request has not been sent: a mere close would send the rest."""
    transport: Any = connection.transport  # None where it has ended
    if transport is None or not transport.get_write_buffer_size():
        return False
    transport.abort()
    connection.close()
    return True


def _lines(headers: Mapping[str, str]) -> str:
    if _FORBIDDEN.search("".join((*headers, *headers.values()))):
        raise ValueError("a header of a callback has a control character: leave it out")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
