"""Watches the digests of a bus as open pages of its console do: ``python -m lab.load.console_watchers URL N``.

Prints ``watching`` once each of the N streams has had its first digest, and reads on until the process is terminated.
"""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit

import uvloop

PATH = "/api/console/stream"
_READ_BYTES = 1 << 16


async def watch(url: str, watchers: int) -> None:
    """Watches until a stream ends, which the bus does to one that has too many beside it or is too slow.

    Raises:
        RuntimeError: a stream has ended.
    """
    address = urlsplit(url)
    request = f"GET {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()

    async def read(first: asyncio.Barrier) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{PATH} answered {status.decode().strip()!r}")
        await reader.readuntil(b"event: digest")
        await first.wait()
        while await reader.read(_READ_BYTES):
            pass
        raise RuntimeError("a stream of digests has ended")

    begun = asyncio.Barrier(watchers + 1)
    async with asyncio.TaskGroup() as streams:
        for _ in range(watchers):
            streams.create_task(read(begun))
        await begun.wait()
        print("watching", flush=True)


def main() -> None:
    url, watchers = sys.argv[1:]
    uvloop.run(watch(url, int(watchers)))


if __name__ == "__main__":
    main()
