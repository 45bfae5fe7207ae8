"""Sets which users may call which tools of a program, beside the rules that a bus has already."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from toolbus.bus.catalog.policy import EVERYONE, AccessRules
from toolbus.tools.backend import Backend


class ToolPermissions:
    """The rules that a program has set for tools. Safe from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._tools: frozenset[str] = frozenset()  # with a rule that was set here

    def __repr__(self) -> str:
        return f"<ToolPermissions tools={len(self._tools)}>"

    def set(self, permissions: Mapping[str, Iterable[str]]) -> None:
        """Replaces the rules that were set here before; see `ToolRegistry.set_permissions`.

        Raises:
            InvalidRequest: naming the value that breaks a rule.
        """
        rules = dict(permissions)

        def revised(before: AccessRules) -> AccessRules:
            tables: dict[str, dict[str, Any]] = {**before.as_tables()}
            others = {name: users for name, users in tables["tools"].items() if name not in self._tools}
            return AccessRules.read(tables | {"tools": others | rules})

        with self._lock:
            self._backend.view.revise(revised)
            self._tools = frozenset(rules)
        self._backend.changed()

    def allow(self, tool_name: str, user_id: str) -> bool:
        """Tells whether a user may call a tool; on a bus by all rules that hold for it."""
        permissions, entry = self._backend.view.permissions, self._backend.registry.find(tool_name)
        if entry is None:
            rules = [permissions.tools[tool_name]] if tool_name in permissions.tools else []
        else:
            rules = [users for _, _, users in permissions.rules_for(entry)]
        return all(EVERYONE in users or user_id in users for users in rules)
