"""Where a loop's tools come from: a protocol of three methods, and what makes a bus or a host follow it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from toolbus.errors import PeerLost, SetupError
from toolbus.functions.call_context import NO_CONTEXT, CallContext
from toolbus.tool import Progress, Result, Tool, level_of


@runtime_checkable
class ToolSource(Protocol):
    """Lists and calls tools. A failed call is a `Result` with its error, never an exception."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        """Returns the catalog's revision and its tools, in its order; cheap while the revision stays."""

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        """Calls a tool. Cancelling the task that awaits it cancels the call.

        Args:
            schema_hash: of the declaration that the caller knows; "" calls whatever has the name.
            timeout: seconds; None means the tool's own.
        """

    def changes(self) -> AsyncIterator[int]:
        """Yields the revision as it is, then after each change, until the source ends."""


def source_of(
    offered: Any,
    *,
    role: str | None = None,
    names: Iterable[str] | None = None,
    context: CallContext | None = None,
    background_after: float | None = None,
) -> ToolSource:
    """Returns where tools come from: a `toolbus.Bus`, a `toolbus.Host`, a `toolbus.tools.ToolRegistry`, a source.

    A source is returned as it is.

    Args:
        role: tools of this role only.
        names: these only; None means all.
        context: on whose behalf tools are listed, and called where a call says nothing else.
        background_after: seconds after which a call becomes a task, whose id the model reads then; None: never.

    Raises:
        SetupError: it is none of these, or a source that something else is asked of.
    """
    if isinstance(offered, ToolSource):
        if any(given is not None for given in (role, names, context, background_after)):
            raise SetupError(
                f"{offered!r} is a source of tools already: say role, names, context and background_after where it is "
                "made, not here"
            )
        return offered
    if hasattr(offered, "as_source"):  # a toolbus.tools.ToolRegistry
        return source_of(
            offered.as_source(), role=role, names=names, context=context, background_after=background_after
        )
    wanted = None if names is None else tuple(names)
    if hasattr(getattr(offered, "registry", None), "revision"):
        return _BusSource(offered, role, wanted, context, background_after)
    if all(inspect.iscoroutinefunction(getattr(offered, method, None)) for method in ("list", "call")):
        return _HostSource(offered, role, wanted, context, background_after)
    raise SetupError(
        f"a {type(offered).__name__} is no source of tools: give a toolbus.Bus, a toolbus.Host (a SyncHost would "
        "block the loop), or an object with the methods of toolbus.loop.ToolSource"
    )


class _Source:
    """What a bus and a host have in common: how they are called, and that a revision's tools are kept."""

    def __init__(
        self,
        offered: Any,
        role: str | None,
        names: tuple[str, ...] | None,
        context: CallContext | None,
        background_after: float | None,
    ) -> None:
        self._offered = offered
        self._role = role
        self._names = names
        self.context = context
        self._background_after = background_after
        self._revision = 0  # of `_tools`; 0 until they were listed
        self._tools: tuple[Tool, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.strip('_')} {self._offered!r} tools={len(self._tools)}>"

    def _keep(self, revision: int, listed: Iterable[Any]) -> None:
        by_name: dict[str, Tool] = {}
        for line in listed:  # roles may have different tools of one name; a call finds the first of them
            by_name.setdefault(line.tool.name, line.tool)
        self._revision = revision
        self._tools = tuple(by_name.values())

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        result: Result = await self._offered.call(
            name,
            arguments_json,
            timeout=timeout,
            role=self._role,
            context=self.context if context is None else context,
            schema_hash=schema_hash,
            background_after=self._background_after,
            on_progress=on_progress,
        )
        return result

    async def changes(self) -> AsyncIterator[int]:
        changes = self._offered.watch()
        try:
            async for change in changes:
                yield change.revision
        finally:
            await changes.aclose()  # now, and not whenever the garbage collector comes by


class _BusSource(_Source):
    """The tools of a bus of this process."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        revision = self._offered.registry.revision
        if revision != self._revision:
            wanted = self._names
            context = self.context or NO_CONTEXT
            listed = self._offered.list(self._role, user_id=context.user_id, level=level_of(context.attributes))
            self._keep(revision, (line for line in listed if wanted is None or line.tool.name in wanted))
        return self._revision, self._tools


class _HostSource(_Source):
    """The tools of a bus elsewhere."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        if self._names == ():  # a list of no names would be no filter
            return self._revision, ()
        listing = await self._offered.list(
            self._role, names=self._names or (), if_revision=self._revision, context=self.context
        )
        if not listing.unchanged:
            self._keep(listing.revision, listing)
        return self._revision, self._tools

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the error that nobody answered within so long, as the host says it."""
        error: PeerLost = self._offered.unanswered(seconds)
        return error
