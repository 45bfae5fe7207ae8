"""Records who changed what on the bus, in the data directory, as a chain that shows later changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call_records import Row
from toolbus.bus.core import Core, Room
from toolbus.common.newest import NewestCache
from toolbus.errors import InvalidRequest
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.audit.audit_log import FOLDER, AuditWriter
from toolbus.parts.audit.settings import AuditSettings

MAX_CALLS = 1_000  # of one line
CALLS_SECONDS = 1.0  # after which fewer become a line
LIMITED_SECONDS = 10.0  # between two lines about calls that the quota of one identity refuses
MAX_LIMITED = 1_000  # identities whose last such line is remembered


class AuditRoom(Room):
    """The audit of one bus; without a data directory nothing is written."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._writer: AuditWriter | None = None  # None: nothing is written
        self._calls: list[Row] = []  # not yet written
        # By identity, when its last such line was recorded, and how many calls were refused since.
        self._limited_calls = NewestCache[str, tuple[float, int]](MAX_LIMITED)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that shows the head of the audit."""
        return [self.audit_head]

    @llm_tool(
        description="The number and hash of the newest line of the audit: stored elsewhere, the hash shows later "
        "whether lines were cut or rewritten."
    )
    async def audit_head(self) -> dict[str, Any]:
        """Returns the head of the audit, for `toolbus audit verify --head`."""
        head = self.core.audit.head
        if head is None:
            raise InvalidRequest("this bus has no audit: start it with a data directory, and without audit = false")
        return {"seq": head[0], "head": head[1]}

    async def open(self) -> None:
        """Opens the files and records the start of the bus.

        Raises:
            SetupError: the files cannot be written.
        """
        config, timings, settings = self.core.config, self.core.program.timings, self.core.config.part(AuditSettings)
        if config.data_dir is None or not settings.audit:
            return
        writer = AuditWriter(
            config.data_dir / FOLDER,
            self.core.sessions.presence.handshake.boot_id,
            sync_seconds=timings.audit_sync_seconds,
            head_seconds=timings.audit_head_seconds,
        )
        writer.open()
        self._writer = writer
        self.core.audit.open(writer, required=settings.audit_required)
        self.core.audit.record("start", target=" ".join(config.grpc), why=f"http {config.http}")
        seams = self.core.calls.dispatcher.seams
        seams.on_denied, seams.on_limited = self._denied, self._limited
        if settings.audit_calls:
            self.core.calls.records.pass_on(self._take)
            self.repeat(CALLS_SECONDS, self._flush, "wrote calls into the audit")

    async def stop(self) -> None:
        """Writes the queued lines, and records that the bus stopped."""
        self._flush()
        if self._writer is not None:
            self.core.audit.record("stop")
            self.core.audit.close()
            await asyncio.to_thread(self._writer.close)

    def _denied(self, principal: Principal, name: str, why: str) -> None:
        self.core.audit.record("denied", principal, target=name, outcome="refused", why=why)

    def _limited(self, principal: Principal, calls: int, why: str) -> None:
        now, name = time.monotonic(), principal.identity.name
        noted_at, count = self._limited_calls.get(name, (-LIMITED_SECONDS, 0))
        count += calls
        if now - noted_at >= LIMITED_SECONDS:
            self.core.audit.record("rate", principal, outcome="refused", why=why, calls=count)
            noted_at, count = now, 0
        self._limited_calls[name] = noted_at, count

    def _take(self, row: Row) -> None:
        calls = self._calls
        calls.append(row)
        if len(calls) >= MAX_CALLS:
            self._flush()

    def _flush(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, []
            self.core.audit.record_calls(calls, self.core.calls.records.began)
