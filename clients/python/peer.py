"""Keeps one peer on the bus, with the generated stubs alone: a pattern for client libraries in other languages.

It has everything that a client library needs, in the order of docs/protocol.md: attach, one writer that sends all that
waits, results in any order, heartbeats, cancels, graceful shutdown, calls that were given up while this process stood
still, reconnecting with backoff, and a credential for a bus on another machine. The scenarios in
toolbus/conformance check a copy. It is one file, a little long, because it is meant to be read and copied as a
whole. For Python programs `toolbus.sdk` is better: it also runs blocking handlers, and finds out why TLS fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import random
import stat
import time
import tomllib
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import grpc

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

logger = logging.getLogger("toolbus.peer")

ADDRESS = "127.0.0.1:48930"

FRAME_ITEMS = 128
FRAME_BYTES = 1024 * 1024
FIRST_DELAY, MAX_DELAY = 0.1, 5.0  # backoff: seconds between attempts; each is drawn from the upper half
HANDSHAKE_SECONDS = 20.0  # for connecting and attaching
MISSED_HEARTBEATS = 5  # after so many heartbeat intervals without a message the bus counts as lost
STEADY_SECONDS = 1.0  # a session that lived so long ended for a new reason
TICK_SECONDS, LATE_SECONDS = 0.5, 0.5  # a clock that is looked at so often, and later than that, stood still
DRAIN_SECONDS = 2.0  # after our drain the bus ends the stream; if it does not, we half-close after this long
# After these statuses another attempt would be refused too.
FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
}
SINGLE = ("attach", "heartbeat", "drain")  # fields that a frame holds once


class Refused(Exception):
    """The bus refuses this peer; the text is the bus's."""


class Outbox:
    """The messages that wait to be written on one stream; the one place that makes frames."""

    def __init__(self) -> None:
        self._items: deque[tuple[str, Any]] = deque()  # (field, message), oldest first
        self._wake = asyncio.Event()  # set when there is something to do for the writer
        self._closed = False  # whether nothing more is taken

    @property
    def closed(self) -> bool:
        """Whether the stream is over, or this side of it."""
        return self._closed

    def put(self, field: str, item: Any) -> None:
        """Adds an item; drops it if the stream is over."""
        if not self._closed:
            self._items.append((field, item))
            self._wake.set()

    def close(self) -> None:
        """Lets the writer send what waits and then half-close."""
        self._closed = True
        self._wake.set()

    async def frame(self) -> wire.InvokeRequest | None:
        """Returns the waiting items, up to the limits of a frame; None when closed and empty."""
        while not self._items:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        frame, size, items = wire.InvokeRequest(), 0, 0
        while self._items and items < FRAME_ITEMS:
            field, item = self._items[0]
            size += item.ByteSize()
            if items and (size > FRAME_BYTES or (field in SINGLE and frame.HasField(field))):  # type: ignore[arg-type]
                break
            if field in SINGLE:
                getattr(frame, field).CopyFrom(item)
            else:
                getattr(frame, field).append(item)
            self._items.popleft()
            items += 1
        return frame


