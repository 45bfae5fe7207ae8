"""Exports the tools of a backend in OpenAI's format, and finds them by the names that a model knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.dialects.export import Export
from toolbus.dialects.openai_chat import OpenAIChat
from toolbus.tools.backend import Backend


@dataclass(frozen=True, slots=True)
class _CachedExport:
    """The export of one revision, and the index of each tool in it by its name on the bus."""

    revision: int
    export: Export
    indexes: Mapping[str, int]


class OpenAITools:
    """The export of the current revision, cached."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dialect = OpenAIChat()
        self._cached: _CachedExport | None = None  # None: to be exported

    def __repr__(self) -> str:
        return f"<OpenAITools revision={self._cached.revision if self._cached is not None else None}>"

    def all(self) -> list[dict[str, Any]]:
        """Returns the tools for any user, in the order of the registry."""
        return list(self._current().export.tools)

    def for_user(self, user_id: str) -> list[dict[str, Any]]:
        """Returns the tools that a user may call."""
        cached = self._current()
        names = (listing.tool.name for listing in self._backend.listings(user_id))
        return [cached.export.tools[cached.indexes[name]] for name in names if name in cached.indexes]

    def by_names(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the tools of some names, in the order of the registry; unknown names are skipped."""
        cached = self._current()
        indexes = {cached.indexes[name] for name in names if name in cached.indexes}
        return [cached.export.tools[index] for index in sorted(indexes)]

    def bus_name(self, name: str) -> str:
        """Returns a tool's name on the bus for the name that a model knows; task tools also have their bare name."""
        registry = self._backend.registry
        if registry.find(name) is not None:
            return name
        listed = self._current().export.names.to_bus.get(name, name)
        own = f"{BUS_SOURCE}:{name}"
        return own if listed == name and registry.find(own) is not None else listed

    def clear(self) -> None:
        """Empties the cache; a new revision does so by itself."""
        self._cached = None

    def _current(self) -> _CachedExport:
        cached, revision = self._cached, self._backend.registry.revision  # the revision is read before the tools are
        if cached is None or cached.revision != revision:
            export = self._dialect.export(listing.tool for listing in self._backend.listings(None))
            cached = _CachedExport(revision, export, {name: index for index, name in enumerate(export.kept)})
            self._cached = cached
        return cached
