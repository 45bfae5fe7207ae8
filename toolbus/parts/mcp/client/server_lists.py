"""Reads the lists of a mounted server: tools, prompts, resources and templates of resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolbus.parts.mcp.client.mcp_connection import McpConnection, ServerInfo
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

MAX_ENTRIES = 10_000  # of one list; a longer one is cut, with a notice for operators
MAX_PAGES = 1_000
# Kind → method, key of the result, capability that declares such a list.
METHODS: Mapping[str, tuple[str, str, str]] = {
    "tools": ("tools/list", "tools", "tools"),
    "prompts": ("prompts/list", "prompts", "prompts"),
    "resources": ("resources/list", "resources", "resources"),
    "templates": ("resources/templates/list", "resourceTemplates", "resources"),
}
CHANGED: Mapping[str, tuple[str, ...]] = {
    "notifications/tools/list_changed": ("tools",),
    "notifications/prompts/list_changed": ("prompts",),
    "notifications/resources/list_changed": ("resources", "templates"),
}
"""Notification → kinds of changed lists."""


async def read_lists(
    connection: McpConnection, peer: ServerInfo, kinds: tuple[str, ...] = tuple(METHODS)
) -> dict[str, list[Any]]:
    """Returns lists of a server by kind; one that it does not have is empty.

    Raises:
        RpcError, Lost, Busy: as for `McpConnection.request`.
    """
    lists: dict[str, list[Any]] = {}
    for kind in kinds:
        method, key, capability = METHODS[kind]
        lists[kind] = await _read_list(connection, method, key) if peer.can(capability) else []
    return lists


async def _read_list(connection: McpConnection, method: str, key: str) -> list[Any]:
    entries: list[Any] = []
    cursor: object = None
    for _ in range(MAX_PAGES):
        try:
            page = await connection.request(method, {} if cursor is None else {"cursor": cursor})
        except RpcError as error:
            if error.code == McpCode.METHOD_NOT_FOUND:  # a server may have resources without templates
                break
            raise
        content = page.get(key)
        entries += content if isinstance(content, list) else []
        before, cursor = cursor, page.get("nextCursor")
        if not isinstance(cursor, str) or not cursor or cursor == before or len(entries) > MAX_ENTRIES:
            break
    return entries[: MAX_ENTRIES + 1]  # one more, so that the cut is noticed
