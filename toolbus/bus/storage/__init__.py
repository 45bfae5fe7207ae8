"""Persists what survives a restart, in SQLite files."""
