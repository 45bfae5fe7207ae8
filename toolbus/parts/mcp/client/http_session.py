"""Opens HTTP connections to MCP servers of any machine.

A connection to an address that is not public is opened only if the operator wrote that address: the owner of a public
name could otherwise point it at this machine or the network around it. Proxies, cookies, redirects and decompression
are off.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from toolbus.bus.outbound import MAX_HEAD_BYTES, Connector
from toolbus.common.text import quote
from toolbus.common.version import VERSION

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 4.0  # common servers close an idle connection after 5 s
# Suffixes that public name services do not answer, so the operator who wrote one meant the local network.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".intranet", ".corp", ".home")


def open_session(urls: Collection[str], *, trusts_private: bool = False) -> aiohttp.ClientSession:
    """Returns a session for the running loop; the caller closes it.

    Args:
        urls: as the operator wrote them; private addresses in them are allowed.
        trusts_private: whether every private address is allowed.
    """
    return aiohttp.ClientSession(
        connector=Connector(
            None,
            limit=0,
            resolver=None
            if trusts_private
            else PublicResolver(frozenset(urlsplit(url).hostname or "" for url in urls)),
            ttl_dns_cache=10,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"toolbus/{VERSION}", "Accept-Encoding": "identity"},
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        trust_env=False,
    )


def origin_of(url: str) -> tuple[str, str, int]:
    """Returns scheme, host and port of a URL, for comparison."""
    parts = urlsplit(url)
    port = parts.port if parts.port is not None else {"https": 443, "http": 80}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def is_private_host(host: str) -> bool:
    """Tells whether a host's own text shows that it is not public."""
    host = host.lower().rstrip(".")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_SUFFIXES)


class PublicResolver(AbstractResolver):
    """Resolves names, and drops the addresses that are not public unless the operator wrote a private name.

    Args:
        written: hosts as the operator wrote them.
        system: resolves the names; None: the system's name service.
    """

    def __init__(self, written: frozenset[str], system: AbstractResolver | None = None) -> None:
        self._may_be_private = frozenset(host for host in written if is_private_host(host))
        self._system = system or aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._system.resolve(host, port, family)
        if host.lower() in self._may_be_private:
            return addresses
        public = [each for each in addresses if ipaddress.ip_address(each["host"]).is_global]
        if not public:
            raise OSError(
                None,
                f"{quote(host)} is at {addresses[0]['host']}, which is not public: write the address itself into "
                "the url of the mount if you mean it",
            )
        return public

    async def close(self) -> None:
        await self._system.close()
