"""Holds the session with a legacy server: its id, its standing stream, and a new session when the server loses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from toolbus.common.text import clean_line
from toolbus.parts.mcp.client.http_link import (
    EVENTS,
    MAX_ERROR_BYTES,
    MAX_EVENT_BYTES,
    HttpLink,
    first_message,
    read_body,
)
from toolbus.parts.mcp.client.http_timings import HttpTimings
from toolbus.parts.mcp.client.sse import EventTooLong, SseParser
from toolbus.parts.mcp.client.transport import Lost, Receiver, SessionLost
from toolbus.parts.mcp.messages import headers, jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import RpcError

log = logging.getLogger("toolbus.mounts")

LAST_EVENT = "Last-Event-ID"
_POST = {"Content-Type": "application/json", "Accept": f"application/json, {EVENTS}"}
_LISTS = ("tools", "prompts", "resources")


class LegacySession:
    """The sessions with one server, one at a time.

    Args:
        receiver: returns the receiver of messages.
        read: delivers the messages of a stream until it ends.

    Attributes:
        id: "" before the handshake, and if the server uses none.
        opening: the `initialize` message, which opens a new session too.
        gate: calls wait until it is set: until the standing stream is open.
        is_standing: whether that stream is open.
        standing_ended: set when the standing stream that is open now has ended.
    """

    def __init__(
        self,
        name: str,
        link: HttpLink,
        timings: HttpTimings,
        receiver: Callable[[], Receiver],
        read: Callable[[aiohttp.ClientResponse, SseParser, None], Awaitable[object]],
    ) -> None:
        self.id = ""
        self.opening = b""
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_standing = False
        self.standing_ended = asyncio.Event()
        self._name = name
        self._link = link
        self._timings = timings
        self._receiver = receiver
        self._read = read
        self._version = ""  # of the protocol; "" before the handshake
        self._standing: asyncio.Task[None] | None = None  # holds the stream open; None before the first
        self._renewing: asyncio.Task[None] | None = None  # opens a new session; None before the first

    def __repr__(self) -> str:
        return f"<LegacySession {self._name} {'standing' if self.is_standing else 'no stream'}>"

    def agreed(self, version: str) -> None:
        """Takes the version of the handshake. Calls now wait for the standing stream, `HttpTimings.gate` at most."""
        self._version = version
        self.gate.clear()
        asyncio.get_running_loop().call_later(self._timings.gate, self.gate.set)

    def headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the headers of a GET or DELETE."""
        written = {"Accept": EVENTS, headers.VERSION: self._version, **(extra or {})}
        if self.id:
            written[headers.SESSION] = self.id
        return written

    async def close(self) -> None:
        """Ends the session; waits for the server for `HttpTimings.drain` at most."""
        tasks = [*filter(None, (self._standing, self._renewing))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.id and self._version:
            with contextlib.suppress(aiohttp.ClientError, OSError, Lost, TimeoutError):
                async with asyncio.timeout(self._timings.drain), self._link.request("DELETE", self.headers()):
                    pass

    def stand(self) -> None:
        """Opens the standing stream, in place of an earlier one."""
        if self._standing is not None:
            self._standing.cancel()
        self._standing = asyncio.create_task(self._keep_standing())

    async def _keep_standing(self) -> None:
        parser, backoff, opened = SseParser(MAX_EVENT_BYTES), self._timings.first_backoff, False
        while True:
            session, pause = self.id, backoff
            try:
                extra = {LAST_EVENT: parser.last_id} if parser.last_id else {}
                async with self._link.request("GET", self.headers(extra)) as response:
                    self.gate.set()
                    if response.status == 200 and response.headers.get("Content-Type", "").startswith(EVENTS):
                        if opened and not parser.last_id:
                            relist(self._receiver())
                        opened, began = True, time.monotonic()
                        self.standing_ended = asyncio.Event()
                        self.is_standing = True
                        await self._read(response, parser, None)
                        if time.monotonic() - began > self._timings.steady:
                            backoff = self._timings.first_backoff
                        pause = max(self._timings.pause(parser.retry_seconds), backoff)
                    elif response.status == 404 and session:
                        await self.renew(session)  # opens a new standing stream
                        return
                    elif response.status < 500 and response.status not in (408, 429):
                        return  # 405: the server offers no such stream
            except Lost as error:
                log.info("%s: no stream of notifications: %s", self._name, clean_line(str(error)))
                return
            except EventTooLong as error:
                log.warning("%s: the stream of notifications: %s", self._name, error)
                parser = SseParser(MAX_EVENT_BYTES)
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            finally:
                self.gate.set()
                self.is_standing = False
                self.standing_ended.set()
            parser = parser.restarted()
            await asyncio.sleep(pause)
            backoff = min(2 * backoff, self._timings.max_retry)

    async def renew(self, session: str) -> None:
        """Opens a new session in place of one that the server lost; callers at the same time share it."""
        if self.id != session:
            return
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._open_session())
            # All callers may be cancelled; then the exception is read here.
            self._renewing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._renewing)

    async def _open_session(self) -> None:
        async with asyncio.timeout(self._timings.handshake):
            await self._initialize_again()
        log.info("%s: the server has lost the session, a new one is open", self._name)
        relist(self._receiver())
        asyncio.get_running_loop().call_soon(self.stand)

    async def _initialize_again(self) -> None:
        async with self._link.request("POST", _POST, self.opening) as response:
            session = response.headers.get(headers.SESSION, "")
            version = await self._version_of(response)
        if version != self._version:
            why = f"server {self._name!r} has lost the session, and opens no new one of version {self._version}"
            self._receiver().closed(why)
            raise SessionLost(why)
        self.id = session
        ready = jsonrpc.notification("notifications/initialized")
        async with self._link.request("POST", {**self.headers(), **_POST}, ready) as response:
            await read_body(response, MAX_ERROR_BYTES)

    async def _version_of(self, response: aiohttp.ClientResponse) -> str:
        """Returns the version in the answer to `initialize`; "" if the server refuses it."""
        if response.status != 200:
            return ""
        try:
            result = jsonrpc.decode(await first_message(response)).result
            version = jsonrpc.read(result, dict, "result").get("protocolVersion")
        except RpcError:
            return ""
        return version if isinstance(version, str) else ""


def relist(receiver: Receiver) -> None:
    """Has the lists read again: they may have changed while no stream was open."""
    for each in _LISTS:
        receiver.received(jsonrpc.notification(f"notifications/{each}/list_changed"))
