"""Hosts and plugins with credentials on a real bus: identities, renewed files, revoked keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus import Bus, Config, Host, Plugin, Unauthenticated
from toolbus.parts.identity.scope_texts import template
from toolbus.sdk.connection_settings import ConnectionTimings

QUICK = ConnectionTimings(first_pause=0.01, max_pause=0.05, max_refused_pause=0.05)


@pytest.fixture
def keys(tmp_path: Path) -> KeysDirectory:
    """Keys by the machine's clock: TLS checks the dates."""
    return KeysDirectory(tmp_path, time.time())


@contextlib.asynccontextmanager
async def served(keys: KeysDirectory) -> AsyncIterator[str]:
    """A bus with these keys; yields its mtls: address."""
    config = Config(grpc=("127.0.0.1:0", "mtls:127.0.0.1:0"), http="off", keys=keys.path)
    async with Bus(config) as bus:
        (address,) = (address for address in bus.grpc_addresses if address.startswith("mtls:"))
        yield address


def add(a: int, b: int) -> int:
    return a + b


async def test_a_host_calls_a_plugin_over_mtls_and_knows_its_identity(keys: KeysDirectory) -> None:
    keys.add("chat", template("host"))
    keys.add("calc", template("plugin", "calc"))
    async with served(keys) as address:
        plugin = Plugin("calc", address=address, credential=keys.folder / "calc.toolbus")
        plugin.add_tool(add)
        async with plugin, Host(address, credential=keys.folder / "chat.toolbus") as host:
            await within(plugin.ready())
            assert (await within(host.call("add", {"a": 1, "b": 2}))).unwrap() == 3
            assert host.identity == "chat"
            assert host.expires is not None
            assert 89 * 86_400 < host.expires.timestamp() - time.time() < 91 * 86_400


async def test_calls_go_on_when_the_key_is_replaced_by_that_of_a_renewed_file(keys: KeysDirectory) -> None:
    old = keys.add("chat", template("host"))
    keys.add("calc", template("plugin", "calc"))
    async with served(keys) as address:
        plugin = Plugin("calc", address=address, credential=keys.folder / "calc.toolbus")
        plugin.add_tool(add)
        async with plugin, Host(address, credential=keys.folder / "chat.toolbus") as host:
            await within(plugin.ready())
            await within(host.ready())
            first = host.expires
            keys.renew("chat", days=30)
            keys.store.revoke(old["id"])
            await until(lambda: host.expires != first)  # attached again, by itself
            assert (await within(host.call("add", {"a": 1, "b": 2}))).unwrap() == 3


async def test_a_plugin_whose_key_is_revoked_ends_with_the_words_of_the_bus(keys: KeysDirectory) -> None:
    keys.add("calc", template("plugin", "calc"))
    file = keys.folder / "calc.toolbus"
    async with served(keys) as address, Plugin("calc", address=address, credential=file, _timings=QUICK) as plugin:
        await within(plugin.ready())
        keys.store.revoke("calc")
        with pytest.raises(Unauthenticated, match="was revoked on") as raised:
            await asyncio.wait_for(plugin.ended(), WAIT_SECONDS)
    assert str(file) in str(raised.value)
