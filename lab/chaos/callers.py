"""The ways in which hosts call: by the SDK, by generated stubs alone, by REST."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import grpc
import httpx

from lab.chaos.load import Order, Told
from lab.chaos.work import Ledger
from toolbus.sdk import Host
from toolbus.tool import Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs
from toolbus.v1 import tool_pb2 as pb

PATIENCE = 4.0  # seconds that a caller over HTTP waits beyond the call's own timeout
PAUSE = 0.1
OPENING_SECONDS = 5.0


def told_by(result: Result) -> Told:
    """Returns what a result says."""
    if result.error is None:
        return Told("OK", (result.output or {}).get("ran"))
    error = result.error
    limit = error.limit[0] if error.limit else ""
    return Told(error.code.name, None, error.stage.name, error.retry_safe, limit, error.message[:200])


class SdkCaller:
    """Calls with `toolbus.sdk.Host`, which sends again what is safe to be sent again."""

    def __init__(self, address: str, source: str) -> None:
        self._host = Host(address, source=source)

    async def call(self, order: Order) -> Told:
        """Makes a call; one that is left is cancelled."""
        calling = self._host.call(order.tool, order.arguments, timeout=order.timeout)
        if not order.leave:
            return told_by(await calling)
        try:
            return told_by(await asyncio.wait_for(calling, order.leave))
        except TimeoutError:
            return Told("LEFT")

    async def close(self) -> None:
        """Says goodbye."""
        await self._host.close()


class RestCaller:
    """Calls over HTTP."""

    def __init__(self, http: str) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://{http}", trust_env=False)

    async def call(self, order: Order) -> Told:
        """Makes a call; one that is left has its connection closed."""
        body = {
            "name": order.tool,
            "arguments": order.arguments,
            "call_id": order.token,
            "timeout_seconds": order.timeout,
        }
        asking = self._client.post("/api/tools/invoke", json=body, timeout=order.timeout + PATIENCE)
        try:
            answer = (await asyncio.wait_for(asking, order.leave or None)).json()
        except TimeoutError:
            return Told("LEFT")
        except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
            return Told("AWAY", stage="NOT_DISPATCHED", message=str(problem))
        except (httpx.TransportError, ValueError) as problem:
            return Told("LOST", stage="UNKNOWN", message=f"{type(problem).__name__}: {problem}")
        error = answer["error"]
        if error is None:
            return Told("OK", (answer["output"] or {}).get("ran"))
        limit = (error["limit"] or {}).get("name", "")
        return Told(error["code"], None, error["stage"], error["retry_safe"], limit, error["message"][:200])

    async def close(self) -> None:
        """Closes what is kept open."""
        await self._client.aclose()


class RawCaller:
    """Calls with the generated stubs alone: sends nothing again, and sees every result that the bus sends.

    What should never come, a second result or one that nobody asked for, goes into the ledger.
    """

    def __init__(self, address: str, source: str, ledger: Ledger) -> None:
        self._address = address
        self._source = source
        self._ledger = ledger
        self._ids = map(str, itertools.count(1))
        self._waiting: dict[str, asyncio.Future[Told]] = {}  # the calls of this stream
        self._ended: set[str] = set()  # those that had their result
        self._outbox: asyncio.Queue[wire.InvokeRequest] | None = None  # None while there is no stream
        self._open = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None  # None until the bus has drained
        self._task = asyncio.create_task(self._live())

    async def call(self, order: Order) -> Told:
        """Makes a call; one that is left is cancelled, and still gets its result."""
        try:
            async with asyncio.timeout(order.timeout):
                while not self._open.is_set():  # it may be clear again when the waiter has its turn
                    await self._open.wait()
        except TimeoutError:
            return Told("AWAY", stage="NOT_DISPATCHED")
        outbox, call_id = self._outbox, next(self._ids)
        assert outbox is not None  # there is a stream
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        arguments = json.dumps(order.arguments)
        call = pb.ToolCall(call_id=call_id, name=order.tool, arguments_json=arguments, timeout_seconds=order.timeout)
        outbox.put_nowait(wire.InvokeRequest(calls=[call]))
        if order.leave:
            await asyncio.wait([answer], timeout=order.leave)
            outbox.put_nowait(wire.InvokeRequest(cancels=[pb.ToolCancel(call_id=call_id, reason="left")]))
        return await answer

    async def close(self) -> None:
        """Ends the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                await self._stream()
            await asyncio.sleep(PAUSE)

    async def _stream(self) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source=self._source)))
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            stream: Any = stubs.ToolBusServiceStub(channel).Invoke(_endless(self._outbox))
            try:
                async with asyncio.timeout(OPENING_SECONDS) as opening:
                    async for frame in stream:
                        opening.reschedule(None)
                        self._take(frame)
            finally:
                self._open.clear()
                stream.cancel()
                lost, self._waiting, self._ended = self._waiting, {}, set()
                for answer in lost.values():
                    answer.set_result(Told("LOST", stage="UNKNOWN"))

    def _take(self, frame: wire.InvokeResponse) -> None:
        assert self._outbox is not None  # a frame came over it
        if frame.HasField("attached"):
            self._open.set()
        for result in frame.results:
            answer = self._waiting.pop(result.call_id, None)
            if answer is None:
                self._ledger.write(stray=result.call_id, again=result.call_id in self._ended, host=self._source)
                continue
            self._ended.add(result.call_id)
            answer.set_result(told_by(Result.from_wire(result)))
        if frame.HasField("heartbeat"):
            self._outbox.put_nowait(wire.InvokeRequest(heartbeat=frame.heartbeat))
        if frame.HasField("drain"):
            self._open.clear()  # what is in flight ends on this stream, what comes waits for the next one
            self._leaving = asyncio.create_task(self._half_close(self._outbox))

    async def _half_close(self, outbox: asyncio.Queue[Any]) -> None:
        while self._outbox is outbox and self._waiting:
            await asyncio.sleep(0.02)
        outbox.put_nowait(None)


async def _endless(outbox: asyncio.Queue[Any]) -> Any:
    """Yields what is put into an outbox, until None."""
    while (item := await outbox.get()) is not None:
        yield item
