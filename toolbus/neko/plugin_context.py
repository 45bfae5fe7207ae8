"""Defines `PluginContext`, the argument of a plugin's constructor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.neko.absences import find_absent
from toolbus.neko.outlet import Outlet
from toolbus.neko.plugin_logger import PluginLogger

_SECTIONS_OF_THE_PLUGIN = ("plugin", "plugin_runtime", "plugin_state")  # of plugin.toml; the others are configuration


@dataclass(eq=False)
class PluginContext:
    """The `ctx` that `toolbus run` passes to a plugin's constructor. A plugin may replace its attributes.

    Attributes:
        plugin_id: the plugin's id.
        logger: the plugin's logger.
        folder: the folder of the plugin's file.
        manifest: the values of its plugin.toml; empty without one.
        outlet: sends its messages.
    """

    plugin_id: str
    logger: PluginLogger
    folder: Path
    manifest: Mapping[str, Any] = field(default_factory=dict)
    outlet: Outlet = field(default_factory=Outlet)

    def __getattr__(self, name: str) -> Any:
        return find_absent(self, name)

    @property
    def config_path(self) -> Path:
        """The plugin's plugin.toml, whether or not it has one."""
        return self.folder / "plugin.toml"

    @property
    def data_dir(self) -> Path:
        """The folder for the plugin's own files."""
        return self.folder / "data"

    @property
    def metadata(self) -> dict[str, Any]:
        """The section ``[plugin]`` of plugin.toml."""
        section = self.manifest.get("plugin")
        return dict(section) if isinstance(section, Mapping) else {}

    @property
    def config(self) -> dict[str, Any]:
        """The sections of plugin.toml that are the plugin's own."""
        return {key: value for key, value in self.manifest.items() if key not in _SECTIONS_OF_THE_PLUGIN}

    def push_message(self, **message: Any) -> dict[str, Any]:
        """Sends the user a message outside a call, as a notification; returns whether it was accepted."""
        return self.outlet.push(message)
