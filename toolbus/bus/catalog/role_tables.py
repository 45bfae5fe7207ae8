"""Holds the role tables, decides which of them a tool goes to, and whether they have room.

There is one table for each configured role and one for roles that are added later. Tools for a role that does not exist
wait in a *hidden* table, which no client sees: a reserved one, which restored tools wait in beside copies of the tools
for all roles, or a waiting one, which has nothing else. The registry changes the tables under its lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.catalog.entry import BUS_SOURCE, CompiledTool, Entry, Handler, RoleTable
from toolbus.errors import LimitExceeded, UnknownRole
from toolbus.protocol.tool import Tool


# The index also collects changed offers: for a store, and for the sessions whose tools got or lost their role. The
# registry changes it under its lock.
class OfferIndex:
    """The entries of each handler and of each source.

    Attributes:
        by_handler: the entries that a handler offers, those that wait for a role included.
        by_source: the entries of a source, offline ones included.
        offline: the end of the grace period and the instance that disconnected, for each entry that is offline; the
            first ends first.
        unsaved: persisted handlers whose offers changed since `Registry.take_unsaved`.
        reviewed: tools whose role was added or removed since `Registry.take_reviewed`, by (name, role): whether each is
            offered.
    """

    __slots__ = ("by_handler", "by_source", "offline", "reviewed", "unsaved")

    def __init__(self) -> None:
        self.by_handler: dict[Handler, dict[Entry, None]] = {}
        self.by_source: dict[str, dict[Entry, None]] = {}
        self.offline: dict[Entry, tuple[float, str]] = {}
        self.unsaved: dict[Handler, None] = {}
        self.reviewed: dict[Handler, dict[tuple[str, str], bool]] = {}

    def __repr__(self) -> str:
        return f"<OfferIndex handlers={len(self.by_handler)} sources={len(self.by_source)} offline={len(self.offline)}>"

    def add(self, entry: Entry) -> None:
        """Adds an entry of a source."""
        self.by_source.setdefault(entry.source, {})[entry] = None

    def forget(self, entry: Entry) -> None:
        """Removes an entry, which has no handler any more."""
        self.offline.pop(entry, None)
        entries = self.by_source[entry.source]
        entries.pop(entry, None)
        if not entries:  # otherwise every former source would stay in memory
            del self.by_source[entry.source]

    def link(self, handler: Handler, entry: Entry) -> None:
        """Adds a handler to an entry."""
        self.by_handler.setdefault(handler, {})[entry] = None
        if handler.persisted:
            self.unsaved[handler] = None

    def unlink(self, handler: Handler, entry: Entry) -> None:
        """Removes a handler from an entry."""
        if handler.persisted:
            self.unsaved[handler] = None
        entries = self.by_handler.get(handler)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self.by_handler[handler]

    def replaced_by(self, handler: Handler) -> dict[Entry, None]:
        """Returns the entries that an attach replaces: the handler's own and, on a reconnect, those of its instance."""
        before = dict(self.by_handler.get(handler, {}))
        if handler.instance:
            for entry in self.by_source.get(handler.source, ()):
                if entry in self.offline and self.offline[entry][1] == handler.instance:
                    before[entry] = None
        return before

    def review(self, handler: Handler, entry: Entry, role: str, is_offered: bool) -> None:
        """Notes that the role of a tool was added or removed."""
        self.reviewed.setdefault(handler, {})[entry.bare_name, role] = is_offered


Lost = dict[tuple[Handler, str], list[str]]  # the roles in which a handler lost a tool, by its bare name
# Offers a tool of a handler in a table: whether it is qualified, and what others lose.
Offer = Callable[[RoleTable, Handler, CompiledTool, bool, Lost], object]


