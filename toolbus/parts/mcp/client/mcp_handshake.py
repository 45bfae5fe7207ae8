"""Detects the era of the protocol that a server speaks, and performs the handshake of that era.

A server of unknown era gets `server/discover`. On one pipe a `ping` follows at once, because some servers do not answer
unknown methods, and every server answers a ping:

- discover is answered → modern;
- discover is refused → `initialize` on the same pipe;
- the ping is answered first → the server does not answer discover → `initialize`;
- the pipe ends → the server exits at a message before `initialize`: `DiedOfProbe`, start it again as legacy.

Over HTTP requests have no order, and the status is enough: no ping is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from toolbus.parts.mcp.client.mcp_connection import (
    LEGACY_ACCEPTS,
    McpConnection,
    ServerInfo,
    capabilities_of,
    client_info,
)
from toolbus.parts.mcp.client.transport import HttpRefused, Lost, NeedsLogin, SessionLost
from toolbus.parts.mcp.messages import eras
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

DISCOVER_SECONDS = 10.0  # the timeout of discover
AFTER_PING_SECONDS = 0.1  # a server that runs requests in parallel may answer the ping first


class DiedOfProbe(Lost):
    """The server exited at `server/discover`: it accepts no other message before `initialize`."""


async def open_connection(connection: McpConnection, *, modern: bool | None) -> ServerInfo:
    """Performs the handshake, and sets `McpConnection.peer`.

    Args:
        modern: the era of the last handshake; None: unknown, it is detected. A server that has changed since is
            detected again.

    Raises:
        DiedOfProbe: start the server again, with ``modern=False``.
        NeedsLogin: a user has to log in first.
        Lost: the server has disconnected.
        RpcError: the server refuses the handshake.
    """
    peer = None if modern is False else await _discover(connection, probes=modern is None)
    if peer is None:
        peer = await _initialize(connection)
    connection.peer = peer
    connection.transport.agreed(peer.version, modern=peer.modern)
    if not peer.modern:
        connection.notify("notifications/initialized")
    return peer


async def _discover(connection: McpConnection, *, probes: bool) -> ServerInfo | None:
    """Sends `server/discover`; returns None for a legacy server."""
    version = eras.NEWEST
    asking = asyncio.create_task(_request_discover(connection, version))
    try:
        if probes and connection.transport.shares_one_pipe:
            return await _before_ping(connection, asking)
        return await asking
    except NeedsLogin:
        raise
    except Lost as error:
        if isinstance(error, (HttpRefused, SessionLost)):
            return None
        if connection.closed_why is not None and connection.transport.shares_one_pipe:
            raise DiedOfProbe(str(error), error.stage) from None
        raise
    finally:
        asking.cancel()


async def _before_ping(connection: McpConnection, asking: asyncio.Task[ServerInfo | None]) -> ServerInfo | None:
    ping = asyncio.create_task(connection.request("ping"))
    try:
        await asyncio.wait((asking, ping), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            refused = ping.exception() is not None  # a modern server has no ping
            await asyncio.wait((asking,), timeout=DISCOVER_SECONDS if refused else AFTER_PING_SECONDS)
        return await asking if asking.done() else None
    finally:
        ping.cancel()
        await asyncio.gather(ping, return_exceptions=True)


async def _request_discover(connection: McpConnection, version: str, *, again: bool = True) -> ServerInfo | None:
    """Sends `server/discover`; once more if the server refuses the version and names one that the bus knows."""
    params = {"_meta": connection.modern_meta(version)}
    try:
        result = await connection.request("server/discover", params, timeout=DISCOVER_SECONDS)
    except TimeoutError:
        return None
    except RpcError as error:
        other = _common(_supported(error)) if error.code == McpCode.UNSUPPORTED_VERSION else None
        if other is None or not again:
            return None
        return await _request_discover(connection, other, again=False)
    offered = result.get("supportedVersions")
    known = _common(offered if isinstance(offered, list) else [version])
    if known is None:
        return None
    return ServerInfo(
        modern=True,
        version=known,
        capabilities=_mapping(result.get("capabilities")),
        info=_mapping(result.get("serverInfo") or _mapping(result.get("_meta")).get(eras.META_SERVER)),
        instructions=_text(result.get("instructions")),
    )


async def _initialize(connection: McpConnection) -> ServerInfo:
    params = {
        "protocolVersion": eras.NEWEST_LEGACY,
        "capabilities": capabilities_of(LEGACY_ACCEPTS, modern=False),
        "clientInfo": client_info(),
    }
    result = await connection.request("initialize", params)
    version = result.get("protocolVersion")
    if version not in eras.LEGACY_VERSIONS:
        raise RpcError(
            McpCode.UNSUPPORTED_VERSION,
            f"the server speaks version {str(version)[:40]!r} of the protocol: the bus speaks "
            f"{', '.join((*eras.LEGACY_VERSIONS, *eras.MODERN_VERSIONS))}; update the server",
        )
    return ServerInfo(
        modern=False,
        version=str(version),
        capabilities=_mapping(result.get("capabilities")),
        info=_mapping(result.get("serverInfo")),
        instructions=_text(result.get("instructions")),
    )


def _supported(error: RpcError) -> list[Any]:
    data = error.data if isinstance(error.data, Mapping) else {}
    supported = data.get("supported")
    return supported if isinstance(supported, list) else []


def _common(versions: list[Any]) -> str | None:
    """Returns the newest modern version that both sides speak; None if they share none."""
    return next((version for version in reversed(eras.MODERN_VERSIONS) if version in versions), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
