"""Recordings: calls with their contents in a file, played against another build of a plugin."""
