"""A peer made of the generated stubs alone, for tests that must see every frame.

It does nothing by itself but read, and echo heartbeats and answer calls where it was told to: no retries, no
re-attach, no checks. Everything that arrives is kept in the order in which it came.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import grpc

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

Answer = Callable[[pb.ToolCall], pb.ToolResult | None]


def tool(name: str, parameters: object = None, **fields: Any) -> pb.Tool:
    """A tool with a schema given as a value, or as text that need not be JSON."""
    text = parameters if isinstance(parameters, str) else json.dumps(parameters or {"type": "object"})
    return pb.Tool(name=name, parameters_json=text, **fields)


def echo(call: pb.ToolCall) -> pb.ToolResult:
    """Answers a call with its own arguments."""
    return pb.ToolResult(call_id=call.call_id, output_json=call.arguments_json)


def silent(call: pb.ToolCall) -> None:
    """Leaves a call unanswered."""


class RawPeer:
    """One Invoke stream.

    Args:
        address: where the bus listens.
        answer: what to answer a call with; None leaves it to the test.
        echoes: whether heartbeats are answered.
        reads: whether anything is read at all.
    """

    def __init__(self, address: str, *, answer: Answer = silent, echoes: bool = True, reads: bool = True) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub: Any = rpc.ToolBusServiceStub(self.channel)
        self.answer = answer
        self.echoes = echoes
        self.frames: list[wire.InvokeResponse] = []  # everything that came, but heartbeats
        self.calls: list[pb.ToolCall] = []
        self.results: list[pb.ToolResult] = []
        self.progress: list[pb.ToolProgress] = []
        self.cancels: list[pb.ToolCancel] = []
        self.events: list[wire.Event] = []
        self.drains: list[wire.Drain] = []
        self.heartbeats = 0
        self.echoed: list[wire.Heartbeat] = []  # the echoes of its own heartbeats
        self.attached: wire.Attached | None = None  # the newest one
        self.code: grpc.StatusCode | None = None  # None while the stream is open
        self.details = ""
        self._reads = reads
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[pb.ToolResult]] = {}  # by call_id, until the first result
        self._writing = asyncio.Lock()
        self._stream: Any = None  # None until opened
        self._reading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RawPeer frames={len(self.frames)} calls={len(self.calls)} results={len(self.results)} {self.code}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- opening and closing -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the stream without a word."""
        self._stream = self.stub.Invoke()
        self.code, self.details, self.attached = None, "", None
        if self._reads:
            self._reading = asyncio.create_task(self._read())

    async def attach(self, source: str, *tools: pb.Tool, **fields: Any) -> wire.Attached:
        """Opens the stream, attaches and returns the answer."""
        if self._stream is None:
            self.open()
        await self.send(attach=attach(source, *tools, **fields))
        if not self._reads:
            return wire.Attached()
        await until(lambda: self.attached or self.code, "attached")
        assert self.attached, f"the attach was refused: {self.code} {self.details}"
        return self.attached

    async def refused(self, frame: wire.InvokeRequest) -> tuple[grpc.StatusCode, str]:
        """Opens the stream with a frame and returns how the bus ends it."""
        self.open()
        await self.send_frame(frame)
        return await self.ended()

    async def ended(self, seconds: float = WAIT_SECONDS) -> tuple[grpc.StatusCode, str]:
        """Waits for the end of the stream and returns its status."""
        await until(lambda: self.code, "the end of the stream", seconds)
        assert self.code is not None
        return self.code, self.details

    async def half_close(self) -> None:
        """Ends this side's direction."""
        await self._stream.done_writing()

    async def close(self) -> None:
        """Drops the connection without a drain."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._stream is not None:
            self._stream.cancel()
        await self.channel.close(None)

    # -- saying --------------------------------------------------------------------------------------------------

    async def send(self, **arms: Any) -> None:
        """Sends one frame made of arms."""
        await self.send_frame(wire.InvokeRequest(**arms))

    async def send_frame(self, frame: wire.InvokeRequest) -> None:
        """Sends a frame, one at a time."""
        async with self._writing:
            try:
                await self._stream.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the stream is over; the reader learns how it ended

    async def send_quietly(self, frame: wire.InvokeRequest) -> None:
        """Sends a frame that may never get through."""
        await asyncio.gather(self.send_frame(frame), return_exceptions=True)

    def ask(self, name: str, arguments: Any = None, **fields: Any) -> pb.ToolCall:
        """Builds a call with an id of its own; arguments are a value, or text that need not be JSON."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
        fields.setdefault("call_id", f"c{next(self._ids)}")
        return pb.ToolCall(name=name, arguments_json=text, **fields)

    async def start(self, *calls: pb.ToolCall) -> list[asyncio.Future[pb.ToolResult]]:
        """Sends calls in one frame and returns the futures of their results."""
        futures = []
        for call in calls:
            future = self._waiting[call.call_id] = asyncio.get_running_loop().create_future()
            futures.append(future)
        await self.send(calls=calls)
        return futures

    async def call(self, name: str, arguments: Any = None, **fields: Any) -> pb.ToolResult:
        """Makes one call and returns its result."""
        (future,) = await self.start(self.ask(name, arguments, **fields))
        return await asyncio.wait_for(future, WAIT_SECONDS)

    # -- hearing -------------------------------------------------------------------------------------------------

    async def received(self, number: int = 1, seconds: float = WAIT_SECONDS) -> list[pb.ToolCall]:
        """Waits until so many calls have come in all."""
        await until(lambda: len(self.calls) >= number or self.code, f"{number} calls", seconds)
        assert len(self.calls) >= number, f"only {len(self.calls)} calls came, then {self.code} {self.details}"
        return self.calls

    async def _read(self) -> None:
        try:
            while frame := await self._stream.read():  # the end of the stream is false, a message never is
                await self._take(frame)
        except grpc.aio.AioRpcError:
            pass
        self.details = await self._stream.details()
        self.code = await self._stream.code()

    async def _take(self, frame: wire.InvokeResponse) -> None:
        if frame.heartbeat.from_peer:
            self.echoed.append(frame.heartbeat)
        elif frame.HasField("heartbeat"):
            self.heartbeats += 1
            if self.echoes:
                await self.send(heartbeat=frame.heartbeat)
        if frame.HasField("attached"):
            self.attached = frame.attached
        if frame.HasField("drain"):
            self.drains.append(frame.drain)
        self.frames.append(frame)
        self.events.extend(frame.events)
        self.progress.extend(frame.progress)
        self.cancels.extend(frame.cancels)
        self._take_results(frame.results)
        self.calls.extend(frame.calls)
        answers = wire.InvokeRequest()
        for call in frame.calls:
            answer = self.answer(call)
            if answer is not None:
                answers.results.append(answer)
                if answer.ByteSize() > 100_000:  # not many large ones in one frame
                    await self.send_frame(answers)
                    answers = wire.InvokeRequest()
        if answers.results:
            await self.send_frame(answers)

    def _take_results(self, results: Iterable[pb.ToolResult]) -> None:
        for result in results:
            self.results.append(result)
            future = self._waiting.pop(result.call_id, None)
            if future is not None and not future.done():
                future.set_result(result)


def attach(source: str, *tools: pb.Tool, **fields: Any) -> wire.Attach:
    """Builds an attach of the protocol version that the bus speaks."""
    fields.setdefault("protocol_version", 1)
    return wire.Attach(source=source, tools=tools, **fields)


def opening(source: str, *tools: pb.Tool, **fields: Any) -> wire.InvokeRequest:
    """Builds the first frame of a stream."""
    return wire.InvokeRequest(attach=attach(source, *tools, **fields))
