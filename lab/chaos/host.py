"""Calls all the time, on the SDK, on a raw stream or over REST.

``python -m lab.chaos.host NAME ADDRESS HTTP FOLDER SEED GENERATION TOOL...``
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from lab.chaos.cast import part_of
from lab.chaos.load import Order, call_until_terminated
from lab.ledger import CALLS, Ledger
from lab.load.callers import Reply, invoke, reply_of, unless_left
from lab.load.peer import Peer
from toolbus.protocol.tool import Result
from toolbus.sdk import Host
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

RESPONSE_SECONDS = 4.0  # that a caller over HTTP waits beyond the call's own timeout
PAUSE = 0.1
OPENING_SECONDS = 5.0


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
        self._peer: Peer | None = None  # None while no stream is open
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


async def main(name: str, address: str, http: str, folder: str, seed: str, generation: str, *tools: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    ledger = Ledger(Path(folder) / CALLS)
    async with contextlib.AsyncExitStack() as stack:
        match part_of(name).way:
            case "sdk":  # it sends again what is safe to be sent again
                host = Host(address, source=name)
                stack.push_async_callback(host.close)

                async def call(order: Order) -> Reply:
                    result = host.call(order.tool, order.arguments, timeout=order.timeout)
                    return await unless_left(_replied(result), order.leave)

            case "raw":
                raw = RawCaller(address, name, ledger)
                stack.push_async_callback(raw.close)
                call = raw.call
            case _:
                session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{http}"))

                async def call(order: Order) -> Reply:
                    body: dict[str, Any] = {"name": order.tool, "arguments": order.arguments, "call_id": order.token}
                    body["timeout_seconds"] = order.timeout
                    return await unless_left(invoke(session, body, order.timeout + RESPONSE_SECONDS), order.leave)

        await call_until_terminated(call, ledger, name, (seed, generation), tools)


async def _replied(calling: Awaitable[Result]) -> Reply:
    return reply_of(await calling)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
