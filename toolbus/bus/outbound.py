"""Opens HTTP connections to programs of this machine, for every room that sends requests.

Loopback addresses only, without a name service (REST-32); no proxies, no cookies, no redirects unless a caller enables
them; no decompression here, since a small response may expand without end.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from toolbus.common.local_users import refusal_of
from toolbus.common.newest import NewestCache
from toolbus.common.version import VERSION
from toolbus.protocol.limits import KIB

# Servers close idle connections, gunicorn after 2 s, others after 0.5 to 5. We close them first, so that no request is
# lost on one. A busy plugin's are not idle that long, and a new one on loopback takes a fraction of a millisecond.
KEEP_ALIVE_SECONDS = 0.4
# Some servers close each connection after its response and do not say so. The first connections to a server are used
# again only after they stayed open for so long.
TRIAL_SECONDS, FORGET_SECONDS = 0.05, 60.0
MAX_SERVERS = 1_000  # of which that is known
MAX_HEAD_BYTES = 64 * KIB  # of a line of a response's head; as much as the bus takes itself


def open_session(
    *,
    connections: int,
    seconds: float | None,
    content_type: str | None = None,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    may_serve: Callable[[int], bool] | None = None,
) -> aiohttp.ClientSession:
    """Returns a session for the running loop; the caller closes it.

    Args:
        connections: open at once; 0 means any number.
        seconds: timeout of a whole exchange; None: the caller sets one per request.
        content_type: of every request; None: each request sets its own. Headers of the session are made once, those
            of a request are copied one by one.
        keep_alive_seconds: after which an idle connection is closed.
        may_serve: tells whether a user's programs may get requests, by uid; a connection to another one is refused.
            None: those of every user.
    """
    return aiohttp.ClientSession(
        connector=Connector(
            may_serve,
            limit=connections,
            resolver=_Loopback(),
            use_dns_cache=False,
            keepalive_timeout=keep_alive_seconds,
        ),
        timeout=aiohttp.ClientTimeout(total=seconds, connect=None, sock_read=None, sock_connect=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={
            "Accept": "application/json, */*",
            "Accept-Encoding": "identity",
            "User-Agent": f"toolbus/{VERSION}",
            **({"Content-Type": content_type} if content_type is not None else {}),
        },
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        trust_env=False,
    )


class Connector(aiohttp.TCPConnector):
    """Reuses the idle connection that was used last, and only where nothing has arrived on it since its response.

    What arrives there is its end, with which a request would be lost (a POST is not retried), or surplus bytes, which
    would pass for the next response. aiohttp checks neither and reuses the connection that was idle longest, so the
    connections of a burst would never expire. A server that ended an idle connection is given half of that time, or
    none, until a minute later, since it may only have been started again.
    """

    def __init__(self, may_serve: Callable[[int], bool] | None, **options: Any) -> None:
        super().__init__(**options)
        self._may_serve = may_serve
        # Seconds a connection to a server may be idle, known after its trial, and when that is forgotten.
        self._idle: NewestCache[Any, tuple[float, float]] = NewestCache(MAX_SERVERS)

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        """Refuses a connection to another user's program before anything is sent, TLS aside."""
        protocol = await super()._create_connection(req, traces, timeout)
        if self._may_serve is not None and (refusal := refusal_of(protocol.transport, self._may_serve)):
            protocol.close()
            raise aiohttp.ClientConnectorError(req.connection_key, OSError(None, refusal))
        return protocol

    async def _get(self, key: Any, traces: Any) -> Any:
        while idle := self._conns.get(key):
            idle.rotate(1)
            protocol, last_used = idle[0]
            now = time.monotonic()
            seconds = now - last_used
            known = self._idle.get(key)
            if known is not None and now > known[1]:
                known = None
                del self._idle[key]
            if protocol.should_close or not protocol.is_connected() or _is_readable(protocol.transport):
                shorter = min(seconds, known[0] if known else seconds) / 2
                self._idle[key] = shorter if shorter > TRIAL_SECONDS else 0.0, now + FORGET_SECONDS
            elif known is None and seconds < TRIAL_SECONDS:
                return None
            else:
                self._idle[key] = known = known or (self._keepalive_timeout or 0.0, math.inf)
                if seconds <= known[0]:
                    return await super()._get(key, traces)
            idle.popleft()
            protocol.close()
        return None


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
