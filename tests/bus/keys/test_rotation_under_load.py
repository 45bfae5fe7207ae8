"""Tests that no call is lost while certificates are renewed and the authority rotates."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.waiting import until
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import template
from toolbus.sdk import Host, Plugin

WORKERS = 16


async def test_no_call_is_lost_while_certificates_are_renewed_and_the_authority_rotates(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    config = Config(grpc=("127.0.0.1:0", "mtls:localhost:0"), http="off", keys=keys.path)
    async with Bus(config) as bus:
        address = bus.grpc_addresses[1]
        keys.store.init(["localhost"], "mtls:localhost:1")
        keys.add("weather", template("plugin", "weather"))
        keys.add("chat")
        plugin = Plugin("weather", address=address, credential=tmp_path / "weather.toolbus")

        @plugin.tool
        def double(number: int) -> int:
            return 2 * number

        failed, calls, busy = [], [0], True

        async def call(host: Host) -> None:
            while busy:
                result = await host.call("double", {"number": calls[0]})
                calls[0] += 1
                if result.is_error:
                    failed.append(result.text)

        async def new_host(name: str) -> Host:
            host = Host(address=address, credential=tmp_path / f"{name}.toolbus")
            await host.__aenter__()
            assert (await host.call("double", {"number": 21})).output == 42
            return host

        async def after_calls(count: int) -> None:
            enough = calls[0] + count
            await until(lambda: calls[0] >= enough, "more calls")

        async def in_force(change: object) -> None:
            before = bus.core.keyring.server_certificate() if bus.core.keyring is not None else None
            await asyncio.to_thread(change)  # type: ignore[arg-type]
            await until(
                lambda: bus.core.keyring is not None and bus.core.keyring.server_certificate() is not before,
                "the new certificate",
            )

        async with plugin:
            await plugin.ready()
            hosts = [await new_host("chat")]
            workers = [asyncio.create_task(call(hosts[0])) for _ in range(WORKERS)]
            await in_force(lambda: keys.store.init([]))  # a new certificate of the server
            hosts.append(await new_host("chat"))
            await after_calls(200)
            await in_force(keys.store.rotate)
            hosts.append(await new_host("chat"))  # with the old root
            keys.renew("chat")
            hosts.append(await new_host("chat"))
            await after_calls(200)
            await in_force(lambda: keys.store.finish_rotation(force=True))
            hosts.append(await new_host("chat"))
            await after_calls(200)
            busy = False
            await asyncio.gather(*workers)
            for host in hosts:
                await host.__aexit__(None, None, None)
    assert not failed
    assert calls[0] >= 600
