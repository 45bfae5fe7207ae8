"""One peer of the bus, written on the generated stubs alone.

Everything a client library has to do is here, in the order in which docs/protocol.md tells it: attach, one writer
that sends whatever is waiting, answers in any order, echoes of heartbeats, cancels, goodbye, and coming back after a
break. An author in another language can take this file as the pattern; tests/vectors/peer.jsonl says whether the
copy is right. It stays one file, a little long, because it is there to be read and copied whole. Python programs are
better served by `toolbus.sdk`, which also runs blocking handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

logger = logging.getLogger("toolbus.bus.streams.peer")

FRAME_ITEMS = 128
FRAME_BYTES = 1024 * 1024
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds between attempts; each is drawn from the upper half
OPENING_SECONDS = 20.0  # how long connecting and attaching may take
SILENCES = 5  # a bus that is silent for this many of its heartbeat intervals is taken for dead
LEAVING_SECONDS = 2.0  # after our drain the bus ends the stream; if it does not, we half-close after this long
# Attaching again would meet the same refusal.
FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
}
SINGLE = ("attach", "heartbeat", "drain")  # arms that a frame holds once


class Refused(Exception):
    """The bus does not want this peer; the text is the bus's own sentence."""


class Outbox:
    """What waits to be written on one stream, and the one place from which frames are made."""

    def __init__(self) -> None:
        self._items: deque[tuple[str, Any]] = deque()  # (arm, message), oldest first
        self._wake = asyncio.Event()  # set when there is something to do for the writer
        self._closed = False  # whether nothing more is taken

    def put(self, arm: str, item: Any) -> None:
        """Adds an item, or drops it where the stream is over."""
        if not self._closed:
            self._items.append((arm, item))
            self._wake.set()

    def close(self) -> None:
        """Lets the writer send what waits and then half-close."""
        self._closed = True
        self._wake.set()

    async def frame(self) -> wire.InvokeRequest | None:
        """Returns whatever is waiting, up to the limits of a frame; None when closed and empty."""
        while not self._items:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        frame, size, items = wire.InvokeRequest(), 0, 0
        while self._items and items < FRAME_ITEMS:
            arm, item = self._items[0]
            size += item.ByteSize()
            if items and (size > FRAME_BYTES or (arm in SINGLE and frame.HasField(arm))):  # type: ignore[arg-type]
                break
            if arm in SINGLE:
                getattr(frame, arm).CopyFrom(item)
            else:
                getattr(frame, arm).append(item)
            self._items.popleft()
            items += 1
        return frame


