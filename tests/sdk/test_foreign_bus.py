"""Tests what a peer says about a bus that is another user's: only that, only on loopback, and only once."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.other_user import CAN_BE_NOBODY, NOBODY
from tests.support.waiting import within
from toolbus.common.local_users import Address
from toolbus.sdk import Credential, Host
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.reconnect import foreign_owner
from toolbus.testing import running_bus

OWN = os.geteuid()


@pytest.mark.parametrize(
    ("address", "owners", "foreign"),
    [
        ("127.0.0.1:1", {("127.0.0.1", 1): NOBODY}, NOBODY),
        ("[::1]:1", {("::1", 1): NOBODY}, NOBODY),
        ("LOCALHOST:1", {("::1", 1): NOBODY, ("127.0.0.1", 1): OWN}, NOBODY),
        ("localhost:1", {("::1", 1): OWN, ("127.0.0.1", 1): OWN}, None),
        ("127.0.0.1:1", {("127.0.0.1", 1): OWN}, None),
        ("127.0.0.1:1", {("127.0.0.1", 1): 0}, None),
        ("127.0.0.1:1", {}, None),  # nothing listens, or the system does not say
        ("192.0.2.1:1", {("192.0.2.1", 1): NOBODY}, None),  # another machine
        ("tls:127.0.0.1:1", {("127.0.0.1", 1): NOBODY}, None),  # its certificate says who it is
        ("unix:/run/bus.sock", {}, None),
    ],
)
def test_only_another_user_who_listens_on_loopback_is_foreign(
    address: str, owners: dict[Address, int], foreign: int | None
) -> None:
    assert foreign_owner(BusAddress.parse(address), owners.get) == foreign


@asynccontextmanager
async def _relay(to: str) -> AsyncIterator[str]:
    """Passes on what comes to a port; where tests run as root, the port is another user's."""
    host, _, port = to.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(65_536):
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, out_writer), copy(out_reader, writer))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        if CAN_BE_NOBODY:
            os.fchown(listening.fileno(), NOBODY, -1)
        async with await asyncio.start_server(serve, sock=listening):
            yield f"127.0.0.1:{listening.getsockname()[1]}"


async def _accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


async def test_a_token_is_not_sent_to_a_program_of_another_user(caplog: pytest.LogCaptureFixture) -> None:
    async with played_bus(_accept) as bus, _relay(bus.address) as relay:
        host = Host(relay, credential=Credential(token="PAW"))
        await within(host.ready())
        await host.close()
    assert bus.keys == [("Invoke", "" if CAN_BE_NOBODY else "Bearer PAW")]
    assert caplog.text.count(f"is not sent to {relay}") == int(CAN_BE_NOBODY)
    assert "PAW" not in caplog.text


async def test_a_peer_warns_of_a_bus_of_another_user_and_of_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "toolbus.sdk.connection"):
        async with running_bus() as bus, _relay(bus.grpc_addresses[0]) as relay:
            for address in (bus.grpc_addresses[0], relay):
                async with Host(address) as host:
                    await within(host.ready())
    warned = [record.getMessage() for record in caplog.records if "belongs to" in record.getMessage()]
    assert len(warned) == (1 if CAN_BE_NOBODY else 0)
    assert all(relay in text and f"(uid {NOBODY})" in text for text in warned)
