"""Plays bus.jsonl against any bus: a raw client on the generated stubs, without an SDK.

`toolbus dev conformance --bus ADDRESS` plays all scenarios, `run_scenario` one of them, for tests. Every scenario uses
names of its own, so one bus serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import json_format

from toolbus.parts.conformance.match import Bindings, Expectation, Item, Mismatch, check, fill, items_of, mapped
from toolbus.parts.conformance.script import bus_scenarios
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

STEP_SECONDS = 5.0
SETTLING_SECONDS = 15.0  # longer than the grace period of a bus that has just started
REQUESTS = {
    "Register": wire.RegisterRequest,
    "Unregister": wire.UnregisterRequest,
    "Clear": wire.ClearRequest,
    "List": wire.ListRequest,
}


class RawStream:
    """One Invoke stream of the raw client. It echoes heartbeats by itself, like every client."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._arrived: asyncio.Queue[Item] = asyncio.Queue()  # items, and at last ("end", (status, text))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                for field, item in items_of(frame):
                    if field == "heartbeat":
                        await self.send({"heartbeat": item})
                    else:
                        self._arrived.put_nowait((field, item))
            ending = (await self._call.code()).name, await self._call.details()
        except grpc.aio.AioRpcError as error:
            ending = error.code().name, error.details()
        self._arrived.put_nowait(("end", ending))

    async def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame. If the stream has ended, nothing happens here: `next` returns the end."""
        message = json_format.ParseDict(frame, wire.InvokeRequest())
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def headers(self) -> None:
        try:
            await asyncio.wait_for(self._call.initial_metadata(), STEP_SECONDS)
        except TimeoutError:
            raise Mismatch(f"no response headers came for {STEP_SECONDS:g} s") from None

    async def half_close(self) -> None:
        """Ends this direction."""
        await self._call.done_writing()

    async def next(self, waiting_for: str) -> Item:
        """Returns the next item, or the end of the stream."""
        try:
            return await asyncio.wait_for(self._arrived.get(), STEP_SECONDS)
        except TimeoutError:
            raise Mismatch(f"nothing came for {STEP_SECONDS:g} s; waiting for {waiting_for}") from None

    async def close(self) -> None:
        """Cancels the stream, as the death of this process would."""
        self._call.cancel()
        await asyncio.wait({self._reading})


class RawClient:
    """The raw client of one scenario."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rpc.ToolBusServiceStub(channel)
        self._streams: dict[str, RawStream] = {}  # by the name that the scenario gives them
        self._bindings: Bindings = {}

    async def play(self, steps: list[dict[str, Any]]) -> None:
        """Plays the steps.

        Raises:
            Mismatch: the bus does something else; the text names the first such step.
        """
        kinds: dict[str, Callable[[str, Any], Awaitable[None]]] = {
            "send": lambda on, frame: self._stream(on).send(frame),
            "expect": self._expect,
            "expect_end": self._expect_end,
            "half_close": lambda on, _: self._stream(on).half_close(),
            "headers": lambda on, _: self._stream(on).headers(),
            "break": lambda on, _: self._streams[on].close(),
            "rpc": self._rpc,
        }
        for number, step in enumerate(steps, 1):
            kind = next(name for name in step if name in kinds)
            try:
                filled = fill(step, self._bindings) if kind in ("send", "rpc") else step
                await kinds[kind](step.get("on", "main"), filled if kind == "rpc" else filled[kind])
            except Mismatch as problem:
                raise Mismatch(f"step {number} ({kind}): {problem}") from None

    async def close(self) -> None:
        """Ends all open streams."""
        for stream in self._streams.values():
            await stream.close()

    def _stream(self, on: str) -> RawStream:
        """Returns the stream of a name, opened at its first use."""
        if on not in self._streams:
            self._streams[on] = RawStream(self._stub.Invoke())  # type: ignore[call-arg]  # stubs know only an iterator
        return self._streams[on]

    async def _expect(self, on: str, frame: dict[str, Any]) -> None:
        expectation = Expectation(frame)
        while expectation.missing:
            expectation.take(*await self._streams[on].next(repr(expectation)), self._bindings)

    async def _expect_end(self, on: str, expected: dict[str, Any]) -> None:
        field, ending = await self._streams[on].next(f"the end of the stream: {expected}")
        if field != "end":
            raise Mismatch(f"came: {field} {ending}; expected: the end of the stream")
        check(expected, {"status": ending[0], "message": ending[1]}, self._bindings, "end")

    async def _rpc(self, _: str, step: dict[str, Any]) -> None:
        name = step["rpc"]
        request = json_format.ParseDict(step.get("request", {}), REQUESTS[name]())
        try:
            response = await getattr(self._stub, name)(request, timeout=STEP_SECONDS)
        except grpc.aio.AioRpcError as error:
            actual: dict[str, Any] = {"status": error.code().name, "message": error.details()}
        else:
            actual = {"status": "OK", "response": mapped(response)}
        expected = {key: step[key] for key in ("status", "message", "response") if key in step}
        check({"status": "OK", **expected}, actual, self._bindings, name)


async def run_scenario(address: str, scenario: dict[str, Any]) -> None:
    """Plays one scenario against the bus at an address.

    Raises:
        Mismatch: the bus does something else.
    """
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        client = RawClient(channel)
        try:
            await client.play(scenario["steps"])
        except Mismatch as problem:
            raise Mismatch(f"{scenario['scenario']}, {problem}") from None
        finally:
            await client.close()


async def settled(address: str) -> None:
    """Waits until a bus that has just started answers NOT_FOUND for an unknown name."""
    attach = {"attach": {"protocol_version": 1, "source": "vectors.settling"}}
    call = {"call_id": "1", "name": "vectors.settling", "arguments_json": "{}"}
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(SETTLING_SECONDS):
        while True:
            stream = RawStream(rpc.ToolBusServiceStub(channel).Invoke())  # type: ignore[call-arg]  # as above
            await stream.send({**attach, "calls": [call]})
            field, item = await stream.next("a result")
            while field not in ("results", "end"):
                field, item = await stream.next("a result")
            await stream.close()
            if field == "end":
                raise Mismatch(f"the bus ended the stream: {': '.join(map(str, item))}")
            if item["error"]["code"] != "ERROR_CODE_UNAVAILABLE":
                return
            await asyncio.sleep(item["error"]["retry_after_seconds"] or 0.05)


async def play_all(address: str, done: Callable[[str, Mismatch | None], object]) -> int:
    """Plays every scenario; returns how many failed.

    Args:
        done: called after each, with the mismatch if it failed.

    Raises:
        Mismatch, TimeoutError: no bus answers at the address.
    """
    await settled(address)
    failed = 0
    for scenario in bus_scenarios():
        try:
            await run_scenario(address, scenario)
        except Mismatch as problem:
            failed += 1
            done(scenario["scenario"], problem)
        else:
            done(scenario["scenario"], None)
    return failed
