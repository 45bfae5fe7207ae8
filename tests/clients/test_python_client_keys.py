"""The client on generated stubs alone, with a credential: keys, renewed files, and what it refuses to do."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from peer import Peer, Refused

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.certificates import Authority, server_credentials
from tests.support.waiting import within

AUTHORITY = Authority()
TLS = server_credentials(AUTHORITY.server("127.0.0.1"))
MTLS = server_credentials(AUTHORITY.server("127.0.0.1"), AUTHORITY)
CLIENT = AUTHORITY.client("chat")


def write(file: Path, token: str, **more: str) -> Path:
    values = {"token": token, "ca": AUTHORITY.pem, "certificate": CLIENT.certificate, "key": CLIENT.key, **more}
    file.touch(0o600)
    file.write_text("".join(f'{key} = """{value}"""\n' for key, value in values.items()), "utf-8")
    return file


async def accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


async def test_every_request_carries_the_key(tmp_path: Path) -> None:
    async with played_bus(accept, tls=MTLS) as bus:
        peer = Peer("", "one", credential=str(write(tmp_path / "c", "PAW", address=f"mtls:{bus.address}")))
        running = asyncio.create_task(peer.run())
        await within(peer.attached.wait())
        await peer.list()
        peer.drain()
        running.cancel()
        await asyncio.wait([running])
    assert bus.keys == [("Invoke", "Bearer PAW"), ("List", "Bearer PAW")]


async def test_a_session_that_ends_for_its_key_attaches_once_more_with_the_renewed_file(tmp_path: Path) -> None:
    async def end(stream: PlayedStream) -> None:
        await stream.accept()
        write(tmp_path / "c", "new")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "the key has expired")

    async with played_bus(end, tls=TLS) as bus:
        peer = Peer(f"tls:{bus.address}", "one", credential=str(write(tmp_path / "c", "old")))
        with pytest.raises(Refused, match="UNAUTHENTICATED: the key has expired"):
            await within(peer.run())
    assert bus.keys == [("Invoke", "Bearer old"), ("Invoke", "Bearer new")]


async def test_a_key_that_is_not_accepted_is_final(tmp_path: Path) -> None:
    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "no such key")

    async with played_bus(refuse, tls=TLS) as bus:
        peer = Peer(f"tls:{bus.address}", "one", credential=str(write(tmp_path / "c", "wrong")))
        with pytest.raises(Refused, match="no such key"):
            await within(peer.run())
        assert bus.streams == 1


async def test_a_file_that_others_can_read_and_plain_text_to_another_machine_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "c", "PAW")
    for address in ("10.0.0.5:1", "127.0.0.1.example:1"):
        with pytest.raises(Refused, match=re.escape(f"write tls:{address}")):
            await within(Peer(address, "one", credential=str(file)).run())
    file.chmod(0o640)
    with pytest.raises(Refused, match=f"chmod 600 {file}"):
        Peer("", "one", credential=str(file))
