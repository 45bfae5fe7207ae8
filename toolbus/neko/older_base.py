"""Provides the base class of older N.E.K.O. plugins, from ``plugin.sdk.base``: their store is not awaited.

Their configuration is awaited where a loop runs, and not awaited elsewhere.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from toolbus.neko.plugin_base import NekoPluginBase
from toolbus.neko.plugin_config import PluginConfig
from toolbus.neko.plugin_store import PluginStore

_METHODS_OF_CONFIG = ("dump", "get", "require", "get_bool", "get_int", "get_str", "set", "update", "base_dump")


class OlderStore:
    """Keys and values of a `PluginStore`; each method returns the value itself, or raises.

    Args:
        store: holds them.
    """

    enabled = True

    def __init__(self, store: PluginStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<OlderStore of {self._store!r}>"

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default."""
        return self._store._read_value(key, default)

    def set(self, key: str, value: Any) -> None:
        """Stores a value under a key."""
        self._store._write_value(key, value)

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it existed."""
        return self._store._delete_value(key)

    def exists(self, key: str) -> bool:
        """Tells whether a key is stored."""
        return key in self.dump()

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys that begin with a prefix, sorted."""
        return sorted(key for key in self.dump() if key.startswith(prefix))

    def count(self) -> int:
        """Returns how many keys are stored."""
        return len(self.dump())

    def dump(self) -> dict[str, Any]:
        """Returns all keys with their values."""
        return self._store._read_all()

    def clear(self) -> int:
        """Removes everything; returns how many keys there were."""
        return sum(self.delete(key) for key in self.keys())

    def close(self) -> None:
        """Does nothing: every change is in the file already."""


class OlderConfig:
    """The configuration of a `PluginConfig`; its methods are awaited only where a loop runs.

    Args:
        config: reads and writes it.
    """

    def __init__(self, config: PluginConfig) -> None:
        self._config = config

    def __repr__(self) -> str:
        return f"<OlderConfig of {self._config!r}>"

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._config, name)
        if name not in _METHODS_OF_CONFIG:
            return method

        def call(*args: Any, **options: Any) -> Any:
            answer = method(*args, **options)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(answer)
            return answer

        return call


class OlderPluginBase(NekoPluginBase):
    """Base of plugin classes that import it from ``plugin.sdk.base`` or ``plugin.sdk``."""

    @cached_property
    def store(self) -> Any:
        """Keys and values that persist between runs."""
        return OlderStore(super().store)

    @cached_property
    def config(self) -> Any:
        """The configuration: plugin.toml, and the values that the plugin has set."""
        return OlderConfig(super().config)
