"""Tools of legacy plugins: each call is one POST to the callback URL that the plugin registered (REST-40 to REST-43).

A `CallbackHandler` is one registration. An `Origin` is where the callbacks of one source lead; it counts connect
failures in a row, and its tools go offline and come back together. `Callbacks` does what touches the network for all of
them: the exchanges over kept connections, and the probes of origins that are away.

The deadline of a call is the dispatcher's. It cancels the exchange, whatever that is waiting for, so that one limit
holds for connecting, sending and reading together (REST-41).
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
from toolbus.bus.gateway import callback_messages
from toolbus.bus.outbound import open_session
from toolbus.errors import Code, Stage
from toolbus.tool import MIB, CallError, Limits, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.callbacks")

FAILURES_TO_OFFLINE = 3  # REST-43
FIRST_PROBE_SECONDS = 0.25
MAX_PROBE_SECONDS = 30.0
PROBE_SHARE = 0.1  # a tool is back after a tenth of the time that it was away, at most MAX_PROBE_SECONDS later
CONNECT_SECONDS = 2.0  # of a probe
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL}  # ours, not the plugin's fault


class Origin:
    """Where the callbacks of one source lead: scheme, host, port.

    Attributes:
        handlers: the registrations that lead there.
        online: whether their tools are offered.
        failures: connect failures in a row.
        answered_at: when somebody last answered there, in seconds since the epoch.
    """

    __slots__ = ("address", "answered_at", "failures", "handlers", "online", "probing", "source", "why")

    def __init__(self, source: str, address: tuple[str, str, int], answered_at: float) -> None:
        self.source = source
        self.address = address
        self.handlers: dict[CallbackHandler, None] = {}
        self.online = True
        self.failures = 0
        self.answered_at = answered_at
        self.why = ""  # what the last failure was
        self.probing: asyncio.Task[None] | None = None  # None while online

    def __repr__(self) -> str:
        state = "online" if self.online else "offline"
        return f"<Origin {self} of {self.source!r} {state} failures={self.failures} tools={len(self.handlers)}>"

    def __str__(self) -> str:
        scheme, host, port = self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def heard(self) -> None:
        """Somebody answered, whatever it was (REST-43)."""
        self.failures = 0
        self.answered_at = time.time()


class CallbackHandler:
    """One registration: a tool with the URL that runs it.

    Attributes:
        key: names the registration where it is kept.
    """

    __slots__ = (
        *("_callbacks", "headers", "key", "max_in_flight", "offered", "origin", "pending", "source", "stuck"),
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
        self.stuck = 0
        self._callbacks = callbacks
        origin.handlers[self] = None

    def __repr__(self) -> str:
        return f"<CallbackHandler {self.offered.tool.name} of {self.source!r} at {self.target.shown}>"

    @property
    def session_state(self) -> int:
        """Live, or offline while nobody accepts a connection there."""
        return wire.SESSION_STATE_LIVE if self.origin.online else wire.SESSION_STATE_OFFLINE

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Starts an exchange for each call, in a task of its own."""
        for call in calls:
            self._callbacks.start(self, call)

    def cancel(self, call: Call, reason: str) -> bool:
        """Breaks the exchange off; the slot is free as soon as that is done."""
        self._callbacks.break_off(call)
        return False

    def stage(self, call: Call) -> Stage:
        """A request is on its way as soon as it is sent."""
        return Stage.DISPATCHED


