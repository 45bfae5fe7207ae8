"""HTTP towards programs of this machine: one way to open it, for every room that asks others.

Loopback by address, never by what a name service says (REST-32); no proxy, no cookie and no redirect that a caller did
not ask for; nothing compressed, since a small answer may unfold without end.
"""

from __future__ import annotations

import select
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

import toolbus

# Common servers close an idle connection after 5 s: ours goes first, so that no request meets a closed one.
KEEP_ALIVE_SECONDS = 4.0


def open_session(*, connections: int, seconds: float | None, content_type: str | None = None) -> aiohttp.ClientSession:
    """Returns a session for the running loop; whoever opens it closes it.

    Args:
        connections: at once; 0 means any number.
        seconds: for a whole exchange; None: whoever asks has a limit of its own.
        content_type: of every request; None: each says its own. Headers of the session are made once, those of a
            request are copied one by one.
    """
    return aiohttp.ClientSession(
        connector=_Connector(
            limit=connections, resolver=_Loopback(), use_dns_cache=False, keepalive_timeout=KEEP_ALIVE_SECONDS
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
    """Uses that kept connection again which has rested shortest, and only where nothing came over it since its answer.

    That would be its end, with which a request would be lost (and a POST is not sent twice), or more than was asked
    for, which would pass for the next answer. aiohttp looks at neither, and takes the one that has rested longest:
    what a moment of many calls opened would all be used in turn, for ever.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while True:
            if resting := self._conns.get(key):
                resting.rotate(1)
            connection = await super()._get(key, traces)
            if connection is None:
                return None
            kept = connection.protocol
            if kept is not None and not kept.should_close and not _has_news(connection.transport):
                return connection
            connection.close()


def _has_news(transport: Any) -> bool:
    """Tells whether bytes, or the end, have arrived and are not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class _Loopback(AbstractResolver):
    """Knows one name, and asks nobody what it means."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host.lower() != "localhost":
            raise OSError(None, f"{host} is not localhost, and no other name is looked up")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Holds nothing."""
