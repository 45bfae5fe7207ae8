from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parts.moving.upstream.main_server import MainServer
from tests.support.core_model import PeerDouble, offered
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.storage.store import Store
from toolbus.parts.moving.upstream.ownership import StoredOwnership
from toolbus.parts.moving.upstream.sync import MAX_RESPONSE_BYTES, Upstream
from toolbus.parts.moving.upstream.sync_state import UpstreamTimings
from toolbus.protocol.tool import Tool

BASE = "http://127.0.0.1:48916"
SHORT = UpstreamTimings(
    poll_seconds=0.03,
    debounce_seconds=0.002,
    first_backoff_seconds=0.01,
    max_backoff_seconds=0.05,
    first_retry_seconds=0.03,
)


class Side:
    """Our side: a real registry whose changes wake the upstream, as the bus does it."""

    def __init__(self, *roles: str, grace_seconds: float = 0.0) -> None:
        self.registry = Registry(roles or ("default",), grace_seconds=grace_seconds)
        self.view = CatalogView(self.registry, Policy())
        self.warning_changes = 0  # how often the upstream said that warnings changed
        self.timings = SHORT  # of the upstream, until it connects
        self.max_response_bytes = MAX_RESPONSE_BYTES  # of the upstream, until it connects
        self.upstream: Upstream | None = None
        self._watchers: list[asyncio.Event] = []
        self._warned = asyncio.Event()

    def offer(self, source: str, *tools: Tool, qualified: bool = False) -> PeerDouble:
        handler = PeerDouble(source)
        self.registry.register(handler, offered(*tools), qualified=qualified)
        self.changed()
        return handler

    def withdraw(self, handler: PeerDouble) -> None:
        self.registry.withdraw(handler)
        self.changed()

    def changed(self) -> None:
        for event in self._watchers:
            event.set()

    async def watch(self) -> AsyncIterator[object]:
        event = asyncio.Event()
        self._watchers.append(event)
        while True:
            yield None
            await event.wait()
            event.clear()

    def _on_warning(self) -> None:
        self.warning_changes += 1
        self._warned.set()
        self.changed()

    async def connect(self, url: str, base: str = BASE, store: Store | None = None) -> Upstream:
        self.upstream = Upstream(
            url,
            self.registry,
            self.view,
            callback_base=base,
            bus_id="b1",
            changed=self.watch,
            on_warning=self._on_warning,
            ownership_file=StoredOwnership(store, url) if store is not None else None,
            timings=self.timings,
            max_response_bytes=self.max_response_bytes,
        )
        await self.upstream.start()
        return self.upstream

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds after some warning; fails after 5 s."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                self._warned.clear()
                await self._warned.wait()

    def warning(self, name: str, role: str = "") -> str:
        entry = self.registry.find(name, role)
        assert entry is not None
        return entry.warnings.get("upstream", "")


@pytest.fixture
async def server() -> AsyncIterator[MainServer]:
    async with MainServer() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store of a data directory."""
    with closing(Store.of(tmp_path / "data")) as opened:
        opened.open()
        yield opened


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    made = Side()
    yield made
    if made.upstream is not None:
        await made.upstream.stop()


@pytest.fixture
def short_requests(side: Side) -> None:
    """Requests time out after a tenth of a second."""
    side.timings = replace(side.timings, request_seconds=0.1)
