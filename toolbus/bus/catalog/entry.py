"""Who has a name: the entries of a role's table, their declarations and the handlers behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolbus.bus.catalog.schema import ArgumentChecker
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, Tool

BUS_SOURCE = "toolbus"  # the bus's own tools: listed only when asked for, never under a bare name
VERSIONS_KEPT = 4  # older declarations of a tool that CATALOG_STALE can still compare with
CHOICE_OF_TWO = 16  # above so many sessions the better of two at random is as good as the best (design.md 4)


class Handler(Protocol):
    """Whoever runs a tool: a stream, a local function, a callback, a file."""

    source: str
    instance: str
    max_in_flight: int
    pending: dict[str, Any]  # the calls in flight there, by the bus's id; stuck ones included
    stuck: int  # how many of them have ended for their caller and are not confirmed
    shares: bool  # whether it offers a tool together with others of the source that share, or the newer replaces all
    max_item_bytes: int  # the largest call that it can receive
    remote: bool  # whether the tool runs outside the bus's process
    kept: bool  # whether its offers are to outlive the bus: somebody writes them down

    @property
    def takes_calls(self) -> bool:
        """Whether a new call may be sent now."""

    @property
    def session_state(self) -> int:
        """How the handler is, as listings show it: a ``SessionState`` of the wire."""

    def send(self, calls: Sequence[Any], now: float) -> None:
        """Starts calls that are in ``pending`` already. Their results go to ``Dispatcher.results``."""

    def cancel(self, call: Any, reason: str) -> bool:
        """Asks to stop a call. Returns whether the call never left, so that nothing will confirm it."""

    def stage(self, call: Any) -> Any:
        """How far a call has got."""


class Declaration:
    """One way in which a source declares a tool, and the handlers that offer it so."""

    __slots__ = ("checker", "handlers", "strips", "timeout", "tool")

    def __init__(self, tool: Tool, checker: ArgumentChecker | None, strips: frozenset[str]) -> None:
        self.tool = tool
        self.timeout = tool.timeout_seconds or DEFAULT_TIMEOUT_SECONDS  # of calls that do not say
        self.checker = checker  # None: arguments are not looked at
        self.strips = strips  # keys that are taken out of the arguments
        self.handlers: list[Handler] = []

    def __repr__(self) -> str:
        return f"<Declaration {self.tool.name} {self.tool.schema_hash[:8]} handlers={len(self.handlers)}>"

    def for_handler(self, *handlers: Handler) -> Declaration:
        """Returns the same declaration with other handlers, or none."""
        other = Declaration(self.tool, self.checker, self.strips)
        other.handlers.extend(handlers)
        return other

    def pick(self) -> Handler | None:
        """Returns the handler with the fewest calls in flight that takes one more, or None."""
        handlers = self.handlers
        if len(handlers) == 1:
            handler = handlers[0]
            return handler if handler.takes_calls and len(handler.pending) < handler.max_in_flight else None
        if len(handlers) > CHOICE_OF_TWO:
            free = [handler for handler in random.sample(handlers, 2) if has_room(handler)]
            if free:
                return min(free, key=in_flight)
        return min(filter(has_room, handlers), key=in_flight, default=None)


class Entry:
    """What one role has under one listed name."""

    __slots__ = (
        *("bare_name", "current", "declarations", "former", "last_error", "levels", "line", "name", "place"),
        *("shared_line", "source", "suspended", "table", "warnings"),
    )

    def __init__(self, table: Table, name: str, bare_name: str, source: str, place: int) -> None:
        self.table = table
        self.place = place  # where it stands in listings of several roles
        self.name = name
        self.bare_name = bare_name
        self.source = source
        self.declarations: dict[str, Declaration] = {}  # by schema_hash, newest last
        self.current: Declaration | None = None  # the newest that has a handler; None while offline
        self.former: dict[str, Tool] = {}  # declarations that are no longer offered, oldest first
        self.levels: dict[Handler, int] = {}  # the access level that a handler asks for, where it asks for one
        self.last_error = ""  # why the tool was last lost
        self.suspended: Declaration | None = None  # one whose handler is away, not offered until it is back
        self.warnings: dict[str, str] = {}  # what an operator should know about the tool, by who says it
        # How it was listed last by itself, and with the same tool of other roles after it; each with the tool of then.
        self.line: tuple[Tool, ToolListing] | None = None
        self.shared_line: tuple[Tool, ToolListing] | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.name} of {self.source} role={self.table.role} {self.current!r}>"

    @property
    def tool(self) -> Tool:
        """The declaration that is offered, or was offered last."""
        declaration = self.current or self.suspended or next(reversed(self.declarations.values()), None)
        if declaration is not None:
            return declaration.tool
        return next(reversed(self.former.values()))

    @property
    def min_level(self) -> int:
        """The access level that a call needs: the highest that is asked for, whichever session would take the call."""
        return max((self.tool.min_level, *self.levels.values()))

    def add(self, declaration: Declaration, handler: Handler) -> bool:
        """Adds an offer. Returns whether what is offered has changed."""
        key = declaration.tool.schema_hash
        before, level = self.current, declaration.tool.min_level
        same = self.declarations.get(key)
        if same is not None and handler in same.handlers:
            changed = same.tool != declaration.tool
            same.tool, same.checker, same.timeout = declaration.tool, declaration.checker, declaration.timeout
            self._ask_for(handler, level)
            return changed
        for other in list(self.declarations.values()):
            for old in [old for old in other.handlers if not (old.shares and handler.shares)]:
                self._drop(other, old)
        self._drop_handler(handler)
        same = self.declarations.pop(key, None)
        if same is not None:
            declaration.handlers = same.handlers
        declaration.handlers.append(handler)
        self._ask_for(handler, level)
        self.declarations[key] = declaration
        self.former.pop(key, None)
        self.current = declaration
        return before is None or before.tool != declaration.tool

    def remove(self, handler: Handler) -> bool:
        """Takes a handler's offer away. Returns whether what is offered has changed."""
        before = self.current
        self._drop_handler(handler)
        if self.suspended is not None and handler in self.suspended.handlers:
            self.suspended = None
        self.current = next(reversed(self.declarations.values()), None)
        return self.current is not before

    def suspend(self, handler: Handler) -> bool:
        """Puts a handler's offer aside until it is back. Returns whether what is offered has changed."""
        for declaration in self.declarations.values():
            if handler in declaration.handlers:
                changed = self.remove(handler)
                self.suspended = declaration.for_handler(handler)
                return changed
        return False

    def resume(self) -> bool:
        """Offers again what was put aside. Returns whether what is offered has changed."""
        aside, self.suspended = self.suspended, None
        return aside is not None and self.add(aside.for_handler(), aside.handlers[0])

    def handlers(self) -> list[Handler]:
        """All handlers that offer the tool, in any declaration, and the one that is suspended."""
        declarations = [*self.declarations.values(), *([self.suspended] if self.suspended is not None else ())]
        return [handler for declaration in declarations for handler in declaration.handlers]

    def _ask_for(self, handler: Handler, level: int) -> None:
        self.levels.pop(handler, None)
        if level:
            self.levels[handler] = level

    def _drop_handler(self, handler: Handler) -> None:
        for declaration in list(self.declarations.values()):
            if handler in declaration.handlers:
                self._drop(declaration, handler)

    def _drop(self, declaration: Declaration, handler: Handler) -> None:
        declaration.handlers.remove(handler)
        self.levels.pop(handler, None)
        if not declaration.handlers:
            key = declaration.tool.schema_hash
            del self.declarations[key]
            self.former.pop(key, None)
            self.former[key] = declaration.tool
            while len(self.former) > VERSIONS_KEPT:
                del self.former[next(iter(self.former))]


