"""Connections over TLS: keys with every request, renewed files, and what each wrong client learns."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from tests.sdk.played_bus import PlayedBus, PlayedStream, played_bus
from tests.support.certificates import Authority, Pair, server_credentials
from tests.support.waiting import until, within
from toolbus import Host, PeerLost, Plugin, SyncHost, Unauthenticated
from toolbus.sdk import Credential
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import ConnectionTimings
from toolbus.sdk.tls_probe import diagnose

AUTHORITY, FOREIGN = Authority(), Authority("another authority")
SERVER = AUTHORITY.server("127.0.0.1", "bus.example")
CLIENT = AUTHORITY.client("chat")
TOKEN = "tbk_1_PAWPAW"
SMALL_ATTACH = ConnectionTimings(attach_bytes=1000)
QUICK = ConnectionTimings(first_pause=0.01, max_pause=0.05, max_refused_pause=0.05)


def server(pair: Pair = SERVER, *, clients: bool = False) -> grpc.ServerCredentials:
    """Returns what a listener shows; with ``clients`` it asks for their certificates."""
    return server_credentials(pair, AUTHORITY if clients else None)


def credential(pair: Pair | None = None, *, token: str = TOKEN, ca: str = AUTHORITY.pem, days: int = 90) -> Credential:
    end = datetime.now(UTC) + timedelta(days=days)
    certificate, key = (pair.certificate, pair.key) if pair else ("", "")
    return Credential("", token, ca, certificate, key, end, "chat", Path("/keys/chat.toolbus"))


def write(file: Path, token: str) -> Path:
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(f'token = "{token}"\nca = """{AUTHORITY.pem}"""\nname = "chat"\n', "utf-8")
    return fresh.replace(file)


async def accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


@asynccontextmanager
async def tls_bus(*plays: object, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[PlayedBus]:
    async with played_bus(*(plays or (accept,)), tls=tls or server()) as bus:  # type: ignore[arg-type]
        yield bus


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


# -- what a wrong client learns ---------------------------------------------------------------------------------------

WRONG = {
    # server, prefix of the address, credential → words of the reason
    "plain text to a listener with TLS": (server(), "", None, ["speaks TLS", "no client certificate", "write tls:"]),
    "plain text to a listener that asks for certificates": (
        *(server(clients=True), "", None),
        ["speaks TLS", "a client certificate", "write mtls:"],
    ),
    "TLS to plain text": (None, "tls:", credential(), ["does not speak TLS"]),
    "certificates to plain text": (None, "mtls:", credential(CLIENT), ["does not speak TLS"]),
    "no certificate": (
        *(server(clients=True), "tls:", credential()),
        ["asks for a client certificate", "/keys/chat.toolbus has none", "write mtls:", "toolbus keys add"],
    ),
    "an expired certificate": (
        *(server(clients=True), "mtls:", credential(AUTHORITY.client("chat", -1), days=-1)),
        ["/keys/chat.toolbus expired on 20", "toolbus keys renew chat"],
    ),
    "a certificate of another authority": (
        *(server(clients=True), "mtls:", credential(FOREIGN.client("chat"))),
        ["refused the certificate of the credential /keys/chat.toolbus", "valid until", "toolbus keys renew chat"],
    ),
    "a server's certificate": (
        *(server(clients=True), "mtls:", credential(SERVER)),
        ["refused the certificate of the credential /keys/chat.toolbus"],
    ),
    "a key of another certificate": (
        *(server(clients=True), "mtls:", credential(Pair(CLIENT.certificate, AUTHORITY.client("x").key))),
        ["/keys/chat.toolbus cannot be used", "the key in it is not that of its certificate"],
    ),
    "a bus of another authority": (
        *(server(), "tls:", credential(ca=FOREIGN.pem)),
        ["not signed by the ca of the credential /keys/chat.toolbus", "toolbus keys renew chat"],
    ),
    "an expired bus": (
        *(server(AUTHORITY.server("127.0.0.1", days=-1)), "tls:", credential()),
        ["the certificate of the server", "has expired"],
    ),
    "another name": (
        *(server(AUTHORITY.server("bus.example", "10.0.0.5")), "tls:", credential()),
        ["is for bus.example, 10.0.0.5, not for 127.0.0.1", "toolbus keys init --name 127.0.0.1"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_client_learns_what_is_wrong_and_how_to_fix_it(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls, prefix, given, words = WRONG[case]
    async with played_bus(accept, tls=tls) as bus:
        async with Host(prefix + bus.address, credential=given) as host:
            await until(lambda: "not attached to" in caplog.text)
            with pytest.raises(PeerLost) as raised:
                await host.list(timeout=0.1)
            result = await within(host.call("add", {}, timeout=0.1))
        assert bus.streams == 0
    for text in (str(raised.value), caplog.text, str(result.error)):
        assert all(word in text for word in words), text
        assert "Socket closed" not in text
        assert "PRIVATE KEY" not in text
        assert TOKEN not in text
    assert [record.levelno for record in caplog.records if "not attached to" in record.message] == [logging.WARNING]


async def test_a_server_that_accepts_the_client_by_now_is_reported_with_the_text_of_grpc() -> None:
    async with tls_bus() as bus:
        address = BusAddress.parse(f"tls:{bus.address}")
        text = await asyncio.to_thread(diagnose, address, credential(), "Socket closed")
    assert text.endswith("accepts this client, so its address and keys are right: grpc reported Socket closed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", ""),  # it closes
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS"),
        (None, ""),  # it says nothing
    ],
)
async def test_a_server_of_another_kind_is_recognized(answer: bytes | None, words: str) -> None:
    silent = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer is None:
            await silent.wait()
        else:
            writer.write(answer)
        writer.close()

    other = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        address = BusAddress.parse(f"tls:127.0.0.1:{port}")
        text = await asyncio.to_thread(diagnose, address, credential(), "", 0.2)
        silent.set()
    assert words in text
    if answer == b"":
        assert "ended the connection during the TLS handshake" in text


async def test_a_bus_that_is_not_there_is_reported_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async with Host("tls:127.0.0.1:1", credential=credential()) as host:
        with pytest.raises(PeerLost, match="Connection refused"):
            await host.list(timeout=0.3)


async def test_closing_does_not_wait_for_a_probe() -> None:
    accepted = asyncio.Event()
    released = asyncio.Event()
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count > 1:  # the probe
            accepted.set()
            await released.wait()
        writer.transport.abort()

    other = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        async with Host(f"tls:127.0.0.1:{port}", credential=credential()):
            await within(accepted.wait())
        assert any(thread.name.startswith("toolbus-probe") for thread in threading.enumerate())
        released.set()
