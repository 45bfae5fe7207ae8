"""Measures what TLS and mTLS add to frames there and back: over one server in this process, in paired bursts.

The server listens in all three ways, with the credentials of a bus, and answers each frame of calls with one of
results; nothing else is done to a call. Bursts take turns, so that what else the machine does meets all ways alike, and
what TLS adds is the difference within a pair, in processor time of both ends, which a busy machine changes little. The
way of a call through the bus, host → bus → plugin and back, is two of these.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured_here
from lab.benchmarks.relay import END
from lab.load import peer, workload
from lab.stage import Stage
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call import Seams
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.streams.doors import Doors
from toolbus.parts.identity.key_store import CredentialRequest, KeyStore
from toolbus.parts.identity.scope_texts import template
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

TABLE = "Frames there and back, processor time of both ends"
WORKS: tuple[Work, ...] = ((1, 0), (FRAME, 0), (1, LARGE), (FRAME, LARGE))


class Echo(stubs.ToolBusServiceServicer):
    """Answers each frame of calls with a frame of results."""

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        while (frame := await context.read()) is not END:
            results = [pb.ToolResult(call_id=call.call_id, output_json=workload.OUTPUT_JSON) for call in frame.calls]
            await context.write(wire.InvokeResponse(results=results))


def frames(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Sends frames of one call and of 128 in each way, and returns what a call takes and what TLS adds to it."""
    facts = uvloop.run(_measured(Path(stage.folder()), repeats * plan.rounds))
    plain, aims = facts[: len(WORKS)], [None if size else AIMS[calls] for calls, size in WORKS]
    added = (
        Fact("frames", f"{fact.line} adds to {fact.sentence}", fact.unit, aim, _less(fact, base))
        for place in range(len(WORKS), len(facts), len(WORKS))
        for fact, base, aim in zip(facts[place : place + len(WORKS)], plain, aims, strict=True)
    )
    return (*facts, *added)


def _less(fact: Fact, base: Fact) -> tuple[float, ...]:
    return tuple(mine - other for mine, other in zip(fact.samples, base.samples, strict=True))


async def _measured(folder: Path, rounds: int) -> tuple[Fact, ...]:
    async with _streams(folder) as streams:
        lines: dict[str, Line] = {SECURE.get(way, way): partial(_bursts, each) for way, each in streams.items()}
        for measure in lines.values():
            await measure()  # a new connection's first frames wait for its windows
        return await measured_here("frames", TABLE, lines, rounds)


async def _bursts(stream: Any) -> Measured:
    return {_column(work): [await _burst(stream, work)] for work in WORKS}


def _column(work: Work) -> Column:
    calls, size = work
    arguments = f" of {size // 1000} kB" if size else ""
    return (f"a frame of one call{arguments}" if calls == 1 else f"a call{arguments} in frames of {calls}"), "µs"


async def _burst(stream: Any, work: Work) -> float:
    calls, size = work
    request = wire.InvokeRequest(calls=[peer.call(str(number), number, size=size) for number in range(calls)])
    began_at = time.process_time()
    for _ in range(FRAMES[calls]):
        await stream.write(request)
        answer = await stream.read()
        if len(answer.results) != calls:
            raise RuntimeError(f"{len(answer.results)} results for {calls} calls")
    return (time.process_time() - began_at) * 1e6 / FRAMES[calls] / calls


@asynccontextmanager
async def _streams(folder: Path) -> AsyncIterator[Mapping[str, Any]]:
    store = KeyStore(folder / "keys")
    store.init(["localhost"], "mtls:localhost:1")
    made = store.add("bench", template("host", "bench"), CredentialRequest(folder / "bench.toolbus"))
    credential = Credential.read(made.file)
    doors = Doors(Neighbours(), Doorman(Keyring(folder / "keys")), Audit(), Seams(), lambda: False)
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
