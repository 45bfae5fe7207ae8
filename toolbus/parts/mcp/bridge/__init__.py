"""Connects MCP clients that start their servers as processes with a bus (`toolbus mcp`)."""
