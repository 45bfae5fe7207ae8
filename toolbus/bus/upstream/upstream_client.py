"""How a main server is asked: over loopback only, with a limit on everything (REST-32)."""

from __future__ import annotations

import aiohttp

from toolbus.bus.outbound import open_session
from toolbus.bus.upstream.upstream_answers import Trouble, clean

REQUEST_SECONDS = 5.0  # for a whole exchange; REST-11 says that a server answers well within
MAX_ANSWER = 8 * 1024 * 1024  # bytes: 20,000 listed tools with long descriptions
CONNECTIONS = 8


class Client:
    """Asks one main server. Belongs to the loop that it was made on."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session = open_session(connections=CONNECTIONS, seconds=REQUEST_SECONDS)

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
