"""Handles: large results stay on the bus, and callers get their beginning and a link."""
