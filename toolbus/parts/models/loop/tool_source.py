"""Adapts a bus or a host to the protocol by which a loop lists and calls tools."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from toolbus.errors import PeerLost, SetupError
from toolbus.functions.call_context import NO_CONTEXT, CallContext
from toolbus.protocol.tool import Progress, Result, Tool, dump_arguments, level_of


@runtime_checkable
class ToolSource(Protocol):
    """Lists and calls tools. A failed call is a `Result` with its error, never an exception."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        """Returns the catalog's revision and its tools, in its order; fast while the revision is the same."""

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
            schema_hash: of the declaration that the caller knows; "" calls any tool of that name.
            timeout: seconds; None means the tool's own.
        """

    def changes(self) -> AsyncIterator[int]:
        """Yields the current revision, then the new one after each change, until the source ends."""


def source_of(
    offered: Any,
    *,
    role: str | None = None,
    names: Iterable[str] | None = None,
    context: CallContext | None = None,
    background_after: float | None = None,
) -> ToolSource:
    """Returns the tool source of a `toolbus.Bus`, a `toolbus.Host` or a `toolbus.tools.ToolRegistry`.

    A tool source is returned unchanged.

    Args:
        role: tools of this role only.
        names: these only; None means all.
        context: on whose behalf tools are listed, and called where a call has no context of its own.
        background_after: seconds after which a call becomes a task, whose id the model gets then; None: never.

    Raises:
        SetupError: it cannot be a source, or it is a source already and other options are set.
    """
    if isinstance(offered, ToolSource):
        if any(option is not None for option in (role, names, context, background_after)):
            raise SetupError(
                f"{offered!r} is a source of tools already: set role, names, context and background_after where it is "
                "created, not here"
            )
        return offered
    if hasattr(offered, "as_source"):  # a toolbus.tools.ToolRegistry
        return source_of(
            offered.as_source(), role=role, names=names, context=context, background_after=background_after
        )
    selected = None if names is None else tuple(names)
    if hasattr(getattr(offered, "registry", None), "revision"):
        return _BusSource(offered, role, selected, context, background_after)
    if all(inspect.iscoroutinefunction(getattr(offered, method, None)) for method in ("list", "call")):
        return _HostSource(offered, role, selected, context, background_after)
    raise SetupError(
        f"a {type(offered).__name__} is not a source of tools: give a toolbus.Bus, a toolbus.Host (a SyncHost would "
        "block the event loop), or an object with the methods of toolbus.loop.ToolSource"
    )


def missing_after_restart(source: ToolSource, known: Iterable[str], tools: Iterable[Tool]) -> set[str]:
    """Returns which known tools a bus lacks that has just restarted: calls of them wait for their plugins.

    Only a source with `settling` tells that its bus has restarted; of others nothing is missing.
    """
    if not getattr(source, "settling", False):
        return set()
    return set(known).difference(tool.name for tool in tools)


class _Source:
    """The common part of a bus and a host: how they are called, and a cache of the newest revision's tools."""

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

    def _cache(self, revision: int, entries: Iterable[Any]) -> None:
        by_name: dict[str, Tool] = {}
        for entry in entries:  # roles may have different tools of one name; a call finds the first of them
            by_name.setdefault(entry.tool.name, entry.tool)
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
            await changes.aclose()  # at once, not when the garbage collector runs


class _BusSource(_Source):
    """The tools of a bus of this process."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        revision = self._offered.registry.revision
        if revision != self._revision:
            names = self._names
            context = self.context or NO_CONTEXT
            entries = self._offered.list(self._role, user_id=context.user_id, level=level_of(context.attributes))
            self._cache(revision, (entry for entry in entries if names is None or entry.tool.name in names))
        return self._revision, self._tools


class _HostSource(_Source):
    """The tools of a bus in another process."""

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        if self._names == ():  # an empty list of names would not filter
            return self._revision, ()
        listing = await self._offered.list(
            self._role, names=self._names or (), if_revision=self._revision, context=self.context
        )
        if not listing.unchanged:
            self._cache(listing.revision, listing)
        return self._revision, self._tools

    @property
    def settling(self) -> bool:
        """Whether the bus has just restarted, so that tools may be missing whose plugins are reconnecting."""
        return bool(getattr(self._offered, "settling", False))

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the host's error for a bus that did not answer within this time."""
        error: PeerLost = self._offered.unanswered(seconds)
        return error


log = logging.getLogger("toolbus.loop")

Match: TypeAlias = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls a tool for a user's message.

    Attributes:
        match: takes the text and returns the arguments of the call, or None if the rule does not match. A pattern is
            searched in the text; its named groups are the arguments.
        tool: the tool's name on the bus.
        priority: rules are tried in ascending order; of equal ones the first.

    Raises:
        SetupError: from the constructor, if the pattern is invalid.
    """

    match: Match | re.Pattern[str] | str
    tool: str
    priority: int = 50

    def __post_init__(self) -> None:
        if isinstance(self.match, str):
            try:
                object.__setattr__(self, "match", re.compile(self.match))
            except re.error as error:
                raise SetupError(
                    f"the rule for {self.tool!r} has an invalid pattern: {error}; correct the regular expression"
                ) from None

    def arguments(self, text: str) -> str | None:
        """Returns the arguments of the call as JSON; None if the rule does not match, or fails."""
        try:
            arguments = self._match_arguments(text)
            return None if arguments is None else dump_arguments(dict(arguments))
        except Exception:  # a rule is the program's own code, and the model can still answer
            log.exception("the rule for %r failed: it is skipped", self.tool)
            return None

    def _match_arguments(self, text: str) -> Mapping[str, Any] | None:
        if callable(self.match):
            return self.match(text)
        match = re.search(self.match, text)
        if match is None:
            return None
        return {name: value for name, value in match.groupdict().items() if value is not None}


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules in the order in which they are tried."""
    return tuple(sorted(rules, key=lambda rule: rule.priority))


def route(
    rules: Sequence[Rule], text: str, offered: Mapping[str, Tool], may_route: Callable[[Tool], bool]
) -> tuple[str, str] | None:
    """Returns the tool and the arguments of the first rule that matches; None if no rule matches.

    Args:
        offered: the offered tools; a rule cannot call other tools.
        may_route: which of these a rule may call.
    """
    for rule in rules:
        tool = offered.get(rule.tool)
        if tool is not None and may_route(tool) and (arguments := rule.arguments(text)) is not None:
            return rule.tool, arguments
    return None


def comes_from_no_file(tool: Tool) -> bool:
    """Tells whether a tool does not come from a file of a drop-in folder, whose metadata has `{"origin": "dropin"}`."""
    if not tool.metadata_json:
        return True
    try:
        metadata = json.loads(tool.metadata_json)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(metadata, dict) and metadata.get("origin") == "dropin")
