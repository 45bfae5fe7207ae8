"""Offers the bus's own tools to operators, and persists the permissions that they change at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.core import Core, Room
from toolbus.bus.operators.admin_tools import AdminTools
from toolbus.bus.operators.explainer import Explainer
from toolbus.bus.operators.grants import Grants
from toolbus.bus.operators.key_tools import KeyTools


class OperatorsRoom(Room):
    """The operators' tools, of source ``toolbus``, and the grants of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.grants = Grants(core.registry, core.policy, core.view, core.presence, core.signals, core.audit)
        self._tools = AdminTools(core, self.grants)
        self._explainer = Explainer(core)
        self._key_tools = KeyTools(core.config.keys_dir, core.audit)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools."""
        return [*self._tools.tools(), *self._key_tools.tools(), self._explainer.explain]

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the search for models."""
        return [self._tools.search_tools] if group == "search" else []

    async def open(self) -> None:
        """Restores the roles and grants of the data directory and persists those to come."""
        if self.core.config.data_dir is not None:
            self.core.roles.open(self.core.config.data_dir)
            self.grants.persist_in(self.core.config.data_dir, self.core.config.permissions)
