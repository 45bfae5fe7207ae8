"""Changes the catalog: every way to add and remove offers, under one lock.

A role table maps a listed name to an entry; an entry holds the declarations of its source, each with its handlers,
newest last. A tool whose handlers disconnect stays listed as offline for the grace period, so that a plugin that
reconnects finds its place again. The registry knows nothing of streams and calls.

Which tables there are, and which entries a handler or a source has, is in role_tables.py. All of it changes here.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from toolbus.bus.catalog.changes import CatalogChanges, ChangeOutcome, Journal, LostTool
from toolbus.bus.catalog.entry import (
    BLOCK_PLACES,
    LENT_MODEL,
    MAX_EARLIER,
    MAX_MARKS,
    Block,
    CompiledTool,
    Declaration,
    Entry,
    Handler,
    RoleTable,
    ToolListing,
    displaced_place,
    is_operators,
)
from toolbus.bus.catalog.role_tables import Lost, OfferIndex, RoleTables
from toolbus.common.newest import NewestCache
from toolbus.common.text import clean_line
from toolbus.errors import UnknownRole
from toolbus.protocol.tool import Tool


def is_public(listing: ToolListing) -> bool:
    """Tells whether a tool belongs into listings: not one for operators, nor a model that a host lends."""
    return not is_operators(listing.source) and listing.tool.name != LENT_MODEL


def build(tables: Sequence[RoleTable], names: Iterable[str]) -> Iterable[ToolListing]:
    """Yields a listing for each tool of some names; one for all roles that have the same tool."""
    entries = [[entry for name in names if (entry := table.entries.get(name))] for table in tables]
    return listings_of(entries)


def listings_of(entries: Sequence[Collection[Entry]]) -> Iterable[ToolListing]:
    """Yields a listing for each tool of some roles; one for all roles that have the same tool."""
    grouped: dict[tuple[str, str, str, bool], list[Entry]] = {}
    for entry in itertools.chain.from_iterable(entries):
        key = (entry.name, entry.source, entry.tool.schema_hash, entry.current is None)
        grouped.setdefault(key, []).append(entry)
    return map(listing_of, grouped.values())


class _Built:
    """The listings of some role tables in blocks, as of a revision.

    Attributes:
        marked: how many marks of each table they contain.
        by_number: the blocks by their numbers.
        blocks: the same in order.
    """

    __slots__ = ("blocks", "by_number", "include_offline", "marked", "revision", "tables")

    def __init__(
        self, tables: Sequence[RoleTable], include_offline: bool, lock: AbstractContextManager[object]
    ) -> None:
        with lock:
            self.tables, self.marked = tables, [table.marked for table in tables]
            entries = [list(table.entries.values()) for table in tables]
        self.include_offline, self.revision = include_offline, -1
        self.by_number: dict[int, Block] = {}
        # Without the lock: on a thread this holds up no change. What changes meanwhile is marked.
        self._put(listings_of(entries), {})

    def _put(self, listings: Iterable[ToolListing], found: dict[int, list[ToolListing]]) -> None:
        for listing in listings:
            if self.include_offline or listing.entry.current is not None:
                found.setdefault(listing.place // BLOCK_PLACES, []).append(listing)
        for number, block in found.items():
            self.by_number[number] = tuple(sorted(block, key=lambda listing: listing.place))
        self.blocks = tuple(self.by_number[number] for number in sorted(self.by_number) if self.by_number[number])

    def misses_too_much(self) -> bool:
        """Tells whether some of what changed is not marked any more."""
        return any(table.marked - seen > MAX_MARKS for table, seen in zip(self.tables, self.marked, strict=True))

    def update(self, revision: int) -> None:
        """Builds anew what has changed; inside the registry's lock."""
        tables, marks = self.tables, dict[tuple[int, str], None]()
        for table, seen in zip(tables, self.marked, strict=True):
            marks.update(dict.fromkeys(itertools.islice(reversed(table.marks), table.marked - seen)))
        names = dict.fromkeys(name for _, name in marks)
        numbers = {number for number, _ in marks}
        for table in tables:  # a listing stands at the first place of all its roles
            numbers.update(entry.place // BLOCK_PLACES for name in names if (entry := table.entries.get(name)))
        others = {
            number: [each for each in self.by_number.get(number, ()) if each.tool.name not in names]
            for number in numbers
        }
        self._put(build(tables, names), others)
        self.marked, self.revision = [table.marked for table in tables], revision


def listing_of(entries: Sequence[Entry]) -> ToolListing:
    """Returns the listing of a tool that several roles have."""
    first = entries[0]
    roles = tuple(entry.table.role for entry in entries if entry.table.role is not None)
    return ToolListing(first.tool.renamed(first.name), first.source, roles, tuple(entries))


# Lookups of a name read the live tables without a lock: every change replaces a value in one step. A reader of
# several values, such as a listing, takes the lock that writers share.
class Lookups:
    """The lookups in one catalog.

    Attributes:
        tables: which role tables there are; only the registry changes them.
        first: the live entries of the first role, where most calls find their tool.
        revision: the number of the newest change.
    """

    def __init__(self, tables: RoleTables, index: OfferIndex, first_revision: int) -> None:
        self._lock = threading.RLock()
        self._index = index
        self.tables = tables
        self._journal = Journal(first_revision)
        self.shows: Callable[[Entry], bool] = lambda entry: True  # whether watchers may see a tool; set by CatalogView
        self.revision = first_revision
        self.renamed: Mapping[str, str] = {}  # listed names that operators chose, by ``SOURCE:NAME``
        self._states: tuple[int, dict[str, int]] = (-1, {})  # a revision, and the counts of `count_states` then
        self._publish()

    def _publish(self) -> None:
        """Replaces the tables that lookups read, in one step: to be called when a role was added or removed."""
        self._configured, self._shown = self.tables.configured, self.tables.shown
        # What `blocks` has built, by role and whether offline tools are included.
        self._built: dict[tuple[str | None, bool], _Built] = {}
        self.first: dict[str, Entry] = next((table.entries for table in self._configured.values()), {})

    @property
    def roles(self) -> tuple[str, ...]:
        """The configured roles, in order."""
        return tuple(self._configured)

    @property
    def known_roles(self) -> tuple[str, ...]:
        """The configured roles and the reserved ones."""
        return (*self._configured, *self.tables.reserved)

    @property
    def size(self) -> int:
        """How many entries all roles have that clients see."""
        return sum(len(table.entries) for table in self._shown)

    def find(self, name: str, role: str = "") -> Entry | None:
        """Returns the entry of a name: in a role, or in the first role in order that offers it.

        An offline entry is returned where no role offers the tool.

        Raises:
            UnknownRole: the role is not configured.
        """
        if role:
            table = self._configured.get(role)
            if table is None:
                raise UnknownRole(role)
            return table.get(name)
        offline = None
        for table in self._shown:
            entry = table.get(name)
            if entry is not None:
                if entry.current is not None:
                    return entry
                offline = offline or entry
        return offline

    def _names(self, source: str, bare_name: str) -> tuple[str, ...]:
        """Returns the names under which a source's tool may be listed."""
        names = bare_name, f"{source}:{bare_name}"
        return (*names, self.renamed[names[1]]) if names[1] in self.renamed else names

    def entries_of(self, source: str, bare_name: str) -> list[Entry]:
        """Returns a source's entries under a bare name of its own, in each role in order."""
        with self._lock:
            entries = []
            for table in self._shown:
                for name in self._names(source, bare_name):
                    entry = table.entries.get(name)
                    if entry is not None and entry.source == source and entry.bare_name == bare_name:
                        entries.append(entry)
            return entries

    def offered_by(self, source: str) -> list[Entry]:
        """Returns a source's entries in every role, offline tools included."""
        with self._lock:
            return list(self._index.by_source.get(source, ()))

    def find_all(self, name: str) -> list[Entry]:
        """Returns the entries that offer a name, in each role in order."""
        entries = (table.get(name) for table in self._shown)
        return [entry for entry in entries if entry is not None and entry.current is not None]

    def listings(self, role: str | None = None, *, include_offline: bool = False) -> tuple[ToolListing, ...]:
        """Returns the listings of one role or of all, in the order in which names came.

        Raises:
            UnknownRole: the role is not configured.
        """
        return tuple(itertools.chain.from_iterable(self.blocks(role, include_offline=include_offline)))

    def blocks(self, role: str | None = None, *, include_offline: bool = False) -> tuple[Block, ...]:
        """Returns the same listings in blocks.

        Raises:
            UnknownRole: the role is not configured.
        """
        key = (role, include_offline)
        built = self._built.get(key)
        while built is None or built.revision != self.revision:
            tables = self._tables_of(role)
            if built is None or built.tables != tables or built.misses_too_much():
                built = _Built(tables, include_offline, self._lock)
            with self._lock:
                if self._tables_of(role) == tables and not built.misses_too_much():
                    built.update(self.revision)
                    self._built[key] = built
                    break
        return built.blocks

    def named(
        self, names: Iterable[str], role: str | None = None, *, include_offline: bool = False
    ) -> list[ToolListing]:
        """Returns those of the listings that have some names.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            found = build(self._tables_of(role), dict.fromkeys(names))
            named = [each for each in found if include_offline or each.entry.current is not None]
            return sorted(named, key=lambda listing: listing.place)

    def _tables_of(self, role: str | None) -> tuple[RoleTable, ...]:
        if role is not None and role not in self._configured:
            raise UnknownRole(role)
        return (self._configured[role],) if role is not None else self._shown

    def begin_after(self, revision: int) -> None:
        """Goes on after a revision of an earlier run, if that is higher; before anything is served."""
        if revision >= self.revision:
            self.revision = revision + 1
            self._journal.begin_at(self.revision)

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
                named = build(self._shown, [name])
                listings = [each for each in named if each.source == source and each.entry.current is not None]
                if listings:
                    (changed if existed else added).extend(listings)
                elif existed:
                    removed.append((name, source))
            return CatalogChanges(now, False, tuple(added), tuple(changed), tuple(removed))

    def offers(self, handler: Handler) -> list[str]:
        """Returns the bare names that a handler offers now, each once."""
        with self._lock:
            entries = self._index.by_handler.get(handler, ())
            shown = (entry for entry in entries if not (entry.displaced or self.tables.hides(entry)))
            return list(dict.fromkeys(entry.bare_name for entry in shown))

    def waits(self, handler: Handler) -> list[tuple[str, str]]:
        """Returns the tools of a handler that wait for a role that does not exist: (bare name, role)."""
        with self._lock:
            hidden = filter(self.tables.hides, self._index.by_handler.get(handler, ()))
            return [
                (entry.bare_name, role)
                for entry in hidden
                if (role := entry.table.role) is not None and role in entry.roles_of(handler)
            ]

    def counted(self, handler: Handler) -> list[object]:
        """Returns the items that count against a limit of tools: each offered or displaced name, each that waits."""
        with self._lock:
            displaced = [each.bare_name for each in self._index.by_handler.get(handler, ()) if each.displaced]
            return [*dict.fromkeys((*self.offers(handler), *displaced)), *self.waits(handler)]

    def waiting(self, role: str | None = None) -> list[ToolListing]:
        """Returns the listings of the tools that wait, for one role that does not exist or for all, by their places."""
        with self._lock:
            tables = self.tables.hidden()
            listings = (
                listing for table in tables if role in (None, table.role) for listing in build([table], table.entries)
            )
            own = (listing for listing in listings if listing.tool.role == listing.entry.table.role)
            return sorted(own, key=lambda listing: listing.place)

    def declared_by(self, handler: Handler) -> list[Tool]:
        """Returns the tools that a handler offers now as it declared them, each once."""
        with self._lock:
            declared = (
                (declaration.original or declaration).tool
                for entry in self._index.by_handler.get(handler, ())
                for declaration in entry.declarations.values()
                if handler in declaration.handlers
            )
            return list({(tool.name, tool.role): tool for tool in declared}.values())

    def max_offers(self, handler: Handler) -> int:
        """Returns an upper bound of how many tools a handler offers, in constant time: a tool counts once per role."""
        return len(self._index.by_handler.get(handler, ()))

    def sources(self) -> dict[str, int]:
        """Returns every source that offers something, with the size of its entry list; a tool has one in each role."""
        with self._lock:
            return {source: len(entries) for source, entries in self._index.by_source.items()}

    def some_handlers(self, source: str) -> list[Handler]:
        """Returns the handlers of one tool of a source, which stand for it where it is not a session."""
        entry = next(iter(self._index.by_source.get(source, ())), None)
        return entry.handlers() if entry is not None else []

    def has(self, source: str, name: str) -> bool:
        """Tells whether a source has a tool in any role, an offline or hidden one too, by its listed name."""
        entries = (table.entries.get(name) for table in self.tables.of(None))
        return any(entry is not None and entry.source == source for entry in entries)

    def count_states(self) -> dict[str, int]:
        """Returns how many tools are offered, offline and suspended; a tool for several roles counts in each."""
        if self._states[0] != self.revision:
            with self._lock:
                of_sources, offline = self._index.by_source.values(), len(self._index.offline)
                entries = sum(map(len, of_sources))
                suspended = sum(entry.suspended is not None for each in of_sources for entry in each)
                entries -= sum(entry.displaced and entry.current is not None for each in of_sources for entry in each)
            states = {"offered": entries - offline - suspended, "offline": offline, "suspended": suspended}
            self._states = self.revision, states
        return self._states[1]

    def all_entries(self, owner: Handler | str) -> list[Entry]:
        """Returns the entries of a handler or a source, in every role, those included that no client sees."""
        with self._lock:
            index = self._index
            entries = index.by_source.get(owner) if isinstance(owner, str) else index.by_handler.get(owner)
            return list(entries or ())

    def places(self, handler: Handler) -> tuple[tuple[str | None, int], ...]:
        """Returns where a handler's tools stand: (role, None for roles that are added later; position in listings).

        The position of a displaced tool is that of its name and of its turn, as `displaced_place` makes it.
        """
        with self._lock:
            entries = self._index.by_handler.get(handler, ())
            return tuple((each.table.role, displaced_place(each) if each.displaced else each.place) for each in entries)

    # -- room ---------------------------------------------------------------------------------------------------

    def check_room(self, offered: Sequence[CompiledTool], source: str, *, qualified: bool) -> None:
        """Checks what `RoleTables.check_room` does."""
        with self._lock:
            self.tables.check_room(offered, source, qualified=qualified)


log = logging.getLogger("toolbus.catalog")

MAX_WARNED = 10_000  # tools whose warnings are remembered as logged


class Registry(Lookups):
    """The catalog of one bus: see the module's docstring."""

    def __init__(
        self,
        roles: Sequence[str] = ("default",),
        *,
        tools_per_role: int = 250_000,
        unconfigured_roles: int = 100,
        grace_seconds: float = 5.0,
        first_revision: int = 1,
        first_owner: bool = False,
    ) -> None:
        index = OfferIndex()
        tables = RoleTables(roles, index, tools_per_role=tools_per_role, unconfigured_roles=unconfigured_roles)
        super().__init__(tables, index, first_revision)
        self._last_place = 0  # the position of the newest name
        # What was logged about schemas, by listed name and source.
        self._warned: NewestCache[tuple[str, str], tuple[str, ...]] = NewestCache(MAX_WARNED)
        self.grace_seconds = grace_seconds
        self.first_owner = first_owner  # whether a name stays with the source that has it; else the last writer's
        # Changes how a handler's tool is offered, and its listed name; None: no part does.
        self.overlay: Callable[[Handler, CompiledTool, str], tuple[CompiledTool, str]] | None = None
        self.checks_outputs = False  # whether a tool was ever offered whose results are checked

    def __repr__(self) -> str:
        sizes = ", ".join(f"{role}: {len(table.entries)}" for role, table in self._configured.items())
        return f"<Registry revision={self.revision} {{{sizes}}} offline={len(self._index.offline)}>"

    # -- what changed -------------------------------------------------------------------------------------------

    def take_unsaved(self) -> list[Handler]:
        """Returns the persisted handlers whose offers changed since this was last called."""
        index = self._index
        if not index.unsaved:
            return []
        with self._lock:
            unsaved, index.unsaved = list(index.unsaved), {}
            return unsaved

    def take_reviewed(self) -> dict[Handler, dict[tuple[str, str], bool]]:
        """Returns the tools whose role was added or removed since the last call: whether each is offered now."""
        index = self._index
        if not index.reviewed:
            return {}
        with self._lock:
            reviewed, index.reviewed = index.reviewed, {}
            return reviewed

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
    ) -> ChangeOutcome:
        """Offers tools of a handler; the last writer wins, and a name keeps its place in the list (REST-5).

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
            tables = self.tables
            if roles is None and not (handler.awaits_roles or waits):
                tables.check_roles(offered)
            before = self._index.replaced_by(handler) if declare else {}
            affected: dict[str, None] = {}
            failed: list[tuple[str, str, str]] = []
            lost: Lost = {}
            taken: dict[str, None] = {}
            waiting: dict[tuple[str, str], None] = {}
            refused: list[CompiledTool] = []
            self.revision += bool(offered or before)  # a host that attaches changes nothing
            for item in offered:
                is_taken = False
                for table in tables.targets(item.tool.role or None) if roles is None else tables.exactly(roles):
                    if table.role not in self._configured and needs_role and not is_taken:
                        continue
                    entry = self._offer_in(table, handler, item, qualified, lost)
                    if entry is None:
                        if table.role is None or table.role in self._configured:
                            failed.append((table.role or "", item.tool.name, tables.full_text()))
                        continue
                    is_taken = True
                    before.pop(entry, None)
                    if table.role is not None:
                        affected[table.role] = None
                if not is_taken:
                    refused.append(item)
                elif roles is None and item.tool.role and item.tool.role not in self._configured:
                    waiting[item.tool.name, item.tool.role] = None
                else:
                    taken[item.tool.name] = None
                if tables.waiting and is_taken and roles is None and not item.tool.role:
                    tables.replace_waiting(handler, _listed_name(handler, item, qualified), before, lost)
            for entry in before:
                self._remove(entry, handler)
            tables.drop_empty()
            return ChangeOutcome(
                names=tuple(taken),
                roles=tables.in_order(affected),
                failed=tuple(failed),
                lost=self._lost_tools(lost, handler.source),
                refused=tuple(refused),
                waiting=tuple(waiting),
            )

    def unregister(self, name: str, role: str = "", source: str = "", *, hidden: bool = False) -> ChangeOutcome:
        """Withdraws one tool, in one role or in all; with a source only where that has it, else of earlier owners too.

        Args:
            hidden: whether the role may be one that tools wait for.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            entries = []
            for table in self.tables.of(role or None, hidden=hidden):
                named = [*table.earlier.get(name, ()), *filter(None, [table.entries.get(name)])]
                if source:
                    others = filter(None, map(table.entries.get, self._names(source, name)[1:]))
                    named = [each for each in named if each.source == source] or list(others)
                entries += named
            return self._withdraw(entries)

    def clear(self, source: str, role: str = "") -> ChangeOutcome:
        """Withdraws every tool of a source, in one role or in all.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            tables = self.tables.of(role or None)
            return self._withdraw([entry for entry in self._index.by_source.get(source, ()) if entry.table in tables])

    def withdraw(
        self,
        handler: Handler,
        only: Callable[[Entry], bool] = lambda entry: True,
        *,
        names: Collection[str] | None = None,
    ) -> ChangeOutcome:
        """Withdraws tools of a handler at once, all or some: it drains, has unregistered, or declares them badly.

        Args:
            names: only those with one of these bare names, which are looked up; None: all are checked.
        """
        with self._lock:
            entries = list(filter(only, self._entries_of(handler, names)))
            if entries:
                self.revision += 1
            for entry in entries:
                self._remove(entry, handler)
            return ChangeOutcome(names=tuple(dict.fromkeys(entry.bare_name for entry in entries)))

    def lose(self, handler: Handler, why: str, now: float) -> list[str]:
        """Takes tools of a handler that disconnected offline; they keep their places for the grace period.

        Returns:
            The names that no handler offers any more.
        """
        with self._lock:
            entries = list(self._index.by_handler.pop(handler, ()))
            if entries:
                self.revision += 1
            unoffered = []
            for entry in entries:
                visible = self._visible(entry)
                if entry.remove(handler):
                    self._journalize(entry, visible)
                if entry.current is None:
                    entry.last_error = why
                    unoffered.append(entry.name)
                if entry.current is None and entry.suspended is None and entry.displaced:
                    self._drop(entry, None)
                elif entry.current is None and entry.suspended is None:
                    self._index.offline.pop(entry, None)
                    self._index.offline[entry] = (now + self.grace_seconds, handler.instance)
            return list(dict.fromkeys(unoffered))

    def suspend(self, handlers: Iterable[Handler], why: str) -> list[str]:
        """Takes tools of unreachable handlers offline, without a grace period: they keep their places until `resume`.

        Returns:
            The names that no handler offers any more.
        """
        with self._lock:
            unoffered = []
            self.revision += 1
            for handler in handlers:
                for entry in self._index.by_handler.get(handler, ()):
                    visible = self._visible(entry)
                    if entry.suspend(handler):
                        self._journalize(entry, visible)
                    if entry.current is None:
                        entry.last_error = why
                        unoffered += [entry.name] if visible is not None else []
            return list(dict.fromkeys(unoffered))

    def resume(self, handlers: Iterable[Handler]) -> list[str]:
        """Offers the tools of suspended handlers again. Returns the names that are back."""
        with self._lock:
            back = []
            self.revision += 1
            for handler in handlers:
                for entry in list(self._index.by_handler.get(handler, ())):
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
            # Collected first: finding the first entry of a dict takes ever longer as its front is removed.
            ended = list(itertools.takewhile(lambda item: item[1][0] <= now, self._index.offline.items()))
            for entry, _ in ended:
                expired.append(entry.name)
                self.revision += 1
                self._drop(entry, self._visible(entry))
        return list(dict.fromkeys(expired))

    def touch(self, handler: Handler) -> None:
        """Announces the tools of a handler as changed: its state changed (suspect, or answering again)."""
        with self._lock:
            entries = self._index.by_handler.get(handler)
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
            for table in self._shown:
                for entry in table.entries.values():
                    if entry.current is not None and is_affected(entry):
                        self._journalize(entry, self._visible(entry))
            change()
            self.revision += 1  # again: listings that were cached in between show the old rules

    def add_role(self, role: str) -> None:
        """Adds a role; it gets every tool that was registered for all roles (REST-12)."""
        with self._lock:
            if role in self._configured:
                return
            self.revision += 1
            table = self.tables.prepare(role, self._offer_in)
            for entry in table.entries.values():
                self._journalize(entry, False)  # before the role is shown: watchers know the tools that are visible now
                for handler in entry.handlers():
                    if handler.awaits_roles and role in entry.roles_of(handler):
                        self._index.review(handler, entry, role, True)
            for entry in () if self._configured else self.tables.future.entries.values():
                self._journalize(entry, self._visible(entry))  # some were listed until now, and lost their name
            self.tables.add(role, table)
            self._publish()

    def reserve(self, role: str) -> None:
        """Lets restored tools wait for a role that is not configured; it is never listed."""
        with self._lock:
            self.tables.reserve(role)

    def remove_role(self, role: str) -> None:
        """Removes a role and the tools it has; tools of sessions that are for this role wait for it.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            table = self._configured.get(role)
            if table is None:
                raise UnknownRole(role)
            self.revision += 1
            waiting = RoleTable(role)
            for entry in [each for earlier in table.earlier.values() for each in earlier]:
                for handler in entry.handlers():
                    self._index.unlink(handler, entry)
                self._drop(entry, None)
            for entry in list(table.entries.values()):
                visible = self._visible(entry)
                for handler in entry.handlers():
                    if handler.awaits_roles and role in entry.roles_of(handler):
                        self._index.review(handler, entry, role, False)
                        continue
                    self._index.unlink(handler, entry)
                    entry.remove(handler)
                if entry.handlers() or (entry in self._index.offline and entry.tool.role == role):
                    self._journalize(entry, visible)
                    entry.table = waiting
                    waiting.put(entry)
                else:
                    self._drop(entry, visible)
            self.tables.remove(role, waiting)
            self._publish()
            for entry in () if self._configured else self.tables.future.entries.values():
                self._journalize(entry, False)  # without roles, the tools for roles that are added later are listed

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _offer_in(
        self,
        table: RoleTable,
        handler: Handler,
        declared: CompiledTool,
        qualified: bool,
        lost: Lost,
        *,
        held: bool = False,
    ) -> Entry | None:
        item, name = declared, _listed_name(handler, declared, qualified)
        if self.overlay is not None:
            item, chosen = self.overlay(handler, item, name)
            name = name if held else chosen  # another source has the one that was chosen
        tool = item.tool
        entry = table.entries.get(name)
        visible = self._visible(entry) if entry is not None else None
        if entry is None and self.tables.is_full(table, handler.source):
            return None
        stays = entry is not None and (entry.trust > handler.trust or (self.first_owner and not qualified))
        if entry is not None and entry.source != handler.source and stays:
            own = self._offer_in(table, handler, declared, True, lost, held=True)
            if own is not None:
                why = "which is trusted more" if entry.trust > handler.trust else "which had it first"
                text = f"it is listed as {own.name!r}: {entry.source!r}, {why}, has the name {name!r}"
                own.warnings = {**own.warnings, "name": text}
                log.warning("held tool=%r source=%r %s", item.tool.name, handler.source, clean_line(text))
            return own
        if entry is not None and entry.source != handler.source:
            self._journalize(entry, visible)  # removed, for watchers that knew it as its old source's
            for owner in entry.handlers():
                if table.role in self._configured or table.role in self.tables.waiting:
                    lost.setdefault((owner, entry.bare_name), []).append(table.role)
                self._index.link(owner, entry)  # its place is another one now
            entry, visible = self._displace(entry, handler.source, tool.name), None
        if entry is None:
            self._last_place += 1
            entry = Entry(table, name, tool.name, handler.source, self._last_place)
        for old in entry.handlers():
            if old is not handler and not (old.shares and handler.shares):
                self._index.unlink(old, entry)
        if entry.suspended is not None:  # the new handler replaces one that is unreachable
            self._index.unlink(entry.suspended.handlers[0], entry)
            entry.suspended = None
        declaration = Declaration(tool, item.checker, item.strips, item.warnings, item.output_checker, item.original)
        self.checks_outputs = self.checks_outputs or item.output_checker is not None
        changed = entry.add(declaration, handler)
        entry.trust = handler.trust
        table.put(entry)
        self._index.add(entry)
        self._index.link(handler, entry)
        self._index.offline.pop(entry, None)
        if changed or visible is None:
            self._journalize(entry, visible)
        if self._warned.get((name, handler.source), ()) != item.warnings:  # once, however often a plugin reconnects
            self._warned[name, handler.source] = item.warnings
            for warning in item.warnings:
                log.warning("warning tool=%r source=%r %s", name, handler.source, clean_line(warning))
        return entry

    def _displace(self, entry: Entry, source: str, bare_name: str) -> Entry:
        """Returns the entry of a source that takes a name. The earlier one is kept, unless nobody offers it."""
        table = entry.table
        own = table.displace(entry, source) or Entry(table, entry.name, bare_name, source, entry.place)
        own.place = entry.place
        table.put(own)
        unoffered = not entry.handlers() or table.role in self.tables.waiting
        first = entry if unoffered else table.earlier[entry.name][0]
        if unoffered or len(table.earlier[entry.name]) > MAX_EARLIER:
            for owner in first.handlers():
                self._index.unlink(owner, first)
            table.drop(first)
            self._index.forget(first)
        return own

    def _remove(self, entry: Entry, handler: Handler) -> None:
        visible = self._visible(entry)
        self._index.unlink(handler, entry)
        changed = entry.remove(handler)
        if entry.current is None and entry.suspended is None:
            self._drop(entry, visible)
        elif changed:
            self._journalize(entry, visible)

    def _withdraw(self, entries: Sequence[Entry]) -> ChangeOutcome:
        if not entries:
            return ChangeOutcome()
        self.revision += 1
        affected: dict[str, None] = {}
        lost: Lost = {}
        count = sum(1 for entry in entries if entry.table.role in self._configured and not entry.displaced)
        for entry in entries:
            role = entry.table.role
            for handler in entry.handlers():
                if (role in self._configured or role in self.tables.waiting) and not entry.displaced:
                    lost.setdefault((handler, entry.bare_name), []).append(role)
                self._index.unlink(handler, entry)
            if role is not None:
                affected[role] = None
            self._drop(entry, self._visible(entry))
        return ChangeOutcome(
            names=tuple(dict.fromkeys(entry.bare_name for entry in entries)),
            roles=self.tables.in_order(affected),
            count=count,
            lost=self._lost_tools(lost),
        )

    def _entries_of(self, handler: Handler, names: Collection[str] | None) -> Collection[Entry]:
        """Returns the entries that a handler offers, those with some bare names or all; hidden ones too."""
        entries = self._index.by_handler.get(handler, {})
        if names is None or not entries:
            return entries
        listed = {each for name in names for each in self._names(handler.source, name)}
        places = [(table, name) for table in self.tables.of(None) for name in listed]
        found = [each for table, name in places for each in (table.entries.get(name), *table.earlier.get(name, ()))]
        return [entry for entry in found if entry is not None and entry in entries and entry.bare_name in names]

    def _lost_tools(self, lost: Lost, by_source: str | None = None) -> tuple[LostTool, ...]:
        in_order = self.tables.in_order
        return tuple(
            LostTool(owner, name, in_order(roles, hidden=True), by_source) for (owner, name), roles in lost.items()
        )

    def _drop(self, entry: Entry, visible: bool | None) -> None:
        back = entry.table.drop(entry)
        self._index.forget(entry)
        entry.current = entry.suspended = None
        if visible is not None:
            self._journalize(entry, visible)
        owner = entry.table.entries.get(entry.name)
        if owner is not None:  # it is back, or is not contested any more
            self._journalize(owner, self._visible(owner) if back is None else None)
        if back is not None:
            log.info("back tool=%r source=%r", back.name, back.source)
            for handler in back.handlers():
                self._index.link(handler, back)
                if back.table in self._shown:
                    self._index.review(handler, back, back.table.role or "", True)
        if self.tables.waiting:
            self.tables.drop_empty()

    def _visible(self, entry: Entry) -> bool | None:
        """Tells whether watchers may see an entry as it is now; None where it is not offered."""
        return None if entry.current is None or entry.displaced else self.shows(entry)

    def _journalize(self, entry: Entry, visible: bool | None) -> None:
        """Adds a change to the journal, and whether watchers saw the name of this source before, in any role.

        Args:
            visible: what `_visible` returned for the entry before the change.
        """
        existed = visible is True and entry.table in self._shown
        for table in () if existed else self._shown:
            other = table.entries.get(entry.name) if table is not entry.table else None
            if other is not None and other.source == entry.source and other.current is not None and self.shows(other):
                existed = True
        self._journal.note(self.revision, entry.name, entry.source, existed)


def _listed_name(handler: Handler, item: CompiledTool, qualified: bool) -> str:
    return f"{handler.source}:{item.tool.name}" if qualified else item.tool.name
