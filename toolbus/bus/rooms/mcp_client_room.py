"""Mounts MCP servers: offers their tools on the bus."""

from __future__ import annotations

from toolbus.bus.room import Room


class McpClientRoom(Room):
    """The mounted MCP servers."""
