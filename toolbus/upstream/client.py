"""How a main server is asked: over loopback only, with a limit on everything (REST-32)."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from toolbus.upstream.contract import Trouble, clean

REQUEST_SECONDS = 5.0  # for a whole exchange; REST-11 says that a server answers well within
MAX_ANSWER = 8 * 1024 * 1024  # bytes: 20,000 listed tools with long descriptions
CONNECTIONS = 8
KEPT_SECONDS = 4.0  # common servers close an idle connection after 5: ours goes first, so that no request meets that


class Client:
    """Asks one main server. Belongs to the loop that it was made on."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=_Localhost(), use_dns_cache=False, limit=CONNECTIONS, keepalive_timeout=KEPT_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # nothing compressed is asked for, so nothing can unfold
            headers={"Accept-Encoding": "identity", "Accept": "application/json"},
        )

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Sends one request.

        Returns:
            Status and body.

        Raises:
            Trouble: no answer, or none within the limits.
        """
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(
                method, f"{self._url}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await _read(response)
        except TimeoutError:
            raise Trouble(f"{method} {path} was not answered within {REQUEST_SECONDS:g} s") from None
        except aiohttp.ClientConnectorError as problem:
            raise Trouble(f"no connection: {clean(problem.os_error.strerror or problem.os_error)}") from None
        except (aiohttp.ClientError, OSError) as problem:
            words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
            raise Trouble(f"{method} {path} broke off: {clean(words)}") from None

    async def close(self) -> None:
        await self._session.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_any():
        chunks += chunk
        if len(chunks) > MAX_ANSWER:
            response.close()
            raise Trouble(f"an answer has more than {MAX_ANSWER} bytes")
    return bytes(chunks)


class _Localhost(AbstractResolver):
    """Knows one name, and asks nobody what it means."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host.lower() != "localhost":
            raise OSError(None, f"{host} is not localhost, and no other name is looked up")
        await asyncio.sleep(0)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Holds nothing."""
