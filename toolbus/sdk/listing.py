"""Defines the records of a host's listings and of catalog changes, and makes the request of a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from toolbus.functions.call_context import CallContext
from toolbus.protocol.tool import Limits, Tool
from toolbus.sdk.attempt import RefusedTool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

_ANY_SIZE = Limits(schema_bytes=1 << 62, description_bytes=1 << 62)  # the bus has checked the tools


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool together with its source and its sessions.

    Attributes:
        tool: its current declaration, under its listed name.
        source: the source that offers it.
        state: the best of the sessions that offer it: ``live``, ``suspect``, ``draining`` or ``offline``; ``waiting``
            for a role that does not exist yet, ``unconfirmed`` until its plugin has answered.
        roles: the roles that have it.
        schema_hash: names this declaration; a call with it is refused once the tool has changed.
        last_error: why the tool was last lost; empty if it never was.
        sessions: how many sessions offer it.
        in_flight: calls of those sessions that are in flight.
        stuck: calls that ended for their caller but not for the plugin.
        warnings: texts for operators about it; it can still be called.
        repeatable: whether running it twice does no more than once, as far as the bus believes its hints.
    """

    tool: Tool
    source: str
    state: str
    roles: tuple[str, ...]
    schema_hash: str
    last_error: str = ""
    sessions: int = 0
    in_flight: int = 0
    stuck: int = 0
    warnings: tuple[str, ...] = ()
    repeatable: bool = False

    @property
    def name(self) -> str:
        """The tool's listed name."""
        return self.tool.name

    @classmethod
    def from_wire(cls, message: wire.ListedTool) -> ListedTool:
        """Copies it out of its message."""
        state = wire.SessionState.Name(message.session_state) if message.session_state else ""
        declared = pb.Tool()
        declared.CopyFrom(message.tool)
        declared.name = "listed"  # listed names (`source:name`, anything that came by REST) break the rule for names
        tool = Tool.from_wire(declared, _ANY_SIZE).renamed(message.tool.name)
        object.__setattr__(tool, "schema_hash", message.schema_hash)  # of the name that was declared
        return cls(
            tool=tool,
            source=message.source,
            state=state.removeprefix("SESSION_STATE_").lower(),
            roles=tuple(message.roles),
            schema_hash=message.schema_hash,
            last_error=message.last_error,
            sessions=message.sessions,
            in_flight=message.in_flight,
            stuck=message.stuck,
            warnings=tuple(message.warnings),
            repeatable=message.repeatable,
        )


@dataclass(frozen=True, slots=True)
class ToolRef:
    """Names a removed tool."""

    name: str
    source: str


class Listing(Sequence[ListedTool]):
    """The tools of a listing, in the order in which their names were first registered.

    Attributes:
        revision: the catalog's; with it as ``if_revision`` the next listing tells whether anything changed.
        unchanged: whether the catalog still has the revision of the request; the listing is empty then.
        notices: (source, text) of each notice of a source for operators.
        refused: the declared tools that the bus refused, if the request asked for them.
        refused_total: how many the bus refused; `refused` may have fewer.
    """

    __slots__ = ("_tools", "notices", "refused", "refused_total", "revision", "unchanged")

    def __init__(
        self,
        tools: Sequence[ListedTool],
        revision: int,
        *,
        unchanged: bool = False,
        notices: Sequence[tuple[str, str]] = (),
        refused: Sequence[RefusedTool] = (),
        refused_total: int = 0,
    ) -> None:
        self._tools = tuple(tools)
        self.notices = tuple(notices)
        self.refused = tuple(refused)
        self.refused_total = refused_total
        self.revision = revision
        self.unchanged = unchanged

    @classmethod
    def of_pages(cls, pages: Sequence[wire.ListResponse], if_revision: int) -> Listing:
        """Joins the pages of one list; there is at least one."""
        first, revision = pages[0], pages[-1].revision
        return cls(
            [ListedTool.from_wire(tool) for page in pages for tool in page.tools],
            revision,
            unchanged=bool(if_revision) and if_revision == revision,
            notices=[(notice.source, notice.text) for notice in first.notices],
            refused=[RefusedTool.from_wire(tool) for tool in first.refused],
            refused_total=first.refused_total,
        )

    def __repr__(self) -> str:
        return f"<Listing of {len(self._tools)} tools, revision {self.revision}>"

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[ListedTool]:
        return iter(self._tools)

    @overload
    def __getitem__(self, index: int) -> ListedTool: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ListedTool]: ...
    def __getitem__(self, index: int | slice) -> ListedTool | Sequence[ListedTool]:
        return self._tools[index]


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """A change of the catalog.

    Attributes:
        revision: the catalog's, after the change.
        full: whether ``added`` is the whole catalog and replaces everything before, as in the first change after each
            connect.
    """

    revision: int
    full: bool
    added: tuple[ListedTool, ...] = ()
    changed: tuple[ListedTool, ...] = ()
    removed: tuple[ToolRef, ...] = ()

    @classmethod
    def from_wire(cls, message: wire.CatalogChange) -> CatalogChange:
        """Copies it out of its message."""
        return cls(
            message.revision,
            message.full,
            tuple(map(ListedTool.from_wire, message.added)),
            tuple(map(ListedTool.from_wire, message.changed)),
            tuple(ToolRef(each.name, each.source) for each in message.removed),
        )

    def followed_by(self, later: CatalogChange) -> CatalogChange:
        """Returns the one change that does what this one and then a later one do."""
        if later.full:
            return later
        added = {(each.name, each.source): each for each in self.added}
        changed = {(each.name, each.source): each for each in self.changed}
        removed = {(each.name, each.source): each for each in self.removed}
        for ref in later.removed:
            key = (ref.name, ref.source)
            changed.pop(key, None)
            if added.pop(key, None) is None:  # else the reader does not know it
                removed[key] = ref
        for tool in later.added:
            key = (tool.name, tool.source)
            known = removed.pop(key, None) is not None or key in changed
            (changed if known else added)[key] = tool
        for tool in later.changed:
            key = (tool.name, tool.source)
            (added if key in added else changed)[key] = tool
        return CatalogChange(
            later.revision, self.full, tuple(added.values()), tuple(changed.values()), tuple(removed.values())
        )


def list_request(
    role: str | None,
    names: Sequence[str],
    source: str,
    include_offline: bool,
    if_revision: int,
    context: CallContext | None,
    include_refused: bool = False,
) -> wire.ListRequest:
    """Returns the request of a listing; see `Host.list`."""
    return wire.ListRequest(
        role=role,
        names=names,
        source=source,
        include_offline=include_offline,
        if_revision=if_revision,
        context=context.to_wire() if context is not None else None,
        include_refused=include_refused,
    )
