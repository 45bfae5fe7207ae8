"""Provides the attributes of a N.E.K.O. plugin object: logger, configuration, store, files and texts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from toolbus.neko.absences import find_absent
from toolbus.neko.outlet import Outlet
from toolbus.neko.plugin_context import PluginContext
from toolbus.neko.plugin_logger import PluginLogger, plugin_logger
from toolbus.neko.plugin_router import PluginRouter


class PluginServices:
    """The part of the plugins' base class beside tools. Each attribute is made when it is first used.

    A plugin may replace any of them; the names of toolbus's own attributes begin with ``_toolbus``.

    Attributes:
        plugin_id: names the plugin.
        ctx: the argument of the constructor.
    """

    plugin_id: str = ""
    ctx: Any = None

    def __getattr__(self, name: str) -> Any:
        return find_absent(self, name)

    @cached_property
    def logger(self) -> Any:
        """The plugin's logger; takes `{}` and `%s`."""
        return getattr(self.ctx, "logger", None) or self.get_logger()

    @cached_property
    def sdk_logger(self) -> Any:
        """The same as `logger`."""
        return self.logger

    @cached_property
    def file_logger(self) -> Any:
        """The same as `logger`, which writes to the output of `toolbus run`."""
        return self.logger

    @cached_property
    def config(self) -> Any:
        """The configuration: plugin.toml, and the values that the plugin has set."""
        from toolbus.neko.plugin_config import PluginConfig  # here, so that hosts and simple plugins do not load it

        return PluginConfig(self._toolbus_context.config, self._toolbus_context.data_dir / "config.json")

    @cached_property
    def store(self) -> Any:
        """Keys and values that persist between runs."""
        from toolbus.neko.plugin_store import PluginStore

        return PluginStore(self._toolbus_context.data_dir / "store.json")

    @cached_property
    def i18n(self) -> Any:
        """The plugin's texts in several languages."""
        from toolbus.neko.plugin_i18n import PluginI18n

        return PluginI18n.of_folder(self._toolbus_context.folder, self._toolbus_context.metadata.get("i18n"))

    @property
    def metadata(self) -> dict[str, Any]:
        """The section ``[plugin]`` of plugin.toml."""
        return self._toolbus_context.metadata

    @property
    def plugin_dir(self) -> Path:
        """The plugin's folder."""
        return self._toolbus_context.folder

    @property
    def config_dir(self) -> Path:
        """The plugin's folder."""
        return self._toolbus_context.folder

    @property
    def storage_dir(self) -> Path:
        """The folder for the plugin's own files."""
        return self.data_path()

    @property
    def runtime_config_path(self) -> Path:
        """The plugin's plugin.toml."""
        return self._toolbus_context.config_path

    def data_path(self, *parts: str) -> Path:
        """Returns a path in ``data`` of the plugin's folder, and makes ``data``."""
        return _made(self._toolbus_context.data_dir, parts)

    def cache_path(self, *parts: str) -> Path:
        """Returns a path in ``data/cache``, for files that can be made again, and makes that folder."""
        return _made(self._toolbus_context.data_dir / "cache", parts)

    def logger_component(self, suffix: str | None = None) -> str:
        """Returns the name of the plugin's logger."""
        return str(self.get_logger(suffix).logger.name)

    def get_logger(self, suffix: str | None = None) -> PluginLogger:
        """Returns the logger of a part of the plugin."""
        return plugin_logger(self._toolbus_context.plugin_id, suffix)

    def setup_logger(self, *, suffix: str | None = None, **options: Any) -> PluginLogger:
        """Returns the logger; its level is that of the process."""
        return self.get_logger(suffix)

    def enable_file_logging(self, **options: Any) -> Any:
        """Returns the logger, which writes to the output of `toolbus run`."""
        return self.logger

    def get_input_schema(self) -> dict[str, Any]:
        """Returns the class's `input_schema`, if it is a dict."""
        schema = getattr(self, "input_schema", None)
        return schema if isinstance(schema, dict) else {}

    def push_message(self, **message: Any) -> Any:
        """Sends the user a message outside a call, as a notification; returns whether it was accepted."""
        ctx = self.ctx if callable(getattr(self.ctx, "push_message", None)) else self._toolbus_context
        return ctx.push_message(**message)

    async def finish(self, *, data: Any = None, message: str = "", **options: Any) -> Any:
        """Returns the data, with the message if there is one, for a tool to return."""
        if data is None:
            return message or None
        return {"message": message, "data": data} if message else data

    def include_router(self, router: PluginRouter, *, prefix: str = "") -> None:
        """Adds a router, which then belongs to this plugin."""
        router.bind(self, prefix)
        self._routers.append(router)

    def exclude_router(self, router: PluginRouter | str) -> bool:
        """Removes a router; returns whether the plugin had it."""
        included = router if isinstance(router, PluginRouter) else self.get_router(router)
        if included not in self._routers:
            return False
        self._routers.remove(included)
        return True

    def get_router(self, name: str) -> Any:
        """Returns the router of a name; None if there is no such router."""
        return next((each for each in self._routers if each.name() == name), None)

    def list_routers(self) -> list[str]:
        """Returns the names of the routers."""
        return [each.name() for each in self._routers]

    @cached_property
    def _routers(self) -> list[PluginRouter]:
        return []

    @cached_property
    def _toolbus_context(self) -> PluginContext:
        """The plugin's context; if the plugin was made with another object, a context with its values."""
        if isinstance(self.ctx, PluginContext):
            return self.ctx
        plugin_id = str(getattr(self.ctx, "plugin_id", "") or self.plugin_id or type(self).__name__)
        path = getattr(self.ctx, "config_path", None)
        return PluginContext(plugin_id, plugin_logger(plugin_id), Path(path).parent if path else Path.cwd())


def outlet_of(plugin: PluginServices) -> Outlet:
    """Returns the outlet of a plugin's messages."""
    return plugin._toolbus_context.outlet


def _made(base: Path, parts: tuple[str, ...]) -> Path:
    """Returns a path in a folder, and makes that folder."""
    base.mkdir(parents=True, exist_ok=True)
    return base.joinpath(*parts)
