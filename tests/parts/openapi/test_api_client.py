"""The client against servers that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.waiting import within
from toolbus.errors import SetupError
from toolbus.parts.openapi.api_client import ApiClient, ApiResponse, ApiUnreachable
from toolbus.parts.openapi.api_request import ApiRequest
from toolbus.parts.openapi.document_loader import fetch_document

DOCUMENT = b'{"openapi": "3.1.0", "paths": {}}'


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def answering(answer: bytes | Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """Serves one answer to each request; yields the URL."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(head) if callable(answer) else answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*serving)  # their clients have closed


async def get(url: str, limit: int = 1_000, headers: tuple[tuple[str, str], ...] = ()) -> ApiResponse:
    client = ApiClient(url, 1)
    try:
        return await client.send(url, ApiRequest("GET", "/x?q=1"), headers, 30.0, limit)
    finally:
        await client.close()


async def test_a_small_response_that_expands_without_end_is_cut() -> None:
    async with answering(response(gzip.compress(bytes(20_000_000)), "Content-Encoding: gzip")) as url:
        tracemalloc.start()
        answer = await get(url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (len(answer.body), answer.is_cut) == (1_000, True)
        assert peak < 10_000_000
    async with answering(response(gzip.compress(b"fits"), "Content-Encoding: gzip")) as url:
        assert (await get(url, 4)).body == b"fits"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(b"x", "Content-Encoding: br"), "has the content encoding br"),
        (response(b"xyz", "Content-Encoding: gzip"), "incorrect header check"),
        (response(gzip.compress(b"x" * 99, mtime=0)[:-9], "Content-Encoding: gzip"), "ends too early"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "cannot be reached"),
        (b"no http\r\n\r\n", "cannot be reached"),
    ],
    ids=["unknown encoding", "no gzip", "cut gzip", "bad length", "no HTTP"],  # gzip's bytes hold the time
)
async def test_a_response_that_cannot_be_read_is_an_error(answer: bytes, reason: str) -> None:
    async with answering(answer) as url:
        with pytest.raises(ApiUnreachable, match=reason):
            await get(url)


async def test_a_response_that_was_cut_gives_its_connection_back() -> None:
    async with answering(response(bytes(1_000_000))) as url:
        client = ApiClient(url, 1)
        for _ in range(2):
            assert (await client.send(url, ApiRequest("GET", "/"), (), 30.0, 10)).is_cut
        await client.close()


async def test_a_response_that_comes_a_byte_at_a_time_ends_at_the_timeout() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(OSError):
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = ApiClient(url, 1)
    with pytest.raises(ApiUnreachable, match=r"has not answered within 0.2 s"):
        await client.send(url, ApiRequest("GET", "/"), (), 0.2, 1_000_000)
    await client.close()
    await within(ended.wait())
    server.close()


async def test_a_client_asks_its_own_origin_only() -> None:
    client = ApiClient("http://127.0.0.1:9", 1)
    for url in ("http://127.0.0.1:8", "http://localhost:9", "https://127.0.0.1:9"):
        with pytest.raises(ApiUnreachable, match="the request would leave its origin"):
            await client.send(url, ApiRequest("GET", "/"), (), 5.0, 10)
    await client.close()


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_proxies_of_the_environment_are_used(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def answer(head: bytes) -> bytes:
        seen.append(head.split(b"\r\n")[0])
        return response(b"")

    async with answering(answer) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", scheme + proxy.removeprefix("http://"))
        assert (await get("http://api.invalid")).status == 200
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert (await get(proxy)).status == 200
    assert seen == [b"GET http://api.invalid/x?q=1 HTTP/1.1", b"GET /x?q=1 HTTP/1.1"]


async def test_redirects_end() -> None:
    async with answering(lambda head: response(b"", "Location: " + f"{len(head)}/", status="302 Found")) as url:
        assert (await get(url)).status == 302


async def test_a_header_that_cannot_be_sent_is_not_shown() -> None:
    async with answering(response(b"")) as url:
        with pytest.raises(ApiUnreachable, match="a header or credential cannot be sent") as refused:
            await get(url, headers=(("Authorization", "s3cret\n"),))
        assert "s3cret" not in str(refused.value)


def _serve_tls(listening: socket.socket, context: ssl.SSLContext, connections: int) -> None:
    """Answers so many connections with the document; one whose client refuses the certificate just ends."""
    for _ in range(connections):
        plain, _ = listening.accept()
        with plain, suppress(OSError), context.wrap_socket(plain, server_side=True) as stream:
            stream.recv(65_536)
            stream.sendall(response(DOCUMENT))


async def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority()
    pair = authority.server("127.0.0.1")
    (tmp_path / "server.pem").write_text(pair.certificate + pair.key)
    (tmp_path / "root.pem").write_text(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(asyncio.to_thread(_serve_tls, listening, context, 2))
        with pytest.raises(ApiUnreachable):
            await fetch_document(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
        assert (await fetch_document(url)).url == url
        await within(serving)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (response(b"", status="503 Busy"), ApiUnreachable, "was answered with HTTP 503"),
        (response(b"", status="404 Not Found"), SetupError, "was answered with HTTP 404: name the document's own"),
        (response(b"", "Location: https://b.example/k=1", status="301 Moved"), SetupError, "a redirect to 'b.example'"),
        (response(b"[]"), SetupError, "holds a list"),
    ],
    ids=["503", "404", "301", "no document"],
)
async def test_what_is_no_document_is_told_from_a_server_that_is_not_there(
    answer: bytes, error: type[Exception], text: str
) -> None:
    async with answering(answer) as url:
        with pytest.raises(error, match=text):
            await fetch_document(url)
