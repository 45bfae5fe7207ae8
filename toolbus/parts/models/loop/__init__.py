"""The tool loop, realtime sessions, and tools that are offered a few at a time."""
