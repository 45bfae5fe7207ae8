"""Registers the tools of one program with a backend, and withdraws them by name or by source."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.local import LocalHandler
from toolbus.bus.tasks import TaskManager, TaskTools
from toolbus.dropin.file_declarations import spec_of_entry
from toolbus.functions.tool_definition import CTX, ToolDefinition, with_ctx
from toolbus.functions.tool_options import ToolTraits
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.tool import is_source
from toolbus.tools.backend import Backend

Definition = ToolDefinition | ToolSpec | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Registered:
    """A tool that a program has registered.

    Attributes:
        source: whose it is.
        handler: runs it.
        definition: what it was registered with; None where that was not a `ToolDefinition`.
    """

    source: str
    handler: LocalHandler
    definition: ToolDefinition | None


@dataclass(frozen=True, slots=True)
class _TaskTools:
    """The task tools under one source, see `RegisteredTools.register_task_tools`."""

    qualified: bool
    handlers: list[LocalHandler]


class RegisteredTools:
    """What a program has registered. Safe from any thread."""

    def __init__(self, backend: Backend, source: str) -> None:
        self._backend = backend
        self._source = source
        self._lock = threading.RLock()  # `_tools` and the backend's registry change together
        self._tools: dict[str, _Registered] = {}  # by name
        self._task_tools: dict[str, _TaskTools] = {}  # by the source that they are offered with

    def __repr__(self) -> str:
        return f"<RegisteredTools {self._source} tools={len(self._tools)}>"

    def register(self, definition: Definition, options: ToolTraits) -> None:
        """Registers a tool; the same name is replaced.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        shown: ToolDefinition | None = None
        source = self._source
        if isinstance(definition, ToolDefinition):
            shown = definition.for_models()
            spec = shown.spec(**options)
            if definition.takes_dict or definition.metadata.get("source"):
                source = check_source(definition.source)
        elif isinstance(definition, ToolSpec):
            spec = definition
        elif _is_entry(definition):
            spec = spec_of_file(spec_of_entry(definition))
        else:
            raise TypeError(
                f"{definition!r:.80} is not a tool: give a ToolDefinition, or a dict with name, description, "
                "parameters and handler"
            )
        with self._lock:
            self._tools[spec.tool.name] = _Registered(source, self._offer(spec, source), shown)
        self._backend.changed()

    def unregister(self, name: str) -> bool:
        """Withdraws a tool. Returns whether it was registered here and had not been replaced by another source."""
        with self._lock:
            registered = self._tools.pop(name, None)
            if registered is None:
                return False
            withdrawn = bool(self._backend.registry.withdraw(registered.handler).names)
        if withdrawn:
            self._backend.changed()
        return withdrawn

    def clear(self, source: str | None) -> int:
        """Withdraws the tools of one source, or (None) all of them. Returns how many."""
        with self._lock:
            names = [name for name, each in self._tools.items() if source is None or each.source == source]
            return sum(self.unregister(name) for name in names)

    def register_task_tools(self, tasks: TaskManager, source: str, *, qualified: bool = False) -> None:
        """Registers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task``.

        Args:
            qualified: whether they are listed with their source in front.
        """
        with self._lock:
            handlers = [
                self._offer(spec_of(method), source, qualified=qualified) for method in TaskTools(tasks).tools()
            ]
            self._task_tools[source] = _TaskTools(qualified, handlers)
        self._backend.changed()

    def replace_task_tools(self, tasks: TaskManager | None) -> None:
        """Has the task tools that are registered ask another task manager; None withdraws them."""
        with self._lock:
            sources, self._task_tools = self._task_tools, {}
            for source, before in sources.items():
                if tasks is not None:
                    self.register_task_tools(tasks, source, qualified=before.qualified)
                else:
                    for handler in before.handlers:
                        self._backend.registry.withdraw(handler)
        self._backend.changed()

    def definition_of(self, listing: ToolListing) -> ToolDefinition | None:
        """Returns the definition that a listed tool was registered with here; None for a tool of another source."""
        registered = self._tools.get(listing.tool.name)
        if registered is None or registered.handler not in listing.entry.handlers():
            return None
        definition = registered.definition
        if definition is None or definition.takes_dict:  # the handler of a listed definition takes keywords
            return None
        return (
            definition
            if definition.parameters is not None
            else replace(definition, parameters=dict(listing.tool.parameters))
        )

    def _offer(self, spec: ToolSpec, source: str, *, qualified: bool = False) -> LocalHandler:
        backend = self._backend
        handler = LocalHandler(source, spec, backend.dispatcher, backend.slots, run_sync=backend.run_sync)
        backend.registry.register(handler, compile_tools([spec.tool], backend.limits), qualified=qualified)
        return handler


def _is_entry(definition: object) -> bool:
    return isinstance(definition, Mapping) and not {"handler", "execute"}.isdisjoint(definition)


def spec_of_file(spec: ToolSpec) -> ToolSpec:
    """Returns a tool of a tool file as a registry runs it: its ``ctx`` is the context that a caller passes, if any."""
    return with_ctx(spec, has_default=False) if spec.scope == CTX else spec


def check_source(source: str) -> str:
    """Returns a source that a program may use for its tools.

    Raises:
        ValueError: it breaks the rule for sources, or is the bus's own.
    """
    if not is_source(source) or source == BUS_SOURCE:
        raise ValueError(
            f"source {source!r:.80} breaks the rule [A-Za-z0-9_.:-]{{1,128}}, or is the bus's own: name another"
        )
    return source
