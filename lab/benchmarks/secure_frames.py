"""Measures what TLS and mTLS add to frames there and back: over one server in this process, in paired bursts.

The server listens in all three ways, with the credentials of a bus, and answers each frame of calls with one of
results; nothing else is done to a call. Bursts take turns, so that what else the machine does meets all ways alike, and
what TLS adds is the difference within a pair, in processor time of both ends, which a busy machine changes little. The
way of a call through the bus, host → bus → plugin and back, is two of these.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact
from lab.benchmarks.relay import END
from lab.load import peer, workload
from lab.stage import Stage
from toolbus.bus.access.identity import template
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit.audit import Audit
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.key_store import CredentialRequest, KeyStore
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.streams.doors import Doors
from toolbus.sdk.credential import Credential, tls_credentials
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs
from toolbus.v1 import tool_pb2 as pb

PLAIN = "plain"
SECURE = {"tls": "TLS", "mtls": "mTLS"}
FRAME = 128  # calls of a large frame
LARGE = 10_000  # bytes of arguments
FRAMES = {1: 200, FRAME: 10}  # of one burst, by the calls of a frame
AIMS = {1: 40.0, FRAME: 0.5}  # µs that TLS may add to a call with small arguments
MESSAGE_BYTES = 16 << 20

Work: TypeAlias = tuple[int, int]
"""Calls of a frame, and bytes of their arguments."""
Turn: TypeAlias = Mapping[str, tuple[float, float]]
"""What a call took in each way, in µs: processor time of both ends, and by the clock."""

TABLES = ("Frames there and back, processor time of both ends", "Frames there and back, by the clock")
WORKS: tuple[Work, ...] = ((1, 0), (FRAME, 0), (1, LARGE), (FRAME, LARGE))


class Echo(stubs.ToolBusServiceServicer):
    """Answers each frame of calls with a frame of results."""

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        while (frame := await context.read()) is not END:
            results = [pb.ToolResult(call_id=call.call_id, output_json=workload.OUTPUT_JSON) for call in frame.calls]
            await context.write(wire.InvokeResponse(results=results))


def frames(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Sends frames of one call and of 128 in each way, and returns what a call takes and what TLS adds to it."""
    turns = uvloop.run(_turns(Path(stage.folder()), repeats * plan.rounds))
    found: list[Fact] = []
    for index, table in enumerate(TABLES):
        for way in (PLAIN, *SECURE):
            for work, taken in turns.items():
                samples = tuple(turn[way][index] for turn in taken)
                found.append(Fact("frames", *_column(work), None, samples, table, SECURE.get(way, way)))
    for way, name in SECURE.items():
        for work, taken in turns.items():
            sentence, unit = _column(work)
            aim = None if work[1] else AIMS[work[0]]
            added = tuple(turn[way][0] - turn[PLAIN][0] for turn in taken)
            found.append(Fact("frames", f"{name} adds to {sentence}", unit, aim, added))
    return tuple(found)


def _column(work: Work) -> Column:
    calls, size = work
    arguments = f" of {size // 1000} kB" if size else ""
    return (f"a frame of one call{arguments}" if calls == 1 else f"a call{arguments} in frames of {calls}"), "µs"


async def _turns(folder: Path, count: int) -> dict[Work, Sequence[Turn]]:
    async with _streams(folder) as streams:
        for work in WORKS:
            for stream in streams.values():
                await _burst(stream, work)  # a new connection's first frames wait for its windows
        return {work: [await _turn(streams, work, number) for number in range(count)] for work in WORKS}


async def _turn(streams: Mapping[str, Any], work: Work, number: int) -> Turn:
    first = number % len(streams)
    return {way: await _burst(streams[way], work) for way in (*[*streams][first:], *[*streams][:first])}


async def _burst(stream: Any, work: Work) -> tuple[float, float]:
    calls, size = work
    request = wire.InvokeRequest(calls=[peer.call(str(number), number, size=size) for number in range(calls)])
    began_at = time.process_time(), time.perf_counter()
    for _ in range(FRAMES[calls]):
        await stream.write(request)
        answer = await stream.read()
        if len(answer.results) != calls:
            raise RuntimeError(f"{len(answer.results)} results for {calls} calls")
    taken = time.process_time() - began_at[0], time.perf_counter() - began_at[1]
    per_call = 1e6 / FRAMES[calls] / calls
    return taken[0] * per_call, taken[1] * per_call


@asynccontextmanager
async def _streams(folder: Path) -> AsyncIterator[Mapping[str, Any]]:
    store = KeyStore(folder / "keys")
    store.init(["localhost"], "mtls:localhost:1")
    made = store.add("bench", template("host", "bench"), CredentialRequest(folder / "bench.toolbus"))
    credential = Credential.read(made.file)
    doors = Doors(Neighbours(), Doorman(Keyring(folder / "keys")), Audit())
    options = (("grpc.max_receive_message_length", MESSAGE_BYTES),)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *options))
    stubs.add_ToolBusServiceServicer_to_server(Echo(), server)  # type: ignore[abstract]  # no other RPC
    ports = {PLAIN: server.add_insecure_port("127.0.0.1:0")}
    ports |= {way: server.add_secure_port("127.0.0.1:0", doors.credentials(way)) for way in SECURE}
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        streams: dict[str, Any] = {}
        for way, port in ports.items():
            address = f"127.0.0.1:{port}"
            channel = (
                grpc.aio.insecure_channel(address, options=options)
                if way == PLAIN
                else grpc.aio.secure_channel(address, tls_credentials(credential), options=options)
            )
            await stack.enter_async_context(channel)
            stub: Any = stubs.ToolBusServiceStub(channel)
            streams[way] = stub.Invoke(metadata=credential.metadata if way != PLAIN else ())
        yield streams
