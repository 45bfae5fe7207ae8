"""Plugins as supervised processes."""
