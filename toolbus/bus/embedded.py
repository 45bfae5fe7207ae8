"""Offers and calls tools from inside the bus's own process: the part of `Bus` that programs and rooms share."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Unpack

from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller, LocalHandler, OnProgress
from toolbus.bus.signals import Signals
from toolbus.functions.call_context import CallContext
from toolbus.functions.call_options import CallOptions, Inputs
from toolbus.functions.declaration import llm_tool
from toolbus.functions.input_rounds import OnInput, answered
from toolbus.functions.tool_options import ToolOptions
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.functions.workers import Workers
from toolbus.sdk.tracing import in_span
from toolbus.tool import Limits, Result, dump_arguments

LOCAL_WORKERS = 32  # threads for local tools that are plain functions, as many as a plugin has


class EmbeddedBus:
    """A bus as its own process uses it. All methods belong to the loop that started the bus."""

    def __init__(self, registry: Registry, dispatcher: Dispatcher, signals: Signals, limits: Limits) -> None:
        self.registry = registry
        self.dispatcher = dispatcher
        self.loop: asyncio.AbstractEventLoop | None = None  # None until started
        self._limits = limits
        self._signals = signals
        self._caller = LocalCaller("local", dispatcher)
        self._workers = Workers(LOCAL_WORKERS, "toolbus-local")  # not the loop's own: its few threads are the program's
        self.run_sync = self._workers.run  # runs a plain function off the loop
        self.catalog_changed = signals.catalog_changed  # notifies of a changed catalog; from any thread

    def tool(self, function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
        """Offers a function of this process as a tool; a decorator, with or without `ToolOptions`."""

        def offer(function: Callable[..., Any]) -> Callable[..., Any]:
            self.add_tool(spec_of(llm_tool(**options)(function)))
            return function

        return offer if function is None else offer(function)

    def add_tool(self, spec: ToolSpec, source: str = "local") -> None:
        """Offers a tool of this process.

        Raises:
            InvalidTool: its schema does not compile.
            UnknownRole: it is for a role that is not configured.
        """
        self.offer(source, spec)

    def offer(self, source: str, spec: ToolSpec, *, qualified: bool = False) -> None:
        """Offers a tool of this process on behalf of a source.

        Args:
            qualified: whether it is listed as ``source:name``.

        Raises:
            InvalidTool, UnknownRole: as for `add_tool`.
        """
        offered = compile_tools([spec.tool], self._limits)
        handler = LocalHandler(source, spec, lambda: self.dispatcher, run_sync=self.run_sync)
        self.registry.register(handler, offered, qualified=qualified)
        self.catalog_changed()

    def remove_tool(self, name: str, source: str = "local") -> bool:
        """Withdraws a tool of this process. Returns whether it was offered."""
        outcome = self.registry.unregister(name, "", source)
        self.catalog_changed()
        return bool(outcome.names)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        background_after: float | None = None,
        on_progress: OnProgress | None = None,
        on_input: OnInput | None = None,
        inputs: Inputs | None = None,
    ) -> Result:
        """Calls a tool, wherever it runs. A failed call is a Result with ``error``, never an exception.

        Args:
            timeout: seconds; None means the tool's own.
            background_after: seconds after which a call becomes a task, whose id is then the result; None: never.
            context: what the tool may know about the circumstances.
            on_input, inputs: as for `Host.call`.
        """
        if on_input is not None:
            return await answered(
                *(self.call, name, dump_arguments(arguments), on_input, inputs),
                timeout=timeout,
                role=role,
                context=context,
                schema_hash=schema_hash,
                background_after=background_after,
                on_progress=on_progress,
            )
        options = CallOptions.of(timeout, role, context, schema_hash, background_after, inputs)
        call = options.to_wire(name, dump_arguments(arguments))
        return await in_span(call, lambda: self._caller.call(call, on_progress))

    async def call_many(self, calls: Sequence[tuple[str, Mapping[str, Any] | str | None]]) -> list[Result]:
        """Calls several tools at once. Results stand in the order of the calls."""
        texts = [(name, dump_arguments(arguments)) for name, arguments in calls]  # none is sent where one cannot be
        return await asyncio.gather(*(self.call(name, text) for name, text in texts))

    def list(
        self, role: str | None = None, *, user_id: str = "", level: int = 0, include_offline: bool = False
    ) -> builtins.list[ToolListing]:
        """Lists what this program could call on behalf of a user."""
        return [*self.dispatcher.view.listings(role, user_id, level, include_offline=include_offline)]

    def watch(self, since: int = -1) -> AsyncIterator[CatalogChanges]:
        """Yields the whole catalog first, then what changes, until the bus stops.

        Args:
            since: the revision that is known already; only what changed after it is yielded, if that is still known.
        """
        return self._signals.watch(since)
