"""Connects clients that start their MCP servers with the bus: `toolbus mcp`. The standard library alone is imported."""
