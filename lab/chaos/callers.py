"""Calls in the ways of chaos's hosts: on the SDK, on a raw stream, over REST."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import grpc
import httpx

from lab.chaos.load import Order, Reply
from lab.ledger import Ledger
from lab.load.peer import Peer
from toolbus.sdk import Host
from toolbus.tool import Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

RESPONSE_SECONDS = 4.0  # seconds that a caller over HTTP waits beyond the call's own timeout
PAUSE = 0.1
OPENING_SECONDS = 5.0


def reply_of(result: Result) -> Reply:
    """Returns a result as the ledger has it."""
    if result.error is None:
        return Reply("OK", (result.output or {}).get("ran"))
    error = result.error
    limit = error.limit[0] if error.limit else ""
    return Reply(error.code.name, None, error.stage.name, error.retry_safe, limit, error.message[:200])


class SdkCaller:
    """Calls with `toolbus.sdk.Host`, which sends again what is safe to be sent again."""

    def __init__(self, address: str, source: str) -> None:
        self._host = Host(address, source=source)

    async def call(self, order: Order) -> Reply:
        """Makes a call; one that is left is cancelled."""
        calling = self._host.call(order.tool, order.arguments, timeout=order.timeout)
        if not order.leave:
            return reply_of(await calling)
        try:
            return reply_of(await asyncio.wait_for(calling, order.leave))
        except TimeoutError:
            return Reply("LEFT")

    async def close(self) -> None:
        """Disconnects."""
        await self._host.close()


class RestCaller:
    """Calls over HTTP."""

    def __init__(self, http: str) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://{http}", trust_env=False)

    async def call(self, order: Order) -> Reply:
        """Makes a call; one that is left has its connection closed."""
        body = {
            "name": order.tool,
            "arguments": order.arguments,
            "call_id": order.token,
            "timeout_seconds": order.timeout,
        }
        asking = self._client.post("/api/tools/invoke", json=body, timeout=order.timeout + RESPONSE_SECONDS)
        try:
            answer = (await asyncio.wait_for(asking, order.leave or None)).json()
        except TimeoutError:
            return Reply("LEFT")
        except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
            return Reply("AWAY", stage="NOT_DISPATCHED", message=str(failure))
        except (httpx.TransportError, ValueError) as failure:
            return Reply("LOST", stage="UNKNOWN", message=f"{type(failure).__name__}: {failure}")
        error = answer["error"]
        if error is None:
            return Reply("OK", (answer["output"] or {}).get("ran"))
        limit = (error["limit"] or {}).get("name", "")
        return Reply(error["code"], None, error["stage"], error["retry_safe"], limit, error["message"][:200])

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


class RawCaller:
    """Calls on raw streams: sends nothing again, and sees every result that the bus sends.

    A result that must never come, a second one or one of an unknown call, goes into the ledger.
    """

    def __init__(self, address: str, source: str, ledger: Ledger) -> None:
        self._address = address
        self._source = source
        self._ledger = ledger
        self._ids = map(str, itertools.count(1))
        self._pending: dict[str, asyncio.Future[Reply]] = {}  # the calls of this stream
        self._ended: set[str] = set()  # those that had their result
        self._peer: Peer | None = None  # None while there is no stream
        self._open = asyncio.Event()  # set while the stream takes calls
        self._leaving: asyncio.Task[None] | None = None  # None until the bus has drained
        self._task = asyncio.create_task(self._live())

    async def call(self, order: Order) -> Reply:
        """Makes a call; one that is left is cancelled, and still gets its result."""
        try:
            async with asyncio.timeout(order.timeout):
                while not self._open.is_set():  # it may be clear again when the waiter has its turn
                    await self._open.wait()
        except TimeoutError:
            return Reply("AWAY", stage="NOT_DISPATCHED")
        peer, call_id = self._peer, next(self._ids)
        assert peer is not None  # the stream is open
        result: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = result
        arguments = json.dumps(order.arguments)
        call = pb.ToolCall(call_id=call_id, name=order.tool, arguments_json=arguments, timeout_seconds=order.timeout)
        peer.calls.append(call)
        peer.flush()
        if order.leave:
            await asyncio.wait([result], timeout=order.leave)
            peer.cancels.append(pb.ToolCancel(call_id=call_id, reason="left"))
            peer.flush()
        return await result

    async def close(self) -> None:
        """Ends the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError, RuntimeError):
                await self._stream()
            await asyncio.sleep(PAUSE)

    async def _stream(self) -> None:
        peer = Peer(self._address, own_connection=True)
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                await peer.attach(self._source, [])
            self._peer = peer
            self._open.set()
            while (frame := await peer.read()) is not None:
                self._take(peer, frame)
        finally:
            self._open.clear()
            self._peer = None
            lost, self._pending, self._ended = self._pending, {}, set()
            for result in lost.values():
                result.set_result(Reply("LOST", stage="UNKNOWN"))
            await peer.close()

    def _take(self, peer: Peer, frame: wire.InvokeResponse) -> None:
        for result in frame.results:
            waiting = self._pending.pop(result.call_id, None)
            if waiting is None:
                self._ledger.write(stray=result.call_id, again=result.call_id in self._ended, host=self._source)
                continue
            self._ended.add(result.call_id)
            waiting.set_result(reply_of(Result.from_wire(result)))
        if frame.HasField("drain"):
            self._open.clear()  # calls in flight end on this stream, later ones wait for the next one
            self._leaving = asyncio.create_task(self._half_close(peer))

    async def _half_close(self, peer: Peer) -> None:
        while self._peer is peer and self._pending:
            await asyncio.sleep(0.02)
        await peer.half_close()
