"""A bus with keys in a process of its own, and what calls through it over mTLS, each call counted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import psutil

from tests.support.processes import Running, toolbus
from tests.support.waiting import LOOK_SECONDS, WAIT_SECONDS, until, within
from toolbus import Host, Plugin
from toolbus.bus.keys.keys_file import SERVER
from toolbus.sdk.credential import Credential, tls_credentials

BATCH = 10  # calls that a caller sends at once
PAUSE = 0.015  # seconds between two batches: with three callers a thousand calls a second, and fewer on a busy machine
PLUGIN = "counter"


class KeyedBus:
    """A bus in a process of its own that listens on loopback in the clear, over TLS and mTLS, and for HTTPS.

    Attributes:
        plain, tls, mtls, https: its addresses, as HOST:PORT.
        ran: how often the plugin ran each call, by caller and number.
    """

    def __init__(self, folder: Path, running: Running) -> None:
        self.folder = folder
        self.running = running
        line = next(line for line in running.out.splitlines() if line.startswith("toolbus ready"))
        addresses = line.split("grpc=")[1].split()[0].split(",")
        self.plain, self.tls, self.mtls = (address.rpartition("tls:")[2] for address in addresses)
        self.https = line.split("https=")[1].split()[0].removeprefix("https://")
        self.ran = Counter[tuple[str, int]]()

    async def keys(self, *words: str) -> str:
        """Runs ``toolbus keys`` and returns what it printed."""
        return await asyncio.to_thread(keys, self.folder, *words)

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.toolbus"

    async def host(self, stack: AsyncExitStack, name: str, file: Path | None = None) -> Host:
        """Connects a host with a credential."""
        host = Host(f"mtls:{self.mtls}", source=f"host:{name}", credential=file or self.file(name))
        await stack.enter_async_context(host)
        await within(host.ready())
        return host

    async def plugin(self) -> Plugin:
        """Connects the plugin, or another session of it, with its credential as its file is now."""
        plugin = Plugin(PLUGIN, address=f"mtls:{self.mtls}", credential=self.file(PLUGIN))

        @plugin.tool(allow_repeat=True)
        async def count(caller: str, number: int) -> int:
            self.ran[caller, number] += 1
            return number

        await plugin.start()
        await within(plugin.ready())
        return plugin

    async def visit(self, name: str, file: Path | None = None) -> None:
        """Connects anew, calls once over gRPC and once over HTTPS, and leaves."""
        async with AsyncExitStack() as stack:
            host = await self.host(stack, name, file)
            assert (await within(host.call("count", {"caller": "visitor", "number": 0}))).unwrap() == 0
        credential = Credential.read(file or self.file(name))
        trust = ssl.create_default_context(cadata=credential.ca)
        body = {"name": "count", "arguments": {"caller": "visitor", "number": 1}}
        headers = {"Authorization": f"Bearer {credential.token}"}
        async with httpx.AsyncClient(
            base_url=f"https://{self.https}", verify=trust, headers=headers, timeout=WAIT_SECONDS
        ) as web:
            assert (await web.post("/api/tools/invoke", json=body)).json()["output"] == 1

    async def shows_its_newest_certificate(self) -> None:
        """Waits until new connections get the server's certificate that is in the keys directory."""
        newest = (self.folder / "data" / "keys" / SERVER).read_text().split("-----END PRIVATE KEY-----\n")[1]
        ports = [int(address.rpartition(":")[2]) for address in (self.tls, self.mtls, self.https)]

        async def shown() -> bool:
            for port in ports:
                if not newest.startswith(await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))):
                    return False
            return True

        async with asyncio.timeout(WAIT_SECONDS):
            while not await shown():
                await asyncio.sleep(LOOK_SECONDS)

    async def refuses_the_connection(self, file: Path) -> None:
        """Checks that a credential no longer makes a connection over mTLS."""
        credential = Credential.read(file)
        async with grpc.aio.secure_channel(self.mtls, tls_credentials(credential)) as channel:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.channel_ready(), 1.0)
                raise AssertionError(f"{file} still makes a connection")

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.running.process.pid).memory_info().rss)


