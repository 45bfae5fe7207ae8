"""Provides the base class and the class decorator of N.E.K.O. plugins (REST-60 to REST-64).

Such a plugin moves to toolbus by changing its import line to ``from toolbus.sdk import …``. A plugin object holds its
tools in a `ToolSet`; it knows no connection. The program that runs it sets `plugin_id` if the class has none, reads
`tools_of(plugin)`, listens to that set's `on_change`, and calls `start_plugin` and `stop_plugin` (`plugin_lifecycle`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar, overload

from toolbus.errors import SetupError
from toolbus.functions.declaration import describe
from toolbus.functions.tool_spec import ToolSet, collect, spec_of
from toolbus.neko.absences import warn_once
from toolbus.neko.plugin_services import PluginServices
from toolbus.neko.sdk_errors import EntryConflictError
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, is_source

log = logging.getLogger(__name__)

C = TypeVar("C", bound=type)

PREFIX = "plugin:"
MARK = "__toolbus_class__"  # on a decorated class: the decorator's id, empty for none


class NekoPluginBase(PluginServices):
    """Base of plugin classes; methods with `llm_tool` are its tools.

    Attributes:
        plugin_id: names the plugin; set it in the class, or the program that runs the plugin sets it.
        ctx: the argument of the constructor.
    """

    def __init__(self, ctx: Any = None) -> None:
        """Registers the decorated methods; they run when a model calls them, not before.

        Args:
            ctx: any value, stored as `self.ctx`.
        """
        self.ctx = ctx
        if not self.plugin_id:
            self.plugin_id = str(getattr(ctx, "plugin_id", "") or "")
        tools_of(self)

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
        if not tools_of(self).add(spec_of(handler, meta)):
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
        if not tools.add(spec):
            log.warning(
                "%s.%s is not offered: another method is the tool %r already; rename one with @llm_tool(name=…)",
                type(plugin).__name__,
                getattr(spec.handler, "__name__", "?"),
                spec.tool.name,
            )
    return tools


def source_of(plugin_id: str) -> str:
    """Returns a plugin's source: its id with the prefix `plugin:`, set once and never doubled (REST-51).

    Raises:
        SetupError: the id makes no source.
    """
    bare = plugin_id
    while bare.startswith(PREFIX):
        bare = bare.removeprefix(PREFIX)
    if not bare or not is_source(PREFIX + bare):
        longest = 128 - len(PREFIX)
        raise SetupError(
            f"plugin id {plugin_id!r} breaks the rule [A-Za-z0-9_.:-]{{1,{longest}}}: set plugin_id to another"
        )
    return PREFIX + bare


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


def safe_id(stem: str) -> str:
    """Returns a plugin id made from a file's name; different names without a usable letter get different ids."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]", "_", stem)[:100]
    if re.search(r"[A-Za-z0-9]", cleaned):
        return cleaned
    return "plugin_" + stem.encode("utf-8", "surrogatepass").hex()[:64]


def _mark(cls: Any, id: str) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, NekoPluginBase)):
        raise TypeError(f"the plugin decorator is put on a class that derives from NekoPluginBase, not on {cls!r}")
    if id:
        source_of(id)
    setattr(cls, MARK, id)
    return cls