class Table:
    """The tools of one role, in the order in which their names came."""

    __slots__ = ("aliases", "entries", "role")

    def __init__(self, role: str | None) -> None:
        self.role = role  # None: roles still to come
        self.entries: dict[str, Entry] = {}
        self.aliases: dict[str, dict[str, Entry]] = {}  # bare name → qualified entries, first registered first

    def get(self, name: str) -> Entry | None:
        entry = self.entries.get(name)
        aliases = self.aliases.get(name) if entry is None else None
        if aliases:
            # The first registered has it as long as it may come back: a call must not reach another's tool meanwhile.
            entry = next(iter(list(aliases.values())), None)  # a copy made in one step: another thread may write
        return entry

    def put(self, entry: Entry) -> None:
        before = self.entries.get(entry.name)
        if before is not None and before is not entry:
            self._forget(before)
        self.entries[entry.name] = entry
        if entry.name != entry.bare_name and entry.source != BUS_SOURCE:
            self.aliases.setdefault(entry.bare_name, {})[entry.name] = entry

    def drop(self, entry: Entry) -> None:
        del self.entries[entry.name]
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        entry.line = entry.shared_line = None  # they hold entries: nothing may be left to the garbage collector
        alias = self.aliases.get(entry.bare_name)
        if alias is not None:
            alias.pop(entry.name, None)
            if not alias:
                del self.aliases[entry.bare_name]


@dataclass(frozen=True, slots=True)
class ToolListing:
    """One line of the catalog: a tool of a source and the roles that have it."""

    tool: Tool  # under its listed name
    source: str
    roles: tuple[str, ...]
    entries: tuple[Entry, ...]  # live, one for each role

    @property
    def entry(self) -> Entry:
        """The first role's, for states and counts."""
        return self.entries[0]

    @property
    def place(self) -> int:
        """Where it stands among others: where its name stood first."""
        return min(entry.place for entry in self.entries)


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """What a watcher missed since a revision. ``full``: it was too far behind, ``added`` is everything."""

    revision: int
    full: bool
    added: tuple[ToolListing, ...] = ()
    changed: tuple[ToolListing, ...] = ()
    removed: tuple[tuple[str, str], ...] = ()  # (listed name, source)


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the owner of a tool should hear: it lost the tool in these roles, to whom (None: withdrawn)."""

    handler: Handler
    name: str
    roles: tuple[str, ...]
    by_source: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change of the catalog did.

    Attributes:
        names: the tools concerned, by bare name.
        roles: the roles concerned, in configured order.
        failed: (role, tool, error) where a role could not take a tool.
        count: tools withdrawn, each counted once per role.
        notices: what owners should hear.
        accepted: whether every tool is offered in at least one role or waits for roles to come.
    """

    names: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    count: int = 0
    notices: tuple[Notice, ...] = ()
    accepted: bool = True


def has_room(handler: Handler) -> bool:
    return handler.takes_calls and len(handler.pending) < handler.max_in_flight


def in_flight(handler: Handler) -> int:
    return len(handler.pending)
