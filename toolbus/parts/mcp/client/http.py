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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp

from toolbus.common.text import clean_line, quote, shorten
from toolbus.errors import Stage
from toolbus.parts.mcp.client.http_link import (
    EVENTS,
    MAX_ERROR_BYTES,
    MAX_EVENT_BYTES,
    Authorization,
    EventTooLong,
    HttpLink,
    SseParser,
    read_body,
    read_whole,
    stage_of,
)
from toolbus.parts.mcp.client.transport import Busy, Lost, NeedsLogin, Outgoing, Receiver, RequestId, other_form
from toolbus.parts.mcp.messages import eras, headers, jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import JsonRpcMessage, RpcError


@dataclass(frozen=True, slots=True)
class HttpTimings:
    """Lengths of time, in seconds.

    Attributes:
        gate: how long the first calls of a legacy session wait for the standing stream.
        handshake: the timeout of a new handshake after the server has lost the session.
        retry: before a stream is resumed, if the server sends no interval.
        min_retry, max_retry: bounds of the server's interval.
        first_backoff: before a failed stream is opened again; doubled up to max_retry.
        steady: a stream that was open for so long has not failed when it ends.
        drain: how long a stream may stay open after its answer.
        cancel: before the connection of a cancelled legacy request is closed, so that the notification arrives first.
    """

    gate: float = 2.0
    handshake: float = 10.0
    retry: float = 1.0
    min_retry: float = 0.1
    max_retry: float = 30.0
    first_backoff: float = 0.25
    steady: float = 10.0
    drain: float = 1.0
    cancel: float = 1.0

    def pause(self, interval: float | None) -> float:
        """Returns how long to wait before a stream is resumed; `interval` is the server's, None if it sent none."""
        return min(max(self.retry if interval is None else interval, self.min_retry), self.max_retry)


# -- the transport -----------------------------------------------------------------------------------------------------

log = logging.getLogger("toolbus.mounts")

MAX_IN_FLIGHT = 1024  # messages whose exchange has not ended
MAX_RESUMES = 5  # consecutive failures to resume a stream
ACCEPT = "application/json, text/event-stream"
LISTEN = "subscriptions/listen"
_SESSION = re.compile(rb"session", re.IGNORECASE)  # in the body of a 400: how some servers refuse an unknown session


def _message_of(message: bytes) -> JsonRpcMessage | None:
    """Returns a message; None if it cannot be read."""
    try:
        return jsonrpc.decode(message)
    except RpcError:
        return None


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
        text = f"server {self._name!r} refuses the session that it has just opened: restart it"
        raise Lost(text, Stage.NOT_DISPATCHED)

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
        text = f"server {self._name!r} answered {status}" + (f": {quote(shown)}" if shown else "")
        raise Lost(text, Stage.NOT_DISPATCHED if status in (404, 405, 415) else Stage.DISPATCHED)

    def _take_answer(self, request: RequestId, body: bytes) -> None:
        head = _message_of(body)
        if head is not None and head.id is None and head.error:  # the server could not read the id
            self._take_refusal(Outgoing(b"", request), 200, body)
            return
        if head is None or head.id not in (request, other_form(request)) or head.method:
            shown = quote(shorten(body.decode("utf-8", "replace"), 200))
            why = f"answered with something that is not a response to the request: {shown}"
            raise Lost(f"server {self._name!r} {why}", Stage.ACCEPTED)
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
        head = _message_of(data)
        self._owner.received(data, stream)  # which logs what cannot be read
        if head is None or head.method or not isinstance(head.id, int | str):
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


# -- sessions of legacy servers ----------------------------------------------------------------------------------------

LAST_EVENT = "Last-Event-ID"
_POST = {"Content-Type": "application/json", "Accept": f"application/json, {EVENTS}"}


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
        if self._renewing is None or self._renewing.done():
            if self.id != session:
                return
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
            self.id = response.headers.get(headers.SESSION, "")
            version = await self._version_of(response)
        if version != self._version:
            why = f"server {self._name!r} has lost the session, and opens no new one of version {self._version}"
            self._receiver().closed(why)
            raise Lost(why, Stage.NOT_DISPATCHED)
        ready = jsonrpc.notification("notifications/initialized")
        async with self._link.request("POST", {**self.headers(), **_POST}, ready) as response:
            await read_body(response, MAX_ERROR_BYTES)

    async def _version_of(self, response: aiohttp.ClientResponse) -> str:
        """Returns the version in the answer to `initialize`; "" if the server refuses it."""
        if response.status != 200:
            return ""
        try:
            result = jsonrpc.decode(await self._answer_of(response)).result
            version = jsonrpc.read(result, dict, "result").get("protocolVersion")
        except RpcError:
            return ""
        return version if isinstance(version, str) else ""

    async def _answer_of(self, response: aiohttp.ClientResponse) -> bytes:
        """Returns the answer to `initialize`; messages of the server before it go to the receiver."""
        if not response.headers.get("Content-Type", "").startswith(EVENTS):
            return await read_whole(response)
        parser = SseParser(MAX_EVENT_BYTES)
        async for chunk in response.content.iter_any():
            for event in parser.feed(chunk):
                head = _message_of(event.data)
                if head is not None and not head.method:
                    return event.data
                if event.data:
                    self._receiver().received(event.data)
        return b""


def relist(receiver: Receiver) -> None:
    """Has the lists read again: they may have changed while no stream was open."""
    for each in eras.LIST_CHANGES:
        receiver.received(jsonrpc.notification(f"notifications/{each}/list_changed"))
