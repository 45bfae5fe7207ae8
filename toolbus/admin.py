"""The bus's own tools, of source ``toolbus``.

They are called over Invoke like any other, listed only when that source is asked for, and never exported to models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from toolbus.errors import Code, ToolBusError
from toolbus.presence import Presence
from toolbus.records import Records
from toolbus.registry import Registry
from toolbus.sdk import llm_tool

DRAIN_SECONDS = 30.0


class Admin:
    """Operators' tools of one bus.

    Args:
        stop: starts the end of the whole bus; called after the drain has been answered.
        changed: told when a role came or went, so that watchers hear of it.
    """

    def __init__(
        self,
        registry: Registry,
        presence: Presence,
        records: Records,
        stop: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._presence = presence
        self._records = records
        self._stop = stop
        self._changed = changed

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        return [self.drain, self.calls, self.stats, self.role_add, self.role_remove]

    @llm_tool(description="Asks a source's sessions to finish their calls and leave; without a source, the whole bus.")
    async def drain(self, source: str = "", grace_seconds: float = DRAIN_SECONDS) -> dict[str, Any]:
        """Drains a source or the bus."""
        if source:
            return {"source": source, "sessions": self._presence.drain_source(source, grace_seconds, time.monotonic())}
        sessions = len(self._presence.sessions)
        asyncio.get_running_loop().call_soon(self._stop)
        return {"source": "", "sessions": sessions}

    @llm_tool(description="The newest calls, newest first: id, tool, source, caller, seconds, outcome.")
    async def calls(self, limit: int = 50, source: str = "", name: str = "") -> list[dict[str, Any]]:
        """Lists records of ended calls."""
        found: list[dict[str, Any]] = []
        for record in self._records:
            if len(found) >= limit:
                break
            if (source and record.source != source) or (name and record.name != name):
                continue
            found.append(
                {
                    "call_id": record.call_id,
                    "name": record.name,
                    "source": record.source,
                    "caller": record.caller,
                    "seconds": round(record.seconds, 6),
                    "outcome": record.code.name if record.code else "OK",
                }
            )
        return found

    @llm_tool(description="What the bus has counted since it started.")
    async def stats(self) -> dict[str, Any]:
        """Counts sessions, tools and outcomes."""
        records = self._records
        return {
            "sessions": len(self._presence.sessions),
            "sources": len(self._presence.by_source),
            "revision": self._registry.revision,
            "roles": list(self._registry.roles),
            "late_results": records.late,
            "unowed_results": records.unowed,
            "outcomes": {_outcome(code): count for code, count in sorted(records.outcomes.items())},
        }

    @llm_tool(description="Adds a role; it gets every tool that is registered for all roles.")
    async def role_add(self, role: str) -> list[str]:
        """Adds a role."""
        if not role:
            raise ToolBusError("role is empty: name the role to add")
        self._registry.add_role(role)
        self._changed()
        return list(self._registry.roles)

    @llm_tool(description="Removes a role and the tools that it alone has.")
    async def role_remove(self, role: str) -> list[str]:
        """Removes a role."""
        self._registry.remove_role(role)
        self._changed()
        return list(self._registry.roles)


def _outcome(code: int) -> str:
    return Code(code).name if code else "OK"