class Callbacks:
    """What the callback handlers of one bus share: connections, probes, and the word that origins come and go.

    Args:
        moved: called with an origin that went offline or came back.
    """

    def __init__(self, dispatcher: Dispatcher, limits: Limits, moved: Callable[[Origin], None]) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._moved = moved
        self._session: aiohttp.ClientSession | None = None  # None until the first call
        self._running: dict[str, asyncio.Task[None]] = {}  # exchanges, by the bus's call id

    def __repr__(self) -> str:
        return f"<Callbacks exchanges={len(self._running)}>"

    async def stop(self) -> None:
        """Breaks off what still runs and closes every connection."""
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

    def break_off(self, call: Call) -> None:
        """Ends the exchange for a call; its connection is closed, since an answer may still come over it."""
        task = self._running.get(call.id)
        if task is not None:
            task.cancel()

    def _done(self, handler: CallbackHandler, call: Call, task: asyncio.Task[None]) -> None:
        """Answers for an exchange that was broken off, before its first step perhaps."""
        self._running.pop(call.id, None)
        if call.id in handler.pending:
            self._dispatcher.results(handler, [pb.ToolResult(call_id=call.id, is_error=True)], time.monotonic())

    async def _run(self, handler: CallbackHandler, call: Call) -> None:
        try:
            result = await self._exchange(handler, call)
        except Exception:
            log.exception("a fault of the bus in call %s of %s", call.call_id, call.entry.name)
            fault = "a fault of the bus; its log has the details"
            result = _failure(Code.INTERNAL, fault, Stage.UNKNOWN)
        result.call_id = call.id
        self._dispatcher.results(handler, [result], time.monotonic())

    async def _exchange(self, handler: CallbackHandler, call: Call) -> pb.ToolResult:
        """Posts one call and reads the answer (REST-40, REST-42)."""
        name, origin = call.entry.bare_name, handler.origin
        body = callback_messages.callback_body(name, call.arguments_json, call.call_id)
        try:
            async with self._opened().post(
                handler.url,
                # aiohttp warns of large bodies in one piece: each is at most twice the limit of arguments.
                data=body if len(body) < MIB else io.BytesIO(body),
                headers=handler.headers,
                allow_redirects=False,
            ) as answer:
                origin.heard()
                if not origin.online:  # it went offline while this call was on its way
                    self.bring_back(origin)
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    return _failure(
                        Code.TOOL, f"tool {name!r} answered compressed, though asked not to", Stage.ACCEPTED
                    )
                limit = self._limits.callback_bytes
                content = await _read(answer.content, limit)
                if content is None:
                    return _too_large(name, limit)
                return callback_messages.read_answer(answer.status, content, answer.charset or "utf-8", name)
        except aiohttp.ClientConnectorError as problem:
            return self._not_connected(handler, name, problem)
        except aiohttp.ClientResponseError as problem:
            origin.heard()
            why = " ".join(problem.message.split()).rstrip(" ^")[:200]  # it comes in lines, with a caret that points
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: what {origin} sent is no HTTP answer ({why}); it may have run, so it was not tried "
                "again",
                Stage.DISPATCHED,
            )
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as problem:
            why = str(problem) or type(problem).__name__
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: the connection to {origin} broke before its answer was complete ({why}); it may have "
                "run, so it was not tried again",
                Stage.DISPATCHED,
            )

    def _not_connected(
        self, handler: CallbackHandler, name: str, problem: aiohttp.ClientConnectorError
    ) -> pb.ToolResult:
        origin, why = handler.origin, _why(problem)
        if problem.errno in _OUT_OF_FILES:
            message = f"tool {name!r}: this machine has no socket left for the call ({why}): try again later"
            return _failure(Code.OVERLOADED, message, Stage.NOT_DISPATCHED, retry_safe=True)
        if isinstance(problem, aiohttp.ClientSSLError):
            message = f"tool {name!r}: {origin} has no certificate that this machine trusts ({why})"
            return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED)
        self.missed(origin, why)
        message = f"tool {name!r}: nobody accepts a connection at {origin} ({why}): its plugin may come back"
        return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED, retry_safe=True)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # REST-41: no cap below the calls in flight; the limit of time is the dispatcher's.
            self._session = open_session(connections=0, seconds=None, content_type="application/json")
        return self._session

    # -- origins that are away -----------------------------------------------------------------------------------

    def missed(self, origin: Origin, why: str) -> None:
        """Counts a connect failure; the third in a row takes the origin's tools offline (REST-43)."""
        origin.failures += 1
        origin.why = why
        if origin.online and origin.failures >= FAILURES_TO_OFFLINE:
            self.set_aside(origin)

    def set_aside(self, origin: Origin) -> None:
        """Takes the tools of an origin offline and probes it until somebody accepts."""
        origin.online = False
        self._moved(origin)
        origin.probing = asyncio.get_running_loop().create_task(self._probe_until_back(origin))

    def bring_back(self, origin: Origin) -> None:
        """Offers the tools of an origin again."""
        probing, origin.probing = origin.probing, None
        if probing is not None and probing is not asyncio.current_task():
            probing.cancel()
        origin.failures = 0
        if not origin.online:
            origin.online = True
            self._moved(origin)

    async def _probe_until_back(self, origin: Origin) -> None:
        away_since = time.monotonic()
        while origin.handlers:
            if await accepts(origin.address):
                origin.heard()
                self.bring_back(origin)
                return
            pause = (time.monotonic() - away_since) * PROBE_SHARE
            pause = min(max(pause, FIRST_PROBE_SECONDS), MAX_PROBE_SECONDS)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # else the origins of one machine come all at once


async def accepts(address: tuple[str, str, int]) -> bool:
    """Tells whether somebody accepts a TCP connection. Nothing is sent: a request might run a tool (REST-43)."""
    _, host, port = address
    for each in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(each, port)
            # A port from the system's own range may be given to this very socket, which then talks to itself.
            itself = writer.get_extra_info("sockname") == writer.get_extra_info("peername")
            writer.close()
            if not itself:
                return True
    return False


async def accepting(origins: Iterable[Origin]) -> None:
    """Probes many origins once, side by side; those that answer are marked as heard."""
    several = asyncio.Semaphore(64)

    async def probe(origin: Origin) -> None:
        async with several:
            if await accepts(origin.address):
                origin.heard()

    await asyncio.gather(*map(probe, origins))


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes | None:
    """Reads a body; None where it is larger than the limit."""
    if content.is_eof():  # a small body is there with its headers, and reading it in pieces takes longer
        whole = content.read_nowait()
        return whole if len(whole) <= limit else None
    pieces: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > limit:
            return None
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(name: str, limit: int) -> pb.ToolResult:
    message = f"tool {name!r} answered more than {limit} bytes: ask for less"
    return _failure(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("callback_bytes", limit))


def _why(problem: aiohttp.ClientConnectorError) -> str:
    cause = problem.os_error
    return os.strerror(cause.errno) if cause.errno else str(cause) or type(cause).__name__


def _failure(
    code: Code, message: str, stage: Stage, *, retry_safe: bool = False, limit: tuple[str, float] | None = None
) -> pb.ToolResult:
    return Result(is_error=True, error=CallError(code, message, stage, retry_safe, limit)).to_wire()
