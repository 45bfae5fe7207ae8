"""Offers the bus's own tools to operators, and keeps what they grant and deny at run time."""

from __future__ import annotations

from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.core import Core
from toolbus.bus.operators.admin_tools import AdminTools
from toolbus.bus.operators.grants import Grants
from toolbus.bus.room import Room
from toolbus.functions.tool_spec import spec_of


class OperatorsRoom(Room):
    """The operators' tools, of source ``toolbus``, and the grants of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.grants = Grants(core.registry, core.policy, core.view, core.presence, core.signals)
        self._tools = AdminTools(core, self.grants)
        for method in self._tools.tools():
            core.local.offer(BUS_SOURCE, spec_of(method), qualified=True)
        if "search" in core.config.offered:
            core.local.offer(f"{BUS_SOURCE}.search", spec_of(self._tools.search_tools))

    async def open(self) -> None:
        """Restores the grants of the data directory and persists those to come."""
        if self.core.config.data_dir is not None:
            self.grants.keep_in(self.core.config.data_dir, self.core.config.permissions)
