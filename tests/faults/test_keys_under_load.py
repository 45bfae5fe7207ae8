"""Keys change while calls run over mTLS: nothing is lost but what was revoked, and wrong keys keep nobody waiting.

``make rotation`` does twenty rotations and 5,000 wrong keys; ``TOOLBUS_ROTATIONS`` and ``TOOLBUS_WRONG_KEYS`` say how
many.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.faults.keyed_bus import PLUGIN, copied, keyed_bus, load
from tests.faults.processes import run
from tests.support.waiting import Stopwatch, within
from toolbus import CallFailed, Host, Unauthenticated
from toolbus.sdk.credential import Credential, tls_credentials
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

ROTATIONS = int(os.environ.get("TOOLBUS_ROTATIONS", "1"))
WRONG_KEYS = int(os.environ.get("TOOLBUS_WRONG_KEYS", "500"))
AT_ONCE = 100  # wrong keys on each connection at a time
CHANNELS = 5
FLOOD_BYTES = 32 << 20  # that the bus may hold more after a flood, whatever its length
HOSTS = ("chat", "bot", "nurse")


async def test_no_call_is_lost_while_certificates_are_renewed_and_the_authority_rotates(tmp_path: Path) -> None:
    async with keyed_bus(tmp_path, *HOSTS) as bus:
        plugin = await bus.plugin()
        began_at = time.monotonic()
        async with load(bus, *HOSTS) as running:
            for _ in range(ROTATIONS):
                await bus.keys("init")
                await bus.shows_its_newest_certificate()
                await bus.visit("chat")
                await running.goes_on()

                await bus.keys("rotate-ca")
                await bus.shows_its_newest_certificate()
                before = copied(bus.file("chat"))
                await bus.visit("chat", before)
                for name in (PLUGIN, *HOSTS):
                    await bus.keys("renew", name)
                await bus.visit("chat", before)
                renewed = await bus.plugin()
                await plugin.close()
                plugin = renewed
                for caller in running.callers.values():
                    await caller.connect()
                await running.goes_on()

                await bus.keys("rotate-ca", "--finish")
                await bus.shows_its_newest_certificate()
                await bus.visit("chat")
                await bus.refuses_the_connection(before)
                await running.goes_on()
            await running.end()
            sent, seconds = running.sent, time.monotonic() - began_at
        await plugin.close()
    print(f"{ROTATIONS} rotations, {sent} calls, {sent / seconds:.0f} a second, none lost")


async def test_a_host_whose_key_is_revoked_is_told_so_within_a_second_and_no_other_call_fails(
    tmp_path: Path, complaints: list[str]
) -> None:
    async with keyed_bus(tmp_path, *HOSTS, "spy") as bus:
        plugin = await bus.plugin()
        spy = Host(f"mtls:{bus.mtls}", source="host:spy", credential=bus.file("spy"))
        credential = Credential.read(bus.file("spy"))
        async with (
            load(bus, *HOSTS) as running,
            spy,
            grpc.aio.secure_channel(bus.mtls, tls_credentials(credential)) as channel,
        ):
            await within(spy.ready())
            stream = await _attached(channel, "spy")
            await running.goes_on()
            out = await bus.keys("revoke", "spy")
            stopwatch, revoked_at = Stopwatch(), time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await within(_to_the_end(stream))
            counted, seconds = stopwatch.seconds(), time.monotonic() - revoked_at
            key = re.findall(r"revoked (\S+-cert) of identity spy", out)[0]
            sentence = f"key {key} of identity 'spy' was revoked on {time.strftime('%Y-%m-%d')}"
            assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert sentence in (ended.value.details() or "")
            assert counted <= 1.0
            assert sentence in await _refused(channel)
            with pytest.raises(CallFailed, match=re.escape(sentence)):
                await within(_until_refused(spy))
            with pytest.raises(Unauthenticated, match=re.escape(sentence)):
                async with Host(f"mtls:{bus.mtls}", source="host:spy", credential=bus.file("spy")) as again:
                    await within(again.ready())
            await running.goes_on()
            await running.end()
        await plugin.close()
    assert {text.partition(" of identity")[0] for text in complaints} == {
        f"toolbus.sdk.connection: the bus at mtls:{bus.mtls} refuses host:spy: key {key}"
    }
    complaints.clear()
    print(f"the stream of a revoked key ended after {seconds:.2f} s")


async def test_a_flood_of_wrong_keys_keeps_nobody_waiting_and_is_logged_once(tmp_path: Path) -> None:
    async with keyed_bus(tmp_path, *HOSTS) as bus:
        plugin = await bus.plugin()
        credential = Credential.read(bus.file("chat"))
        async with load(bus, *HOSTS) as running, run("health_probe.py", bus.plain) as probe:
            await probe.says("asking")
            await _flood(bus.tls, credential, CHANNELS * AT_ONCE)  # what the first connections leave in memory
            await running.goes_on()
            before, began_at = bus.resident_bytes, time.monotonic()
            await _flood(bus.tls, credential, WRONG_KEYS)
            seconds = time.monotonic() - began_at
            await running.goes_on()
            await running.end()
            more = bus.resident_bytes - before
            probe.send(signal.SIGTERM)
            _, asked, longest = (await probe.says("asked")).split()  # it ends without that where one was not answered
            lines = [line for line in bus.running.err.splitlines() if "refused peer=" in line]
        await plugin.close()
    assert more < FLOOD_BYTES
    assert len(lines) <= 1 + seconds / 60
    assert "is not a key of this bus" in lines[0]
    figures = f"health after {longest} ms at worst of {asked}, {more / 1e6:.1f} MB more"
    print(f"{WRONG_KEYS} wrong keys in {seconds:.1f} s, {figures}")


async def _flood(address: str, credential: Credential, count: int) -> None:
    """Attaches so many times with keys that are none, on several connections; each attach is refused."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    trust = grpc.ssl_channel_credentials(credential.ca.encode())

    async def attempt(channel: grpc.aio.Channel, number: int) -> None:
        metadata = (("authorization", f"Bearer tbk_{number:08x}_wrong"),)
        assert "is not a key of this bus" in await _refused(channel, metadata)

    async def flow(first: int) -> None:
        async with grpc.aio.secure_channel(address, trust, options=options) as channel:
            for begin in range(first, count, CHANNELS * AT_ONCE):
                numbers = range(begin, min(begin + AT_ONCE, count))
                await asyncio.gather(*(attempt(channel, number) for number in numbers))

    await asyncio.gather(*(flow(number * AT_ONCE) for number in range(CHANNELS)))


async def _attached(channel: grpc.aio.Channel, source: str) -> Any:
    stub: Any = rpc.ToolBusServiceStub(channel)  # the published types know no Invoke without an iterator
    stream = stub.Invoke()
    await stream.write(wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source=f"host:{source}")))
    assert (await stream.read()).HasField("attached")
    return stream


async def _refused(channel: grpc.aio.Channel, metadata: Any = ()) -> str:
    """Opens a stream in vain, and returns why.

    Nothing is written: the bus refuses before it reads, and a write to a stream that has ended would hide its status
    (`toolbus.sdk.attempt`).
    """
    stub: Any = rpc.ToolBusServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Invoke(metadata=metadata).read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return refused.value.details() or ""


async def _to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def _until_refused(host: Host) -> None:
    while True:
        (await host.call("count", {"caller": "spy", "number": 0})).unwrap()
        await asyncio.sleep(0.01)
