"""What each wrong client learns of why it cannot talk to a bus."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from tests.sdk.played_bus import played_bus
from tests.sdk.tls_cases import (
    AUTHORITY,
    CLIENT,
    FOREIGN,
    SERVER,
    TOKEN,
    accept,
    credential,
    server,
    tls_bus,
)
from tests.support.certificates import Pair
from tests.support.waiting import until, within
from toolbus import Host, PeerLost
from toolbus.parts.tls_probe.probe import diagnose
from toolbus.sdk.bus_address import BusAddress

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
