"""The ways in which a tool can be called, behind one face: from the bus's process, with the SDK, and by hand.

A further one (the command line, the REST gateway) joins with one class and one line in `CALLERS`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import pytest

from toolbus.bus import Bus
from toolbus.sdk import CallContext, Host
from toolbus.sdk.outgoing import encodable
from toolbus.tool import Progress, Result, dump_arguments
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

SeeProgress = Callable[[Progress], object]


class Caller(ABC):
    """Someone who calls tools; cancelling the task that awaits `call` takes the call back."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    async def call(
        self,
        name: str,
        arguments: Any = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        on_progress: SeeProgress | None = None,
    ) -> Result:
        """Calls a tool; arguments are what JSON can hold, or JSON text."""


class ProgramCaller(Caller):
    """The program that embeds the bus."""

    async def call(
        self, name: str, arguments: Any = None, *, on_progress: SeeProgress | None = None, **options: Any
    ) -> Result:
        return await self.bus.call(name, arguments, on_progress=on_progress, **options)


class HostCaller(Caller):
    """`toolbus.sdk.Host` over the bus's socket."""

    async def __aenter__(self) -> Self:
        self._host = await Host(self.bus.grpc_addresses[0]).__aenter__()
        return self

    async def __aexit__(self, *how: Any) -> None:
        await self._host.__aexit__(*how)

    async def call(self, name: str, arguments: Any = None, **options: Any) -> Result:
        return await self._host.call(name, arguments, **options)


class StreamCaller(Caller):
    """The generated stubs alone: one stream a call, opened with the call itself and closed with its result."""

    async def __aenter__(self) -> Self:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = grpc.aio.insecure_channel(self.bus.grpc_addresses[0], options=options)
        return self

    async def __aexit__(self, *how: Any) -> None:
        await self._channel.close(None)

    async def call(
        self,
        name: str,
        arguments: Any = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        on_progress: SeeProgress | None = None,
    ) -> Result:
        call = pb.ToolCall(
            call_id="only",
            name=name,
            arguments_json=encodable(dump_arguments(arguments)),
            timeout_seconds=timeout or 0.0,
            role=role,
            context=context.to_wire() if context is not None else None,
            schema_hash=schema_hash,
        )
        stream: Any = rpc.ToolBusServiceStub(self._channel).Invoke()  # type: ignore[call-arg]  # the iterator style only
        attach = wire.Attach(protocol_version=1, source="one-shot")
        await stream.write(wire.InvokeRequest(attach=attach, calls=[call]))
        reading = asyncio.create_task(_read(stream, on_progress))
        try:
            return await asyncio.shield(reading)  # a read that is cancelled ends the stream
        except asyncio.CancelledError:
            await stream.write(wire.InvokeRequest(cancels=[pb.ToolCancel(call_id="only", reason="cancelled")]))
            assert (await reading).error is not None
            raise


async def _read(stream: Any, on_progress: SeeProgress | None) -> Result:
    """Reads up to the one result, ends this side, and sees the bus end the other."""
    results: list[pb.ToolResult] = []
    while frame := await stream.read():
        for progress in frame.progress:
            assert not results, "progress came after the result"
            if on_progress is not None:
                on_progress(Progress.from_wire(progress))
        if frame.results:
            results += frame.results
            await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK, await stream.details()
    (result,) = results
    return Result.from_wire(result)


CALLERS: dict[str, type[Caller]] = {"program": ProgramCaller, "host": HostCaller, "stream": StreamCaller}


@pytest.fixture(params=list(CALLERS))
async def caller(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    """Calls tools, in each way in turn."""
    async with CALLERS[request.param](bus) as caller:
        yield caller
