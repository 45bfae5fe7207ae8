"""Provides the base class and the class decorator of N.E.K.O. plugins (REST-60 to REST-64).

Such a plugin moves to toolbus by changing its import line to ``from toolbus.sdk import …``. A plugin object holds its
tools in a `ToolSet`; it knows no connection. The program that runs it sets `plugin_id` if the class has none, and uses
`NekoLifecycle`: it reads the tools, listens to their set's `on_change`, and runs the moments of the object's life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

from toolbus.functions.tool_spec import ToolSet, ToolSpec, collect, cut_description, describe, spec_of
from toolbus.parts.moving.neko.absences import find_absent, warn_once
from toolbus.parts.moving.neko.plugin_context import PluginContext, Send
from toolbus.parts.moving.neko.plugin_i18n import with_master_name
from toolbus.parts.moving.neko.plugin_lifecycle import RunSync, start_plugin, stop_plugin
from toolbus.parts.moving.neko.plugin_logger import PluginLogger, plugin_logger
from toolbus.parts.moving.neko.sdk_errors import EntryConflictError, PluginCallError
from toolbus.protocol.tool import DEFAULT_TIMEOUT_SECONDS, plugin_source

log = logging.getLogger("toolbus.neko.plugin_base")

C = TypeVar("C", bound=type)

MARK = "__toolbus_class__"  # on a decorated class: the decorator's id, empty for none
_OF_THE_PLUGIN = ("ctx", "config", "store", "logger", "file_logger", "i18n", "plugin_id", "plugins", "db")
_OTHER_NAMES = {"_host_ctx": "ctx", "_plugin_id": "plugin_id"}  # that plugins read although they are not public there


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


class NekoPluginBase:
    """Base of plugin classes; methods with `llm_tool` are its tools. Its other attributes are made on first use.

    A plugin may replace any of them; the names of toolbus's own attributes begin with ``_toolbus``.

    Attributes:
        plugin_id: names the plugin; set it in the class, or the program that runs the plugin sets it.
        ctx: the argument of the constructor.
    """

    plugin_id: str = ""
    ctx: Any = None

    def __init__(self, ctx: Any = None) -> None:
        """Registers the decorated methods; they run when a model calls them, not before.

        Args:
            ctx: any value, stored as `self.ctx`.
        """
        self.ctx = ctx
        if not self.plugin_id:
            self.plugin_id = str(getattr(ctx, "plugin_id", "") or "")
        tools_of(self)

    @property
    def __toolbus_lifecycle__(self) -> NekoLifecycle:
        """How `Plugin.from_object` runs this object."""
        return NekoLifecycle(self)

    async def on_start(self) -> None:
        """Runs before the plugin takes calls; override it."""

    async def on_shutdown(self) -> None:
        """Runs after the plugin's last call; override it."""

    def register_llm_tool(
        self,
        name: str,
        description: str,
        parameters: dict[str, Any] | None,
        handler: Callable[..., Any],
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        role: str | None = None,
        **unknown: Any,
    ) -> bool:
        """Adds a tool at run time; a bus that the plugin is attached to gets it at once. Returns True.

        Args:
            parameters: JSON Schema of the arguments; None means from the handler's type hints.
            handler: gets the arguments as keywords; sync or async.
            timeout: seconds a call may take, more than 0 and at most 300.
            role: the persona that it is for; None or empty means all.
            unknown: options of newer versions of N.E.K.O. They have no effect, which is logged.

        Raises:
            EntryConflictError: this object has a tool of that name.
            ValueError, TypeError: as for `llm_tool`.
        """
        if not callable(handler):
            raise TypeError(f"tool {name!r}: handler must be a function, not {type(handler).__name__}")
        for option in unknown:
            warn_once(self, f"register_llm_tool({option}=…)", "toolbus has no such option.")
        meta = describe(handler, name=name, description=description, parameters=parameters, timeout=timeout, role=role)
        if not tools_of(self).add(as_sent(spec_of(handler, meta))):
            raise EntryConflictError(name)
        return True

    def unregister_llm_tool(self, name: str) -> bool:
        """Withdraws a tool; returns whether it existed."""
        return tools_of(self).remove(name)

    def list_llm_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as plain dicts, in the order of their registration."""
        return [
            {
                "name": spec.tool.name,
                "description": spec.tool.description,
                "parameters": spec.tool.parameters,
                "timeout_seconds": spec.tool.timeout_seconds,
                "role": spec.tool.role,
            }
            for spec in tools_of(self)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self, _OTHER_NAMES[name]) if name in _OTHER_NAMES else find_absent(self, name)

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
        return self._toolbus_context.own_config

    @cached_property
    def store(self) -> Any:
        """Keys and values that persist between runs."""
        from toolbus.parts.moving.neko.plugin_config import PluginStore

        return PluginStore(self._toolbus_context.data_dir / "store.json")

    @cached_property
    def i18n(self) -> Any:
        """The plugin's texts in several languages."""
        from toolbus.parts.moving.neko.plugin_i18n import PluginI18n

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

    async def finish(self, **options: Any) -> Any:
        """Returns the data, with the message if there is one, for a tool to return."""
        return await self._toolbus_context.finish(**options)

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


