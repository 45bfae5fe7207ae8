"""Registers the tools of one program with a backend, and withdraws them by name or by source."""

from __future__ import annotations

import threading

from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.listing import ToolListing
from toolbus.bus.local import LocalHandler
from toolbus.bus.tasks import TaskManager, TaskTools
from toolbus.functions.tool_options import ToolTraits
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.neko.tool_definition import ToolDefinition as DictTool
from toolbus.tool import is_source
from toolbus.tools.backend import Backend
from toolbus.tools.tool_definition import ToolDefinition

Definition = ToolDefinition | DictTool


class RegisteredTools:
    """What a program has registered. Safe from any thread."""

    def __init__(self, backend: Backend, source: str) -> None:
        self._backend = backend
        self._source = source
        self._lock = threading.RLock()  # `_tools` and the backend's registry change together
        self._tools: dict[str, tuple[Definition, LocalHandler]] = {}  # by name

    def __repr__(self) -> str:
        return f"<RegisteredTools {self._source} tools={len(self._tools)}>"

    def register(self, definition: Definition, options: ToolTraits) -> None:
        """Registers a tool; the same name is replaced.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        if isinstance(definition, ToolDefinition):
            definition = definition.for_models()
            spec = definition.spec(**options)
        elif isinstance(definition, DictTool):
            spec = definition.spec()
        else:
            raise TypeError(
                f"{definition!r:.80} is not a tool: give a ToolDefinition of toolbus.tools, or one of toolbus.sdk"
            )
        with self._lock:
            self._tools[definition.name] = (definition, self._offer(spec, self._source_of(definition)))
        self._backend.changed()

    def unregister(self, name: str) -> bool:
        """Withdraws a tool. Returns whether it was registered here and had not been replaced by another source."""
        with self._lock:
            definition_and_handler = self._tools.pop(name, None)
            if definition_and_handler is None:
                return False
            withdrawn = bool(self._backend.registry.withdraw(definition_and_handler[1]).names)
        if withdrawn:
            self._backend.changed()
        return withdrawn

    def clear(self, source: str | None) -> int:
        """Withdraws the tools of one source, or (None) all of them. Returns how many."""
        with self._lock:
            names = [
                name
                for name, (definition, _) in self._tools.items()
                if source is None or self._source_of(definition) == source
            ]
            return sum(self.unregister(name) for name in names)

    def register_task_tools(self, tasks: TaskManager, source: str, *, qualified: bool = False) -> None:
        """Registers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task``.

        Args:
            qualified: whether they are listed with their source in front.
        """
        for method in TaskTools(tasks).tools():
            self._offer(spec_of(method), source, qualified=qualified)

    def definition_of(self, listing: ToolListing) -> ToolDefinition | None:
        """Returns the definition that a listed tool was registered with here; None for a tool of another source."""
        definition, handler = self._tools.get(listing.tool.name, (None, None))
        if isinstance(definition, ToolDefinition) and handler in listing.entry.handlers():
            return definition
        return None

    def _source_of(self, definition: Definition) -> str:
        return check_source(definition.source) if isinstance(definition, DictTool) else self._source

    def _offer(self, spec: ToolSpec, source: str, *, qualified: bool = False) -> LocalHandler:
        backend = self._backend
        handler = LocalHandler(source, spec, backend.dispatcher, backend.slots, run_sync=backend.run_sync)
        backend.registry.register(handler, compile_tools([spec.tool], backend.limits), qualified=qualified)
        return handler


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
