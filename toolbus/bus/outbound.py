"""Opens HTTP connections to programs of this machine, for every room that sends requests.

Loopback addresses only, without a name service (REST-32); no proxies, no cookies, no redirects unless a caller wants
them; no compression, since a small response may expand without end.
"""

from __future__ import annotations

import select
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

import toolbus

# Common servers close an idle connection after 5 s: we close it first, so that no request meets a closed one.
KEEP_ALIVE_SECONDS = 4.0


def open_session(
    *,
    connections: int,
    seconds: float | None,
    content_type: str | None = None,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> aiohttp.ClientSession:
    """Returns a session for the running loop; the caller closes it.

    Args:
        connections: open at once; 0 means any number.
        seconds: timeout of a whole exchange; None: the caller sets one per request.
        content_type: of every request; None: each request sets its own. Headers of the session are made once, those
            of a request are copied one by one.
        keep_alive_seconds: after which an idle connection is closed.
    """
    return aiohttp.ClientSession(
        connector=_Connector(
            limit=connections, resolver=_Loopback(), use_dns_cache=False, keepalive_timeout=keep_alive_seconds
        ),
        timeout=aiohttp.ClientTimeout(total=seconds, connect=None, sock_read=None, sock_connect=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={
            "Accept": "application/json, */*",
            "Accept-Encoding": "identity",
            "User-Agent": f"toolbus/{toolbus.__version__}",
            **({"Content-Type": content_type} if content_type is not None else {}),
        },
        auto_decompress=False,
        trust_env=False,
    )


class _Connector(aiohttp.TCPConnector):
    """Reuses the idle connection that was used last, and only where nothing has arrived on it since its response.

    What arrives there is its end, with which a request would be lost (a POST is not retried), or surplus bytes, which
    would pass for the next response. aiohttp checks neither and reuses the connection that was idle longest, so the
    connections of a burst would never expire.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while True:
            if idle := self._conns.get(key):
                idle.rotate(1)
            connection = await super()._get(key, traces)
            if connection is None:
                return None
            protocol = connection.protocol
            if protocol is not None and not protocol.should_close and not _is_readable(connection.transport):
                return connection
            connection.close()


def _is_readable(transport: Any) -> bool:
    """Tells whether bytes, or the end of the connection, have arrived and are not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class _Loopback(AbstractResolver):
    """Resolves ``localhost`` without a name service, and nothing else."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host.lower() != "localhost":
            raise OSError(None, f"{host} is not localhost, and no other name is resolved")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Has nothing to release."""
