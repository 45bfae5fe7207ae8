"""Measures what MCP clients of others do with a bus."""
