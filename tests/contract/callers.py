"""The ways in which a tool can be called, behind one face: from the bus's process, with the SDK, by hand, over HTTP.

A further one (the command line) joins with one class and one line in `CALLERS`.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.common.text import escape_surrogates
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError, Progress, Result, dump_arguments
from toolbus.sdk import CallContext, Host
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

SeeProgress = Callable[[Progress], object]


class Caller(ABC):
    """Someone who calls tools; cancelling the task that awaits `call` takes the call back.

    Attributes:
        many: how many calls at once are many for it.
    """

    many = 200

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
    """`toolbus.sdk.Host` over gRPC."""

    lane = "off"

    async def __aenter__(self) -> Self:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOOLBUS_LANE", self.lane)
            host = Host(self.bus.grpc_addresses[0])
        self._host = await host.__aenter__()
        return self

    async def __aexit__(self, *how: Any) -> None:
        await self._host.__aexit__(*how)

    async def call(self, name: str, arguments: Any = None, **options: Any) -> Result:
        return await self._host.call(name, arguments, **options)


class LaneCaller(HostCaller):
    """The same over the lane."""

    lane = "on"


class StreamCaller(Caller):
    """The generated stubs alone: one stream a call, opened with the call itself and closed with its result."""

    many = 30  # each is a stream of its own: only those of a session can mix

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
            arguments_json=escape_surrogates(dump_arguments(arguments)),
            timeout_seconds=timeout or 0.0,
            role=role,
            context=context.to_wire() if context is not None else None,
            schema_hash=schema_hash,
        )
        stream: Any = rpc.ToolBusServiceStub(self._channel).Invoke()  # type: ignore[call-arg]  # the iterator style only
        attach = wire.Attach(protocol_version=1, source="one-shot")
        await stream.write(wire.InvokeRequest(attach=attach, calls=[call]))
        writing = asyncio.Lock()  # two writes at the same time break a stream of grpcio
        reading = asyncio.create_task(_read(stream, writing, on_progress))
        try:
            return await asyncio.shield(reading)  # a read that is cancelled ends the stream
        except asyncio.CancelledError:
            async with writing:
                await stream.write(wire.InvokeRequest(cancels=[pb.ToolCancel(call_id="only", reason="cancelled")]))
            assert (await reading).error is not None
            raise


async def _read(stream: Any, writing: asyncio.Lock, on_progress: SeeProgress | None) -> Result:
    """Reads up to the one result, ends this side, and sees the bus end the other. Echoes heartbeats meanwhile."""
    results: list[pb.ToolResult] = []
    while frame := await stream.read():
        for progress in frame.progress:
            assert not results, "progress came after the result"
            if on_progress is not None:
                on_progress(Progress.from_wire(progress))
        async with writing:
            if frame.HasField("heartbeat") and not results:
                await stream.write(wire.InvokeRequest(heartbeat=frame.heartbeat))
            if frame.results:
                results += frame.results
                await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK, await stream.details()
    (result,) = results
    return Result.from_wire(result)


class HttpCaller(Caller):
    """A host without gRPC: POST /api/tools/invoke, streamed where progress is wanted. Hanging up takes a call back."""

    many = 30  # httpx looks through all its connections for each request

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None)
        base = f"http://{self.bus.http_address}"
        self._http = httpx.AsyncClient(
            base_url=base, trust_env=False, verify=False, limits=limits, timeout=2 * WAIT_SECONDS
        )
        return self

    async def __aexit__(self, *how: Any) -> None:
        await self._http.aclose()

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
        body = {
            "name": name,
            "arguments": arguments,
            "timeout_seconds": timeout,
            "role": role,
            "context": _context(context) if context is not None else None,
            "schema_hash": schema_hash,
        }
        request: Any = {"content": json.dumps(body)}  # httpx would refuse half of a surrogate pair, JSON can escape it
        if on_progress is None:
            return _result(await self._http.post("/api/tools/invoke", **request))
        request["headers"] = {"Accept": "text/event-stream"}
        async with self._http.stream("POST", "/api/tools/invoke", **request) as answer:
            return await _read_events(answer, on_progress)


def _context(context: CallContext) -> dict[str, Any]:
    return {
        "user_id": context.user_id,
        "attributes": dict(context.attributes),
        "member": context.member,
        "messages": [{"role": each.role, "content": each.content, "name": each.name} for each in context.messages],
        "traceparent": context.traceparent,
    }


def _result(answer: httpx.Response) -> Result:
    """Reads an answer; a role that is not configured is refused in HTTP's own way (REST-2)."""
    if answer.status_code == 404:
        error = CallError(Code.NOT_FOUND, answer.json()["detail"], Stage.NOT_DISPATCHED)
        return Result(is_error=True, error=error)
    assert answer.status_code == 200, answer.text
    return _invoked(answer.json())


def _invoked(body: dict[str, Any]) -> Result:
    error = body["error"]
    if error is not None:
        limit = error["limit"]
        named = {"code": Code[error["code"]], "stage": Stage[error["stage"]]}
        error = CallError(**{**error, **named, "limit": (limit["name"], limit["value"]) if limit else None})
    return Result(
        body["call_id"],
        json.dumps(body["output"], ensure_ascii=False),
        body["is_error"],
        error,
        tuple(ParseDict(block, pb.ContentBlock()) for block in body["content"]),
    )


async def _read_events(answer: httpx.Response, on_progress: SeeProgress) -> Result:
    """Reads up to the result. A piece of the output comes as an event of its own, before what came with it."""
    name, chunk = "", ""
    result: Result | None = None
    async for line in answer.aiter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            assert result is None, f"{name} came after the result"
            body = json.loads(value)
            if name == "result":
                result = _invoked(body)
            elif name == "chunk":
                chunk = body["text"]
            else:
                on_progress(Progress(**body, chunk=chunk))
                chunk = ""
    assert result is not None, "the stream ended without a result"
    return result


CALLERS: dict[str, type[Caller]] = {
    "program": ProgramCaller,
    "host": HostCaller,
    "lane": LaneCaller,
    "stream": StreamCaller,
    "http": HttpCaller,
}


@pytest_asyncio.fixture(params=list(CALLERS), loop_scope="module")
async def caller(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    """Calls tools, in each way in turn."""
    async with CALLERS[request.param](bus) as caller:
        yield caller
