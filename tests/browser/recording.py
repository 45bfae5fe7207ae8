"""Records what Chromium sends when a page makes its attempts: `python -m tests.browser.recording` writes the file.

The file serves the tests that have no browser. A line holds one request, with `PORT` for the port of the bus.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.browser.attempts import ATTEMPTS, REBINDING, script_of
from tests.browser.chromium import FOREIGN_HOST, chromium_page
from tests.bus.gateway.raw_http import Answer, Line
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.testing import running_bus

FILE = Path(__file__).parent / "requests.jsonl"
BLANK = "<!doctype html><link rel=icon href='data:,'><title>page</title><body></body>"
_BOUNDARY = re.compile(r"-{4}WebKitFormBoundary\w+")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request.

    Attributes:
        page: whose page made the attempt: of another port, of another site, or of a name that was rebound.
        head: the request line and the headers.
        status: what the bus answers.
    """

    page: str
    attempt: str
    head: tuple[str, ...]
    body: str
    status: int = 0

    def essence(self) -> tuple[object, ...]:
        """What the bus goes by and other versions of Chromium send alike."""
        names = ("host", "origin", "content-type", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
        lines = [line for line in self.head[1:] if line.partition(":")[0].lower() in names]
        texts = (_BOUNDARY.sub("BOUNDARY", text) for text in (self.head[0], *lines, self.body))
        return self.page, self.attempt, tuple(texts)


def read_recorded() -> list[Recorded]:
    """Returns the requests of the file."""
    lines = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
    return [Recorded(**{**line, "head": tuple(line["head"])}) for line in lines]


class _Recorder:
    """Serves a blank page, and answers everything else as a bus that refuses; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []  # heads and bodies
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
            length = re.search(r"(?i)\r\ncontent-length: (\d+)", head)
            body = (await reader.readexactly(int(length[1]))).decode() if length else ""
            page = head.startswith("GET / ")
            if not page:
                self.requests.append((head, body))
            answer = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(BLANK)}\r\n"
            kept = "" if page else "Cross-Origin-Opener-Policy: same-origin\r\n"
            writer.write(f"{answer}{kept}Connection: close\r\n\r\n{BLANK}".encode())
        except asyncio.IncompleteReadError:  # a connection that the browser opened ahead
            pass
        finally:
            writer.close()


@asynccontextmanager
async def recorder() -> AsyncIterator[_Recorder]:
    """Runs a server that records."""
    recorder = _Recorder()
    async with await asyncio.start_server(recorder.serve, "127.0.0.1", 0) as server:
        recorder.port = server.sockets[0].getsockname()[1]
        yield recorder


async def record() -> list[Recorded]:
    """Makes every attempt in a browser; returns what it sent, in the order of the attempts."""
    found: list[Recorded] = []
    async with recorder() as bus, recorder() as own, chromium_page() as page:
        for kind, address, target, attempts in (
            ("another port", f"localhost:{own.port}", f"127.0.0.1:{bus.port}", tuple(ATTEMPTS)),
            ("another site", f"{FOREIGN_HOST}:{own.port}", f"127.0.0.1:{bus.port}", tuple(ATTEMPTS)),
            ("rebound", f"{FOREIGN_HOST}:{bus.port}", f"{FOREIGN_HOST}:{bus.port}", REBINDING),
        ):
            await page.open(f"http://{address}/")
            for attempt in attempts:
                bus.requests.clear()
                await page.run(script_of(attempt, f"http://{target}"))
                await until(lambda: bus.requests, f"the request of {attempt!r}")
                for head, body in bus.requests:
                    text = head.replace(f":{bus.port}", ":PORT")
                    lines = tuple(text.replace(f":{own.port}", ":9000").split("\r\n"))
                    found.append(Recorded(kind, attempt, lines, body))
    return found


async def replay(bus: Bus, recorded: Recorded) -> Answer:
    """Sends a recorded request to a bus and returns the head of the answer."""
    assert bus.http_address is not None
    text = "\r\n".join([*recorded.head, "", recorded.body]).replace(":PORT", f":{bus.http_address.rpartition(':')[2]}")
    line = Line(bus)
    await line.say(text.encode())
    answer = await line.answer(bodiless=True)
    line.close()
    return answer


async def _with_statuses() -> list[Recorded]:
    async with running_bus(http="127.0.0.1:0") as bus:
        return [replace(each, status=(await replay(bus, each)).status) for each in await record()]


if __name__ == "__main__":
    recorded = asyncio.run(_with_statuses())
    FILE.write_text("".join(json.dumps(asdict(each)) + "\n" for each in recorded), "utf-8")
    sys.stdout.write(f"{len(recorded)} requests are in {FILE.name}: look at the statuses that changed\n")
