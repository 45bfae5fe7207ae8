"""Carries MCP over streamable HTTP, in both eras.

Each message is a POST of its own; the answer to a request is JSON, or a stream of events that ends with it. When a
server restarts, only the calls that it ran are lost: a new session replaces a legacy one that the server no longer
knows, and the message is sent again; streams of notifications are opened again, and the lists are then read again,
since a change may have been missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping

import aiohttp
import msgspec

from toolbus.common.text import clean_line, quote, shorten
from toolbus.errors import Stage
from toolbus.parts.mcp.client.http_link import (
    EVENTS,
    MAX_ERROR_BYTES,
    MAX_EVENT_BYTES,
    Authorization,
    HttpLink,
    read_body,
    read_whole,
    stage_of,
)
from toolbus.parts.mcp.client.http_timings import HttpTimings
from toolbus.parts.mcp.client.legacy_session import LAST_EVENT, LegacySession, relist
from toolbus.parts.mcp.client.sse import EventTooLong, SseParser
from toolbus.parts.mcp.client.transport import (
    Busy,
    HttpRefused,
    Lost,
    NeedsLogin,
    Outgoing,
    Receiver,
    RequestId,
    SessionLost,
    other_form,
)
from toolbus.parts.mcp.messages import eras, headers, jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import RpcError

log = logging.getLogger("toolbus.mounts")

MAX_IN_FLIGHT = 1024  # messages whose exchange has not ended
MAX_RESUMES = 5  # consecutive failures to resume a stream
ACCEPT = "application/json, text/event-stream"
LISTEN = "subscriptions/listen"
_SESSION = re.compile(rb"session", re.IGNORECASE)  # in the body of a 400: how some servers refuse an unknown session


class _Head(msgspec.Struct):
    """The fields that tell the kinds of messages apart."""

    id: int | str | None = None
    method: str = ""
    error: msgspec.Raw = msgspec.Raw(b"")
    result: msgspec.Raw = msgspec.Raw(b"")


_head = msgspec.json.Decoder(_Head)


class HttpTransport:
    """The `Transport` to one MCP server over HTTP.

    Args:
        name: of the mount, for texts and the log.
        headers: those of the operator.
        authorization: provides tokens; None: requests have none.
    """

    shares_one_pipe = False

    def __init__(
        self,
        name: str,
        url: str,
        headers: Mapping[str, str],
        authorization: Authorization | None = None,
        timings: HttpTimings | None = None,
    ) -> None:
        self._name = name
        self._link = HttpLink(name, url, headers, authorization)
        self._timings = timings or HttpTimings()
        self._receiver: Receiver | None = None  # None until started
        self._closed = False
        self._modern = True
        self._version = ""  # of the protocol; "" before the handshake
        self._session = LegacySession(name, self._link, self._timings, lambda: self._owner, self._read_events)
        self._posts: dict[RequestId, asyncio.Task[None]] = {}  # pending requests
        self._others: set[asyncio.Task[None]] = set()  # notifications and responses that are being sent

    def __repr__(self) -> str:
        return f"<HttpTransport {self._name} {self._version or '?'} posts={len(self._posts)}>"

    async def start(self, receiver: Receiver) -> None:
        """Opens the link; nothing is sent before the first message."""
        self._receiver = receiver
        self._link.open()

    def send(self, message: Outgoing) -> None:
        """Starts to send a message.

        Raises:
            Busy: too many messages are pending.
            Lost: the transport is closed.
        """
        if self._closed or self._receiver is None:
            raise Lost("the connection was closed", Stage.NOT_DISPATCHED)
        if self._modern and message.method == "notifications/cancelled":
            return  # the closed stream cancels it; this era has no notifications of clients over HTTP
        if len(self._posts) + len(self._others) >= MAX_IN_FLIGHT:
            raise Busy(f"{MAX_IN_FLIGHT} messages to server {self._name!r} are pending: retry later")
        if message.method == "initialize":
            self._modern, self._session.opening = False, message.data
        elif message.method == "server/discover":
            self._modern = True
        task = asyncio.create_task(self._carry(message))
        if message.id is None:
            self._others.add(task)
            task.add_done_callback(self._others.discard)
        else:
            self._posts[message.id] = task

    def cancel(self, request: RequestId) -> None:
        """Closes the stream of a request; in the legacy era some time after the notification."""
        task = self._posts.get(request)
        if task is None:
            return
        if self._modern:
            task.cancel()
        else:
            asyncio.get_running_loop().call_later(self._timings.cancel, task.cancel)

    def agreed(self, version: str, *, modern: bool) -> None:
        """Takes the version of the handshake. In the legacy era calls now wait for the standing stream."""
        self._version, self._modern = version, modern
        if not modern:
            self._session.agreed(version)

    async def close(self) -> None:
        """Ends all exchanges and the session."""
        if self._closed:
            return
        self._closed = True
        tasks = [*self._posts.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()
        await self._link.close()
        if self._receiver is not None:
            self._receiver.closed("the connection was closed")

    # -- one message --------------------------------------------------------------------------------------------------

    async def _carry(self, message: Outgoing) -> None:
        """Sends a message and reads the answer; any failure ends its request."""
        error: Lost | None = None
        try:
            if message.method == LISTEN and self._modern:
                await self._listen(message)
            else:
                await self._exchange(message)
        except Lost as lost:
            error = lost
        except EventTooLong as too_long:
            error = Lost(f"server {self._name!r}: {too_long}: ask for less", Stage.ACCEPTED)
        except (aiohttp.ClientError, OSError, TimeoutError) as failure:
            error = self._failed(failure)
        except Exception:  # a bug of the bus: the request must still end
            log.exception("%s: internal error with %s", self._name, message.method or "a response")
            error = Lost("internal error: the log of the bus has the details")
        finally:
            if message.id is not None:
                self._posts.pop(message.id, None)
            if message.method == "notifications/initialized" and not self._closed:
                self._session.stand()
        if error is None:
            return
        if message.id is not None:
            self._owner.lost(message.id, error)
            if isinstance(error, NeedsLogin) and self._version:  # only a user can continue
                self._owner.closed(str(error))
        elif not self._closed:
            log.info("%s: %s did not arrive: %s", self._name, message.method or "a response", clean_line(str(error)))

    async def _exchange(self, message: Outgoing) -> None:
        for attempt in range(2):
            if not self._modern and message.method not in ("initialize", "notifications/initialized"):
                await self._session.gate.wait()
            session = "" if message.method == "initialize" else self._session.id
            async with self._link.request("POST", self._headers(message, session), message.data) as response:
                if message.method == "initialize":
                    self._session.id = response.headers.get(headers.SESSION, "") if response.status == 200 else ""
                if response.status < 400:
                    await self._take_response(message, response)
                    return
                body = await read_body(response, MAX_ERROR_BYTES)
            is_unknown = response.status == 404 or (response.status == 400 and _SESSION.search(body) is not None)
            if not session or not is_unknown:
                self._take_refusal(message, response.status, body)
                return
            if attempt == 0:
                await self._session.renew(session)
        raise SessionLost(f"server {self._name!r} refuses the session that it has just opened: restart it")

    async def _take_response(self, message: Outgoing, response: aiohttp.ClientResponse) -> None:
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if message.id is None:
            await read_body(response, MAX_ERROR_BYTES)  # 202 without content
        elif kind == EVENTS:
            parser = SseParser(MAX_EVENT_BYTES)
            if not await self._read_events(response, parser, message.id):
                await self._resume(message.id, parser)
        elif response.status == 200 and kind == "application/json":
            self._take_answer(message.id, await read_whole(response))
        else:
            raise Lost(
                f"server {self._name!r} answered a request with {response.status} and content type {quote(kind)}: it "
                "must be application/json or text/event-stream",
                Stage.ACCEPTED,
            )

    def _take_refusal(self, message: Outgoing, status: int, body: bytes) -> None:
        if message.id is not None:
            with contextlib.suppress(RpcError):
                answer = jsonrpc.decode(body)
                if answer.rpc_error is not None:  # its id may be null, where the message could not be read
                    self._owner.received(jsonrpc.refusal(message.id, answer.rpc_error), str(message.id))
                    return
        shown = shorten(body.decode("utf-8", "replace"), 200)
        raise HttpRefused(status, f"server {self._name!r} answered {status}" + (f": {quote(shown)}" if shown else ""))

    def _take_answer(self, request: RequestId, body: bytes) -> None:
        try:
            head = _head.decode(body)
        except (msgspec.DecodeError, RecursionError):
            head = None
        if head is not None and head.id is None and head.error:  # the server could not read the id
            self._take_refusal(Outgoing(b"", request), 200, body)
            return
        if head is None or head.id not in (request, other_form(request)) or head.method:
            shown = quote(shorten(body.decode("utf-8", "replace"), 200))
            raise Lost(
                f"server {self._name!r} answered with something that is not a response to the request: {shown}",
                Stage.ACCEPTED,
            )
        self._owner.received(body, str(request))

    # -- streams of events --------------------------------------------------------------------------------------------

    async def _read_events(
        self, response: aiohttp.ClientResponse, parser: SseParser, request: RequestId | None
    ) -> bool:
        """Delivers the messages of a stream until it ends or breaks; tells whether the request was answered."""
        has_answer = False
        stream = "" if request is None else str(request)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    if event.kind == "message" and event.data:
                        has_answer = self._take_event(event.data, stream, request) or has_answer
                if has_answer:
                    break
            if has_answer:  # read the stream to its end, so that the connection can be reused
                async with asyncio.timeout(self._timings.drain):
                    await read_body(response, MAX_ERROR_BYTES)
        return has_answer

    def _take_event(self, data: bytes, stream: str, request: RequestId | None) -> bool:
        """Delivers a message; tells whether it answers the request of the stream."""
        try:
            head = _head.decode(data)
        except (msgspec.DecodeError, RecursionError):
            head = _Head(method="?")  # the receiver logs the message
        self._owner.received(data, stream)
        if head.method or head.id is None:
            return False
        if request is not None and head.id in (request, other_form(request)):
            return True
        other = self._posts.get(head.id) or self._posts.get(other_form(head.id))
        if other is not None:  # its answer came on this stream, so its own stream is no longer needed
            other.cancel()
        return False

    async def _resume(self, request: RequestId, parser: SseParser) -> None:
        """Waits for the answer to a request whose stream has ended without it."""
        text = f"server {self._name!r} ended the stream of a request before its answer"
        if self._modern:
            raise Lost(text, Stage.ACCEPTED)
        failures = 0
        while parser.last_id and failures < MAX_RESUMES:
            await asyncio.sleep(self._timings.pause(parser.retry_seconds))
            parser = parser.restarted()
            extra = {LAST_EVENT: parser.last_id}
            try:
                async with self._link.request("GET", self._session.headers(extra)) as response:
                    if response.status in (400, 404, 405):
                        raise Lost(f"{text}, and does not resume it ({response.status})", Stage.ACCEPTED)
                    failures = 0 if response.status == 200 else failures + 1
                    if response.status == 200 and await self._read_events(response, parser, request):
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                failures += 1
        if not parser.last_id and self._session.is_standing:
            await self._session.standing_ended.wait()  # the answer may come on the standing stream; it cancels this
        raise Lost(text, Stage.ACCEPTED)

    async def _listen(self, message: Outgoing) -> None:
        """Holds the stream of notifications of the modern era open, until the server ends it with an answer."""
        backoff, was_open = self._timings.first_backoff, False
        assert message.id is not None
        while True:
            try:
                async with self._link.request("POST", self._headers(message, ""), message.data) as response:
                    if response.headers.get("Content-Type", "").startswith(EVENTS):
                        if was_open:
                            relist(self._owner)
                        was_open, began = True, time.monotonic()
                        if await self._read_events(response, SseParser(MAX_EVENT_BYTES), message.id):
                            return
                        if time.monotonic() - began > self._timings.steady:
                            backoff = self._timings.first_backoff
                    elif response.status >= 400:
                        if not was_open or response.status < 500:
                            self._take_refusal(message, response.status, await read_body(response, MAX_ERROR_BYTES))
                            return
                    else:
                        await self._take_response(message, response)
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                if not was_open:
                    raise
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._timings.max_retry)

    # -- small parts --------------------------------------------------------------------------------------------------

    @property
    def _owner(self) -> Receiver:
        assert self._receiver is not None  # nothing is sent before `start`
        return self._receiver

    def _headers(self, message: Outgoing, session: str) -> dict[str, str]:
        written = {"Content-Type": "application/json", "Accept": ACCEPT, **message.headers}
        version = message.version or (eras.NEWEST if message.method == "server/discover" else "")
        if version:
            written[headers.VERSION] = version
        elif not self._modern and self._version and message.method != "initialize":
            written[headers.VERSION] = self._version
        if self._modern:
            if message.method:
                written[headers.METHOD] = headers.write_value(message.method)
            if message.name:
                written[headers.NAME] = headers.write_value(message.name)
        elif session:
            written[headers.SESSION] = session
        return written

    def _failed(self, error: BaseException) -> Lost:
        stage = stage_of(error)
        what = "cannot be reached" if stage is Stage.NOT_DISPATCHED else "ended the connection before its answer"
        text = shorten(clean_line(str(error) or type(error).__name__), 200)
        return Lost(f"server {self._name!r} {what} ({text}): see whether it runs", stage)
