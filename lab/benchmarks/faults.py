"""Measures how fast faults are noticed: a plugin's death, a caller's cancel, a bus that was killed.

Every function starts a bus and peers of its own, and returns one ``Fact``. Imports grpc, so the importer sets the
environment before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.child import Child, ChildFailed
from lab.load import peer
from lab.stage import Stage, free_ports, until
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs
from toolbus.v1 import tool_pb2 as pb

ANSWER_SECONDS = 30.0
HELD = 100
PLUGINS = 10


def death(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times SIGKILL of a plugin with 100 calls in flight, to the last of their 100 errors at the caller."""
    _, address, _ = stage.bus()
    samples = []
    for _ in range(repeats):
        plugin = stage.module("load.plugin", address, "--hold", str(HELD))
        plugin.line()
        samples.append(uvloop.run(_death(address, plugin)))
    sentence = f"SIGKILL of a plugin with {HELD} calls in flight, to the last error at the caller"
    return Fact("death", sentence, "ms", 10.0, tuple(samples))


async def _death(address: str, plugin: Child) -> float:
    host = peer.Peer(address)
    await host.attach("bench-host", [])
    host.calls += [peer.call(str(number), number) for number in range(HELD)]
    host.flush()
    await asyncio.to_thread(plugin.line)  # it holds them all
    began_at = time.monotonic_ns()
    os.kill(plugin.pid, signal.SIGKILL)
    errors: list[pb.ToolResult] = []
    async with asyncio.timeout(ANSWER_SECONDS):
        while len(errors) < HELD:
            errors += await host.next_results()
    ended_at = time.monotonic_ns()
    others = [error for error in errors if error.error.code != pb.ERROR_CODE_UNAVAILABLE]
    if others:
        raise ChildFailed(f"expected UNAVAILABLE from every call, got {others[0]}")
    await host.close()
    return (ended_at - began_at) / 1e6


def cancel(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a caller's cancel, from its write to the handler of an SDK plugin."""
    _, address, _ = stage.bus()
    plugin = stage.module("load.plugin", address, "--way", "hold", "--tool", "hold")
    _wait_for(address, {"hold"})
    samples = uvloop.run(_cancel(address, plugin, 2 * repeats))
    return Fact("cancel", "cancel at the caller, to the handler of an SDK plugin", "ms", 5.0, samples)


async def _cancel(address: str, plugin: Child, repeats: int) -> tuple[float, ...]:
    host = peer.Peer(address)
    await host.attach("bench-host", [])
    samples = []
    for number in range(repeats):
        call = pb.ToolCall(call_id=str(number), name="hold", arguments_json="{}")
        host.calls.append(call)
        host.flush()
        await asyncio.to_thread(plugin.line)  # the handler runs
        began_at = time.monotonic_ns()
        host.cancels.append(pb.ToolCancel(call_id=call.call_id, reason="cancelled"))
        host.flush()
        cancelled = await asyncio.to_thread(plugin.line)
        samples.append((int(cancelled.split()[1]) - began_at) / 1e6)
    await host.close()
    return tuple(samples)


def restart(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times how long after a killed bus listens again ten SDK plugins are offered again."""
    fixed = f"127.0.0.1:{free_ports(1)[0]}"
    names = {f"hold_{number}" for number in range(PLUGINS)}
    bus, address, _ = stage.bus(grpc=fixed)
    for name in names:
        stage.module("load.plugin", address, "--way", "hold", "--source", f"bench-{name}", "--tool", name)
    _wait_for(address, names)
    samples = []
    for _ in range(max(1, repeats // 3)):
        bus.kill()
        bus, address, _ = stage.bus(grpc=fixed)
        began_at = time.monotonic_ns()
        _wait_for(address, names)
        samples.append((time.monotonic_ns() - began_at) / 1e6)
    sentence = f"bus killed and started again at once: ready line, to all {PLUGINS} SDK plugins listed"
    return Fact("restart", sentence, "ms", 1000.0, tuple(samples))


def _wait_for(address: str, names: set[str]) -> None:
    """Returns once the bus lists all these tools; it lists every 5 ms."""
    missing = names
    with grpc.insecure_channel(address) as channel:
        stub = stubs.ToolBusServiceStub(channel)

        def is_listed() -> bool:
            nonlocal missing
            missing = names - {listed.tool.name for listed in stub.List(wire.ListRequest()).tools}
            return not missing

        if not until(is_listed, ANSWER_SECONDS, 0.005):
            raise ChildFailed(f"after {ANSWER_SECONDS:g} s the bus did not list {', '.join(sorted(missing))}")
