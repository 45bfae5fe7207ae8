"""What peers do that may offer tools: a sandboxed drop-in file has a copy of this one, a plugin with a key runs it.

Imports nothing of the lab, since a sandboxed file can read only itself and Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

PAUSE = 0.001  # between two attempts: the attacker's share of the machine is not what is measured
Channel = Callable[[], Any]


def tool(name: str, schema: dict[str, Any]) -> pb.Tool:
    """Returns a declaration."""
    return pb.Tool(name=name, description="hostile", parameters_json=json.dumps(schema))


def wide(number: int, properties: int) -> dict[str, Any]:
    """Returns a schema with many properties, unlike every other one."""
    return {"type": "object", "properties": {f"p{number}_{each}": {"type": "string"} for each in range(properties)}}


def patterned(number: int, patterns: int) -> dict[str, Any]:
    """Returns a schema with patterns whose classes are large and counted."""
    pattern = {"type": "string", "pattern": f"^[\\p{{L}}\\p{{N}}]{{0,{40 + number % 20}}}$"}
    return {"type": "object", "properties": {f"p{number}_{each}": pattern for each in range(patterns)}}


class Stream:
    """One stream of a peer, whose answers nobody looks at, but for heartbeats."""

    def __init__(self, channel: Any, *, reads: bool = True) -> None:
        self.stub: Any = rpc.ToolBusServiceStub(channel)
        self.stream = self.stub.Invoke()
        self.reads = reads
        self.reading: asyncio.Task[None] | None = None  # None until attached, and of a stream that does not read

    async def attach(self, source: str, token: str = "", **fields: Any) -> str:
        """Attaches; returns the id of the session."""
        attach = wire.Attach(protocol_version=1, source=source, token=token, max_in_flight=1024, **fields)
        await self.stream.write(wire.InvokeRequest(attach=attach))
        first = await self.stream.read()
        if self.reads:
            self.reading = asyncio.create_task(self._read())
        return str(first.attached.session_id) if isinstance(first, wire.InvokeResponse) else ""

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while isinstance(frame := await self.stream.read(), wire.InvokeResponse):
                if frame.HasField("heartbeat"):
                    await self.send(heartbeat=wire.Heartbeat(sequence=frame.heartbeat.sequence))

    async def send(self, **fields: Any) -> None:
        await self.stream.write(wire.InvokeRequest(**fields))

    def end(self) -> None:
        self.stream.cancel()


@contextlib.asynccontextmanager
async def attached(channel: Channel, source: str, token: str, **fields: Any) -> AsyncIterator[tuple[Stream, str]]:
    """Opens a stream on a connection of its own."""
    async with channel() as connection:
        stream = Stream(connection)
        try:
            yield stream, await stream.attach(source, token, **fields)
        finally:
            stream.end()


async def declares(channel: Channel, source: str, token: str) -> None:
    """Registers tools that are dear to compile, and very many of them."""
    async with attached(channel, source, token) as (stream, session):
        for number in itertools.count():
            for tools in (
                [tool(f"wide{number}_{each}", wide(40 * number + each, 3000)) for each in range(40)],
                [tool(f"pattern{number}", patterned(number, 100)), tool(f"more{number}", patterned(number, 400))],
                [tool(f"small{number}_{each}", wide(number, 3)) for each in range(1000)],
            ):
                await stream.stub.Register(wire.RegisterRequest(session_id=session, tools=tools), timeout=60)
                await asyncio.sleep(PAUSE)


async def comes_and_goes(channel: Channel, source: str, token: str) -> None:
    """Attaches with a tool and leaves, again and again."""
    for number in itertools.count():
        async with attached(channel, source, token, tools=[tool(f"t{number % 7}", wide(number, 3))]):
            await asyncio.sleep(PAUSE)


async def stays(channel: Channel, source: str, token: str) -> None:
    """Attaches more and more sessions."""
    async with channel() as connection:
        streams = []
        while True:
            streams.append(Stream(connection))
            await streams[-1].attach(source, token)
            await asyncio.sleep(PAUSE)


async def resets(channel: Channel, source: str, token: str) -> None:
    """Opens streams and resets them."""
    async with channel() as connection:
        while True:
            for stream in [Stream(connection) for _ in range(20)]:
                stream.end()
            await asyncio.sleep(PAUSE)


async def calls(channel: Channel, source: str, token: str) -> None:
    """Notifies with large texts, makes tasks, and calls what does not exist, 64 at a time."""
    large = json.dumps({"text": "x" * 16_000, "data": "y" * 200_000})
    async with attached(channel, source, token) as (stream, _):
        for number in itertools.count():
            kinds = (
                pb.ToolCall(name="toolbus:notify", arguments_json=large),
                pb.ToolCall(name="steep", arguments_json="{}", background_after_seconds=0.01),
                pb.ToolCall(name=f"missing{number}", arguments_json="{}"),
            )
            batch = [kinds[each % 3] for each in range(48)]
            for each, call in enumerate(batch):
                batch[each] = pb.ToolCall()
                batch[each].CopyFrom(call)
                batch[each].call_id = f"{number}-{each}"
            await stream.send(calls=batch)
            await asyncio.sleep(0.02)


async def changes_its_mind(channel: Channel, source: str, token: str) -> None:
    """Registers tools and withdraws them, again and again."""
    async with attached(channel, source, token) as (stream, session):
        for number in itertools.count():
            tools = [tool(f"mind{each}", wide(number % 3, 3)) for each in range(100)]
            await stream.stub.Register(wire.RegisterRequest(session_id=session, tools=tools), timeout=60)
            names = [each.name for each in tools]
            for name in names[:: 1 + 9 * (number % 2)]:
                await stream.stub.Unregister(wire.UnregisterRequest(session_id=session, name=name), timeout=60)
            await asyncio.sleep(PAUSE)


async def answers_nobody(channel: Channel, source: str, token: str) -> None:
    """Sends results, progress and cancels of calls that do not exist, and calls whose arguments are deep."""
    deep, long = "[" * 30_000 + "]" * 30_000, "x" * 100_000
    async with attached(channel, source, token) as (stream, _):
        for number in itertools.count():
            ids = [f"n{number}-{each}" for each in range(1_000)]
            await stream.send(results=[pb.ToolResult(call_id=each, output_json='"x"') for each in ids])
            await stream.send(progress=[pb.ToolProgress(call_id=each, message=long) for each in ids[:20]])
            await stream.send(cancels=[pb.ToolCancel(call_id=each) for each in ids])
            deeper = [pb.ToolCall(call_id=each, name="pour", arguments_json=deep) for each in ids[:20]]
            await stream.send(calls=deeper, cancels=[pb.ToolCancel(call_id=each) for each in ids[:20]])
            await asyncio.sleep(0.02)


ACTS = (declares, comes_and_goes, stays, resets, calls, changes_its_mind, answers_nobody)


async def again(act: Callable[[], Awaitable[None]], until: float) -> None:
    """Does an act until a moment, however often the bus ends it."""
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(Exception):  # whatever the bus does to it
            await asyncio.wait_for(act(), left)
        await asyncio.sleep(0.01)


async def attack(channel: Channel, source: str, token: str, seconds: float) -> None:
    """Does all acts at once."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(again(lambda act=act: act(channel, source, token), until) for act in ACTS))  # type: ignore[misc]
