"""Writes down who did what to the bus: a chain of lines in files that only grow."""
