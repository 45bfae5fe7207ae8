"""Bounds what peers may use that are trusted less than the bus's own programs: its loop, and memory for their tools."""
