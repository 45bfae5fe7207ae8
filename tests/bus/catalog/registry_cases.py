from __future__ import annotations

from typing import Any

from tests.support.core_model import PeerDouble, offered, tool
from toolbus.bus.catalog.registry import Registry
from toolbus.protocol.tool import Tool

V1, V2 = tool("t", "first"), tool("t", "second")


def names(registry: Registry, role: str | None = None, *, include_offline: bool = False) -> list[str]:
    return [listing.tool.name for listing in registry.listings(role, include_offline=include_offline)]


def offers(registry: Registry, source: str, *tools: Tool, **more: Any) -> PeerDouble:
    handler = PeerDouble(source, **more)
    registry.register(handler, offered(*tools), qualified=handler.qualified)
    return handler


def current(registry: Registry, name: str = "t", role: str = "") -> tuple[str, Tool]:
    entry = registry.find(name, role)
    assert entry is not None
    assert entry.current is not None
    return entry.source, entry.current.tool
