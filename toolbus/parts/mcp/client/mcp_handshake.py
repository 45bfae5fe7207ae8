"""Detects the era of the protocol that a server speaks, and performs the handshake of that era.

A server of unknown era gets `server/discover`. On one pipe a `ping` follows at once, because some servers do not answer
unknown methods, and every server answers a ping:

- discover is answered with a modern version and capabilities → modern;
- discover is refused, or its answer is unusable → `initialize` on the same pipe;
- the ping is answered first → the server does not answer discover → `initialize`;
- the pipe ends → the server exits at a message before `initialize`: `DiedOfProbe`, start it again as legacy.

Over HTTP requests have no order, so no ping is sent: whatever is not the answer of a modern server (a status, an empty
body, a page) leads to `initialize`. A server that refuses that too, but has answered discover in part, is taken as
modern.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolbus.common.text import clean_line
from toolbus.parts.mcp.client.mcp_connection import (
    LEGACY_ACCEPTS,
    McpConnection,
    ServerInfo,
    capabilities_of,
    client_info,
)
from toolbus.parts.mcp.client.transport import Lost, NeedsLogin
from toolbus.parts.mcp.messages import eras
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

log = logging.getLogger("toolbus.mounts")

DISCOVER_SECONDS = 10.0  # the timeout of discover
AUTO = "auto"
AFTER_PING_SECONDS = 0.1  # a server that runs requests in parallel may answer the ping first


class DiedOfProbe(Lost):
    """The server exited at `server/discover`: it accepts no other message before `initialize`."""


async def open_connection(connection: McpConnection, *, modern: bool | None, era: str = AUTO) -> ServerInfo:
    """Performs the handshake, and sets `McpConnection.peer`.

    Args:
        modern: the era of the last handshake; None: unknown, it is detected. A server that has changed since is
            detected again.
        era: the operator's choice: ``auto`` detects it, ``legacy`` and ``modern`` accept no other.

    Raises:
        DiedOfProbe: start the server again, with ``modern=False``.
        NeedsLogin: a user has to log in first.
        Lost: the server has disconnected.
        RpcError: the server refuses the handshake.
    """
    legacy_first = era == "legacy" or (era == AUTO and modern is False)
    found = _Discovered(None) if legacy_first else await _discover(connection, probes=modern is None)
    peer = found.peer if found.is_certain else None
    if peer is None and era != "modern":
        try:
            peer = await _initialize(connection)
        except RpcError as error:
            if era == AUTO and (legacy_first or error.code == McpCode.UNSUPPORTED_VERSION):
                found = await _discover(connection, probes=False)
            if found.peer is None:
                raise
            log.info("%s: initialize is refused (%s): it is spoken to as discovered", connection, error.message)
    peer = peer or found.peer
    if peer is None:
        raise RpcError(
            McpCode.UNSUPPORTED_VERSION,
            f"the server does not speak {' or '.join(eras.MODERN_VERSIONS)}, which era = modern demands: remove era "
            "from the mount, or update the server",
        )
    connection.peer = peer
    connection.transport.agreed(peer.version, modern=peer.modern)
    if not peer.modern:
        connection.notify("notifications/initialized")
    return peer


@dataclass(frozen=True, slots=True)
class _Discovered:
    """The answer to `server/discover`.

    Attributes:
        peer: the server by its answer; None if that has nothing of a modern server.
        is_certain: whether it is modern beyond doubt. Other servers are asked with `initialize` first.
    """

    peer: ServerInfo | None
    is_certain: bool = False


async def _discover(connection: McpConnection, *, probes: bool) -> _Discovered:
    """Sends `server/discover`."""
    asking = asyncio.create_task(_request_discover(connection, eras.NEWEST))
    try:
        if probes and connection.transport.shares_one_pipe:
            return await _before_ping(connection, asking)
        return await asking
    except NeedsLogin:
        raise
    except Lost as error:
        if connection.closed_why is None:  # only this request failed; where nothing can be reached, `initialize` tells
            log.info("%s: no answer to server/discover: %s", connection, clean_line(str(error)))
            return _Discovered(None)
        if connection.transport.shares_one_pipe:
            raise DiedOfProbe(str(error), error.stage) from None
        raise
    finally:
        asking.cancel()


async def _before_ping(connection: McpConnection, asking: asyncio.Task[_Discovered]) -> _Discovered:
    ping = asyncio.create_task(connection.request("ping"))
    try:
        await asyncio.wait((asking, ping), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            refused = ping.exception() is not None  # a modern server has no ping
            await asyncio.wait((asking,), timeout=DISCOVER_SECONDS if refused else AFTER_PING_SECONDS)
        return await asking if asking.done() else _Discovered(None)
    finally:
        ping.cancel()
        await asyncio.gather(ping, return_exceptions=True)


async def _request_discover(connection: McpConnection, version: str, *, again: bool = True) -> _Discovered:
    """Sends `server/discover`; once more if the server refuses the version and names one that the bus knows."""
    params = {"_meta": connection.modern_meta(version)}
    try:
        result = await connection.request("server/discover", params, timeout=DISCOVER_SECONDS)
    except TimeoutError:
        return _Discovered(None)
    except RpcError as error:
        other = _common(_supported(error)) if error.code == McpCode.UNSUPPORTED_VERSION else None
        if other is None or not again:
            return _Discovered(None)
        return await _request_discover(connection, other, again=False)
    offered, capabilities = result.get("supportedVersions"), result.get("capabilities")
    known = _common(offered) if isinstance(offered, list) else None
    has_capabilities = isinstance(capabilities, Mapping)
    if known is None and (offered is not None or not has_capabilities):
        return _Discovered(None)
    peer = ServerInfo(
        modern=True,
        version=known or version,
        capabilities=_mapping(capabilities),
        info=_mapping(result.get("serverInfo") or _mapping(result.get("_meta")).get(eras.META_SERVER)),
        instructions=_text(result.get("instructions")),
    )
    return _Discovered(peer, known is not None and has_capabilities)


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
