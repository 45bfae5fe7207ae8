"""Serves grpc.health.v1: the bus itself, its service, and one name for each source.

A source is SERVING while one of its sessions answers or one of its callback URLs accepts connections, NOT_SERVING from
the moment it disconnects or is suspect until its grace period ends or its callback tools are withdrawn, and unknown
afterwards. Nothing is stored: every request is answered from the sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from toolbus.bus.access.identity import Identity
from toolbus.bus.streams.doors import end_rpc, rpc_identity
from toolbus.common.text import quote
from toolbus.errors import Unauthenticated

SERVICE = "toolbus.v1.ToolBusService"
SOURCE_PREFIX = "toolbus.source."
MAX_OPEN_WATCHES = 250  # of the bus itself; beyond, clients that may not use it are refused

Context = grpc.aio.ServicerContext[Any, Any]
_Status = pb.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """Answers Check, Watch and List.

    Args:
        serving: whether the bus takes calls.
        source: whether a source answers; None where it is unknown.
        sources: the known sources.
        hides: whether a source does not exist for an identity.
        current: returns an identity as it is now, and raises Unauthenticated where its key has ended.
    """

    def __init__(
        self,
        serving: Callable[[], bool],
        source: Callable[[str], bool | None],
        sources: Callable[[], Iterable[str]],
        hides: Callable[[str, Identity], bool],
        current: Callable[[Identity], Identity],
    ) -> None:
        self._serving = serving
        self._source = source
        self._sources = sources
        self._hides = hides
        self._current = current
        self._watched: dict[str, set[asyncio.Event]] = {}  # service → the watchers that wait for its next change

    def is_watched(self) -> bool:
        """Tells whether as many streams watch the bus itself as may do so without a key."""
        return len(self._watched.get("", ())) >= MAX_OPEN_WATCHES

    def changed(self, service: str) -> None:
        """Notifies the watchers of a service."""
        for event in self._watched.get(service, ()):
            event.set()

    def source_changed(self, source: str) -> None:
        """Notifies the watchers of a source."""
        if self._watched:
            self.changed(SOURCE_PREFIX + source)

    def keys_changed(self) -> None:
        """Notifies every watcher: its key may have ended, or its scopes may have changed."""
        for service in list(self._watched):
            self.changed(service)

    def status(self, service: str) -> int | None:
        """Returns the status of a service; None where the service is unknown, or hidden from the caller.

        Raises:
            Unauthenticated: the caller's key has ended.
        """
        serving: bool | None = None
        if service in ("", SERVICE):
            serving = self._serving()
        elif service.startswith(SOURCE_PREFIX):
            source = service[len(SOURCE_PREFIX) :]
            if not self._hides(source, self._current(rpc_identity())):
                serving = self._source(source)
        if serving is None:
            return None
        return _Status.SERVING if serving else _Status.NOT_SERVING  # type: ignore[no-any-return]

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Returns the status of a service; NOT_FOUND where the service is unknown."""
        status = self.status(request.service)
        if status is None:
            await end_rpc(
                context,
                "NOT_FOUND",
                f"service {quote(request.service, 200)} is unknown: use '', {SERVICE!r} or {SOURCE_PREFIX}<source>",
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """Sends the status of a service now and whenever it changes; SERVICE_UNKNOWN while the service is unknown.

        It ends with the caller's key.
        """
        changed = asyncio.Event()
        watchers = self._watched.setdefault(request.service, set())
        watchers.add(changed)
        sent: int | None = None  # the last status that was sent
        try:
            while True:
                changed.clear()
                status = self.status(request.service)
                status = _Status.SERVICE_UNKNOWN if status is None else status
                if status != sent:
                    sent = status
                    await context.write(pb.HealthCheckResponse(status=status))
                await changed.wait()
        except Unauthenticated as error:
            await end_rpc(context, "UNAUTHENTICATED", str(error))
        finally:
            watchers.discard(changed)
            if not watchers:
                self._watched.pop(request.service, None)

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        """Returns the status of every service."""
        names = ["", SERVICE, *(SOURCE_PREFIX + source for source in self._sources())]
        statuses = {name: self.status(name) for name in names}
        return pb.HealthListResponse(
            statuses={
                name: pb.HealthCheckResponse(status=status) for name, status in statuses.items() if status is not None
            }
        )
