"""What the connection asks of a plugin, and the rights of its source as the bus tells them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from toolbus.functions.tool_spec import ToolSet
from toolbus.sdk.connection import Connection
from toolbus.sdk.hooks import Hooks
from toolbus.sdk.incoming_calls import Runner
from toolbus.sdk.listing import CatalogChange
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

TOOLS = "tools"  # the right to offer tools


class Permissions:
    """The rights of a source, as far as the bus has told; safe from any thread."""

    def __init__(self) -> None:
        self._granted = frozenset((TOOLS,))  # a bus says what it refuses, not what it permits

    def __repr__(self) -> str:
        return f"<Permissions {', '.join(sorted(self._granted)) or 'none'}>"

    @property
    def granted(self) -> frozenset[str]:
        """All rights that the source has."""
        return self._granted

    def has(self, permission: str) -> bool:
        """Tells whether the source has a right, for example ``tools``."""
        return permission in self._granted

    def set(self, granted: Iterable[str]) -> None:
        """Takes down all rights; the connection's part."""
        self._granted = frozenset(granted)


class PluginDelegate:
    """What the connection asks of a plugin. Everything runs on the connection's loop.

    Args:
        operations: the author's word for what was refused, by the bus's.

    Attributes:
        declare: declares the tools anew; None until there is a connection.
    """

    def __init__(
        self, tools: ToolSet, runner: Runner, permissions: Permissions, hooks: Hooks, operations: Mapping[str, str]
    ) -> None:
        self.declare: Callable[[], object] | None = None
        self._tools = tools
        self._runner = runner
        self._permissions = permissions
        self._hooks = hooks
        self._operations = operations

    def tools(self) -> Sequence[pb.Tool]:
        return [spec.tool.to_wire() for spec in self._tools]

    def subscriptions(self) -> Sequence[Any]:
        return (wire.SUBSCRIPTION_CATALOG,) if self._hooks.wants("tools_changed") else ()

    def take(self, connection: Connection, session: PeerSession, call: pb.ToolCall) -> Any:
        return self._runner.take(connection, session, call)

    def attached(self, refused: Sequence[str], why: str) -> None:
        if refused:
            self.refused(refused, why)
        elif len(self._tools):  # it may have been granted while there was no stream that could have told us
            self._permissions.set(self._permissions.granted | {TOOLS})

    def refused(self, names: Sequence[str], why: str) -> None:
        # A bus takes all tools of a declaration or none; where its reason is one of them, that is the one to mend.
        named = tuple(name for name in names if f"tool {name!r}" in why or f"tool name {name!r}" in why)
        self._hooks.tell("refused", named or tuple(name for name in names if name), why)

    def event(self, event: wire.Event) -> None:
        match event.WhichOneof("kind"):
            case "catalog":
                self._hooks.tell("tools_changed", CatalogChange.from_wire(event.catalog))
            case "tool_overwritten":
                lost = event.tool_overwritten
                log.warning("tool %s is no longer offered: source %s registered the name", lost.name, lost.by_source)
            case "tool_removed":
                log.warning("tool %s was withdrawn by somebody else", event.tool_removed.name)
            case "permission_denied":
                self._denied(event.permission_denied)
            case "permission_changed":
                self._changed(event.permission_changed)

    def _denied(self, denied: wire.PermissionDenied) -> None:
        log.error("the bus refuses %s: this source lacks the right %r", denied.operation, denied.permission)
        self._permissions.set(self._permissions.granted - {denied.permission})
        operation = self._operations.get(denied.operation, denied.operation)
        self._hooks.tell("permission_denied", denied.permission, operation)

    def _changed(self, changed: wire.PermissionChanged) -> None:
        level, what = (logging.INFO, "granted") if changed.granted else (logging.WARNING, "revoked")
        log.log(level, "the right %r was %s", changed.permission, what)
        self._permissions.set(changed.all_granted)
        self._hooks.tell("permission_changed", changed.permission, changed.granted, tuple(changed.all_granted))
        if changed.permission == TOOLS and changed.granted and self.declare is not None:
            self.declare()  # a bus that revoked the right has forgotten them