class RoleTables:
    """The tables of a catalog, and the moves between them when a role is added or removed.

    Attributes:
        configured: the tables of the configured roles, in order; replaced as a whole.
        shown: the same tables; without any role, the table for roles that are added later.
        future: the table for roles that are added later.
        reserved: tables of roles that restored tools wait for, not configured and never listed.
        waiting: tables of roles that tools of sessions wait for. They have nothing else: copies of the tools for all
            roles would multiply what the catalog holds by the number of roles that do not exist.
    """

    __slots__ = (
        *("_index", "configured", "future", "reserved", "shown", "tools_per_role", "unconfigured_roles", "waiting"),
    )

    def __init__(
        self, roles: Sequence[str], index: OfferIndex, *, tools_per_role: int, unconfigured_roles: int
    ) -> None:
        self._index = index
        self.future = RoleTable(None)
        self.reserved: dict[str, RoleTable] = {}
        self.waiting: dict[str, RoleTable] = {}
        self.tools_per_role = tools_per_role
        self.unconfigured_roles = unconfigured_roles
        self._show({role: RoleTable(role) for role in roles})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{role}: {len(table.entries)}" for role, table in self.configured.items())
        return f"<RoleTables {{{sizes}}} reserved={len(self.reserved)} waiting={len(self.waiting)}>"

    # -- which tables -------------------------------------------------------------------------------------------

    def get(self, role: str) -> RoleTable | None:
        """Returns the table of a role, a hidden one too."""
        return self.configured.get(role) or self.reserved.get(role) or self.waiting.get(role)

    def hides(self, entry: Entry) -> bool:
        """Tells whether no client sees an entry, since its role does not exist."""
        return entry.table.role is not None and entry.table.role not in self.configured

    def hidden(self) -> list[RoleTable]:
        """Returns the tables of roles that do not exist."""
        return [*self.reserved.values(), *self.waiting.values()]

    def of(self, role: str | None, *, hidden: bool = False) -> list[RoleTable]:
        """Returns the table of a role, or for None all tables.

        Args:
            hidden: whether the role may be one that tools wait for.

        Raises:
            UnknownRole: the role is not configured.
        """
        if role is None:
            return [*self.configured.values(), *self.hidden(), self.future]
        table = self.get(role) if hidden else self.configured.get(role)
        if table is None:
            raise UnknownRole(role)
        return [table]

    def targets(self, role: str | None) -> list[RoleTable]:
        """Returns where a tool is offered, or waits; nowhere where it would wait for one role too many."""
        if role is None:
            return [*self.configured.values(), *self.reserved.values(), self.future]
        table = self.get(role)
        if table is None:
            if not self.may_wait(role):
                return []
            table = self.waiting[role] = RoleTable(role)
        return [table]

    def exactly(self, roles: Sequence[str | None]) -> list[RoleTable]:
        """Returns the tables of these roles, as far as they exist; None stands for roles that are added later."""
        tables = {table.role: table for table in self.targets(None)}
        return [tables[role] for role in roles if role in tables]

    def in_order(self, roles: Iterable[str], *, hidden: bool = False) -> tuple[str, ...]:
        """Returns those of some roles that are configured, in order, and then perhaps the others."""
        affected = dict.fromkeys(roles)
        others = [role for role in affected if role not in self.configured] if hidden else []
        return (*(role for role in self.configured if role in affected), *others)

    # -- room ---------------------------------------------------------------------------------------------------

    def check_roles(self, offered: Sequence[CompiledTool]) -> None:
        """Checks that every role is configured.

        Raises:
            UnknownRole: naming the first that is not.
        """
        for item in offered:
            if item.tool.role and item.tool.role not in self.configured:
                raise UnknownRole(item.tool.role)

    def may_wait(self, role: str, more: int = 0) -> bool:
        """Tells whether a role exists, or tools may wait for it, besides so many further roles that do not exist."""
        hidden = len(self.waiting) + len(self.reserved)
        return self.get(role) is not None or hidden + more < self.unconfigured_roles

    def is_full(self, table: RoleTable, source: str, more: int = 1) -> bool:
        """Tells whether a role has no room for so many tools; the bus's own do not count.

        Roles that do not exist have together the room of one.
        """
        room = self.tools_per_role - more
        if table.role is not None and table.role not in self.configured and table.role not in self.reserved:
            return sum(len(each.entries) for each in self.waiting.values()) > room
        if len(table.entries) <= room or source == BUS_SOURCE:
            return False
        of_bus = sum(entry.table is table for entry in self._index.by_source.get(BUS_SOURCE, ()))
        return len(table.entries) - of_bus > room

    def has_room(self, role: str, source: str, more: int = 1) -> bool:
        """Tells whether a role, or with "" any role, has room for so many further names of a source."""
        if role and not self.may_wait(role):
            return False
        tables = [self.get(role) or RoleTable(role)] if role else [*self.configured.values(), self.future]
        return any(not self.is_full(table, source, more) for table in tables)

    def check_room(self, offered: Sequence[CompiledTool], source: str, *, qualified: bool) -> None:
        """Checks that each tool finds room in a role, all of them together.

        Raises:
            LimitExceeded: naming the first that does not.
        """
        new: Counter[RoleTable] = Counter()
        for item in offered:
            name = f"{source}:{item.tool.name}" if qualified else item.tool.name
            tables = self.targets(item.tool.role or None)
            lacking = [table for table in tables if name not in table.entries]
            taking = [table for table in lacking if not self.is_full(table, source, new[table] + 1)]
            if lacking and not taking and len(lacking) == len(tables):
                raise LimitExceeded("tools_per_role", self.tools_per_role, self.explain_full(item.tool))
            new.update(taking)

    def explain_full(self, tool: Tool) -> str:
        """Returns why no role takes a tool."""
        if tool.role and tool.role not in self.configured:
            return f"tool {tool.name!r} finds no room, {self.tools_per_role} tools wait for roles that do not exist"
        role = f"role {tool.role!r} has" if tool.role else "every role has"
        return f"tool {tool.name!r} finds no room, {role} {self.tools_per_role} tools: unregister some"

    def full_text(self) -> str:
        """Returns the error of a tool that one role did not take."""
        return f"LimitExceeded: the role has {self.tools_per_role} tools (limit tools_per_role): unregister some"

    # -- adding and removing roles ------------------------------------------------------------------------------------

    def add(self, role: str, table: RoleTable) -> None:
        """Adds a role with its table: clients see it."""
        self._show({**self.configured, role: table})

    def remove(self, role: str, waiting: RoleTable) -> None:
        """Removes a role; tools that wait for it from now on are in a table of their own."""
        if waiting.entries:
            self.waiting[role] = waiting
        self._show({name: other for name, other in self.configured.items() if name != role})

    def _show(self, configured: dict[str, RoleTable]) -> None:
        self.configured = configured
        self.shown = tuple(configured.values()) or (self.future,)

    def reserve(self, role: str) -> None:
        """Lets restored tools wait for a role that is not configured; it is never listed."""
        if role not in self.configured and role not in self.reserved:
            self.reserved[role] = self._filled(role)

    def prepare(self, role: str, offer: Offer) -> RoleTable:
        """Returns the table of a role that is about to be added, with what waited for it; it is not hidden any more."""
        table = self.reserved.pop(role, None) or self._filled(role)
        waiting = self.waiting.pop(role, None)
        if waiting is not None:
            self._merge(waiting, table, offer)
        return table

    def _filled(self, role: str) -> RoleTable:
        """Returns a new table with copies of the tools for all roles."""
        table, index = RoleTable(role), self._index
        displaced = [each for earlier in self.future.earlier.values() for each in earlier]
        for future in (*self.future.entries.values(), *displaced):
            entry = Entry(table, future.name, future.bare_name, future.source, future.place)
            entry.former, entry.last_error, entry.trust = dict(future.former), future.last_error, future.trust
            for declaration in future.declarations.values():
                for handler in declaration.handlers:
                    entry.add(declaration.for_handler(), handler)
                    index.link(handler, entry)
            if future.suspended is not None:
                entry.suspended = future.suspended.for_handler(*future.suspended.handlers)
                index.link(future.suspended.handlers[0], entry)
            if future.displaced:
                entry.displaced = True
                table.earlier.setdefault(entry.name, []).append(entry)
            else:
                table.put(entry)
            index.add(entry)
            if future in index.offline:
                index.offline[entry] = index.offline[future]
        index.offline = dict(sorted(index.offline.items(), key=lambda item: item[1]))
        return table

    def _merge(self, waiting: RoleTable, table: RoleTable, offer: Offer) -> None:
        """Moves tools that waited for a role into its table: they came after those for all roles of the same name."""
        for entry in list(waiting.entries.values()):
            other = table.entries.get(entry.name)
            if other is not None and other.source == entry.source and all(each.shares for each in entry.handlers()):
                for declaration in list(entry.declarations.values()):  # the declarations of a source stack
                    tool = declaration.tool
                    item = CompiledTool(
                        *(tool, declaration.checker, declaration.strips, tool, declaration.warnings),
                        output_checker=declaration.output_checker,
                    )
                    for handler in list(declaration.handlers):
                        self._index.unlink(handler, entry)
                        offer(table, handler, item, entry.name != entry.bare_name, {})
                self._index.forget(entry)
                continue
            if other is not None and other.source != entry.source and other.trust > entry.trust:
                entry.name = f"{entry.source}:{entry.bare_name}"
                other = table.entries.get(entry.name)
            if other is not None:
                former = other if other.source == entry.source else table.displace(other, entry.source)
                if former is not None:
                    for handler in former.handlers():
                        self._index.unlink(handler, former)
                    self._index.forget(former)
                entry.place = other.place
            entry.table = table
            table.put(entry)
        table.entries = dict(sorted(table.entries.items(), key=lambda item: item[1].place))

    def replace_waiting(self, handler: Handler, name: str, before: dict[Entry, None], lost: Lost) -> None:
        """Removes tools that wait under a name that a handler now registers for all roles (REST-5).

        Args:
            name: as it is listed.
            before: the entries that an attach of the handler replaces; removed entries are taken out of it.
            lost: gets the losses of other sources.
        """
        index = self._index
        for role, table in self.waiting.items():
            entry = table.entries.get(name)
            if entry is None:
                continue
            is_own = entry.source == handler.source
            if not is_own and entry.trust > handler.trust:
                continue
            for owner in entry.handlers():
                if is_own and owner is not handler and owner.shares and handler.shares:
                    continue
                if not is_own:
                    lost.setdefault((owner, entry.bare_name), []).append(role)
                index.unlink(owner, entry)
                entry.remove(owner)
            if not entry.handlers() and not (is_own and entry in index.offline):
                before.pop(entry, None)
                table.drop(entry)
                index.forget(entry)

    def drop_empty(self) -> None:
        """Forgets roles that nothing waits for any more."""
        if not all(table.entries for table in self.waiting.values()):
            self.waiting = {role: table for role, table in self.waiting.items() if table.entries}