class Caller:
    """Calls the plugin at a pace, in batches, and notes how each call ended."""

    def __init__(self, bus: KeyedBus, name: str) -> None:
        self.name = name
        self.sent = 0
        self.failed: list[str] = []
        self.host: Host | None = None  # None before the start
        self._bus = bus
        self._stack = AsyncExitStack()  # of the host
        self._leaving = False

    async def connect(self) -> None:
        """Connects, or changes over to a new connection with the credential as its file is now; no call is cut off."""
        stack = AsyncExitStack()
        before, host = (self._stack, self.host), await self._bus.host(stack, self.name)
        self._stack, self.host = stack, host
        if before[1] is not None:
            await within(before[1].drain())
        await before[0].aclose()

    async def run(self) -> None:
        """Calls until it is to leave."""
        while not self._leaving:
            assert self.host is not None
            numbers = range(self.sent, self.sent + BATCH)
            self.sent += BATCH
            calls = [("count", {"caller": self.name, "number": number}) for number in numbers]
            for number, result in zip(numbers, await self.host.call_many(calls), strict=True):
                if result.error is not None or result.output_json != str(number):
                    self.failed.append(f"{self.name} {number}: {result}")
            await asyncio.sleep(PAUSE)

    def leave(self) -> None:
        self._leaving = True

    async def close(self) -> None:
        await self._stack.aclose()


class Load:
    """Callers that call all the time, beside a test."""

    def __init__(self, bus: KeyedBus, callers: dict[str, Caller], running: list[asyncio.Task[None]]) -> None:
        self._bus = bus
        self.callers = callers
        self._running = running

    @property
    def sent(self) -> int:
        return sum(caller.sent for caller in self.callers.values())

    async def goes_on(self) -> None:
        """Waits until every caller has sent some more, and had answers."""
        at = {name: caller.sent for name, caller in self.callers.items()}
        await until(
            lambda: all(
                caller.sent > at[name] + 2 * BATCH or task.done()
                for (name, caller), task in zip(self.callers.items(), self._running, strict=True)
            ),
            "calls to go on",
        )

    async def end(self) -> None:
        """Ends all callers and checks that every call succeeded and ran once."""
        for caller in self.callers.values():
            caller.leave()
        await within(asyncio.gather(*self._running))
        lost = [failure for caller in self.callers.values() for failure in caller.failed]
        assert not lost, f"{len(lost)} of {self.sent}: {lost[:5]}"
        expected = {(name, number) for name, caller in self.callers.items() for number in range(caller.sent)}
        ran = {call: times for call, times in self._bus.ran.items() if call[0] in self.callers}
        assert ran == dict.fromkeys(expected, 1)


@asynccontextmanager
async def load(bus: KeyedBus, *names: str) -> AsyncIterator[Load]:
    """Has hosts of these identities call at a pace until the block ends."""
    callers = {name: Caller(bus, name) for name in names}
    running: list[asyncio.Task[None]] = []
    try:
        for caller in callers.values():
            await caller.connect()
            running.append(asyncio.create_task(caller.run()))
        yield Load(bus, callers, running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for caller in callers.values():
            await caller.close()


@asynccontextmanager
async def keyed_bus(folder: Path, *hosts: str) -> AsyncIterator[KeyedBus]:
    """Runs a bus with keys for the plugin and for hosts of these names."""
    keys(folder, "init", "--name", "localhost", "--address", "mtls:127.0.0.1:48931")
    keys(folder, "add", PLUGIN, "--plugin", PLUGIN)
    for name in hosts:
        keys(folder, "add", name, "--host")
    port = "127.0.0.1:0"
    words = ("--grpc", port, "--grpc", f"tls:{port}", "--grpc", f"mtls:{port}", "--http", "off", "--https", port)
    with Running(folder, "serve", *words, TOOLBUS_DATA_DIR=str(folder / "data")) as running:
        running.says("toolbus ready")
        yield KeyedBus(folder, running)
        assert running.process.poll() is None
        assert "Traceback" not in running.err
        assert "a fault of the bus" not in running.err


def keys(folder: Path, *words: str) -> str:
    """Runs ``toolbus keys`` for the data directory of a folder; credentials are written beside that."""
    out = ("-o", str(folder / f"{words[1]}.toolbus")) if words[0] in ("add", "renew") else ()
    ended = toolbus("keys", *words, *out, TOOLBUS_DATA_DIR=str(folder / "data"))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def copied(file: Path) -> Path:
    """Returns a copy of a credential that a renewal does not change."""
    return Path(shutil.copy2(file, file.with_suffix(".before")))
