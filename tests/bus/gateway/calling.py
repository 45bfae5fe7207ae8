"""Both ends of the gateway as tests need them: a client that can hang up, a legacy plugin, and a reader of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus

Answer = Callable[[dict[str, Any]], Awaitable[bytes]]


def client(bus: Bus, **options: Any) -> httpx.AsyncClient:
    """A client of the bus's gateway that asks nobody else, and reads no certificates, which takes 25 ms."""
    return httpx.AsyncClient(
        base_url=f"http://{bus.http_address}", trust_env=False, verify=False, timeout=WAIT_SECONDS, **options
    )


async def invoke(http: httpx.AsyncClient, name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    """Calls a tool; the answer must be a 200 with exactly the keys that are promised."""
    body = json.dumps({"name": name, "arguments": arguments, **more})  # httpx refuses what JSON can escape
    answer = await http.post("/api/tools/invoke", content=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    said: dict[str, Any] = answer.json()
    assert list(said) == ["call_id", "output", "is_error", "error", "content"]
    assert said["is_error"] == (said["error"] is not None)
    return said


class Connection:
    """A bare connection on which one request is posted, to be read slowly, not at all, or cut."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __aenter__(self) -> Self:
        assert self._bus.http_address is not None
        host, _, port = self._bus.http_address.rpartition(":")
        self.reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Sends a request."""
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await self._writer.drain()

    async def read_until(self, end: bytes) -> bytes:
        """Reads on until something stands in what came, and to the end of what came with it."""
        text = b""
        async with asyncio.timeout(WAIT_SECONDS):
            while end not in text:
                piece = await self.reader.read(1 << 20)
                assert piece, f"the stream ended: {text[-200:]!r}"
                text += piece
        return text

    def leave(self) -> None:
        """Closes the connection behind what was sent."""
        self._writer.close()

    def cut(self) -> None:
        """Hangs up."""
        self._writer.transport.abort()


async def events(
    answer: httpx.Response, lines: AsyncIterator[str] | None = None
) -> AsyncIterator[tuple[str, Any, str]]:
    """Reads a stream as a browser does: yields (event, data, id); a comment is an event of the name ``:``.

    Args:
        lines: those of the answer, where some of them have been read already.
    """
    assert answer.headers["content-type"].startswith("text/event-stream")
    fields: dict[str, str] = {}
    async for line in lines or answer.aiter_lines():
        if line.startswith(":"):
            yield ":", line[1:].strip(), ""
        elif line:
            name, _, value = line.partition(": ")
            assert name not in fields, "a field twice"
            fields[name] = value
        else:
            if "data" in fields:
                yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
            fields = {}
    assert not fields, "the stream ends within an event"


@asynccontextmanager
async def legacy_plugin(answer: Answer) -> AsyncIterator[str]:
    """Runs an HTTP server whose answers are bodies of 200s made of the bodies of requests; yields its URL."""

    serving: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                body = await answer(json.loads(await reader.readexactly(int(lines[b"content-length"]))))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run"
        for task in filter(None, serving):  # one may still answer
            task.cancel()
        await asyncio.gather(*filter(None, serving), return_exceptions=True)
