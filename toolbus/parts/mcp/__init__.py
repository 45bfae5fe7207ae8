"""The Model Context Protocol: the endpoint for MCP clients, mounted MCP servers, and the bridge to standard streams."""
