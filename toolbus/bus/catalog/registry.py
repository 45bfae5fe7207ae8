"""Holds the catalog: which tools are offered, by which source, for which role, in which order.

The *registry* has one role table for each role and one for roles that are added later. Tools for a role that does not
exist wait in a table that no client sees. A role table maps a listed name to an entry; an entry holds the declarations
of its source, each with its handlers, newest last. A tool whose handlers disconnect stays listed as offline for the
grace period, so that a plugin that reconnects finds its place again. The registry knows nothing of streams and calls.

Writers share one lock. Lookups read the live tables without it: every change replaces a value in one step. The file is
long because every way in which a tool comes and goes changes the same tables under that lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from toolbus.bus.catalog.changes import CatalogChanges, Journal, LostTool, Outcome
from toolbus.bus.catalog.compiled_tool import CompiledTool
from toolbus.bus.catalog.entry import Declaration, Entry
from toolbus.bus.catalog.handler import BUS_SOURCE, Handler
from toolbus.bus.catalog.listing import ToolListing, build, describe, is_public
from toolbus.bus.catalog.role_table import RoleTable
from toolbus.errors import LimitExceeded, UnknownRole
from toolbus.newest import NewestCache
from toolbus.text import clean_line
from toolbus.tool import Tool

log = logging.getLogger("toolbus.catalog")

MAX_WARNED = 10_000  # tools whose warnings are remembered as logged


class Registry:
    """The catalog of one bus: see the module's docstring."""

    def __init__(
        self,
        roles: Sequence[str] = ("default",),
        *,
        tools_per_role: int = 250_000,
        unconfigured_roles: int = 100,
        grace_seconds: float = 5.0,
        first_revision: int = 1,
    ) -> None:
        self._lock = threading.RLock()
        self._tables: dict[str, RoleTable] = {role: RoleTable(role) for role in roles}
        self._future = RoleTable(None)
        self._reserved: dict[str, RoleTable] = {}  # roles that restored tools wait for, not configured and never listed
        # Roles that tools of sessions wait for. These tables have nothing else: copies of the tools for all roles would
        # multiply what the catalog holds by the number of roles that do not exist.
        self._waiting: dict[str, RoleTable] = {}
        # Tools whose role came or went since `take_reviewed`, by (name, role): whether they are offered now.
        self._reviewed: dict[Handler, dict[tuple[str, str], bool]] = {}
        self._by_handler: dict[Handler, dict[Entry, None]] = {}
        self._by_source: dict[str, dict[Entry, None]] = {}
        self._offline: dict[Entry, tuple[float, str]] = {}  # entry → (end of grace period, instance that disconnected)
        self._journal = Journal(first_revision)
        self._last_place = 0  # the position of the newest name
        self._unsaved: dict[Handler, None] = {}  # persisted handlers whose offers changed since `take_unsaved`
        # Cache: revision and listings, by role and whether offline tools are included.
        self._listings: dict[tuple[str | None, bool], tuple[int, tuple[ToolListing, ...]]] = {}
        self.first = self._first()  # the live entries of the first role, where most calls find their tool
        # What was logged about schemas, by listed name and source.
        self._warned: NewestCache[tuple[str, str], tuple[str, ...]] = NewestCache(MAX_WARNED)
        self.shows: Callable[[Entry], bool] = lambda entry: True  # whether watchers may see a tool; set by CatalogView
        self.tools_per_role = tools_per_role
        self.unconfigured_roles = unconfigured_roles
        self.grace_seconds = grace_seconds
        self.revision = first_revision

    def __repr__(self) -> str:
        sizes = ", ".join(f"{role}: {len(table.entries)}" for role, table in self._tables.items())
        return f"<Registry revision={self.revision} {{{sizes}}} offline={len(self._offline)}>"

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """The configured roles, in order."""
        return tuple(self._tables)

    @property
    def known_roles(self) -> tuple[str, ...]:
        """The configured roles and the reserved ones."""
        return (*self._tables, *self._reserved)

    def find(self, name: str, role: str = "") -> Entry | None:
        """Returns the entry of a name: in a role, or in the first role in order that offers it.

        An offline entry is returned where no role offers the tool.

        Raises:
            UnknownRole: the role is not configured.
        """
        if role:
            table = self._tables.get(role)
            if table is None:
                raise UnknownRole(role)
            return table.get(name)
        offline = None
        for table in self._shown():
            entry = table.get(name)
            if entry is not None:
                if entry.current is not None:
                    return entry
                offline = offline or entry
        return offline

    def entries_of(self, source: str, bare_name: str) -> list[Entry]:
        """Returns a source's entries under a bare name of its own, in each role in order."""
        with self._lock:
            entries = []
            for table in self._shown():
                for name in (bare_name, f"{source}:{bare_name}"):
                    entry = table.entries.get(name)
                    if entry is not None and entry.source == source and entry.bare_name == bare_name:
                        entries.append(entry)
            return entries

    def offered_by(self, source: str) -> list[Entry]:
        """Returns a source's entries in every role, offline tools included."""
        with self._lock:
            return list(self._by_source.get(source, ()))

    def find_all(self, name: str) -> list[Entry]:
        """Returns the entries that offer a name, in each role in order."""
        entries = (table.get(name) for table in self._shown())
        return [entry for entry in entries if entry is not None and entry.current is not None]

    def listings(self, role: str | None = None, *, include_offline: bool = False) -> tuple[ToolListing, ...]:
        """Returns the listings of one role or of all, in the order in which names came.

        Raises:
            UnknownRole: the role is not configured.
        """
        key = (role, include_offline)
        cached = self._listings.get(key)
        if cached is None or cached[0] != self.revision:
            with self._lock:
                built = self._build(role)
                selected = built if include_offline else (item for item in built if item.entry.current is not None)
                cached = (self.revision, tuple(selected))
                self._listings[key] = cached
        return cached[1]

    def _build(self, role: str | None) -> Iterable[ToolListing]:
        if role is not None and role not in self._tables:
            raise UnknownRole(role)
        return build([self._tables[role]] if role is not None else self._shown())

    def _shown(self) -> list[RoleTable]:
        """The tables of all configured roles; without any role, the table for roles that are added later."""
        return list(self._tables.values()) or [self._future]

    def since(self, revision: int) -> CatalogChanges:
        """Returns the changes that a watcher which knows a revision has missed."""
        with self._lock:
            now = self.revision
            if revision == now:
                return CatalogChanges(now, full=False)
            was_listed = self._journal.since(revision) if revision < now else None
            if was_listed is None:
                public = tuple(listing for listing in self.listings() if is_public(listing))
                return CatalogChanges(now, full=True, added=public)
            added: list[ToolListing] = []
            changed: list[ToolListing] = []
            removed: list[tuple[str, str]] = []
            for (name, source), existed in was_listed.items():
                found = describe(self._shown(), name, source)
                if found:
                    (changed if existed else added).extend(found)
                elif existed:
                    removed.append((name, source))
            return CatalogChanges(now, False, tuple(added), tuple(changed), tuple(removed))

    def offers(self, handler: Handler) -> list[str]:
        """Returns the bare names that a handler offers now, each once."""
        with self._lock:
            entries = self._by_handler.get(handler, ())
            return list(dict.fromkeys(entry.bare_name for entry in entries if not self._is_hidden(entry)))

    def waits(self, handler: Handler) -> list[tuple[str, str]]:
        """Returns the tools of a handler that wait for a role that does not exist: (bare name, role)."""
        with self._lock:
            hidden = filter(self._is_hidden, self._by_handler.get(handler, ()))
            return [
                (entry.bare_name, role)
                for entry in hidden
                if (role := entry.table.role) is not None and role in _roles_of(entry, handler)
            ]

    def counted(self, handler: Handler) -> list[object]:
        """Returns what counts against a limit of tools: each name that is offered, and each tool that waits."""
        return [*self.offers(handler), *self.waits(handler)]

    def waiting(self, role: str | None = None) -> list[ToolListing]:
        """Returns the listings of the tools that wait, for one role that does not exist or for all, by their places."""
        with self._lock:
            tables = (*self._reserved.values(), *self._waiting.values())
            listings = (listing for table in tables if role in (None, table.role) for listing in build([table]))
            own = (listing for listing in listings if listing.tool.role == listing.entry.table.role)
            return sorted(own, key=lambda listing: listing.place)

    def take_reviewed(self) -> dict[Handler, dict[tuple[str, str], bool]]:
        """Returns the tools whose role came or went since this was last called: whether each is offered now."""
        if not self._reviewed:
            return {}
        with self._lock:
            reviewed, self._reviewed = self._reviewed, {}
            return reviewed

    def declared_by(self, handler: Handler) -> list[Tool]:
        """Returns the tools that a handler offers now as it declared them, each once."""
        with self._lock:
            declared = (
                declaration.tool
                for entry in self._by_handler.get(handler, ())
                for declaration in entry.declarations.values()
                if handler in declaration.handlers
            )
            return list({(tool.name, tool.role): tool for tool in declared}.values())

    def max_offers(self, handler: Handler) -> int:
        """Returns an upper bound of how many tools a handler offers, in constant time: a tool counts once per role."""
        return len(self._by_handler.get(handler, ()))

    def places(self, handler: Handler) -> tuple[tuple[str | None, int], ...]:
        """Returns where a handler's tools stand: (role, None for roles that are added later; position in listings)."""
        with self._lock:
            return tuple((entry.table.role, entry.place) for entry in self._by_handler.get(handler, ()))

    def take_unsaved(self) -> list[Handler]:
        """Returns the persisted handlers whose offers changed since this was last called."""
        if not self._unsaved:
            return []
        with self._lock:
            unsaved, self._unsaved = list(self._unsaved), {}
            return unsaved

    # -- changing -----------------------------------------------------------------------------------------------

    def register(
        self,
        handler: Handler,
        offered: Sequence[CompiledTool],
        *,
        qualified: bool = False,
        declare: bool = False,
        needs_role: bool = False,
        waits: bool = False,
        roles: Sequence[str | None] | None = None,
    ) -> Outcome:
        """Offers tools of a handler; the last writer wins and the place in the list is kept (REST-5).

        Args:
            declare: these tools replace everything that this handler offered before, or that an older one of the same
                source and instance had when it disconnected (a reconnect).
            needs_role: a tool that no role takes does not wait for roles that are added later either (REST-4, REST-12).
            waits: tools wait for a role that does not exist, although those of the handler do not.
            roles: exactly these instead of those that the tools name; None stands for roles that are added later.

        Raises:
            UnknownRole: a tool is for a role that does not exist and may not wait for it. Nothing has changed then.
        """
        with self._lock:
            if roles is None and not (handler.awaits_roles or waits):
                self.check_roles(offered)
            before = self._replaced(handler) if declare else {}
            affected: dict[str, None] = {}
            failed: list[tuple[str, str, str]] = []
            lost: dict[tuple[Handler, str], list[str]] = {}
            taken: dict[str, None] = {}
            waiting: dict[tuple[str, str], None] = {}
            refused: list[CompiledTool] = []
            self.revision += bool(offered or before)  # a host that attaches changes nothing
            for item in offered:
                is_taken = False
                for table in self._targets(item.tool.role or None) if roles is None else self._tables_of(roles):
                    if table.role not in self._tables and needs_role and not is_taken:
                        continue
                    entry = self._offer_in(table, handler, item, qualified, lost)
                    if entry is None:
                        if table.role is None or table.role in self._tables:
                            failed.append((table.role or "", item.tool.name, self._full_text()))
                        continue
                    is_taken = True
                    before.pop(entry, None)
                    if table.role is not None:
                        affected[table.role] = None
                if not is_taken:
                    refused.append(item)
                elif roles is None and item.tool.role and item.tool.role not in self._tables:
                    waiting[item.tool.name, item.tool.role] = None
                else:
                    taken[item.tool.name] = None
                if self._waiting and is_taken and roles is None and not item.tool.role:
                    self._replace_waiting(handler, item.tool.name, qualified, before, lost)
            for entry in before:
                self._remove(entry, handler)
            self._drop_empty()
            return Outcome(
                names=tuple(taken),
                roles=self._in_role_order(affected),
                failed=tuple(failed),
                lost=tuple(
                    LostTool(owner, name, self._in_role_order(roles, hidden=True), handler.source)
                    for (owner, name), roles in lost.items()
                ),
                refused=tuple(refused),
                waiting=tuple(waiting),
            )

    def has_room(self, role: str, source: str, more: int = 1) -> bool:
        """Tells whether a role, or with "" any role, has room for so many further names of a source."""
        with self._lock:
            if role and not self.may_wait(role):
                return False
            tables = [self._table_of(role) or RoleTable(role)] if role else [*self._tables.values(), self._future]
            return any(not self._is_full(table, source, more) for table in tables)

    def may_wait(self, role: str, more: int = 0) -> bool:
        """Tells whether a role exists, or tools may wait for it, beside so many further roles that do not exist."""
        hidden = len(self._waiting) + len(self._reserved)
        return self._table_of(role) is not None or hidden + more < self.unconfigured_roles

    def check_room(self, offered: Sequence[CompiledTool], source: str, *, qualified: bool) -> None:
        """Checks that each tool finds room in a role, all of them together.

        Raises:
            LimitExceeded: naming the first that does not.
        """
        with self._lock:
            new: Counter[RoleTable] = Counter()
            for item in offered:
                name = f"{source}:{item.tool.name}" if qualified else item.tool.name
                tables = self._targets(item.tool.role or None)
                lacking = [table for table in tables if name not in table.entries]
                taking = [table for table in lacking if not self._is_full(table, source, new[table] + 1)]
                if lacking and not taking and len(lacking) == len(tables):
                    raise LimitExceeded("tools_per_role", self.tools_per_role, self.explain_full(item.tool))
                new.update(taking)

    def explain_full(self, tool: Tool) -> str:
        """Returns why no role takes a tool."""
        if tool.role and tool.role not in self._tables:
            return f"tool {tool.name!r} finds no room, {self.tools_per_role} tools wait for roles that do not exist"
        role = f"role {tool.role!r} has" if tool.role else "every role has"
        return f"tool {tool.name!r} finds no room, {role} {self.tools_per_role} tools: unregister some"

    def check_roles(self, offered: Sequence[CompiledTool]) -> None:
        """Checks that every role is configured.

        Raises:
            UnknownRole: naming the first that is not.
        """
        for item in offered:
            if item.tool.role and item.tool.role not in self._tables:
                raise UnknownRole(item.tool.role)

    def unregister(self, name: str, role: str = "", source: str = "", *, hidden: bool = False) -> Outcome:
        """Withdraws one tool, in one role or in all; with a source only where that source has it.

        Args:
            hidden: whether the role may be one that tools wait for.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            entries = []
            for table in self._tables_for(role or None, hidden=hidden):
                entry = table.entries.get(name)
                if entry is None or (source and entry.source != source):
                    entry = table.entries.get(f"{source}:{name}") if source else None
                if entry is not None:
                    entries.append(entry)
            return self._withdraw(entries)

    def clear(self, source: str, role: str = "") -> Outcome:
        """Withdraws every tool of a source, in one role or in all.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            tables = self._tables_for(role or None)
            return self._withdraw([entry for entry in self._by_source.get(source, ()) if entry.table in tables])

    def withdraw(
        self,
        handler: Handler,
        only: Callable[[Entry], bool] = lambda entry: True,
        *,
        names: Collection[str] | None = None,
    ) -> Outcome:
        """Withdraws tools of a handler at once, all or some: it drains, has unregistered, or declares them badly.

        Args:
            names: only those with one of these bare names, which are looked up; None: all are gone through.
        """
        with self._lock:
            entries = list(filter(only, self._entries_of(handler, names)))
            if entries:
                self.revision += 1
            for entry in entries:
                self._remove(entry, handler)
            return Outcome(names=tuple(dict.fromkeys(entry.bare_name for entry in entries)))

    def lose(self, handler: Handler, why: str, now: float) -> list[str]:
        """Takes tools of a handler that disconnected offline; they keep their places for the grace period.

        Returns:
            The names that no handler offers any more.
        """
        with self._lock:
            entries = list(self._by_handler.pop(handler, ()))
            if entries:
                self.revision += 1
            gone = []
            for entry in entries:
                visible = self._visible(entry)
                if entry.remove(handler):
                    self._journalize(entry, visible)
                if entry.current is None:
                    entry.last_error = why
                    gone.append(entry.name)
                if entry.current is None and entry.suspended is None:
                    self._offline.pop(entry, None)
                    self._offline[entry] = (now + self.grace_seconds, handler.instance)
            return list(dict.fromkeys(gone))

    def suspend(self, handlers: Iterable[Handler], why: str) -> list[str]:
        """Takes tools of unreachable handlers offline, without a grace period: they keep their places until `resume`.

        Returns:
            The names that no handler offers any more.
        """
        with self._lock:
            gone = []
            self.revision += 1
            for handler in handlers:
                for entry in self._by_handler.get(handler, ()):
                    visible = self._visible(entry)
                    if entry.suspend(handler):
                        self._journalize(entry, visible)
                    if entry.current is None:
                        entry.last_error = why
                        gone += [entry.name] if visible is not None else []
            return list(dict.fromkeys(gone))

    def resume(self, handlers: Iterable[Handler]) -> list[str]:
        """Offers the tools of suspended handlers again. Returns the names that are back."""
        with self._lock:
            back = []
            self.revision += 1
            for handler in handlers:
                for entry in list(self._by_handler.get(handler, ())):
                    if entry.suspended is None or handler not in entry.suspended.handlers:
                        continue
                    if entry.resume():
                        self._journalize(entry, False)
                        back.append(entry.name)
            return list(dict.fromkeys(back))

    def warn(self, entry: Entry, topic: str, text: str) -> None:
        """Sets a warning about a tool, for operators; "" clears it.

        Args:
            topic: what the warning is about; a tool has one warning for each.
        """
        with self._lock:
            if entry.warnings.get(topic, "") != text:
                warnings = {**entry.warnings, topic: text}
                entry.warnings = {each: warning for each, warning in warnings.items() if warning}
                self.revision += 1
                self._journalize(entry, self._visible(entry))

    def expire(self, now: float) -> list[str]:
        """Drops the tools whose grace period has ended. Returns their names."""
        expired = []
        with self._lock:
            while self._offline:
                entry, (when, _) = next(iter(self._offline.items()))
                if when > now:
                    break
                expired.append(entry.name)
                self.revision += 1
                self._drop(entry, self._visible(entry))
        return list(dict.fromkeys(expired))

    def touch(self, handler: Handler) -> None:
        """Announces the tools of a handler as changed: its state changed (suspect, or answering again)."""
        with self._lock:
            entries = self._by_handler.get(handler)
            if entries:
                self.revision += 1
                for entry in entries:
                    self._journalize(entry, self._visible(entry))

    def change_view(self, change: Callable[[], None], is_affected: Callable[[Entry], bool]) -> None:
        """Changes which tools are shown to whom, and announces the affected tools to watchers.

        Args:
            change: puts the change into force.
            is_affected: tells whether other callers may see a tool afterwards than before.
        """
        with self._lock:
            self.revision += 1
            for table in self._shown():
                for entry in table.entries.values():
                    if entry.current is not None and is_affected(entry):
                        self._journalize(entry, self._visible(entry))
            change()
            self.revision += 1  # again: listings that were cached in between show the old rules

    def add_role(self, role: str) -> None:
        """Adds a role; it gets every tool that was registered for all roles (REST-12)."""
        with self._lock:
            if role in self._tables:
                return
            self.revision += 1
            table = self._reserved.pop(role, None) or self._filled(role)
            self._merge(self._waiting.pop(role, None), table)
            for entry in table.entries.values():
                self._journalize(entry, False)  # before the role is shown: what is visible now is what watchers know
                for handler in entry.handlers():
                    if handler.awaits_roles and role in _roles_of(entry, handler):
                        self._reviewed.setdefault(handler, {})[entry.bare_name, role] = True
            self._tables = {**self._tables, role: table}
            self.first = self._first()

    def reserve(self, role: str) -> None:
        """Lets restored tools wait for a role that is not configured; it is never listed."""
        with self._lock:
            if role not in self._tables and role not in self._reserved:
                self._reserved[role] = self._filled(role)

    def _merge(self, waiting: RoleTable | None, table: RoleTable) -> None:
        """Moves tools that waited for a role into its table: they came after those for all roles of the same name."""
        if waiting is None:
            return
        for entry in list(waiting.entries.values()):
            other = table.entries.get(entry.name)
            if other is not None and other.source == entry.source and all(each.shares for each in entry.handlers()):
                for declaration in list(entry.declarations.values()):  # the declarations of a source stack
                    tool = declaration.tool
                    item = CompiledTool(tool, declaration.checker, declaration.strips, tool, declaration.warnings)
                    for handler in list(declaration.handlers):
                        self._unlink(handler, entry)
                        self._offer_in(table, handler, item, entry.name != entry.bare_name, {})
                self._unlink_source(entry)
                self._offline.pop(entry, None)
                continue
            if other is not None:
                for handler in other.handlers():
                    self._unlink(handler, other)
                self._unlink_source(other)
                self._offline.pop(other, None)
                entry.place = other.place
            entry.table = table
            table.put(entry)
        table.entries = dict(sorted(table.entries.items(), key=lambda item: item[1].place))

    def _filled(self, role: str) -> RoleTable:
        table = RoleTable(role)
        for future in self._future.entries.values():
            entry = Entry(table, future.name, future.bare_name, future.source, future.place)
            entry.former, entry.last_error = dict(future.former), future.last_error
            for declaration in future.declarations.values():
                for handler in declaration.handlers:
                    entry.add(declaration.for_handler(), handler)
                    self._link(handler, entry)
            if future.suspended is not None:
                entry.suspended = future.suspended.for_handler(*future.suspended.handlers)
                self._link(future.suspended.handlers[0], entry)
            table.put(entry)
            self._by_source.setdefault(entry.source, {})[entry] = None
            if future in self._offline:
                self._offline[entry] = self._offline[future]
        self._offline = dict(sorted(self._offline.items(), key=lambda item: item[1]))
        return table

    def remove_role(self, role: str) -> None:
        """Removes a role and the tools it has; tools of sessions that are for this role wait for it.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            table = self._tables.get(role)
            if table is None:
                raise UnknownRole(role)
            self.revision += 1
            waiting = RoleTable(role)
            for entry in list(table.entries.values()):
                visible = self._visible(entry)
                for handler in entry.handlers():
                    if handler.awaits_roles and role in _roles_of(entry, handler):
                        self._reviewed.setdefault(handler, {})[entry.bare_name, role] = False
                        continue
                    self._unlink(handler, entry)
                    entry.remove(handler)
                if entry.handlers() or (entry in self._offline and entry.tool.role == role):
                    self._journalize(entry, visible)
                    entry.table = waiting
                    waiting.put(entry)
                else:
                    self._drop(entry, visible)
            if waiting.entries:
                self._waiting[role] = waiting
            self._tables = {name: other for name, other in self._tables.items() if name != role}
            self._listings = {key: built for key, built in self._listings.items() if key[0] != role}
            for entry in () if self._tables else self._future.entries.values():
                self._journalize(entry, False)  # without roles, the tools for roles that are added later are listed
            self.first = self._first()

    def _first(self) -> dict[str, Entry]:
        return next((table.entries for table in self._tables.values()), {})

    # -- inside the lock ----------------------------------------------------------------------------------------

    def _is_hidden(self, entry: Entry) -> bool:
        """Tells whether no client sees an entry, since its role does not exist."""
        return entry.table.role is not None and entry.table.role not in self._tables

    def _table_of(self, role: str) -> RoleTable | None:
        return self._tables.get(role) or self._reserved.get(role) or self._waiting.get(role)

    def _tables_for(self, role: str | None, *, hidden: bool = False) -> list[RoleTable]:
        if role is None:
            return [*self._tables.values(), *self._reserved.values(), *self._waiting.values(), self._future]
        table = self._table_of(role) if hidden else self._tables.get(role)
        if table is None:
            raise UnknownRole(role)
        return [table]

    def _targets(self, role: str | None) -> list[RoleTable]:
        """Returns where a tool is offered, or waits; nowhere where it would wait for one role too many."""
        if role is None:
            return [*self._tables.values(), *self._reserved.values(), self._future]
        table = self._table_of(role)
        if table is None:
            if not self.may_wait(role):
                return []
            table = self._waiting[role] = RoleTable(role)
        return [table]

    def _replace_waiting(
        self,
        handler: Handler,
        bare_name: str,
        qualified: bool,
        before: dict[Entry, None],
        lost: dict[tuple[Handler, str], list[str]],
    ) -> None:
        """Removes what waits under a name that is registered for all roles now (REST-5)."""
        name = f"{handler.source}:{bare_name}" if qualified else bare_name
        for role, table in self._waiting.items():
            entry = table.entries.get(name)
            if entry is None:
                continue
            is_own = entry.source == handler.source
            for owner in entry.handlers():
                if is_own and owner is not handler and owner.shares and handler.shares:
                    continue
                if not is_own:
                    lost.setdefault((owner, entry.bare_name), []).append(role)
                self._unlink(owner, entry)
                entry.remove(owner)
            if not entry.handlers() and not (is_own and entry in self._offline):
                before.pop(entry, None)
                table.drop(entry)
                self._unlink_source(entry)
                self._offline.pop(entry, None)

    def _drop_empty(self) -> None:
        """Forgets roles that nothing waits for any more."""
        if not all(table.entries for table in self._waiting.values()):
            self._waiting = {role: table for role, table in self._waiting.items() if table.entries}

    def _tables_of(self, roles: Sequence[str | None]) -> list[RoleTable]:
        tables = {table.role: table for table in (*self._tables.values(), *self._reserved.values(), self._future)}
        return [tables[role] for role in roles if role in tables]

    def _replaced(self, handler: Handler) -> dict[Entry, None]:
        """Returns the entries that an attach replaces: the handler's own and, on a reconnect, those of its instance."""
        before = dict(self._by_handler.get(handler, {}))
        if handler.instance:
            for entry in self._by_source.get(handler.source, ()):
                if entry in self._offline and self._offline[entry][1] == handler.instance:
                    before[entry] = None
        return before

    def _offer_in(
        self,
        table: RoleTable,
        handler: Handler,
        item: CompiledTool,
        qualified: bool,
        lost: dict[tuple[Handler, str], list[str]],
    ) -> Entry | None:
        tool = item.tool
        name = f"{handler.source}:{tool.name}" if qualified else tool.name
        entry = table.entries.get(name)
        visible = self._visible(entry) if entry is not None else None
        if entry is None and self._is_full(table, handler.source):
            return None
        if entry is not None and entry.source != handler.source:
            self._journalize(entry, visible)  # removed, for watchers that knew it as its old source's
            for owner in entry.handlers():
                if table.role in self._tables or table.role in self._waiting:
                    lost.setdefault((owner, entry.bare_name), []).append(table.role)
                self._unlink(owner, entry)
            self._unlink_source(entry)
            self._offline.pop(entry, None)
            entry, visible = Entry(table, name, tool.name, handler.source, entry.place), None
        if entry is None:
            self._last_place += 1
            entry = Entry(table, name, tool.name, handler.source, self._last_place)
        for old in entry.handlers():
            if old is not handler and not (old.shares and handler.shares):
                self._unlink(old, entry)
        if entry.suspended is not None:  # the new handler replaces one that is unreachable
            self._unlink(entry.suspended.handlers[0], entry)
            entry.suspended = None
        changed = entry.add(Declaration(tool, item.checker, item.strips, item.warnings), handler)
        table.put(entry)
        self._by_source.setdefault(handler.source, {})[entry] = None
        self._link(handler, entry)
        self._offline.pop(entry, None)
        if changed:
            self._journalize(entry, visible)
        if self._warned.get((name, handler.source), ()) != item.warnings:  # once, however often a plugin reconnects
            self._warned[name, handler.source] = item.warnings
            for warning in item.warnings:
                log.warning("warning tool=%r source=%r %s", name, handler.source, clean_line(warning))
        return entry

    def _remove(self, entry: Entry, handler: Handler) -> None:
        visible = self._visible(entry)
        self._unlink(handler, entry)
        changed = entry.remove(handler)
        if entry.current is None and entry.suspended is None:
            self._drop(entry, visible)
        elif changed:
            self._journalize(entry, visible)

    def _withdraw(self, entries: Sequence[Entry]) -> Outcome:
        if not entries:
            return Outcome()
        self.revision += 1
        affected: dict[str, None] = {}
        lost: dict[tuple[Handler, str], list[str]] = {}
        for entry in entries:
            role = entry.table.role
            for handler in entry.handlers():
                if role in self._tables or role in self._waiting:
                    lost.setdefault((handler, entry.bare_name), []).append(role)
                self._unlink(handler, entry)
            if role is not None:
                affected[role] = None
            self._drop(entry, self._visible(entry))
        count = sum(1 for entry in entries if entry.table.role in self._tables)
        return Outcome(
            names=tuple(dict.fromkeys(entry.bare_name for entry in entries)),
            roles=self._in_role_order(affected),
            count=count,
            lost=tuple(
                LostTool(owner, name, self._in_role_order(dict.fromkeys(roles), hidden=True))
                for (owner, name), roles in lost.items()
            ),
        )

    def _drop(self, entry: Entry, visible: bool | None) -> None:
        entry.table.drop(entry)
        self._unlink_source(entry)
        self._offline.pop(entry, None)
        entry.current = entry.suspended = None
        if visible is not None:
            self._journalize(entry, visible)
        if self._waiting:
            self._drop_empty()

    def _link(self, handler: Handler, entry: Entry) -> None:
        self._by_handler.setdefault(handler, {})[entry] = None
        if handler.persisted:
            self._unsaved[handler] = None

    def _entries_of(self, handler: Handler, names: Collection[str] | None) -> Collection[Entry]:
        """Returns the entries that a handler offers, those with some bare names or all; hidden ones too."""
        entries = self._by_handler.get(handler, {})
        if names is None or not entries:
            return entries
        listed = {each for name in names for each in (name, f"{handler.source}:{name}")}
        tables = self._tables_for(None, hidden=True)
        found = (table.entries.get(name) for table in tables for name in listed)
        return [entry for entry in found if entry is not None and entry in entries and entry.bare_name in names]

    def _unlink(self, handler: Handler, entry: Entry) -> None:
        if handler.persisted:
            self._unsaved[handler] = None
        entries = self._by_handler.get(handler)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self._by_handler[handler]

    def _unlink_source(self, entry: Entry) -> None:
        entries = self._by_source[entry.source]
        entries.pop(entry, None)
        if not entries:  # otherwise every source that ever came would stay in memory
            del self._by_source[entry.source]

    def _visible(self, entry: Entry) -> bool | None:
        """Tells whether watchers may see an entry as it is now; None where it is not offered."""
        return None if entry.current is None else self.shows(entry)

    def _journalize(self, entry: Entry, visible: bool | None) -> None:
        """Adds a change to the journal, and whether watchers saw the name of this source before, in any role.

        Args:
            visible: what `_visible` returned for the entry before the change.
        """
        shown = self._shown()
        others = [table.entries.get(entry.name) for table in shown if table is not entry.table]
        existed = (visible is True and entry.table in shown) or any(
            other.source == entry.source and other.current is not None and self.shows(other)
            for other in others
            if other is not None
        )
        self._journal.note(self.revision, entry.name, entry.source, existed)

    def _in_role_order(self, roles: Iterable[str], *, hidden: bool = False) -> tuple[str, ...]:
        affected = dict.fromkeys(roles)
        others = [role for role in affected if role not in self._tables] if hidden else []
        return (*(role for role in self._tables if role in affected), *others)

    def _is_full(self, table: RoleTable, source: str, more: int = 1) -> bool:
        """Tells whether a role has no room for so many tools; the bus's own do not count.

        Roles that do not exist have together the room of one.
        """
        room = self.tools_per_role - more
        if table.role is not None and table.role not in self._tables and table.role not in self._reserved:
            return sum(len(each.entries) for each in self._waiting.values()) > room
        if len(table.entries) <= room or source == BUS_SOURCE:
            return False
        of_bus = sum(entry.table is table for entry in self._by_source.get(BUS_SOURCE, ()))
        return len(table.entries) - of_bus > room

    def _full_text(self) -> str:
        return f"LimitExceeded: the role has {self.tools_per_role} tools (limit tools_per_role): unregister some"


def _roles_of(entry: Entry, handler: Handler) -> set[str | None]:
    """Returns the roles that the declarations of a handler name; None stands for all roles."""
    declarations = [*entry.declarations.values(), *([entry.suspended] if entry.suspended is not None else ())]
    return {each.tool.role or None for each in declarations if handler in each.handlers}
