"""Stores what sources declared when they were trusted, as fingerprints, and has operators approve changes."""
