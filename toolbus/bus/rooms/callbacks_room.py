"""Holds the tools that are registered with a callback URL, by REST or by gRPC without a session.

The room is light: the code that posts to callback URLs is loaded with the first such tool.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from toolbus.bus.access.identity import principal_of
from toolbus.bus.core import Core, Room
from toolbus.bus.storage.registration_store import RegistrationStore
from toolbus.errors import SetupError
from toolbus.sdk import ToolScope, llm_tool
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.bus.gateway.registrations import Registrations


class CallbacksRoom(Room):
    """The callback tools of one bus, persisted in its data directory."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._store: RegistrationStore | None = None  # None: registrations end with the bus
        self._registrations: Registrations | None = None  # None until the first
        core.signals.on_change.append(self._persist)

    @property
    def registrations(self) -> Registrations:
        """The callback tools; they belong to the running loop."""
        if self._registrations is None:
            from toolbus.bus.gateway.registrations import Registrations

            self._registrations = Registrations(self.core, self._store)
            seconds = self.core.program.timings.note_seconds
            self.repeat(seconds, self._registrations.keep_house, "kept the house of callback tools")
        return self._registrations

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tool of this room."""
        return [self.confirm]

    @llm_tool(
        description="Trusts the programs that listen at the callback URLs of a source's unconfirmed tools, as if they "
        "had just registered them."
    )
    async def confirm(self, scope: ToolScope, source: str) -> dict[str, Any]:
        """Confirms the tools of a source that were restored and whose plugin has not shown that it is there."""
        with self.core.audit.operation("confirm", principal_of(scope), target=source):
            confirmed = self._registrations.confirm(source) if self._registrations is not None else []
        return {"source": source, "confirmed": confirmed}

    async def open(self) -> None:
        """Restores the registrations of the data directory; offers at once the tools whose plugin listens.

        Raises:
            SetupError: the client of callback URLs is not installed, or the registrations are damaged.
        """
        if importlib.util.find_spec("aiohttp") is None:  # importing it here would delay the start
            raise SetupError("callback URLs need aiohttp, which is not installed: pip install 'toolbus[server]'")
        if self.core.config.data_dir is None:
            return
        self._store = RegistrationStore(self.core.program.store)
        records = self._store.load()
        self.core.catalog.roles.open(self.core.program.store)  # before tools that are for them
        if records:
            await self.registrations.restore(records)

    async def stop(self) -> None:
        """Persists the rest."""
        if self._registrations is not None:
            await self._registrations.stop()

    def serving(self, source: str) -> bool | None:
        """Tells whether a callback URL of a source accepts connections; None for a source without one."""
        return None if self._registrations is None else self._registrations.serving(source)

    def sources(self) -> Iterable[str]:
        """Names the sources with callback tools."""
        return () if self._registrations is None else self._registrations.sources

    def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        """Registers tools that come by gRPC without a session."""
        return self.registrations.register_by_grpc(request)

    def _persist(self) -> None:
        if self._registrations is not None:
            self._registrations.persist()