class NekoLifecycle:
    """What `Plugin.from_object` needs of a plugin object: its tools, and the moments of its life."""

    def __init__(self, plugin: NekoPluginBase) -> None:
        self._plugin = plugin

    @property
    def tools(self) -> ToolSet:
        """The live set of the object's tools."""
        return tools_of(self._plugin)

    async def start(self, run_sync: RunSync, run_timer: RunSync) -> None:
        """Runs its startup methods, starts its timers and follows its configuration; see `start_plugin`."""
        await start_plugin(self._plugin, run_sync, run_timer, self._plugin._toolbus_context)

    def connected(self, send: Send) -> None:
        """Sends the messages that it has pushed, and those to come."""
        self._plugin._toolbus_context.outlet.open(send)

    async def stop(self, run_sync: RunSync) -> None:
        """Ends its timers and runs its shutdown methods; see `stop_plugin`."""
        await stop_plugin(self._plugin, run_sync)


def tools_of(plugin: NekoPluginBase) -> ToolSet:
    """Returns the live set of a plugin object's tools, also if its class does not call `super().__init__()`.

    Of two methods with the same tool name the first is a tool; the other is skipped with a warning.
    """
    existing = plugin.__dict__.get("_toolbus_tools")
    if isinstance(existing, ToolSet):
        return existing
    tools = ToolSet()
    plugin.__dict__["_toolbus_tools"] = tools
    for spec in collect(plugin):
        if not tools.add(as_sent(spec)):
            log.warning(
                "%s.%s is not offered: another method is the tool %r already; rename one with @llm_tool(name=…)",
                type(plugin).__name__,
                getattr(spec.handler, "__name__", "?"),
                spec.tool.name,
            )
    return tools


def as_sent(spec: ToolSpec) -> ToolSpec:
    """Returns a tool as a bus gets it.

    Its arguments get no defaults from the bus: N.E.K.O fills none in, and a plugin may tell. Its texts have the user's
    name, and a description that a bus would refuse for its length is cut, with a warning.
    """
    tool = spec.tool
    description = cut_description(tool.name, with_master_name(tool.description))
    parameters = with_master_name(tool.parameters_json)
    return replace(spec, tool=replace(tool, no_defaults=True, description=description, parameters_json=parameters))


@overload
def plugin(cls: C, /) -> C: ...
@overload
def plugin(*, id: str = "") -> Callable[[C], C]: ...
def plugin(cls: Any = None, /, *, id: str = "") -> Any:
    """Marks a class as the plugin of its file. Returns the class itself.

    Args:
        id: the plugin's id; by default the class's `plugin_id`, then the file's name.

    Raises:
        TypeError: the class does not derive from `NekoPluginBase`.
    """
    if cls is None:
        return lambda decorated: _mark(decorated, id)
    return _mark(cls, id)


neko_plugin = plugin


def _mark(cls: Any, id: str) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, NekoPluginBase)):
        raise TypeError(f"the plugin decorator is put on a class that derives from NekoPluginBase, not on {cls!r}")
    if id:
        plugin_source(id)
    setattr(cls, MARK, id)
    return cls


def _made(base: Path, parts: tuple[str, ...]) -> Path:
    """Returns a path in a folder, and makes that folder."""
    base.mkdir(parents=True, exist_ok=True)
    return base.joinpath(*parts)
