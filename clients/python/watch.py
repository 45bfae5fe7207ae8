"""Passes the events of a peer's subscriptions to readers: changes of the catalog, notifications of plugins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from toolbus.v1 import tool_bus_service_pb2 as messages

CATALOG, NOTIFICATIONS = messages.SUBSCRIPTION_CATALOG, messages.SUBSCRIPTION_NOTIFICATIONS


class Watch:
    """The subscriptions of one peer, over all its streams."""

    def __init__(self) -> None:
        self.subscribed: list[messages.Subscription.ValueType] = []
        self.newest = 0  # the number of the newest notification
        self._readers: dict[asyncio.Queue[Any], messages.Subscription.ValueType] = {}
        self._catalog: dict[tuple[str, str], messages.ListedTool] = {}  # by name and source
        self._revision = 0  # of the catalog here; 0 before the first list came

    def catalog(self, change: messages.CatalogChange) -> None:
        """Takes a change; one that is `full` replaces everything. A long list continues in further changes."""
        if change.full:
            self._catalog.clear()
        for removed in change.removed:
            self._catalog.pop((removed.name, removed.source), None)
        for listed in (*change.added, *change.changed):
            self._catalog[listed.tool.name, listed.source] = listed
        self._revision = change.revision
        self._pass_on(CATALOG, change)

    def notification(self, notification: messages.Notification) -> None:
        """Takes a notification."""
        self.newest = max(self.newest, notification.number)
        self._pass_on(NOTIFICATIONS, notification)

    async def read(self, feed: messages.Subscription.ValueType) -> AsyncGenerator[Any, None]:
        """Yields the events from now on; for the catalog the whole catalog first."""
        items: asyncio.Queue[Any] = asyncio.Queue()
        if feed == CATALOG and self._revision:
            whole = messages.CatalogChange(revision=self._revision, full=True, added=self._catalog.values())
            items.put_nowait(whole)
        self._readers[items] = feed
        try:
            while (item := await items.get()) is not None:
                yield item
        finally:
            del self._readers[items]

    def close(self) -> None:
        """Ends all readers."""
        for items in self._readers:
            items.put_nowait(None)

    def _pass_on(self, feed: messages.Subscription.ValueType, item: Any) -> None:
        for items, subscribed in self._readers.items():
            if subscribed == feed:
                items.put_nowait(item)
