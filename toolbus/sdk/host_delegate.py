"""Passes the changes of the catalog and the notifications of plugins to the readers of a host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolbus.errors import Code, Stage
from toolbus.sdk.listing import CatalogChange, ListedTool
from toolbus.sdk.notification import Notification
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.sdk.peer_delegate import ANSWERED, Delegate, IncomingCall
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

Feed = Literal["catalog", "notifications"]
Reader = Callable[[Any], object]
_SUBSCRIPTIONS = {"catalog": wire.SUBSCRIPTION_CATALOG, "notifications": wire.SUBSCRIPTION_NOTIFICATIONS}


class HostDelegate(Delegate):
    """The `Delegate` of a host. Everything runs on the connection's loop, but for `subscribe` and `settling`."""

    def __init__(self, settle: float) -> None:
        """Makes the delegate of a connection whose `ConnectionTimings.settle` is given."""
        self._settle = settle
        self._settled_at = 0.0  # until when plugins may be reconnecting after a restart of the bus
        self._boot_id = ""  # of the bus that answered last; "" before an attach, or if the bus states none
        self._subscribed: dict[Feed, None] = {}  # the feeds that have had a reader
        self._readers: dict[Feed, set[Reader]] = {"catalog": set(), "notifications": set()}
        self._mirror: dict[tuple[str, str], ListedTool] = {}  # (name, source) → tool, as of `_revision`
        self._revision = -1  # below 0 until the bus has sent a full list
        self._newest = 0  # the number of the last notification; 0 before the first

    def subscribe(self, feed: Feed) -> bool:
        """Subscribes to a feed from the next attach on; returns False if it was subscribed before."""
        if feed in self._subscribed:
            return False
        self._subscribed[feed] = None
        return True

    def tools(self) -> Sequence[pb.Tool]:
        return ()

    def subscriptions(self) -> Sequence[Any]:
        return [_SUBSCRIPTIONS[feed] for feed in list(self._subscribed)]

    def notifications_after(self) -> int:
        return self._newest

    @property
    def settling(self) -> bool:
        """Whether the bus has restarted so recently that plugins may still be reconnecting."""
        return time.monotonic() < self._settled_at

    def attached(self, attached: wire.Attached) -> None:
        if self._boot_id not in ("", attached.boot_id):
            self._settled_at = time.monotonic() + self._settle
        self._boot_id = attached.boot_id

    def event(self, event: wire.Event) -> None:
        match event.WhichOneof("kind"):
            case "catalog":
                self._publish("catalog", self._mirrored(CatalogChange.from_wire(event.catalog)))
            case "notification":
                notification = Notification.from_wire(event.notification)
                self._newest = max(self._newest, notification.number)
                self._publish("notifications", notification)

    async def read(self, feed: Feed, reader: Reader) -> None:
        """Passes a feed on to a reader; the first item of the catalog's is the whole catalog, if it is known."""
        self._readers[feed].add(reader)
        if feed == "catalog" and self._revision >= 0:
            reader(CatalogChange(self._revision, True, tuple(self._mirror.values())))

    async def unread(self, feed: Feed, reader: Reader) -> None:
        """Stops passing a feed on to a reader."""
        self._readers[feed].discard(reader)

    def _publish(self, feed: Feed, item: Any) -> None:
        for reader in self._readers[feed]:
            reader(item)

    def _mirrored(self, change: CatalogChange) -> CatalogChange:
        if change.full:
            self._mirror.clear()
        for removed in change.removed:
            self._mirror.pop((removed.name, removed.source), None)
        for listed in (*change.added, *change.changed):
            self._mirror[listed.name, listed.source] = listed
        self._revision = change.revision
        return change


def refuse_calls(
    connection: Connection, session: PeerSession, calls: Mapping[str, pb.ToolCall]
) -> Mapping[str, IncomingCall]:
    """Refuses calls of the bus: a host offers no tools."""
    error = CallError(Code.NOT_FOUND, "this peer offers no tools", Stage.NOT_DISPATCHED)
    for call_id in calls:
        connection.answer(session, Result(call_id, is_error=True, error=error))
    return dict.fromkeys(calls, ANSWERED)
