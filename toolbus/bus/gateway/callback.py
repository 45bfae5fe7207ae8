"""Runs calls by callback URL: each call is one POST to the URL that a plugin registered (REST-40 to REST-43).

A `CallbackHandler` is one registration. An `Origin` is scheme, host and port of one source's callbacks; it counts
connect failures in a row, and its tools go offline and online together. `Callbacks` does the network part for all of
them: the exchanges over keep-alive connections, and the probes of offline origins.

The deadline of a call is the dispatcher's. It cancels the exchange at whatever step it is, so that one limit holds for
connecting, sending and reading together (REST-41).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import aiohttp
from yarl import URL

from toolbus.bus.callback_url import CallbackUrl
from toolbus.bus.calls.call import Call
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.compiled_tool import CompiledTool
from toolbus.bus.catalog.slots import Slots
from toolbus.bus.gateway import callback_messages
from toolbus.bus.outbound import open_session, refusal_of
from toolbus.errors import INTERNAL_DETAIL, Code, Stage
from toolbus.tool import MIB, CallError, Limits, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.callbacks")

FAILURES_TO_OFFLINE = 3  # REST-43
FIRST_PROBE_SECONDS = 0.25
MAX_PROBE_SECONDS = 30.0
PROBE_SHARE = 0.1  # a tool is back after a tenth of the time that it was away, at most MAX_PROBE_SECONDS later
CONNECT_SECONDS = 2.0  # of a probe
_OUT_OF_SOCKETS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL}  # this process's fault


class Origin:
    """Scheme, host and port of one source's callbacks.

    Attributes:
        handlers: the registrations with a URL of this origin.
        online: whether their tools are offered.
        failures: connect failures in a row.
        answered_at: when it last accepted a connection or answered, in seconds since the epoch.
    """

    __slots__ = ("address", "answered_at", "failures", "handlers", "last_failure", "online", "probing", "source")

    def __init__(self, source: str, address: tuple[str, str, int], answered_at: float) -> None:
        self.source = source
        self.address = address
        self.handlers: dict[CallbackHandler, None] = {}
        self.online = True
        self.failures = 0
        self.answered_at = answered_at
        self.last_failure = ""  # why the last connection was not accepted; empty before the first failure
        self.probing: asyncio.Task[None] | None = None  # None while online

    def __repr__(self) -> str:
        state = "online" if self.online else "offline"
        return f"<Origin {self} of {self.source!r} {state} failures={self.failures} tools={len(self.handlers)}>"

    def __str__(self) -> str:
        scheme, host, port = self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def reset_failures(self) -> None:
        """Begins the count of failures anew, since it accepted a connection or answered in any way (REST-43)."""
        self.failures = 0
        self.answered_at = time.time()


class CallbackHandler:
    """One registration: a tool with the URL that runs it.

    Attributes:
        key: identifies the registration in the store.
    """

    __slots__ = (
        *("_callbacks", "headers", "key", "max_in_flight", "offered", "origin", "pending", "slots", "source", "stuck"),
        *("target", "url"),
    )

    instance = ""
    shares = False
    remote = True
    persisted = True
    max_item_bytes = 1 << 62
    takes_calls = True

    def __init__(
        self, key: str, offered: CompiledTool, target: CallbackUrl, origin: Origin, callbacks: Callbacks, in_flight: int
    ) -> None:
        self.key = key
        self.source = origin.source
        self.offered = offered
        self.target = target
        self.url = URL(target.url, encoded=True)  # as it was registered: parsing it anew would requote it
        self.headers = target.headers
        self.origin = origin
        self.max_in_flight = in_flight
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self._callbacks = callbacks
        origin.handlers[self] = None

    def __repr__(self) -> str:
        return f"<CallbackHandler {self.offered.tool.name} of {self.source!r} at {self.target.shown}>"

    @property
    def session_state(self) -> int:
        """Live, or offline while the origin accepts no connection."""
        return wire.SESSION_STATE_LIVE if self.origin.online else wire.SESSION_STATE_OFFLINE

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Starts an exchange for each call, in a task of its own."""
        for call in calls:
            self._callbacks.start(self, call)

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels the exchange; the slot is free as soon as that is done."""
        self._callbacks.cancel(call)
        return False

    def stage(self, call: Call) -> Stage:
        """Returns DISPATCHED: a request may have reached the plugin as soon as it is sent."""
        return Stage.DISPATCHED


class Callbacks:
    """The network part that the callback handlers of one bus share: connections, exchanges and probes.

    Args:
        may_serve: tells whether a user's programs may get calls, by uid. The port of a plugin that has ended may be
            taken by a program of another user.
        moved: called with an origin that went offline or came back online.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        may_serve: Callable[[int], bool],
        moved: Callable[[Origin], None],
    ) -> None:
        self.may_serve = may_serve
        self._dispatcher = dispatcher
        self._limits = limits
        self._moved = moved
        self._session: aiohttp.ClientSession | None = None  # None until the first call
        self._running: dict[str, asyncio.Task[None]] = {}  # exchanges, by the bus's call id

    def __repr__(self) -> str:
        return f"<Callbacks exchanges={len(self._running)}>"

    async def stop(self) -> None:
        """Cancels the exchanges that still run and closes every connection."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- exchanges -----------------------------------------------------------------------------------------------

    def start(self, handler: CallbackHandler, call: Call) -> None:
        """Starts the exchange for a call."""
        task = asyncio.get_running_loop().create_task(self._run(handler, call))
        self._running[call.id] = task
        task.add_done_callback(functools.partial(self._done, handler, call))

    def cancel(self, call: Call) -> None:
        """Cancels the exchange for a call; its connection is closed, since a response may still come over it."""
        task = self._running.get(call.id)
        if task is not None:
            task.cancel()

    def _done(self, handler: CallbackHandler, call: Call, task: asyncio.Task[None]) -> None:
        """Ends the call of an exchange that was cancelled, perhaps before its first step."""
        self._running.pop(call.id, None)
        if call.id in handler.pending:
            self._dispatcher.results(handler, [pb.ToolResult(call_id=call.id, is_error=True)], time.monotonic())

    async def _run(self, handler: CallbackHandler, call: Call) -> None:
        try:
            result = await self._exchange(handler, call)
        except Exception:
            log.exception("a fault of the bus in call %.80r of %.80r", call.call_id, call.entry.name)
            result = _failure(Code.INTERNAL, INTERNAL_DETAIL, Stage.UNKNOWN)
        result.call_id = call.id
        self._dispatcher.results(handler, [result], time.monotonic())

    async def _exchange(self, handler: CallbackHandler, call: Call) -> pb.ToolResult:
        """Posts one call and reads the response (REST-40, REST-42)."""
        name, origin = call.entry.bare_name, handler.origin
        body = callback_messages.callback_body(name, call.arguments_json, call.call_id)
        try:
            async with self._open_session().post(
                handler.url,
                # aiohttp warns of large bodies in one piece: each is at most twice the limit of arguments.
                data=body if len(body) < MIB else io.BytesIO(body),
                headers=handler.headers,
                allow_redirects=False,
            ) as response:
                origin.reset_failures()
                if not origin.online:  # it went offline while this call was in flight
                    self.bring_online(origin)
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    return _failure(
                        Code.TOOL,
                        f"tool {name!r} sent a compressed response, which Accept-Encoding: identity ruled out",
                        Stage.ACCEPTED,
                    )
                limit = self._limits.callback_bytes
                content = await _read(response.content, limit)
                if content is None:
                    return _too_large(name, limit)
                return callback_messages.read_response(response.status, content, response.charset or "utf-8", name)
        except aiohttp.ClientConnectorError as error:
            return self._not_connected(handler, name, error)
        except aiohttp.ClientResponseError as error:
            origin.reset_failures()
            reason = " ".join(error.message.split()).rstrip(" ^")[:200]  # it has several lines, with a caret below
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: {origin} sent something that is not an HTTP response ({reason}); the tool may have "
                "run, so the call was not retried",
                Stage.DISPATCHED,
            )
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            reason = str(error) or type(error).__name__
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: the connection to {origin} broke before the response was complete ({reason}); the "
                "tool may have run, so the call was not retried",
                Stage.DISPATCHED,
            )

    def _not_connected(self, handler: CallbackHandler, name: str, error: aiohttp.ClientConnectorError) -> pb.ToolResult:
        origin, reason = handler.origin, _reason(error)
        if error.errno in _OUT_OF_SOCKETS:
            message = f"tool {name!r}: this machine has no socket left for the call ({reason}): retry later"
            return _failure(Code.OVERLOADED, message, Stage.NOT_DISPATCHED, retry_safe=True)
        if isinstance(error, aiohttp.ClientSSLError):
            message = f"tool {name!r}: {origin} has no certificate that this machine trusts ({reason})"
            return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED)
        self.count_failure(origin, reason)
        message = f"tool {name!r}: {origin} accepts no connection ({reason}): start its plugin, or retry later"
        return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED, retry_safe=True)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # REST-41: no cap below the calls in flight; the time limit is the dispatcher's.
            self._session = open_session(
                connections=0, seconds=None, content_type="application/json", may_serve=self.may_serve
            )
        return self._session

    # -- offline origins -----------------------------------------------------------------------------------------

    def count_failure(self, origin: Origin, reason: str) -> None:
        """Counts a connect failure; the third in a row takes the origin's tools offline (REST-43)."""
        origin.failures += 1
        origin.last_failure = reason
        if origin.online and origin.failures >= FAILURES_TO_OFFLINE:
            self.take_offline(origin)

    def take_offline(self, origin: Origin) -> None:
        """Takes the tools of an origin offline and probes it until it accepts a connection."""
        origin.online = False
        self._moved(origin)
        origin.probing = asyncio.get_running_loop().create_task(self._probe_until_online(origin))

    def bring_online(self, origin: Origin) -> None:
        """Offers the tools of an origin again."""
        probing, origin.probing = origin.probing, None
        if probing is not None and probing is not asyncio.current_task():
            probing.cancel()
        origin.failures = 0
        if not origin.online:
            origin.online = True
            self._moved(origin)

    async def _probe_until_online(self, origin: Origin) -> None:
        offline_since = time.monotonic()
        while origin.handlers:
            if await accepts_connections(origin.address, self.may_serve):
                origin.reset_failures()
                self.bring_online(origin)
                return
            backoff = (time.monotonic() - offline_since) * PROBE_SHARE
            backoff = min(max(backoff, FIRST_PROBE_SECONDS), MAX_PROBE_SECONDS)
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # else all origins are probed at the same time


