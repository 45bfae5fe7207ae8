"""grpc.health.v1 over what the bus knows: the bus itself, its service, and one name per source.

A source is SERVING while one of its sessions answers or somebody accepts connections at one of its callback URLs,
NOT_SERVING from the moment it is lost or suspect until its grace period ends or its callback tools are withdrawn, and
unknown afterwards. Nothing is stored: each question is answered from the sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

SERVICE = "toolbus.v1.ToolBusService"
SOURCE_PREFIX = "toolbus.source."

Context = grpc.aio.ServicerContext[Any, Any]
_Status = pb.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """Answers Check, Watch and List.

    Args:
        serving: whether the bus takes calls.
        source: whether a source is well; None where it is not known.
        sources: the sources that are known.
    """

    def __init__(
        self,
        serving: Callable[[], bool],
        source: Callable[[str], bool | None],
        sources: Callable[[], Iterable[str]],
    ) -> None:
        self._serving = serving
        self._source = source
        self._sources = sources
        self._watched: dict[str, set[asyncio.Event]] = {}  # service → those who wait for it to change

    def changed(self, service: str) -> None:
        """Wakes those who watch a service."""
        for waiting in self._watched.get(service, ()):
            waiting.set()

    def source_changed(self, source: str) -> None:
        """Wakes those who watch a source."""
        if self._watched:
            self.changed(SOURCE_PREFIX + source)

    def status(self, service: str) -> int | None:
        """The status of a service, or None where there is no such service."""
        if service in ("", SERVICE):
            well: bool | None = self._serving()
        elif service.startswith(SOURCE_PREFIX):
            well = self._source(service[len(SOURCE_PREFIX) :])
        else:
            well = None
        if well is None:
            return None
        return _Status.SERVING if well else _Status.NOT_SERVING  # type: ignore[no-any-return]

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Says how a service is; NOT_FOUND where there is none."""
        status = self.status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service[:200]!r}: ask for '', {SERVICE!r} or {SOURCE_PREFIX}<source>",
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """Says how a service is, and again whenever that changes; SERVICE_UNKNOWN while there is none."""
        waiting = asyncio.Event()
        watchers = self._watched.setdefault(request.service, set())
        watchers.add(waiting)
        told: int | None = None
        try:
            while True:
                waiting.clear()
                status = self.status(request.service)
                shown = _Status.SERVICE_UNKNOWN if status is None else status
                if shown != told:
                    told = shown
                    await context.write(pb.HealthCheckResponse(status=shown))
                await waiting.wait()
        finally:
            watchers.discard(waiting)
            if not watchers:
                self._watched.pop(request.service, None)

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        """Says how every service is."""
        names = ["", SERVICE, *(SOURCE_PREFIX + source for source in self._sources())]
        statuses = {name: self.status(name) for name in names}
        return pb.HealthListResponse(
            statuses={
                name: pb.HealthCheckResponse(status=status) for name, status in statuses.items() if status is not None
            }
        )
