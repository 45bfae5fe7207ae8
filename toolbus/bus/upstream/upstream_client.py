"""Sends requests to a main server: over loopback only, with a limit on time and size (REST-32)."""

from __future__ import annotations

import aiohttp

from toolbus.bus.outbound import open_session
from toolbus.bus.upstream.upstream_responses import UpstreamError, clean
from toolbus.limits import MIB

MAX_RESPONSE_BYTES = 8 * MIB  # 20,000 listed tools with long descriptions
CONNECTIONS = 8


class UpstreamClient:
    """The HTTP client of one main server. Belongs to the loop that it was made on.

    Args:
        timeout: seconds for a whole exchange.
        max_response_bytes: a longer response is cut off, and its request has failed.
    """

    def __init__(self, url: str, timeout: float, max_response_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._max_response_bytes = max_response_bytes
        self._session = open_session(connections=CONNECTIONS, seconds=timeout)

    async def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Sends one request.

        Returns:
            Status and body.

        Raises:
            UpstreamError: no response, or none within the limits.
        """
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(
                method, f"{self._url}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await self._read(response)
        except TimeoutError:
            raise UpstreamError(f"{method} {path} was not answered within {self._timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(f"no connection: {clean(error.os_error.strerror or error.os_error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UpstreamError(f"the connection broke during {method} {path}: {clean(text)}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, limit = bytearray(), self._max_response_bytes
        async for chunk in response.content.iter_any():
            chunks += chunk
            if len(chunks) > limit:
                response.close()
                raise UpstreamError(f"a response has more than {limit} bytes")
        return bytes(chunks)

    async def close(self) -> None:
        await self._session.close()
