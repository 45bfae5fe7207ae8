"""Offers the tools of the bus to MCP clients, at `/mcp` and over a pipe."""
