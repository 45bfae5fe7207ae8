"""Reads the lists of a mounted server: tools, prompts, resources and templates of resources."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.common.text import dump_json
from toolbus.parts.mcp.client.mcp_connection import McpConnection, ServerInfo
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

log = logging.getLogger("toolbus.mounts")

MAX_ENTRIES = 10_000  # of one list; a longer one is cut, with a notice for operators
MAX_PAGES = 1_000
MAX_EMPTY_PAGES = 3  # in a row: a server may filter what a page would have
MAX_ATTEMPTS = 3  # to read a list whose cursors end because it changes
UNDECLARED_SECONDS = 5.0  # for a server that declares no tools to list some
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


@dataclass(slots=True)
class ServerLists:
    """What a server lists.

    Attributes:
        entries: by kind, each entry once; a list that the server does not have is empty.
        notices: for operators, by method: why a list ends before its server says so, or what it repeats.
    """

    entries: dict[str, list[Any]] = field(default_factory=dict)
    notices: dict[str, tuple[str, ...]] = field(default_factory=dict)


async def read_lists(
    connection: McpConnection, peer: ServerInfo, kinds: tuple[str, ...] = tuple(METHODS)
) -> ServerLists:
    """Reads lists of a server. Tools are listed also by a server that does not declare them, if it has any.

    Raises:
        RpcError, Lost, Busy: as for `McpConnection.request`.
    """
    listing = ServerLists()
    for kind in kinds:
        method, key, capability = METHODS[kind]
        listing.entries[kind], notices = [], list[str]()
        if peer.can(capability):
            listing.entries[kind] = await _read_list(connection, method, key, notices)
        elif kind == "tools":
            with contextlib.suppress(RpcError, TimeoutError):  # it has none
                async with asyncio.timeout(UNDECLARED_SECONDS):
                    listing.entries[kind] = await _read_list(connection, method, key, notices)
        listing.notices[method] = tuple(notices)
    return listing


async def _read_list(connection: McpConnection, method: str, key: str, notices: list[str]) -> list[Any]:
    """Reads all pages of one list; once more from its start if the list changes meanwhile, which ends its cursors."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            entries, why = await _read_pages(connection, method, key)
        except RpcError as error:
            if error.code == McpCode.METHOD_NOT_FOUND:  # a server may have resources without templates
                return []
            if error.code != McpCode.INVALID_PARAMS or attempt + 1 == MAX_ATTEMPTS:
                raise
        else:
            if why:
                log.warning("%s: %s %s", connection, method, why)
                notices.append(why)
            return entries
    raise AssertionError("the last attempt returns or raises")


async def _read_pages(connection: McpConnection, method: str, key: str) -> tuple[list[Any], str]:
    """Returns the entries of all pages, and why reading ended early; "" if it did not."""
    entries: list[Any] = []
    names: set[object] = set()
    cursors: set[object] = set()
    cursor: object = None
    empty_pages = repeated = 0
    for number in range(1, MAX_PAGES + 1):
        page = await connection.request(method, {} if cursor is None else {"cursor": cursor})
        content = page.get(key)
        content = content if isinstance(content, list) else []
        # Two entries of one page that share a name are told apart later: only pages repeat each other.
        news = [each for each in content if _name_of(each) not in names]
        names.update(map(_name_of, news))
        entries += news
        repeated += len(content) - len(news)
        empty_pages = 0 if content else empty_pages + 1
        cursor = page.get("nextCursor")
        if cursor is None or cursor == "" or len(entries) > MAX_ENTRIES:
            break
        if isinstance(cursor, bool) or not isinstance(cursor, str | int):
            return entries, f"page {number} names the next one by something other than text: the rest is not read"
        if cursor in cursors:
            return entries, f"page {number} leads back to an earlier page, so reading ends there"
        if (content and not news) or empty_pages == MAX_EMPTY_PAGES:
            return entries, f"page {number} has nothing new, and leads to another: reading ends there"
        cursors.add(cursor)
    else:
        return entries, f"it has more than {MAX_PAGES} pages: the rest is not read"
    why = f"{repeated} entries came on more than one page, and are offered once" if repeated else ""
    return entries[: MAX_ENTRIES + 1], why  # one more, so that the cut is noticed


def _name_of(entry: object) -> str:
    """Returns what tells an entry from others of its list: the name, the URI of a resource, else all of it."""
    names = [entry.get(each) for each in ("uri", "uriTemplate", "name")] if isinstance(entry, Mapping) else []
    return next((name for name in names if isinstance(name, str)), "") or dump_json(entry)