async def accepts_connections(address: tuple[str, str, int], may_serve: Callable[[int], bool]) -> bool:
    """Probes an origin with a TCP connect, and who answers it. Sends nothing: a request might run a tool (REST-43)."""
    _, host, port = address
    for each in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(each, port)
            # A port from the system's own range may be given to this very socket, which then talks to itself.
            itself = writer.get_extra_info("sockname") == writer.get_extra_info("peername")
            refused = refusal_of(writer, may_serve)
            writer.close()
            if not itself and not refused:
                return True
    return False


async def probe_once(origins: Iterable[Origin], may_serve: Callable[[int], bool]) -> None:
    """Probes many origins once, side by side, and notes which of them accept a connection."""
    slots = asyncio.Semaphore(64)

    async def probe(origin: Origin) -> None:
        async with slots:
            if await accepts_connections(origin.address, may_serve):
                origin.reset_failures()

    await asyncio.gather(*map(probe, origins))


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes | None:
    """Returns a body; None where it is larger than the limit."""
    if content.is_eof():  # a small body arrives with its headers, and reading it in chunks takes longer
        body = content.read_nowait()
        return body if len(body) <= limit else None
    chunks: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        size += len(chunk)
        if size > limit:
            return None
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(name: str, limit: int) -> pb.ToolResult:
    message = f"tool {name!r} answered more than {limit} bytes (limit callback_bytes): ask for less"
    return _failure(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("callback_bytes", limit))


def _reason(error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    return os.strerror(cause.errno) if cause.errno else cause.strerror or str(cause) or type(cause).__name__


def _failure(
    code: Code, message: str, stage: Stage, *, retry_safe: bool = False, limit: tuple[str, float] | None = None
) -> pb.ToolResult:
    return Result(is_error=True, error=CallError(code, message, stage, retry_safe, limit)).to_wire()