class Connection:
    """The state of one stream. None of it may reach the next stream, where its call ids mean nothing."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.in_flight: dict[str, asyncio.Task[Any]] = {}  # running handlers, by the bus's call id
        self.pending: dict[str, asyncio.Future[pb.ToolResult]] = {}  # calls of our own, by our id
        self.opened_at: float | None = None  # when the bus answered the attach; None before it did
        self.drain_sent = False
        self.drain_received = False
        self.echoes = False  # whether the bus echoes heartbeats of the peer's own
        self.held: dict[str, pb.ToolCall] = {}  # calls that may have ended while this process stood still, by their id
        self.asked = 0  # the heartbeat whose echo begins what is held
        self.holding = False  # whether calls that arrive are held
        self._due = math.inf  # when the clock is looked at next, at the latest
        self._ids = itertools.count(1)

    async def call(self, call: pb.ToolCall) -> pb.ToolResult:
        """Makes a call on this stream and on no other; one that comes after its end has failed."""
        if self.outbox.closed:
            text = "the stream for this call has ended, and with it the call that it is part of, if there is one"
            return _failure(pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_NOT_DISPATCHED, text)
        call.call_id = call_id = f"c{next(self._ids)}"
        future: asyncio.Future[pb.ToolResult] = asyncio.get_running_loop().create_future()
        self.pending[call_id] = future
        self.outbox.put("calls", call)
        try:
            return await future
        except asyncio.CancelledError:
            self.outbox.put("cancels", pb.ToolCancel(call_id=call_id, reason="cancelled"))
            raise
        finally:
            self.pending.pop(call_id, None)
            self.close_if_idle()

    def look_at_the_clock(self) -> None:
        """Holds calls from now on where this process stood still: it was stopped, or its machine was suspended.

        The bus may have ended them meanwhile. It echoes a heartbeat behind everything that it has sent before, so what
        is not cancelled by then is still wanted.
        """
        now = boot_time()
        if now > self._due and self.echoes:
            self.holding = True
            self.asked += 1
            self.outbox.put("heartbeat", wire.Heartbeat(sequence=self.asked, from_peer=True))
        self._due = now + TICK_SECONDS + LATE_SECONDS

    async def watch_the_clock(self) -> None:
        """Looks at the clock until cancelled."""
        while True:
            self.look_at_the_clock()
            await asyncio.sleep(TICK_SECONDS)

    def seconds(self) -> float:
        """Returns how long the session has been live; below 0 if the bus has not answered."""
        return -1.0 if self.opened_at is None else asyncio.get_running_loop().time() - self.opened_at

    def close_if_idle(self) -> None:
        """Half-closes once either side has sent a drain and no call is pending or in flight."""
        if self.in_flight or self.pending or self.held:
            return
        if self.drain_received:
            self.outbox.close()
        elif self.drain_sent:  # a call may have crossed our drain on the wire: leave the bus time to end the stream
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.outbox.close)


class Call:
    """A call that this peer answers, as its handler sees it."""

    def __init__(self, message: pb.ToolCall, connection: Connection) -> None:
        self.message = message
        self._connection = connection

    def progress(self, done: float = 0.0, total: float = 0.0, message: str = "", chunk: str = "") -> None:
        """Reports progress; `chunk` is the next piece of the output."""
        call_id = self.message.call_id
        item = pb.ToolProgress(call_id=call_id, progress=done, total=total, message=message, output_chunk=chunk)
        self._connection.outbox.put("progress", item)

    async def invoke(self, name: str, arguments: dict[str, Any]) -> pb.ToolResult:
        """Calls another tool as part of this call: it has the same context and ends no later.

        It goes to the stream of this call and is never sent again on another, where the id of its parent could be the
        id of another user's call.
        """
        return await self._connection.call(_message(name, arguments, parent_call_id=self.message.call_id))


def read_credential(path: str) -> dict[str, Any]:
    """Returns the values of a credential file; {} without a path.

    Raises:
        Refused: other users can read the file.
    """
    if not path:
        return {}
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
            raise Refused(f"{path} must belong to this user, who alone may read it: chmod 600 {path}")
        return tomllib.load(file)


Handler = Callable[[dict[str, Any], Call], Coroutine[Any, Any, Any]]


class Peer:
    """Keeps one stream to the bus for as long as `run` runs: offers tools, answers calls, makes calls."""

    def __init__(self, address: str, source: str, token: str = "", credential: str = "") -> None:
        """Makes a peer.

        Args:
            address: `HOST:PORT`, `unix:PATH`, `tls:HOST:PORT` or `mtls:HOST:PORT`; "" means that of the credential.
            token: binds the source.
            credential: the file that proves who this peer is, to a bus on another machine; "" for none.
        """
        self._credential = credential
        self.address = address or read_credential(credential).get("address", ADDRESS)
        self.stub: rpc.ToolBusServiceAsyncStub | None = None  # for the other RPCs; None while there is no connection
        self.metadata: list[tuple[str, str]] = []  # of every RPC on the current connection
        self.attached = asyncio.Event()  # set while the bus has accepted this peer
        # The same source and instance in every attach, by which the bus recognizes a plugin that reconnects.
        self._attach = wire.Attach(protocol_version=1, source=source, instance=uuid.uuid4().hex, token=token)
        self._handlers: dict[str, Handler] = {}
        self._connection = Connection()  # the current stream, or the last one
        self._draining = asyncio.Event()  # set when this peer must not reconnect
        self.refused: dict[tuple[str, str], str] = {}  # (name, role) of tools that the bus refused → why

    def tool(self, description: str, parameters: dict[str, Any], **fields: Any) -> Callable[[Handler], Handler]:
        """Offers an async function `handler(arguments, call)` under its own name, from the next attach on.

        It returns its output, or a `pb.ToolResult` where there is more to say; `fields` are further ones of `pb.Tool`.
        """

        def offer(handler: Handler) -> Handler:
            name = handler.__name__
            schema = json.dumps(parameters)
            self._attach.tools.add(name=name, description=description, parameters_json=schema, **fields)
            self._handlers[name] = handler
            return handler

        return offer

    async def run(self) -> None:
        """Attaches, serves and reconnects, until `drain` is called or the bus sends a drain that is final.

        Raises:
            Refused: the bus answered the attach with a status that another attempt would not change.
        """
        delay = FIRST_DELAY
        key_ended = False  # whether the session before ended because its key is not accepted any more
        while not self._draining.is_set():
            try:
                await self._serve()
                reason = "the bus ended the stream"
            except TimeoutError:
                reason = "the bus stopped answering"
            except grpc.aio.AioRpcError as error:
                lived = self._connection.seconds()
                again = lived < STEADY_SECONDS and (lived < 0 or key_ended)
                key_ended = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if error.code() in FINAL or (key_ended and again):
                    raise Refused(f"{error.code().name}: {error.details()}") from None
                reason = f"{error.code().name}: {error.details()}"
            delay = FIRST_DELAY if self._connection.seconds() >= 0 else min(2 * delay, MAX_DELAY)
            if not self._draining.is_set():
                logger.warning("not attached to %s (%s): retrying within %.1f s", self.address, reason, delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._draining.wait(), random.uniform(delay / 2, delay))

    def drain(self, reason: str = "leaving") -> None:
        """Shuts down gracefully: the bus sends no new calls, those in flight are finished, then `run` returns."""
        self._draining.set()
        if not self._connection.drain_sent:
            self._connection.drain_sent = True
            self._connection.outbox.put("drain", wire.Drain(reason=reason))
            self._connection.close_if_idle()

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float = 0.0) -> pb.ToolResult:
        """Calls any tool of the bus, waiting for the stream to be there. A failure is a result with `error` set."""
        await self.attached.wait()
        return await self._connection.call(_message(name, arguments, timeout_seconds=timeout_seconds))

    async def _serve(self) -> None:
        """Runs one stream from its attach to its end."""
        connection = self._connection = Connection()
        # gRPC has a backoff of its own per address, shared between channels; with this option only ours counts.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with self._open_channel(options) as channel:
            self.stub = rpc.ToolBusServiceStub(channel)
            stream = self.stub.Invoke(metadata=self.metadata)  # type: ignore[call-arg]  # the type stubs know only the other style, an iterator
            connection.outbox.put("attach", self._attach)
            writer = asyncio.create_task(_write(stream, connection.outbox))
            watch = asyncio.create_task(connection.watch_the_clock())
            try:
                await self._read(stream, connection)
            finally:
                watch.cancel()
                self._end(connection)
                stream.cancel()  # no effect on a stream that has ended; else it releases a blocked write
                await writer

    def _open_channel(self, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """Opens a channel with the credential as its file is now: it may have been renewed."""
        credential = read_credential(self._credential)
        prefix, _, target = self.address.partition(":")
        tls = prefix in ("tls", "mtls")
        token = credential.get("token")
        host = self.address.rpartition(":")[0]
        if token and not tls and prefix != "unix" and host not in ("127.0.0.1", "localhost", "[::1]"):
            raise Refused(f"a token is not sent to {self.address} in plain text: write tls:{self.address}")
        self.metadata = [("authorization", f"Bearer {token}")] if token else []
        if not tls:
            return grpc.aio.insecure_channel(self.address, options=options)
        pem = [credential[name].encode() if name in credential else None for name in ("ca", "key", "certificate")]
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*pem), options=options)

    async def _read(self, stream: Any, connection: Connection) -> None:
        timeout = HANDSHAKE_SECONDS
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout) as deadline:
            async for frame in stream:
                connection.look_at_the_clock()
                if frame.HasField("attached"):
                    connection.echoes = frame.attached.echoes
                    if connection.opened_at is None:
                        connection.opened_at = loop.time()
                    self.attached.set()
                    timeout = MISSED_HEARTBEATS * (frame.attached.heartbeat_seconds or 10.0)
                    self._note_refused(frame.attached.refused, anew=True)
                    for tool in frame.attached.waiting:
                        logger.warning(
                            "the tool %r waits for role %r, which the bus does not have", tool.name, tool.role
                        )
                deadline.reschedule(loop.time() + timeout)
                self._receive(frame, connection)

    def _receive(self, frame: wire.InvokeResponse, connection: Connection) -> None:
        """Handles the fields of a frame in the order of the protocol. It ignores progress and most events."""
        for event in frame.events:
            if event.HasField("tools_reviewed"):
                reviewed = event.tools_reviewed
                offered = {*reviewed.registered, *(tool.name for tool in reviewed.waiting)}
                self.refused = {key: why for key, why in self.refused.items() if key[0] not in offered}
                self._note_refused(reviewed.refused)
        for call in frame.calls:
            if connection.holding:
                connection.held[call.call_id] = call
            else:
                self._start(call, connection)
        for result in frame.results:
            future = connection.pending.pop(result.call_id, None)
            if future is not None and not future.done():
                future.set_result(result)
        for cancel in frame.cancels:
            if cancel.call_id in connection.in_flight:
                connection.in_flight[cancel.call_id].cancel()
            elif connection.held.pop(cancel.call_id, None) is not None:
                _refuse(cancel.call_id, connection, "the call was cancelled before it began")
        if frame.heartbeat.from_peer:
            if frame.heartbeat.sequence == connection.asked:
                connection.holding, held, connection.held = False, connection.held, {}
                for call in held.values():
                    self._start(call, connection)
        elif frame.HasField("heartbeat"):
            connection.outbox.put("heartbeat", frame.heartbeat)
        if frame.HasField("drain"):
            if frame.drain.reason != "shutdown":
                self._draining.set()
            connection.drain_received = True
            self.attached.clear()  # new calls wait for the next stream
        connection.close_if_idle()

    def _note_refused(self, tools: Iterable[wire.RefusedTool], *, anew: bool = False) -> None:
        """Notes which tools the bus refused; logs each once, not again after every reconnect. It offers the others."""
        before = self.refused
        self.refused = {} if anew else dict(before)
        for tool in tools:
            key = tool.name, tool.role
            self.refused[key] = tool.error
            if before.get(key) != tool.error:
                logger.warning("the bus does not offer the tool %r: %s", tool.name, tool.error)

    def _start(self, message: pb.ToolCall, connection: Connection) -> None:
        handler = self._handlers.get(message.name)
        if handler is None:
            text = f"this plugin has no tool {message.name!r}; it has: {', '.join(self._handlers)}"
            refusal = _failure(pb.ERROR_CODE_NOT_FOUND, pb.CALL_STAGE_NOT_DISPATCHED, text)
        else:
            try:
                arguments = json.loads(message.arguments_json or "{}")
            except ValueError as error:
                arguments = error
            if isinstance(arguments, dict):
                task = asyncio.create_task(handler(arguments, Call(message, connection)))
                connection.in_flight[message.call_id] = task
                # By callback, not in the task: a call cancelled before its task first ran still gets its one result.
                task.add_done_callback(partial(_finish, message.call_id, connection))
                return
            text = f"the arguments must be the JSON text of an object, they are {message.arguments_json[:80]!r}"
            refusal = _failure(pb.ERROR_CODE_INVALID_ARGUMENTS, pb.CALL_STAGE_NOT_DISPATCHED, text)
        refusal.call_id = message.call_id
        connection.outbox.put("results", refusal)

    def _end(self, connection: Connection) -> None:
        """Cancels the handlers and fails the pending calls of a stream that is over."""
        self.attached.clear()
        self.stub = None
        connection.outbox.close()
        connection.held.clear()
        for task in connection.in_flight.values():
            task.cancel()
        lost = pb.CallError(
            code=pb.ERROR_CODE_UNAVAILABLE, stage=pb.CALL_STAGE_UNKNOWN, message="the connection to the bus broke"
        )
        for call_id, future in connection.pending.items():
            if not future.done():
                future.set_result(pb.ToolResult(call_id=call_id, is_error=True, error=lost))


def _finish(call_id: str, connection: Connection, task: asyncio.Task[Any]) -> None:
    """Makes the one result of a call from however its handler ended."""
    connection.in_flight.pop(call_id, None)
    if task.cancelled():
        result = _failure(pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_ACCEPTED, "the call was cancelled")
    else:
        try:
            result = task.result()
            if not isinstance(result, pb.ToolResult):
                result = pb.ToolResult(output_json=json.dumps(result, ensure_ascii=False, allow_nan=False))
        except Exception as error:  # the handler's own, or an output that JSON cannot hold
            kind = type(error).__name__
            result = _failure(pb.ERROR_CODE_TOOL, pb.CALL_STAGE_ACCEPTED, str(error) or kind, kind)
    result.call_id = call_id
    connection.outbox.put("results", result)
    connection.close_if_idle()


def _refuse(call_id: str, connection: Connection, text: str) -> None:
    """Answers a call that was cancelled before it began."""
    result = _failure(pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_NOT_DISPATCHED, text)
    result.call_id = call_id
    connection.outbox.put("results", result)


def boot_time() -> float:
    """Returns the seconds since some moment, those in which the machine was suspended included where it knows."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _message(name: str, arguments: dict[str, Any], **fields: Any) -> pb.ToolCall:
    return pb.ToolCall(name=name, arguments_json=json.dumps(arguments, ensure_ascii=False), **fields)


def _failure(
    code: pb.ErrorCode.ValueType, stage: pb.CallStage.ValueType, message: str, reason: str = ""
) -> pb.ToolResult:
    error = pb.CallError(code=code, stage=stage, message=message, reason=reason)
    return pb.ToolResult(is_error=True, error=error)


async def _write(stream: Any, outbox: Outbox) -> None:
    """Writes what waits; the stream's one writer. It is never cancelled: that would break every later write."""
    with contextlib.suppress(Exception):  # any exception means that the stream is over; the reader reports why
        while (frame := await outbox.frame()) is not None:
            await stream.write(frame)
        await stream.done_writing()
