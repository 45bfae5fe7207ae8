"""Connections over TLS: keys with every request, renewed files, and what each wrong client learns."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.sdk.tls_cases import (
    CLIENT,
    QUICK,
    SMALL_ATTACH,
    TOKEN,
    accept,
    credential,
    server,
    tls_bus,
    write,
)
from tests.support.waiting import until, within
from toolbus import Host, PeerLost, Plugin, SyncHost, Unauthenticated
from toolbus.sdk import Credential


def add(a: int, b: int) -> int:
    return a + b


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["tls:", "mtls:"])
async def test_every_request_carries_the_key(prefix: str) -> None:
    given = credential(CLIENT)
    tls = server(clients=prefix == "mtls:")
    async with tls_bus(tls=tls) as bus, Host(prefix + bus.address, credential=given) as host:
        await within(host.ready())
        await within(host.list())
        assert bus.keys == [("Invoke", f"Bearer {TOKEN}"), ("List", f"Bearer {TOKEN}")]
        plugin = Plugin("calc", address=prefix + bus.address, credential=given, _timings=SMALL_ATTACH)
        for number in range(2):  # more than fit into one attach
            plugin.add_tool(add, name=f"add{number}", description="d" * 600)
        async with plugin:
            await within(plugin.ready())
        assert ("Register", f"Bearer {TOKEN}") in bus.keys


async def test_on_loopback_the_key_is_sent_without_tls_too() -> None:
    async with played_bus(accept) as bus, Host(bus.address, credential=Credential(token=TOKEN)) as host:
        await within(host.ready())
        assert bus.keys == [("Invoke", f"Bearer {TOKEN}")]


async def test_a_peer_without_a_credential_sends_no_key() -> None:
    async with played_bus(accept) as bus, Host(bus.address) as host:
        await within(host.ready())
        assert bus.keys == [("Invoke", "")]


async def test_the_environment_names_credential_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tls_bus() as bus:
        file = write(tmp_path / "chat.toolbus", TOKEN)
        file.write_text(f'address = "tls:{bus.address}"\n' + file.read_text("utf-8"), "utf-8")
        monkeypatch.setenv("TOOLBUS_CREDENTIAL", str(file))
        async with Host() as host:
            await within(host.ready())
        with await asyncio.to_thread(SyncHost) as other:
            await within(asyncio.to_thread(other.ready))
            await within(asyncio.to_thread(other.close))  # blocks while the bus of this loop ends the stream
        assert bus.keys == [("Invoke", f"Bearer {TOKEN}")] * 2


async def test_a_host_knows_its_identity_and_when_its_key_expires(caplog: pytest.LogCaptureFixture) -> None:
    async def play(stream: PlayedStream) -> None:
        await stream.accept(identity="chat", expires_seconds=20 * 86_400.0)
        await stream.read()

    async with tls_bus(play) as bus, Host(f"tls:{bus.address}", credential=credential()) as host:
        assert (host.identity, host.expires) == ("", None)
        await within(host.ready())
        assert host.identity == "chat"
        assert host.expires is not None
        assert timedelta(days=19) < host.expires - datetime.now(UTC) < timedelta(days=20)
        assert "expires" not in caplog.text


async def test_the_log_warns_some_days_before_a_key_expires(caplog: pytest.LogCaptureFixture) -> None:
    async def play(stream: PlayedStream) -> None:
        await stream.accept(identity="chat", expires_seconds=3 * 86_400.0 + 60)
        await stream.read()

    async with tls_bus(play) as bus, Host(f"tls:{bus.address}", credential=credential()) as host:
        await within(host.ready())
        await until(lambda: "expires in 3.0 days" in caplog.text)
    assert "/keys/chat.toolbus" in caplog.text
    assert "toolbus keys renew chat" in caplog.text


# -- renewed files ----------------------------------------------------------------------------------------------------


async def test_a_renewed_file_is_used_at_the_next_connection(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.toolbus", "old")

    async def end(stream: PlayedStream) -> None:
        await stream.accept()
        write(file, "new")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "the key 'old' has expired")

    async with tls_bus(end, accept) as bus:
        plugin = Plugin("calc", address=f"tls:{bus.address}", credential=file, _timings=QUICK)
        async with plugin:
            await until(lambda: len(bus.keys) == 2)
            await within(plugin.ready())
        assert [key for _, key in bus.keys] == ["Bearer old", "Bearer new"]


async def test_a_session_that_ends_for_its_key_attaches_once_more_and_no_more(tmp_path: Path) -> None:
    async def end(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "the key of 'chat' was revoked")

    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "the key of 'chat' was revoked")

    file = write(tmp_path / "chat.toolbus", "old")
    for second in (refuse, end):
        async with tls_bus(end, second) as bus:
            plugin = Plugin("calc", address=f"tls:{bus.address}", credential=str(file), _timings=QUICK)
            async with plugin:
                with pytest.raises(Unauthenticated, match=re.escape(f"'chat' was revoked (the credential {file})")):
                    await within(plugin.ended())
            assert bus.streams == 2


async def test_a_peer_without_a_key_learns_where_to_name_one() -> None:
    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "no key says who asks")

    async with played_bus(refuse) as bus, Host(bus.address) as host:
        with pytest.raises(Unauthenticated, match=r"no key says who asks.*TOOLBUS_CREDENTIAL"):
            await within(host.ready())
        assert bus.streams == 1


async def test_a_renewed_file_that_cannot_be_used_leaves_the_credential_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "chat.toolbus", "old")

    async def end(stream: PlayedStream) -> None:
        await stream.accept()
        file.chmod(0o644)
        await stream.end(grpc.StatusCode.UNAVAILABLE, "the bus stops")

    async with tls_bus(end, end, accept) as bus:
        async with Plugin("calc", address=f"tls:{bus.address}", credential=file, _timings=QUICK):
            await until(lambda: len(bus.keys) == 3)
        assert {key for _, key in bus.keys} == {"Bearer old"}
    assert caplog.text.count(f"chmod 600 {file}; using the credential that was read before") == 1


async def test_a_bus_that_is_not_there_is_reported_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async with Host("tls:127.0.0.1:1", credential=credential()) as host:
        with pytest.raises(PeerLost, match="Connection refused"):
            await host.list(timeout=0.3)
