"""Mounts MCP servers: runs or reaches them, and offers their tools on the bus."""