class Link:
    """What belongs to one stream and must not leak into the next one: call ids mean nothing there."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.running: dict[str, asyncio.Task[Any]] = {}  # handlers at work, by the bus's call id
        self.waiting: dict[str, asyncio.Future[pb.ToolResult]] = {}  # calls of our own, by our id
        self.opened = False  # whether the bus has answered the attach
        self.said_goodbye = False  # whether we have sent drain
        self.bus_drains = False  # whether the bus has sent drain

    def settle(self) -> None:
        """Closes our direction once a goodbye was said and nobody waits for anything any more."""
        if self.running or self.waiting:
            return
        if self.bus_drains:
            self.outbox.close()
        elif self.said_goodbye:  # a call may have crossed our drain on the wire: leave the bus time to end the stream
            asyncio.get_running_loop().call_later(LEAVING_SECONDS, self.outbox.close)


class Call:
    """A call that this peer answers, as its handler sees it."""

    def __init__(self, message: pb.ToolCall, peer: Peer, link: Link) -> None:
        self.message = message
        self._peer = peer
        self._link = link

    def progress(self, done: float = 0.0, total: float = 0.0, message: str = "", chunk: str = "") -> None:
        """Shows that the call is being worked on; `chunk` is the next piece of its output."""
        call_id = self.message.call_id
        item = pb.ToolProgress(call_id=call_id, progress=done, total=total, message=message, output_chunk=chunk)
        self._link.outbox.put("progress", item)

    async def invoke(self, name: str, arguments: dict[str, Any]) -> pb.ToolResult:
        """Calls another tool on behalf of this call: it shares its context and ends no later."""
        return await self._peer.call(name, arguments, parent_call_id=self.message.call_id)


Handler = Callable[[dict[str, Any], Call], Coroutine[Any, Any, Any]]


class Peer:
    """Keeps one stream to the bus for as long as `run` runs: offers tools, answers calls, makes calls."""

    def __init__(self, address: str, source: str, token: str = "") -> None:
        self.address = address
        self.stub: rpc.ToolBusServiceAsyncStub | None = None  # for the other RPCs; None while there is no connection
        self.attached = asyncio.Event()  # set while the bus has accepted this peer
        # The same source and instance at every attach: so the bus knows that this is the same plugin coming back.
        self._attach = wire.Attach(protocol_version=1, source=source, instance=uuid.uuid4().hex, token=token)
        self._handlers: dict[str, Handler] = {}
        self._link = Link()  # the current stream, or the last one
        self._ids = itertools.count(1)
        self._leave = asyncio.Event()  # set when this peer is not to come back

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
        """Attaches, serves and comes back after every break, until `leave` or the bus says otherwise.

        Raises:
            Refused: where the bus answered the attach with a status that trying again would not change.
        """
        delay = FIRST_DELAY
        while not self._leave.is_set():
            try:
                await self._serve()
                reason = "the bus ended the stream"
            except TimeoutError:
                reason = "the bus is silent"
            except grpc.aio.AioRpcError as error:
                if error.code() in FINAL:
                    raise Refused(f"{error.code().name}: {error.details()}") from None
                reason = f"{error.code().name}: {error.details()}"
            delay = FIRST_DELAY if self._link.opened else min(2 * delay, LONGEST_DELAY)
            if not self._leave.is_set():
                logger.warning("not attached to %s (%s): trying again within %.1f s", self.address, reason, delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leave.wait(), random.uniform(delay / 2, delay))

    def leave(self, reason: str = "leaving") -> None:
        """Says goodbye: new calls go elsewhere, those at work are finished, then `run` returns."""
        self._leave.set()
        if not self._link.said_goodbye:
            self._link.said_goodbye = True
            self._link.outbox.put("drain", wire.Drain(reason=reason))
            self._link.settle()

    async def call(
        self, name: str, arguments: dict[str, Any], *, timeout_seconds: float = 0.0, parent_call_id: str = ""
    ) -> pb.ToolResult:
        """Calls any tool of the bus, waiting for the stream to be there. A failure is a result with `error` set."""
        await self.attached.wait()
        link, call_id = self._link, f"c{next(self._ids)}"
        answer: asyncio.Future[pb.ToolResult] = asyncio.get_running_loop().create_future()
        link.waiting[call_id] = answer
        message = pb.ToolCall(
            call_id=call_id,
            name=name,
            arguments_json=json.dumps(arguments, ensure_ascii=False),
            timeout_seconds=timeout_seconds,
            parent_call_id=parent_call_id,
        )
        link.outbox.put("calls", message)
        try:
            return await answer
        except asyncio.CancelledError:
            link.outbox.put("cancels", pb.ToolCancel(call_id=call_id, reason="cancelled"))
            raise
        finally:
            link.waiting.pop(call_id, None)
            link.settle()

    async def _serve(self) -> None:
        """One stream from its attach to its end."""
        link = self._link = Link()
        # gRPC keeps a back-off of its own per address, shared between channels: ours is the one that should count.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            self.stub = rpc.ToolBusServiceStub(channel)
            stream = self.stub.Invoke()  # type: ignore[call-arg]  # the type stubs know only the other style, an iterator
            link.outbox.put("attach", self._attach)
            writer = asyncio.create_task(_write(stream, link.outbox))
            try:
                await self._read(stream, link)
            finally:
                self._end(link)
                stream.cancel()  # no effect on a stream that has ended; else it releases a blocked write
                await writer

    async def _read(self, stream: Any, link: Link) -> None:
        silence = OPENING_SECONDS
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(silence) as watch:
            async for frame in stream:
                if frame.HasField("attached"):
                    link.opened = True
                    self.attached.set()
                    silence = SILENCES * (frame.attached.heartbeat_seconds or 10.0)
                    for tool in frame.attached.refused:
                        logger.error("the bus did not take the tool %s: %s", tool.name, tool.error)
                watch.reschedule(loop.time() + silence)
                self._receive(frame, link)

    def _receive(self, frame: wire.InvokeResponse, link: Link) -> None:
        """Takes the arms of a frame in the order of the protocol. Events, and progress of our calls, are not used."""
        for call in frame.calls:
            self._start(call, link)
        for result in frame.results:
            answer = link.waiting.pop(result.call_id, None)
            if answer is not None and not answer.done():
                answer.set_result(result)
        for cancel in frame.cancels:
            if cancel.call_id in link.running:
                link.running[cancel.call_id].cancel()
        if frame.HasField("heartbeat"):
            link.outbox.put("heartbeat", frame.heartbeat)
        if frame.HasField("drain"):
            if frame.drain.reason != "shutdown":
                self._leave.set()
            link.bus_drains = True
            self.attached.clear()  # new calls wait for the next stream
        link.settle()

    def _start(self, message: pb.ToolCall, link: Link) -> None:
        handler = self._handlers.get(message.name)
        if handler is None:
            text = f"this plugin has no tool {message.name!r}; it has: {', '.join(self._handlers)}"
            refusal = _failure(pb.ERROR_CODE_NOT_FOUND, pb.CALL_STAGE_NOT_DISPATCHED, text)
        else:
            try:
                arguments = json.loads(message.arguments_json or "{}")
            except ValueError as problem:
                arguments = problem
            if isinstance(arguments, dict):
                task = asyncio.create_task(handler(arguments, Call(message, self, link)))
                link.running[message.call_id] = task
                # By callback, not in the task: a call cancelled before its task first ran still gets its one result.
                task.add_done_callback(partial(_finish, message.call_id, link))
                return
            text = f"the arguments must be the JSON text of an object, they are {message.arguments_json[:80]!r}"
            refusal = _failure(pb.ERROR_CODE_INVALID_ARGUMENTS, pb.CALL_STAGE_NOT_DISPATCHED, text)
        refusal.call_id = message.call_id
        link.outbox.put("results", refusal)

    def _end(self, link: Link) -> None:
        """The stream is over: nobody waits for our results, and ours will not come."""
        self.attached.clear()
        self.stub = None
        link.outbox.close()
        for task in link.running.values():
            task.cancel()
        lost = pb.CallError(code=pb.ERROR_CODE_UNAVAILABLE, stage=pb.CALL_STAGE_UNKNOWN, message="the bus went away")
        for call_id, answer in link.waiting.items():
            if not answer.done():
                answer.set_result(pb.ToolResult(call_id=call_id, is_error=True, error=lost))


def _finish(call_id: str, link: Link, task: asyncio.Task[Any]) -> None:
    """Turns the end of a handler, whichever it was, into the one result of its call."""
    link.running.pop(call_id, None)
    if task.cancelled():
        result = _failure(pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_ACCEPTED, "the call was stopped on request")
    else:
        try:
            result = task.result()
            if not isinstance(result, pb.ToolResult):
                result = pb.ToolResult(output_json=json.dumps(result, ensure_ascii=False, allow_nan=False))
        except Exception as problem:  # the handler's own, or an output that JSON cannot hold
            kind = type(problem).__name__
            result = _failure(pb.ERROR_CODE_TOOL, pb.CALL_STAGE_ACCEPTED, str(problem) or kind, kind)
    result.call_id = call_id
    link.outbox.put("results", result)
    link.settle()


def _failure(
    code: pb.ErrorCode.ValueType, stage: pb.CallStage.ValueType, message: str, reason: str = ""
) -> pb.ToolResult:
    error = pb.CallError(code=code, stage=stage, message=message, reason=reason)
    return pb.ToolResult(is_error=True, error=error)


async def _write(stream: Any, outbox: Outbox) -> None:
    """Is the only one to write on a stream. It is never cancelled: that would poison every later write."""
    with contextlib.suppress(Exception):  # whatever a write raises means that the stream is over; the reader says why
        while (frame := await outbox.frame()) is not None:
            await stream.write(frame)
        await stream.done_writing()
