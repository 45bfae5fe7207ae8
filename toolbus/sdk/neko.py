"""Provides the classes that authors of N.E.K.O. plugins know (REST-60 to REST-64), on this bus.

Such a plugin moves over by changing its import line to ``from toolbus.sdk import …``. A plugin object holds its tools
in a `ToolSet`; it knows no connection. The program that runs it sets `plugin_id` where the class has none, reads
`tools_of(plugin)`, listens to that set's `on_change`, and calls `start_plugin` and `stop_plugin` around its life.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.declaration import describe
from toolbus.functions.reply import Err
from toolbus.functions.tool_spec import ToolSet, ToolSpec, collect, spec_of
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, is_source

log = logging.getLogger(__name__)

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

PREFIX = "plugin:"
MARK = "__toolbus_class__"  # on a decorated class: the id it was given, empty for none
_MOMENT = "__toolbus_lifecycle__"  # on a method: startup or shutdown
_MOMENTS = ("startup", "shutdown")


class EntryConflictError(ToolBusError):
    """A plugin object already has a tool of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)

    def __str__(self) -> str:
        return f"this plugin already has a tool {self.name!r}: unregister_llm_tool({self.name!r}) first, or rename one"


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What `toolbus run` hands to a plugin's constructor as `ctx`.

    Attributes:
        plugin_id: the plugin's id.
        logger: a logger of the plugin's own.
        folder: where the plugin's file lies.
    """

    plugin_id: str
    logger: logging.Logger
    folder: Path


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool of the host's own process, with its handler (REST-63).

    Attributes:
        handler: takes the arguments as one dict; sync or async.
        metadata: `source` in it says whose tool it is.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    handler: Callable[[dict[str, Any]], Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Whose tool it is; `external` if the metadata do not state it."""
        return str(self.metadata.get("source") or "external")

    def spec(self) -> ToolSpec:
        """Returns how to offer and run it.

        Raises:
            TypeError: it has no handler, or `parameters` is not a dict.
            ValueError: a name that breaks its rule.
        """
        if self.handler is None:
            raise TypeError(f"ToolDefinition {self.name!r} has no handler: pass handler=, a function of one dict")
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        meta = describe(
            self.handler,
            name=self.name,
            description=self.description,
            parameters=parameters,
            metadata=self.metadata or None,
        )
        return spec_of(self.handler, meta, takes_dict=True)


class NekoPluginBase:
    """Base of plugin classes; methods with `llm_tool` are its tools.

    Attributes:
        plugin_id: names the plugin; set it in the class, or the program that runs the plugin sets it.
        ctx: whatever the constructor was given.
    """

    plugin_id: str = ""
    ctx: Any = None

    def __init__(self, ctx: Any = None) -> None:
        """Registers the decorated methods; they run when a model calls them, not before.

        Args:
            ctx: anything; kept as `self.ctx`.

        Raises:
            EntryConflictError: two methods have the same tool name.
        """
        self.ctx = ctx
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
    ) -> None:
        """Adds a tool at run time; a bus that the plugin is attached to gets it at once.

        Args:
            parameters: JSON Schema of the arguments; None means from the handler's type hints.
            handler: gets the arguments as keywords; sync or async.
            timeout: seconds a call may take, more than 0 and at most 300.
            role: the persona that it is for; None or empty means all.

        Raises:
            EntryConflictError: this object has a tool of that name.
            ValueError, TypeError: as for `llm_tool`.
        """
        if not callable(handler):
            raise TypeError(f"tool {name!r}: handler must be a function, not {type(handler).__name__}")
        meta = describe(handler, name=name, description=description, parameters=parameters, timeout=timeout, role=role)
        if not tools_of(self).add(spec_of(handler, meta)):
            raise EntryConflictError(name)

    def unregister_llm_tool(self, name: str) -> bool:
        """Withdraws a tool; returns whether it was there."""
        return tools_of(self).remove(name)

    def list_llm_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as plain dicts, in the order in which they came."""
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
    """Returns the live set of a plugin object's tools, also where its class forgot `super().__init__()`."""
    existing = plugin.__dict__.get("_toolbus_tools")
    if isinstance(existing, ToolSet):
        return existing
    tools = ToolSet()
    plugin.__dict__["_toolbus_tools"] = tools
    for spec in collect(plugin):
        if not tools.add(spec):
            raise EntryConflictError(spec.tool.name)
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
        id: the plugin's id; the class's `plugin_id`, then the file's name where it is not given.

    Raises:
        TypeError: the class does not derive from `NekoPluginBase`.
    """
    if cls is None:
        return lambda decorated: _mark(decorated, id)
    return _mark(cls, id)


neko_plugin = plugin


def lifecycle(*, id: str) -> Callable[[F], F]:
    """Makes a method run at a moment of the plugin's life.

    Args:
        id: `startup`, before it takes calls, or `shutdown`, after its last one.

    Raises:
        ValueError: another moment.
    """
    if id not in _MOMENTS:
        raise ValueError(f"lifecycle id {id!r} is unknown: it must be 'startup' or 'shutdown'")

    def mark(method: F) -> F:
        setattr(method, _MOMENT, id)
        return method

    return mark


async def start_plugin(plugin: NekoPluginBase, run_sync: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
    """Runs what a plugin wants run before its first call, in the order in which it is written.

    Args:
        run_sync: runs a method that is a plain function off the loop.

    Raises:
        SetupError: a method raised or returned `Err`; the plugin must not start.
    """
    for name, method in _methods(plugin, "startup"):
        shown = f"{type(plugin).__name__}.{name}"
        try:
            returned = await _run(method, run_sync)
        except Exception as problem:
            raise SetupError(f"{shown} raised {type(problem).__name__}: {problem}") from problem
        if isinstance(returned, Err):
            raise SetupError(f"{shown} returned Err: {returned.error}")


async def stop_plugin(plugin: NekoPluginBase, run_sync: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
    """Runs what a plugin wants run after its last call, the newest method first; failures are logged, never raised."""
    for name, method in reversed(_methods(plugin, "shutdown")):
        try:
            returned = await _run(method, run_sync)
        except Exception:
            log.exception("%s.%s failed while the plugin stopped", type(plugin).__name__, name)
            continue
        if isinstance(returned, Err):
            log.error("%s.%s returned Err: %s", type(plugin).__name__, name, returned.error)


def safe_id(stem: str) -> str:
    """Returns a plugin id made from a file's name; distinct names without a usable letter stay distinct."""
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


def _methods(plugin: NekoPluginBase, moment: str) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the methods for a moment: those with `lifecycle` as written, base classes first, then `on_…`."""
    names: dict[str, bool] = {}
    for kind in reversed(type(plugin).__mro__):
        for name, raw in vars(kind).items():
            if name in names or inspect.isroutine(raw):
                names[name] = getattr(raw, _MOMENT, None) == moment
    last = {"startup": "on_start", "shutdown": "on_shutdown"}[moment]
    marked = [name for name, is_marked in names.items() if is_marked and name != last]
    return [(name, getattr(plugin, name)) for name in [*marked, last]]


async def _run(method: Callable[..., Any], run_sync: Callable[[Callable[[], Any]], Awaitable[Any]]) -> Any:
    returned = method() if inspect.iscoroutinefunction(method) else await run_sync(method)
    return await returned if inspect.isawaitable(returned) else returned
