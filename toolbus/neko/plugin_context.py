"""Defines what a plugin's constructor is given."""

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
    """What `toolbus run` hands to a plugin's constructor as `ctx`. A plugin may replace what it finds in it.

    Attributes:
        plugin_id: the plugin's id.
        logger: a logger of the plugin's own.
        folder: where the plugin's file lies.
        manifest: what its plugin.toml says; empty where it has none.
        outlet: where its messages go.
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
        """The folder for what the plugin writes."""
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
        """Says something to the user outside a call; hosts get it as a notification. Returns whether it was taken."""
        return self.outlet.push(message)
