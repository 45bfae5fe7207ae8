"""Connects hosts: the base of `Host` and `SyncHost`."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from toolbus.errors import PeerLost
from toolbus.sdk.connection import Connection
from toolbus.sdk.connection_settings import ConnectionSettings, find_credential
from toolbus.sdk.host_delegate import Feed, HostDelegate, refuse_calls
from toolbus.sdk.listing import Listing
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential
    from toolbus.sdk.plugin_client import Plugin


class HostBase:
    """The base of both hosts: the settings, the connection, its end."""

    def __init__(
        self,
        address: str | None = None,
        *,
        source: str | None = None,
        instance: str | None = None,
        max_in_flight: int = 0,
        token: str | None = None,
        credential: Credential | str | Path | None = None,
    ) -> None:
        """Makes a host; it connects when it is entered or started.

        Args:
            address: where the bus listens; None means TOOLBUS_ADDRESS, then the credential's, then 127.0.0.1:48930.
            source: the caller's name in the bus's records and logs; None means ``host:`` and the process's id.
            instance: tells several hosts of one source apart; None generates one.
            max_in_flight: calls that it may have in flight at once; further ones wait here. 0 means 256.
            token: proves that this host may use a bound source; None means TOOLBUS_TOKEN.
            credential: proves who this host is, to a bus on another machine: a file of `toolbus keys add`. None means
                TOOLBUS_CREDENTIAL. The file is read again at each connection.

        Raises:
            SetupError: an argument breaks its rule, or the credential cannot be used.
        """
        settings = ConnectionSettings(
            source or f"host:{os.getpid()}",
            address or "",
            instance or "",
            max_in_flight,
            token=token or "",
            credential=find_credential(credential),
        )
        self._delegate = HostDelegate(settings.timings.settle)
        self._connection = Connection(settings, self._delegate, refuse_calls)
        self._began = False
        self._closed = False
        self._lender: Plugin | None = None  # offers this host's model; None while it lends none

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connection!r}>"

    @property
    def source(self) -> str:
        """The caller's name in the bus's records and logs."""
        return self._connection.settings.source

    @property
    def identity(self) -> str:
        """The name that this host's key proved, as the bus reported at the last attach; "" without a key."""
        return self._connection.identity

    @property
    def expires(self) -> datetime | None:
        """When that key expires, as the bus reported at the last attach; None if it does not."""
        return self._connection.expires

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the bus now; without one, calls wait for it."""
        return self._began and self._connection.calls.connected

    @property
    def settling(self) -> bool:
        """Whether the bus has restarted so recently that its list may lack tools: their plugins are reconnecting."""
        return self._delegate.settling

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the error that no bus answered within some seconds: its address, why, and how to fix it."""
        return self._connection.unanswered(seconds)

    def _begin(self, feed: Feed | None = None) -> Connection:
        if self._closed:
            raise PeerLost(f"host {self.source!r} is closed: make a new one")
        subscribe = feed is not None and self._delegate.subscribe(feed)
        if not self._began:
            self._began = True
            self._connection.start()
        elif subscribe:
            self._connection.tools_changed()  # attaches again, now with the subscription
        return self._connection

    async def _list(self, request: wire.ListRequest, timeout: float) -> Listing:
        """Requests all pages of a list; on the connection's loop."""
        pages: list[wire.ListResponse] = []
        while not pages or pages[-1].next_page_token:
            request.page_token = pages[-1].next_page_token if pages else ""
            pages.append(await self._connection.unary("List", request, timeout))
        return Listing.of_pages(pages, request.if_revision)

    async def _finish_calls(self, grace_seconds: float) -> None:
        """Waits until no call is in flight; on the connection's loop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        while self._connection.calls.unfinished and loop.time() < until:
            await asyncio.sleep(0.01)  # an event for each result would make every call slower
