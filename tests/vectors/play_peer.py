"""Plays peer.jsonl against any client library: takes the bus's part, on a real gRPC server.

    python -m tests.vectors.play_peer -- python clients/python/conformance.py

The command after `--` is the client under test: it reads TOOLBUS_ADDRESS, offers the fixed tool set of README.md and
leaves on SIGTERM. One line a scenario; the exit code is 1 where one failed. `Player` is the same for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from tests.vectors.items import Expectation, items_of
from tests.vectors.match import Bindings, Mismatch, fill
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

SCENARIOS = Path(__file__).with_name("peer.jsonl")
PATIENCE_SECONDS = 5.0
FRAME_ITEMS = 128
FENCE = "9000000000000000001"  # the heartbeat that ends a scenario: nothing but its echo may come
TOOLS = ("echo", "fail", "slow", "steps", "meet", "relay", "context")
ATTACH = {
    "protocol_version": 1,
    "source": "conformance",
    "instance": {"$filled": True},
    "tools": {"$has": [{"name": name, "description": {"$filled": True}} for name in TOOLS]},
}
ATTACHED = {
    "session_id": "5e55101d5e55101d5e55101d5e55101d",
    "bus_id": "vectors",
    "boot_id": "vectors",
    "heartbeat_seconds": 10,
    "registered": list(TOOLS),
    "revision": "1",
    "protocol_version": 1,
    "bus_version": "0",
}


def scenarios() -> list[dict[str, Any]]:
    """Reads peer.jsonl."""
    return [json.loads(line) for line in SCENARIOS.read_text(encoding="utf-8").splitlines()]


class Stream:
    """One stream of the client, as the player sees it; holds what every client must keep to in every scenario."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.ending: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()  # status and text
        self._arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()  # (arm or event, value)
        self.pending: set[str] = set()  # ids of calls that were sent and not yet answered
        self.over = False  # whether either side has ended its direction

    async def read(self, requests: AsyncIterator[wire.InvokeRequest]) -> None:
        """Takes frames apart into items, in the order in which a bus reads them."""
        async for request in requests:
            items = items_of(request)
            if not 1 <= len(items) <= FRAME_ITEMS:
                items = [("fault", f"a frame of {len(items)} items; a frame has 1 to {FRAME_ITEMS}")]
            for item in items:
                self._arrived.put_nowait(item)
        self._arrived.put_nowait(("half_close", None))

    async def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame and notes which calls it asks for."""
        message = json_format.ParseDict(frame, wire.InvokeResponse())
        self.pending.update(call.call_id for call in message.calls)
        await self._context.write(message)

    async def next(self, waiting_for: str) -> tuple[str, Any]:
        """Returns the next item, after checking it against the rules that hold everywhere."""
        try:
            arm, item = await asyncio.wait_for(self._arrived.get(), PATIENCE_SECONDS)
        except TimeoutError:
            raise Mismatch(f"nothing came for {PATIENCE_SECONDS:g} s; waiting for {waiting_for}") from None
        if arm == "fault":
            raise Mismatch(item)
        if arm in ("results", "progress") and item["call_id"] not in self.pending:
            raise Mismatch(f"{arm} for a call that is not owed on this stream (or was answered already): {item}")
        if arm == "results":
            self.pending.remove(item["call_id"])
        self.over = self.over or arm == "half_close"
        return arm, item

    def end(self, status: str, text: str) -> None:
        """Ends the stream from the bus's side."""
        self.over = True
        if not self.ending.done():
            self.ending.set_result((status, text))


