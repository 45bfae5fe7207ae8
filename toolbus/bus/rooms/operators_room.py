"""Offers the bus's own tools to operators, and persists the permissions that they change at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.core import Core, Room
from toolbus.bus.operators.admin_tools import AdminTools
from toolbus.bus.operators.grants import Grants


class OperatorsRoom(Room):
    """The operators' tools, of source ``toolbus``, and the grants of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.grants = Grants(
            core.catalog.registry,
            core.catalog.policy,
            core.catalog.view,
            core.sessions.presence,
            core.signals,
            core.audit,
        )
        self._tools = AdminTools(core, self.grants)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools."""
        return self._tools.tools()

    async def open(self) -> None:
        """Restores the stored roles and grants, and persists those to come."""
        self.core.catalog.roles.open(self.core.program.store)
        self.grants.persist_in(self.core.program.store, self.core.config.permissions)
