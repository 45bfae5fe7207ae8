"""The life of a call."""
