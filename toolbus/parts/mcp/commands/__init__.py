"""The commands of this part: `mcp`, `mount`, `unmount`, `mounts`."""
