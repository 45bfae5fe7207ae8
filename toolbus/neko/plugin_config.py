"""Provides `self.config`: the values of a plugin's plugin.toml, and those that the plugin has set itself."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from toolbus.neko.json_file import JsonFile
from toolbus.neko.sdk_errors import Absence, NotProvided, ValidationError

V = TypeVar("V")

_PROFILES = Absence(
    "switches between sets of configuration",
    "Use self.config.set(path, value), or one plugin.toml for each set.",
)


class PluginConfig:
    """Configuration by paths such as ``weather.city``.

    Values come from plugin.toml. Those that `set` and `update` store, in a JSON file of the plugin's data, win over
    them. `timeout` has no effect.

    Args:
        values: of plugin.toml.
        path: the file for the values that the plugin sets.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._base = dict(values)
        self._changes = JsonFile(path)

    def __repr__(self) -> str:
        return f"<PluginConfig {', '.join(self._base)}; changes in {self._changes.path}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("profile_"):
            raise NotProvided(f"self.config.{name}", _PROFILES)
        raise AttributeError(f"PluginConfig has no attribute {name!r}")

    async def dump(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Returns everything as one dict."""
        return await asyncio.to_thread(self._merged)

    async def get(self, path: str, default: Any = None, *, timeout: float = 5.0) -> Any:
        """Returns the value at a path, or the default."""
        try:
            return _at(await self.dump(), path)
        except ValidationError:
            return default

    async def require(self, path: str, *, timeout: float = 5.0) -> Any:
        """Returns the value at a path.

        Raises:
            ValidationError: the path has no value.
        """
        return _at(await self.dump(), path)

    async def get_bool(self, path: str, default: bool | None = None, *, timeout: float = 5.0) -> bool | None:
        """Returns the truth value at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, bool)

    async def get_int(self, path: str, default: int | None = None, *, timeout: float = 5.0) -> int | None:
        """Returns the whole number at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, int)

    async def get_str(self, path: str, default: str | None = None, *, timeout: float = 5.0) -> str | None:
        """Returns the text at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, str)

    async def base_dump(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Returns the values of plugin.toml."""
        return copy.deepcopy(self._base)

    async def base_get(self, path: str, default: Any = None, *, timeout: float = 5.0) -> Any:
        """Returns the value of plugin.toml at a path, or the default."""
        try:
            return _at(self._base, path)
        except ValidationError:
            return default

    async def set(self, path: str, value: Any, *, timeout: float = 5.0) -> None:
        """Stores a value at a path, for later runs too.

        Raises:
            ValidationError: the path is empty.
            TransportError: the file cannot be written.
        """
        parts = path.split(".")
        if not all(parts):
            raise ValidationError(f"configuration path {path!r} has an empty part: write it as section.key")

        def put(changes: dict[str, Any]) -> None:
            inner = changes
            for part in parts[:-1]:
                if not isinstance(inner.get(part), dict):
                    inner[part] = {}
                inner = inner[part]
            inner[parts[-1]] = value

        await asyncio.to_thread(self._changes.change, put)

    async def update(self, patch: Mapping[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Stores several values, inner dicts key by key, and returns everything.

        Raises:
            TransportError: the file cannot be written.
        """

        def put(changes: dict[str, Any]) -> None:
            merged = merge(changes, patch)
            changes.clear()
            changes.update(merged)

        await asyncio.to_thread(self._changes.change, put)
        return await self.dump()

    def _merged(self) -> dict[str, Any]:
        return copy.deepcopy(self._changes.read(lambda changes: merge(self._base, changes)))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two mappings as one; the second wins, and dicts that both have are merged in the same way."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _at(values: Mapping[str, Any], path: str) -> Any:
    inner: Any = values
    for part in path.split(".") if path else ():
        if not isinstance(inner, Mapping) or part not in inner:
            raise ValidationError(f"configuration has no {path!r}: set it in plugin.toml")
        inner = inner[part]
    return copy.deepcopy(inner)


def _typed(value: Any, path: str, kind: type[V]) -> V | None:
    if value is None or (isinstance(value, kind) and isinstance(value, bool) is (kind is bool)):
        return value
    raise ValidationError(f"configuration {path!r} is {value!r:.80}, it must be of type {kind.__name__}")
