"""The commands of this part: `search` and `export`."""
