"""Taking tools out of the catalog, whoever asks by whichever way, and telling the sessions that lose them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams.peer import Peer
from toolbus.errors import InvalidRequest, NotPermitted
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.sessions")


class Withdrawal:
    """Unregister and clear.

    Args:
        on_change: called after the catalog may have changed.
    """

    def __init__(self, registry: Registry, on_change: Callable[[], None]) -> None:
        self._registry = registry
        self._on_change = on_change

    def unregister(self, name: str, role: str = "", owner: Peer | None = None) -> Outcome:
        """Withdraws one tool, in one role or in all.

        Args:
            owner: the session that asks; only its source's tool then. None: whoever owns the tool.

        Raises:
            UnknownRole: the role is not configured.
            InvalidRequest, NotPermitted: there is no such thing to ask for.
        """
        if not name:
            raise InvalidRequest("name is empty: say which tool to unregister")
        entry = self._registry.find(name, role)
        if entry is not None and entry.source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be unregistered")
        outcome = self._registry.unregister(name, role, owner.source if owner else "")
        tell_owners(outcome, besides=owner)
        self._on_change()
        return outcome

    def clear(self, source: str, role: str = "") -> Outcome:
        """Withdraws every tool of a source, in one role or in all.

        Raises:
            UnknownRole: the role is not configured.
            InvalidRequest, NotPermitted: there is no such thing to ask for.
        """
        if not source:
            raise InvalidRequest("source is empty: say whose tools to clear")
        if source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be cleared")
        outcome = self._registry.clear(source, role)
        tell_owners(outcome)
        log.info("cleared source=%r tools=%d", source, outcome.count)
        self._on_change()
        return outcome


def tell_owners(outcome: Outcome, besides: Peer | None = None) -> None:
    """Tells sessions which of their tools others withdrew or overwrote, and the log of all that lost one."""
    for notice in outcome.lost:
        if notice.handler is besides:
            continue
        log.info("lost tool=%r source=%r to=%r", notice.name, notice.handler.source, notice.by_source)
        if not isinstance(notice.handler, Peer):
            continue
        event = wire.Event()
        if notice.by_source is not None:
            event.tool_overwritten.MergeFrom(
                wire.ToolOverwritten(name=notice.name, by_source=notice.by_source, roles=notice.roles)
            )
        else:
            event.tool_removed.MergeFrom(wire.ToolRemoved(name=notice.name, roles=notice.roles))
        notice.handler.tell(event)
