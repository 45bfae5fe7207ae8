"""Holds the entries of each role by name, with their declarations and the handlers that offer them.

An *entry* belongs to one role table and one source. Its *declarations* are the ways in which sessions of that source
declare the tool; the newest that has a handler is offered. The entry keeps older declarations for CATALOG_STALE. A
*role table* has the entries of one role, and a *listing* shows one tool of a source with the roles that have it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from toolbus.bus.catalog.handler import LENT_MODEL, Handler, has_room, in_flight, is_operators, share_of
from toolbus.bus.catalog.schema import ArgumentChecker
from toolbus.bus.metrics.call_counts import CallCounts
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, Tool

MAX_FORMER = 4  # older declarations of a tool that CATALOG_STALE can still compare with
CHOICE_OF_TWO = 16  # handlers; among more of them the better of two at random is as good as the best


class Declaration:
    """One way in which a source declares a tool, with the handlers that offer it so."""

    __slots__ = (*("checker", "handlers", "is_special", "output_checker", "strips", "timeout", "tool", "warnings"),)

    def __init__(
        self,
        tool: Tool,
        checker: ArgumentChecker | None,
        strips: frozenset[str],
        warnings: tuple[str, ...] = (),
        output_checker: ArgumentChecker | None = None,
    ) -> None:
        self._set_tool(tool)
        self.checker = checker  # None: arguments are not validated
        self.strips = strips  # keys that are taken out of the arguments
        self.warnings = warnings  # about its schema, for operators
        self.output_checker = output_checker  # None: results are not checked
        self.handlers: list[Handler] = []

    def _set_tool(self, tool: Tool) -> None:
        self.tool = tool
        self.timeout = tool.timeout_seconds or DEFAULT_TIMEOUT_SECONDS  # of calls that do not set one
        self.is_special = bool(tool.idle_timeout_seconds or tool.needs)  # whether its calls need more than most

    def take_over(self, other: Declaration) -> None:
        """Takes the other fields of a declaration of the same name, description and parameters."""
        self._set_tool(other.tool)
        self.checker, self.warnings, self.output_checker = other.checker, other.warnings, other.output_checker

    def __repr__(self) -> str:
        return f"<Declaration {self.tool.name} {self.tool.schema_hash[:8]} handlers={len(self.handlers)}>"

    def for_handler(self, *handlers: Handler) -> Declaration:
        """Returns a copy of the declaration with these handlers instead."""
        other = Declaration(self.tool, self.checker, self.strips, self.warnings, self.output_checker)
        other.handlers.extend(handlers)
        return other

    def pick(self) -> Handler | None:
        """Returns the handler with the fewest calls in flight that takes another; None: all are full (backpressure)."""
        handlers = self.handlers
        if len(handlers) == 1:
            handler = handlers[0]
            return handler if handler.takes_calls and len(handler.pending) < handler.max_in_flight else None
        if len(handlers) > CHOICE_OF_TWO:
            free = [handler for handler in random.sample(handlers, 2) if has_room(handler)]
            if free:
                return min(free, key=in_flight)
        return min(filter(has_room, handlers), key=in_flight, default=None)

    def pick_for(self, caller: object, now: float) -> Handler | None:
        """Returns the handler with the fewest calls in flight that takes another from a caller; None: none does."""
        return min((one for one in self.handlers if share_of(one, caller, now)), key=in_flight, default=None)


class Entry:
    """The tool that one role has under one listed name."""

    __slots__ = (
        *("bare_name", "counts", "current", "declarations", "former", "last_error", "levels", "listing", "name"),
        *("place", "shared_listing", "source", "suspended", "table", "warnings"),
    )

    def __init__(self, table: RoleTable, name: str, bare_name: str, source: str, place: int) -> None:
        self.table = table
        self.place = place  # its position in listings: names stand in the order in which they came
        self.name = name
        self.bare_name = bare_name
        self.source = source
        self.declarations: dict[str, Declaration] = {}  # by schema_hash, newest last
        self.current: Declaration | None = None  # the newest that has a handler; None while offline
        self.former: dict[str, Tool] = {}  # declarations that are no longer offered, oldest first
        self.levels: dict[Handler, int] = {}  # the access level that a handler requires, where it requires one
        self.counts: CallCounts | None = None  # of its calls; None before the first
        self.last_error = ""  # why the tool went offline the last time
        self.suspended: Declaration | None = None  # its handler is unreachable; not offered until that resumes
        self.warnings: dict[str, str] = {}  # for operators, beside those about its schema, by topic
        # Cached listings: of this entry alone, and together with the same tool of later roles. Each is valid only for
        # the tool that is stored with it.
        self.listing: tuple[Tool, ToolListing] | None = None
        self.shared_listing: tuple[Tool, ToolListing] | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.name} of {self.source} role={self.table.role} {self.current!r}>"

    @property
    def tool(self) -> Tool:
        """The tool as it is offered, or as it was offered last."""
        declaration = self.current or self.suspended or next(reversed(self.declarations.values()), None)
        if declaration is not None:
            return declaration.tool
        return next(reversed(self.former.values()))

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """The warnings about the tool for operators, one sentence each."""
        declaration = self.current or self.suspended
        return (*self.warnings.values(), *(declaration.warnings if declaration is not None else ()))

    @property
    def min_level(self) -> int:
        """The access level that a call needs: the highest of all handlers, whichever would take the call."""
        return max((self.tool.min_level, *self.levels.values()))

    def add(self, declaration: Declaration, handler: Handler) -> bool:
        """Adds a handler with its declaration. Returns whether the offered tool has changed."""
        key = declaration.tool.schema_hash
        before, min_level = self.current, declaration.tool.min_level
        same = self.declarations.get(key)
        if same is not None and handler in same.handlers:
            changed = same.tool != declaration.tool or same.warnings != declaration.warnings
            same.take_over(declaration)
            self._set_level(handler, min_level)
            return changed
        for other in list(self.declarations.values()):
            for old in [old for old in other.handlers if not (old.shares and handler.shares)]:
                self._drop(other, old)
        self._drop_handler(handler)
        same = self.declarations.pop(key, None)
        if same is not None:
            declaration.handlers = same.handlers
        declaration.handlers.append(handler)
        self._set_level(handler, min_level)
        self.declarations[key] = declaration
        self.former.pop(key, None)
        self.current = declaration
        return before is None or before.tool != declaration.tool

    def remove(self, handler: Handler) -> bool:
        """Removes a handler. Returns whether the offered tool has changed."""
        before = self.current
        self._drop_handler(handler)
        if self.suspended is not None and handler in self.suspended.handlers:
            self.suspended = None
        self.current = next(reversed(self.declarations.values()), None)
        return self.current is not before

    def suspend(self, handler: Handler) -> bool:
        """Stops offering a handler's declaration until it resumes. Returns whether the offered tool has changed."""
        for declaration in self.declarations.values():
            if handler in declaration.handlers:
                changed = self.remove(handler)
                self.suspended = declaration.for_handler(handler)
                return changed
        return False

    def resume(self) -> bool:
        """Offers the suspended declaration again. Returns whether the offered tool has changed."""
        suspended, self.suspended = self.suspended, None
        return suspended is not None and self.add(suspended.for_handler(), suspended.handlers[0])

    def handlers(self) -> list[Handler]:
        """Returns all handlers of the tool, of every declaration and of the suspended one."""
        declarations = [*self.declarations.values(), *([self.suspended] if self.suspended is not None else ())]
        return [handler for declaration in declarations for handler in declaration.handlers]

    def roles_of(self, handler: Handler) -> set[str | None]:
        """Returns the roles that the declarations of a handler name; None stands for all roles."""
        declarations = [*self.declarations.values(), *([self.suspended] if self.suspended is not None else ())]
        return {each.tool.role or None for each in declarations if handler in each.handlers}

    def _set_level(self, handler: Handler, min_level: int) -> None:
        self.levels.pop(handler, None)
        if min_level:
            self.levels[handler] = min_level

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
            while len(self.former) > MAX_FORMER:
                del self.former[next(iter(self.former))]


