"""Finds tools in a catalog when there are hundreds: the public names of the search."""

from toolbus.parts.models.search import IndexCache, ToolIndex

__all__ = ["IndexCache", "ToolIndex"]
