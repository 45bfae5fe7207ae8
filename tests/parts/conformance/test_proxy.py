"""The proxy before the scripted bus does what it says; else a rule about networks could not be broken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.waiting import until
from toolbus.parts.conformance.proxy import Proxy, bound, reserved


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def connected(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_an_open_port_passes_bytes_on_and_a_closed_one_refuses_and_can_open_again(echo: int) -> None:
    proxy = Proxy()
    with pytest.raises(ConnectionRefusedError):
        await connected(proxy)
    for _ in range(2):
        await proxy.open(echo)
        reader, writer = await connected(proxy)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        await proxy.close()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await connected(proxy)
    assert len(proxy.attempts) == 2
    await proxy.stop()


async def read_one_byte(proxy: Proxy) -> None:
    reader, writer = await connected(proxy)
    try:
        await reader.readexactly(1)
    finally:
        writer.close()


async def test_a_refusing_port_resets_each_connection_and_counts_them(echo: int) -> None:
    proxy = Proxy()
    await proxy.open(echo, refusing=True)
    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            await read_one_byte(proxy)
    assert len(proxy.attempts) == 3
    await proxy.stop()


async def test_a_stalled_proxy_passes_nothing_on_until_it_goes_on(echo: int) -> None:
    proxy = Proxy()
    await proxy.open(echo)
    reader, writer = await connected(proxy)
    proxy.stall(True)
    writer.write(b"late")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(4), 0.1)
    proxy.stall(False)
    assert await reader.readexactly(4) == b"late"
    writer.close()
    await proxy.stop()


async def test_the_end_of_a_direction_passes_and_the_other_goes_on(echo: int) -> None:
    proxy = Proxy()
    await proxy.open(echo)
    reader, writer = await connected(proxy)
    writer.write(b"last")
    writer.write_eof()
    assert await reader.read() == b"last"
    writer.close()
    await proxy.stop()


async def test_a_unix_socket_passes_bytes_on_and_goes_when_it_is_closed(echo: int, tmp_path: Path) -> None:
    proxy = Proxy(tmp_path / "bus.sock")
    await proxy.open(echo)
    reader, writer = await asyncio.open_unix_connection(proxy.address.removeprefix("unix:"))
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()
    await proxy.close()
    await until(lambda: not (tmp_path / "bus.sock").exists(), "the end of the socket")
    await proxy.stop()


async def test_small_pieces_pass_at_once() -> None:
    no_delay: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(accept, sock=bound(0))
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
    assert no_delay == [1]


def test_a_reserved_port_is_shared_with_its_own_sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of two runs on one machine would meet the bus of the other."""
    with reserved() as holder:
        port = holder.getsockname()[1]
        with bound(port) as own:
            own.listen()
        ports = iter([port, port])
        monkeypatch.setattr("random.randrange", lambda *_: next(ports, 0))
        with reserved() as other:
            assert other.getsockname()[1] != port
