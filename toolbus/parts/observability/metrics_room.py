"""Serves the counts of the bus at ``/metrics``, and drops those of tools that left the catalog.

Its code is loaded by the first request, so a bus that is not scraped does not pay for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room
from toolbus.bus.web_paths import Message, Receive, Send
from toolbus.parts.observability.traces_room import TracesRoom

if TYPE_CHECKING:
    from toolbus.parts.observability.bus_metrics import BusMetrics

log = logging.getLogger("toolbus.metrics")

PATH = "/metrics"
FORGET_SECONDS = 5.0  # between two checks of some of the counted tools


class MetricsRoom(Room):
    """The metrics of one bus, unless the configuration turns them off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._metrics: BusMetrics | None = None  # None until it is first needed
        self._forgetting: asyncio.Task[None] | None = None  # None until started

    async def open(self) -> None:
        """Adds the path."""
        config = self.core.config
        if config.metrics and (config.http != "off" or config.https is not None):
            self.core.web.add(PATH, self._serve)

    async def start(self) -> None:
        """Begins to drop tools that left the catalog."""
        if self.core.config.metrics:
            self._forgetting = asyncio.get_running_loop().create_task(self._forget(), name="toolbus metrics")

    async def stop(self) -> None:
        """Stops dropping tools."""
        if self._forgetting is not None:
            self._forgetting.cancel()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type.

        Args:
            accept: the header of that name; "" without one.
        """
        from toolbus.parts.observability.exposition import content_type_for, write

        if self._metrics is None:
            from toolbus.parts.observability.bus_metrics import BusMetrics

            self._metrics = BusMetrics(self.core, self._dropped_spans)
        content_type = content_type_for(accept)
        return write(self._metrics.families(), content_type), content_type

    def _dropped_spans(self) -> int:
        traces = self.core.rooms.find(TracesRoom)
        return traces.dropped if traces is not None else 0

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            try:
                self.core.metrics.forget(time.monotonic(), self.core.registry.has)
            except Exception:
                log.exception("a fault of the bus while it looked for tools that left the catalog")

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH:
            await _respond(send, 404, f"there is nothing at this path: metrics are at {PATH}\n".encode())
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, f"{PATH} is read with GET\n".encode(), allow="GET, HEAD")
            return
        accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
        body, content_type = self.exposition(accept)
        await _respond(send, 200, body, content_type=content_type, is_head=scope["method"] == "HEAD")


async def _respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: str = "text/plain; charset=utf-8",
    allow: str = "",
    is_head: bool = False,
) -> None:
    headers = [
        (b"content-type", content_type.encode("latin-1")),
        (b"content-length", str(len(body)).encode("ascii")),
        (b"cache-control", b"no-store"),
        (b"vary", b"Accept"),
    ]
    if allow:
        headers.append((b"allow", allow.encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else body})
