"""Withdraws tools from the catalog, by any way in, and notifies the sessions that lose them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from toolbus.bus.access.principal import OBSERVER, Principal
from toolbus.bus.audit.audit import Audit
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams.peer import Peer
from toolbus.errors import InvalidRequest, NotPermitted, UnknownRole
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.sessions")


class Withdrawal:
    """The operations unregister and clear.

    Args:
        on_change: called after the catalog may have changed.
        forget_refused: forgets the refused declarations of a name, role and source, "" being every one of them; returns
            how many.
    """

    def __init__(
        self,
        registry: Registry,
        on_change: Callable[[], None],
        audit: Audit,
        forget_refused: Callable[[str, str, str], int],
    ) -> None:
        self._registry = registry
        self._forget_refused = forget_refused
        self._audit = audit
        self._on_change = on_change

    def unregister(
        self,
        name: str,
        role: str = "",
        owner: Peer | None = None,
        principal: Principal = OBSERVER,
        *,
        hidden: bool = False,
    ) -> ChangeOutcome:
        """Withdraws one tool, in one role or in all, and forgets refused declarations of the name.

        Args:
            owner: the session that requests it: only a tool of its source is withdrawn. None: a tool of any source is.
            principal: who requests it, for the audit.
            hidden: whether the role may be one that does not exist, for which tools wait or were refused.

        Raises:
            UnknownRole: the role does not exist.
            InvalidRequest: the name is empty.
            NotPermitted: the tool belongs to the bus itself.
        """
        if not name:
            raise InvalidRequest("name is empty: give the name of the tool to unregister")
        known = not role or role in self._registry.roles
        if not known and not hidden:
            raise UnknownRole(role)
        entry = self._registry.find(name, role) if known else None
        if entry is not None and entry.source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be unregistered")
        self._audit.check()
        source = owner.source if owner else ""
        forgotten = self._forget_refused(name, role, source)
        if known or not forgotten:
            outcome = replace(self._registry.unregister(name, role, source, hidden=hidden), forgotten=forgotten)
        else:  # the tool was refused because its role does not exist
            outcome = ChangeOutcome(forgotten=forgotten)
        if outcome.names:
            principal = owner.principal if owner is not None else principal
            self._audit.record("withdraw", principal, target=name, peer=owner.session_id if owner is not None else "")
        notify_owners(outcome, except_for=owner)
        self._on_change()
        return outcome

    def clear(self, source: str, role: str = "", principal: Principal = OBSERVER) -> ChangeOutcome:
        """Withdraws every tool of a source, in one role or in all.

        Args:
            principal: who requests it, for the audit.

        Raises:
            UnknownRole: the role is not configured.
            InvalidRequest: the source is empty.
            NotPermitted: the source is the bus itself.
        """
        if not source:
            raise InvalidRequest("source is empty: give the source whose tools to clear")
        if source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be cleared")
        self._audit.check()
        self._forget_refused("", role, source)
        outcome = self._registry.clear(source, role)
        if outcome.count:
            count = outcome.count
            self._audit.record("withdraw", principal, target=source, why="every tool of the source", tools=count)
        notify_owners(outcome)
        log.info("cleared source=%r tools=%d", source, outcome.count)
        self._on_change()
        return outcome


def notify_owners(outcome: ChangeOutcome, except_for: Peer | None = None) -> None:
    """Notifies sessions which of their tools others withdrew or overwrote, and logs every such loss."""
    for lost in outcome.lost:
        owner = lost.handler
        if owner is except_for:
            continue
        log.info("lost tool=%r source=%r to=%r", lost.name, owner.source, lost.by_source)
        if not isinstance(owner, Peer):
            continue
        event = wire.Event()
        if lost.by_source is not None:
            event.tool_overwritten.name, event.tool_overwritten.by_source = lost.name, lost.by_source
            event.tool_overwritten.roles.extend(lost.roles)
        else:
            event.tool_removed.name = lost.name
            event.tool_removed.roles.extend(lost.roles)
        owner.send_event(event)
