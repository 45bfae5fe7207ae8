"""HTTP as bytes on a socket, for requests that no library would send."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its status, its headers by lower-case name, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        assert self.headers["content-type"] == "application/json", self
        return json.loads(self.body)


class Line:
    """A connection to the gateway of a bus, or to an address."""

    def __init__(self, bus: Bus | str) -> None:
        address = bus if isinstance(bus, str) else bus.http_address
        assert address is not None
        self._address = address
        self._reader: asyncio.StreamReader | None = None  # None until the first word
        self._writer: asyncio.StreamWriter | None = None  # None until the first word

    async def say(self, data: bytes) -> None:
        """Sends bytes; whoever has hung up meanwhile is read, not written to."""
        if self._writer is None:
            host, _, port = self._address.rpartition(":")
            self._reader, self._writer = await asyncio.open_connection(host.strip("[]"), int(port))
        self._writer.write(data)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._writer.drain()
        except ConnectionError:
            pass

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Reads one answer, by its length or to the end of the connection."""
        assert self._reader is not None
        async with asyncio.timeout(WAIT_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = [line.partition(":") for line in head[1:] if line]
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            assert len(headers) == len(pairs), f"a header twice: {head}"
            length = headers.get("content-length")
            body = b""
            if not bodiless:
                body = await (self._reader.readexactly(int(length)) if length else self._reader.read())
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the other end has closed it, with nothing more to say; waits for that."""
        assert self._reader is not None
        async with asyncio.timeout(WAIT_SECONDS):
            return await self._reader.read(1) == b""

    def close(self) -> None:
        """Hangs up."""
        if self._writer is not None:
            self._writer.close()


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """A request of exactly these lines."""
    return "\r\n".join([f"{line} HTTP/1.1", *headers, "", ""]).encode("latin-1") + body


async def ask(bus: Bus | str, data: bytes) -> Answer:
    """Sends bytes over a connection of their own and returns the first answer."""
    line = Line(bus)
    try:
        await line.say(data)
        return await line.answer(bodiless=data.startswith(b"HEAD "))
    finally:
        line.close()