class Service(rpc.ToolBusServiceServicer):
    """Takes streams in; the other RPCs keep the generated answer, UNIMPLEMENTED."""

    def __init__(self, streams: asyncio.Queue[Stream]) -> None:
        self._streams = streams

    async def Invoke(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Hands the stream to the scenario that plays, and ends it as that says."""
        stream = Stream(context)
        self._streams.put_nowait(stream)
        reading = asyncio.create_task(stream.read(request_iterator))
        try:
            status, text = await stream.ending
        finally:
            reading.cancel()
        if status != "OK":
            await context.abort(grpc.StatusCode[status], text)


class Player:
    """A bus by script. One process of the client plays scenario after scenario, each on a stream of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment or {}  # on top of this process's own
        self._server = grpc.aio.server()
        self._address = ""
        self._streams: asyncio.Queue[Stream] = asyncio.Queue()  # streams that the client opened
        self._client: asyncio.subprocess.Process | None = None  # None before the first and after a failed scenario
        self._stream: Stream | None = None  # the current one; None before a scenario's first step
        self._bindings: Bindings = {}

    async def __aenter__(self) -> Player:
        service = Service(self._streams)  # type: ignore[abstract]
        rpc.add_ToolBusServiceServicer_to_server(service, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_client()
        await self._server.stop(0)

    async def play(self, scenario: dict[str, Any]) -> None:
        """Plays one scenario.

        Raises:
            Mismatch: where the client does something else; its process is then ended, the next scenario gets a new one.
        """
        self._stream, self._bindings = None, {}
        if self._client is None or self._client.returncode is not None:
            environment = {**os.environ, **self._environment, "TOOLBUS_ADDRESS": self._address}
            self._client = await asyncio.create_subprocess_exec(*self._command, env=environment)
        steps: dict[str, Callable[[Any], Awaitable[None]]] = {
            "stream": self._open,
            "accept": self._accept,
            "send": self._send,
            "expect": self._expect,
            "expect_half_close": self._expect_half_close,
            "end": self._end,
            "leave": self._leave,
            "expect_exit": self._expect_exit,
        }
        try:
            for number, step in enumerate(scenario["steps"], 1):
                ((kind, value),) = step.items()
                try:
                    await steps[kind](fill(value, self._bindings))
                except Mismatch as problem:
                    raise Mismatch(f"{scenario['scenario']}, step {number} ({kind}): {problem}") from None
            await self._close(scenario["scenario"])
        except BaseException:
            await self._stop_client()
            raise

    async def _close(self, name: str) -> None:
        """Checks that nothing is left over, and ends the stream so that the client comes back for the next scenario."""
        stream = self._current
        if stream.over:
            return
        if stream.pending:
            raise Mismatch(f"{name}: the calls {sorted(stream.pending)} were never answered")
        await self._send({"heartbeat": {"sequence": FENCE}})
        await self._expect({"heartbeat": {"sequence": FENCE}})
        stream.end("UNAVAILABLE", "end of the scenario: attach again")

    @property
    def _current(self) -> Stream:
        if self._stream is None:
            raise ValueError("the vector is wrong: its first step must be 'accept' or 'stream'")
        return self._stream

    async def _open(self, attach: dict[str, Any]) -> None:
        assert self._client is not None
        opened, gone = asyncio.create_task(self._streams.get()), asyncio.create_task(self._client.wait())
        await asyncio.wait({opened, gone}, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in (opened, gone):
            task.cancel()
        if not opened.done():
            code = self._client.returncode
            ended = "" if code is None else f", it ended with exit code {code}"
            raise Mismatch(f"the client opened no stream within {PATIENCE_SECONDS:g} s{ended}")
        self._stream = opened.result()
        await self._expect({"attach": {**ATTACH, **attach}})

    async def _accept(self, attach: dict[str, Any]) -> None:
        await self._open(attach)
        await self._send({"attached": ATTACHED})

    async def _send(self, frame: dict[str, Any]) -> None:
        await self._current.send(frame)

    async def _expect(self, frame: dict[str, Any]) -> None:
        expectation = Expectation(frame)
        while expectation.wanted:
            expectation.take(*await self._current.next(repr(expectation)), self._bindings)

    async def _expect_half_close(self, _: bool) -> None:
        arm, item = await self._current.next("the end of the client's direction")
        if arm != "half_close":
            raise Mismatch(f"came: {arm} {item}; expected: the end of the client's direction")

    async def _end(self, status: str) -> None:
        self._current.end(status, f"the scenario ends the stream with {status}")

    async def _leave(self, _: bool) -> None:
        assert self._client is not None
        self._client.terminate()

    async def _expect_exit(self, how: str) -> None:
        assert self._client is not None
        try:
            code = await asyncio.wait_for(self._client.wait(), PATIENCE_SECONDS)
        except TimeoutError:
            raise Mismatch(f"the client still runs after {PATIENCE_SECONDS:g} s") from None
        if (code == 0) != (how == "done"):
            raise Mismatch(f"the client ended with exit code {code}, expected {'0' if how == 'done' else 'another'}")

    async def _stop_client(self) -> None:
        """Ends the client and forgets streams that nobody played."""
        client, self._client = self._client, None
        if client is not None and client.returncode is None:
            client.kill()
            await client.wait()
        if self._stream is not None:
            self._stream.end("UNAVAILABLE", "the scenario failed")
        while not self._streams.empty():
            self._streams.get_nowait().end("UNAVAILABLE", "nobody plays this stream")


async def play_all(command: Sequence[str], only: str) -> int:
    """Plays every scenario whose name holds a text; returns how many failed."""
    failed = 0
    async with Player(command) as player:
        for scenario in scenarios():
            if only not in scenario["scenario"]:
                continue
            try:
                await player.play(scenario)
            except Mismatch as problem:
                failed += 1
                print(f"FAIL  {problem}")
            else:
                print(f"ok    {scenario['scenario']}")
    return failed


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Play peer.jsonl against a client library.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only scenarios whose name holds TEXT")
    parser.add_argument("command", nargs="+", help="the client under test, after --")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        failed = asyncio.run(play_all(options.command, options.only))
        print(f"{failed} failed" if failed else "all passed")
        return 1 if failed else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
