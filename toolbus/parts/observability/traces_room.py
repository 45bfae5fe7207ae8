"""Traces calls where the configuration names a collector, and exports their spans to it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room
from toolbus.bus.loopback import mask
from toolbus.common.version import VERSION
from toolbus.errors import SetupError
from toolbus.parts.observability.settings import TraceSettings

if TYPE_CHECKING:
    from toolbus.parts.observability.span_export import SpanExport

log = logging.getLogger("toolbus.traces")


class TracesRoom(Room):
    """The spans of one bus; without a collector calls are not traced."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._export: SpanExport | None = None  # None: calls are not traced

    @property
    def dropped(self) -> int:
        """How many spans were not exported."""
        return self._export.dropped if self._export is not None else 0

    async def open(self) -> None:
        """Begins to make spans.

        Raises:
            SetupError: the extra `otel` is not installed.
        """
        config = self.core.config.part(TraceSettings)
        if config.traces is None:
            if config.trace_ratio:
                log.warning("trace_ratio has no effect: name a collector in traces")
            return
        try:
            from toolbus.parts.observability.span_export import SpanExport

            self._export = SpanExport(
                *(config.url, VERSION, self.core.sessions.presence.handshake.boot_id),
                collect_seconds=self.core.program.timings.span_seconds,
            )
        except ImportError as missing:
            raise SetupError(
                f"traces names a collector, {mask(config.traces)}, and {missing.name} is not installed: install "
                "'toolbus[otel]', or set traces to off"
            ) from missing
        except Exception as problem:  # one of OpenTelemetry's variables, which are set for other programs too
            read = ", ".join(name for name in sorted(os.environ) if name.startswith("OTEL_")) or "its settings"
            why = f"{type(problem).__name__}: {mask(str(problem))}"
            log.warning("calls are not traced: the exporter does not start with %s: %s", read, why)
            return
        self._export.start()
        self.core.calls.dispatcher.traces.start(self._export.take, ratio=config.trace_ratio, most=config.trace_most)
        log.info("traces go to %s", mask(config.url))

    async def stop(self) -> None:
        """Exports the queued spans, for a short time."""
        if self._export is not None:
            self.core.calls.dispatcher.traces.stop()
            await asyncio.to_thread(self._export.stop)
