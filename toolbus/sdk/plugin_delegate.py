"""Connects a plugin to its connection: declares its tools, reacts to events, tracks permissions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from toolbus.functions.tool_spec import ToolSet
from toolbus.sdk.hooks import Hooks
from toolbus.sdk.listing import CatalogChange
from toolbus.sdk.standing import Standing
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

TOOLS = "tools"  # the permission to offer tools


class Permissions:
    """The permissions of a source, as the bus has reported them; safe from any thread."""

    def __init__(self) -> None:
        self._granted = frozenset((TOOLS,))  # a bus reports only that it denies this permission, not that it grants it

    def __repr__(self) -> str:
        return f"<Permissions {', '.join(sorted(self._granted)) or 'none'}>"

    @property
    def granted(self) -> frozenset[str]:
        """All permissions that the source has."""
        return self._granted

    def has(self, permission: str) -> bool:
        """Tells whether the source has a permission, for example ``tools``."""
        return permission in self._granted

    def set(self, granted: Iterable[str]) -> None:
        """Replaces all permissions; for the connection."""
        self._granted = frozenset(granted)


class PluginDelegate:
    """The `Delegate` of a plugin. Everything runs on the connection's loop.

    Args:
        operations: the names that authors know for denied operations, by the bus's names.

    Attributes:
        declare: declares the tools again; None before there is a connection.
    """

    def __init__(
        self,
        tools: ToolSet,
        permissions: Permissions,
        standing: Standing,
        hooks: Hooks,
        operations: Mapping[str, str],
    ) -> None:
        self.declare: Callable[[], object] | None = None
        self._tools = tools
        self._permissions = permissions
        self._standing = standing
        self._hooks = hooks
        self._operations = operations

    def tools(self) -> Sequence[pb.Tool]:
        return [spec.tool.to_wire() for spec in self._tools]

    def notifications_after(self) -> int:
        return 0

    def subscriptions(self) -> Sequence[Any]:
        return (wire.SUBSCRIPTION_CATALOG,) if self._hooks.wants("tools_changed") else ()

    def attached(self, attached: wire.Attached) -> None:
        if len(self._tools) > attached.refused_total:  # the permission may have been granted while there was no stream
            self._permissions.set(self._permissions.granted | {TOOLS})
        self._standing.attached(attached.refused, attached.waiting)

    def registered(self, response: wire.RegisterResponse) -> None:
        self._standing.added(response.refused, response.waiting)

    def refused(self, names: Sequence[str], reason: str) -> None:
        # If the reason for refusing all names some of them, the author has to fix those.
        named = tuple(name for name in names if f"tool {name!r}" in reason or f"tool name {name!r}" in reason)
        self._hooks.fire("refused", named or tuple(name for name in names if name), reason)

    def event(self, event: wire.Event) -> None:
        match event.WhichOneof("kind"):
            case "catalog":
                self._hooks.fire_change("tools_changed", CatalogChange.from_wire(event.catalog))
            case "tools_reviewed":
                self._standing.reviewed(event.tools_reviewed)
            case "tool_overwritten":
                taken = event.tool_overwritten
                log.warning("tool %s is no longer offered: source %s registered the name", taken.name, taken.by_source)
            case "tool_removed":
                log.warning("tool %s was withdrawn by another peer or an operator", event.tool_removed.name)
            case "permission_denied":
                self._denied(event.permission_denied)
            case "permission_changed":
                self._changed(event.permission_changed)

    def _denied(self, denied: wire.PermissionDenied) -> None:
        log.error("the bus refuses %s: this source lacks the permission %r", denied.operation, denied.permission)
        self._permissions.set(self._permissions.granted - {denied.permission})
        operation = self._operations.get(denied.operation, denied.operation)
        self._hooks.fire("permission_denied", denied.permission, operation)

    def _changed(self, changed: wire.PermissionChanged) -> None:
        level, change = (logging.INFO, "granted") if changed.granted else (logging.WARNING, "revoked")
        log.log(level, "the permission %r was %s", changed.permission, change)
        self._permissions.set(changed.all_granted)
        self._hooks.fire("permission_changed", changed.permission, changed.granted, tuple(changed.all_granted))
        if changed.permission == TOOLS and changed.granted and self.declare is not None:
            self.declare()  # the bus may have withdrawn them meanwhile