class RoleTable:
    """Holds the entries of one role, in the order in which their names came.

    It answers to listed names, and to the bare names of qualified tools where no listed name matches. The registry has
    one for each role, and one for roles that are added later.
    """

    __slots__ = ("aliases", "entries", "role")

    def __init__(self, role: str | None) -> None:
        self.role = role  # None: the table for roles that are added later
        self.entries: dict[str, Entry] = {}
        self.aliases: dict[str, dict[str, Entry]] = {}  # bare name → qualified entries, first registered first

    def get(self, name: str) -> Entry | None:
        """Returns the entry of a listed name, or of a bare name that no listed name hides."""
        entry = self.entries.get(name)
        aliases = self.aliases.get(name) if entry is None else None
        if aliases:
            # The first registered keeps the name while it is offline: a call must not reach another's tool meanwhile.
            entry = next(iter(list(aliases.values())), None)  # copied in one step: another thread may write
        return entry

    def put(self, entry: Entry) -> None:
        """Adds an entry; it replaces the one with its name, in place."""
        before = self.entries.get(entry.name)
        if before is not None and before is not entry:
            self._forget(before)
        self.entries[entry.name] = entry
        if entry.name != entry.bare_name and entry.name != LENT_MODEL and not is_operators(entry.source):
            self.aliases.setdefault(entry.bare_name, {})[entry.name] = entry

    def drop(self, entry: Entry) -> None:
        """Removes an entry."""
        del self.entries[entry.name]
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        entry.listing = entry.shared_listing = None  # they hold entries: cycles would wait for the garbage collector
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
        """The first role's entry, for states and counts."""
        return self.entries[0]

    @property
    def place(self) -> int:
        """Its position among others: the earliest of its entries."""
        return min(entry.place for entry in self.entries)
