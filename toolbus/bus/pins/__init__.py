"""Detects that a source changed its tools since they were trusted: fingerprints, and their file."""
