"""Offers the tools of the bus to MCP clients."""

from __future__ import annotations

from toolbus.bus.room import Room


class McpServerRoom(Room):
    """The endpoint for MCP clients."""
