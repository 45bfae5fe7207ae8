"""Provides `PluginRouter`, in which N.E.K.O. plugins group methods; it reaches its plugin's logger and store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolbus.neko.sdk_errors import PluginCallError

_OF_THE_PLUGIN = ("ctx", "config", "store", "logger", "file_logger", "i18n", "plugin_id", "plugins", "db")


class PluginRouter:
    """A group of methods of a plugin.

    Args:
        prefix: of the ids of its entries.
        tags: anything.
        name: by default the class's.
    """

    def __init__(self, *, prefix: str = "", tags: Sequence[str] | None = None, name: str | None = None) -> None:
        self.prefix = prefix
        self.tags = list(tags or ())
        self._name = name or type(self).__name__
        self._plugin: Any = None  # None before `bind`

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_PLUGIN:
            return getattr(self.main_plugin, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def main_plugin(self) -> Any:
        """The plugin that includes it.

        Raises:
            PluginCallError: no plugin includes it.
        """
        plugin = self.__dict__.get("_plugin")
        if plugin is None:
            raise PluginCallError(f"router {self.name()!r} belongs to no plugin yet: self.include_router(router)")
        return plugin

    @property
    def is_bound(self) -> bool:
        """Whether a plugin includes it."""
        return self.__dict__.get("_plugin") is not None

    def name(self) -> str:
        """Returns its name."""
        return str(self.__dict__.get("_name") or type(self).__name__)

    def set_prefix(self, prefix: str) -> None:
        """Sets the prefix of the ids of its entries."""
        self.prefix = prefix

    def bind(self, plugin: Any, prefix: str = "") -> None:
        """Gives it its plugin; `include_router` does."""
        self._plugin = plugin
        if prefix:
            self.prefix = prefix

    def get_plugin_attr(self, name: str, default: Any = None) -> Any:
        """Returns an attribute of the plugin, or the default."""
        return getattr(self.__dict__.get("_plugin"), name, default)

    def has_plugin_attr(self, name: str) -> bool:
        """Tells whether the plugin has an attribute."""
        return hasattr(self.__dict__.get("_plugin"), name)

    def get_dependency(self, name: str, default: Any = None) -> Any:
        """Returns an attribute of the router, else of the plugin, else the default."""
        own = getattr(self, name, None) if name not in _OF_THE_PLUGIN or self.is_bound else None
        return self.get_plugin_attr(name, default) if own is None else own

    def report_status(self, status: Any) -> None:
        """Hands a status to the plugin."""
        self.main_plugin.report_status(status)

    def on_mount(self) -> None:
        """Is never called; override it if you like."""

    def on_unmount(self) -> None:
        """Is never called; override it if you like."""
