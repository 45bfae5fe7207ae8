"""Looks up the catalog: which tools are offered, by which source, for which role, in which order.

Lookups of a name read the live tables without a lock: every change replaces a value in one step. A reader of
several values, such as a listing, takes the lock that writers share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.catalog.catalog_listing import build, describe, is_public
from toolbus.bus.catalog.changes import CatalogChanges, Journal
from toolbus.bus.catalog.compiled_tool import CompiledTool
from toolbus.bus.catalog.entry import Entry, ToolListing
from toolbus.bus.catalog.handler import Handler
from toolbus.bus.catalog.offer_index import OfferIndex
from toolbus.bus.catalog.role_tables import RoleTables
from toolbus.errors import UnknownRole
from toolbus.tool import Tool


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
        # Cache: revision and listings, by role and whether offline tools are included.
        self._states: tuple[int, dict[str, int]] = (-1, {})  # a revision, and the counts of `count_states` then
        self._listings: dict[tuple[str | None, bool], tuple[int, tuple[ToolListing, ...]]] = {}
        self._publish()

    def _publish(self) -> None:
        """Replaces the tables that lookups read, in one step: to be called when a role was added or removed."""
        self._configured, self._shown = self.tables.configured, self.tables.shown
        self.first: dict[str, Entry] = next((table.entries for table in self._configured.values()), {})

    @property
    def roles(self) -> tuple[str, ...]:
        """The configured roles, in order."""
        return tuple(self._configured)

    @property
    def known_roles(self) -> tuple[str, ...]:
        """The configured roles and the reserved ones."""
        return (*self._configured, *self.tables.reserved)

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

    def entries_of(self, source: str, bare_name: str) -> list[Entry]:
        """Returns a source's entries under a bare name of its own, in each role in order."""
        with self._lock:
            entries = []
            for table in self._shown:
                for name in (bare_name, f"{source}:{bare_name}"):
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
        if role is not None and role not in self._configured:
            raise UnknownRole(role)
        return build([self._configured[role]] if role is not None else self._shown)

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
                listings = describe(self._shown, name, source)
                if listings:
                    (changed if existed else added).extend(listings)
                elif existed:
                    removed.append((name, source))
            return CatalogChanges(now, False, tuple(added), tuple(changed), tuple(removed))

    def offers(self, handler: Handler) -> list[str]:
        """Returns the bare names that a handler offers now, each once."""
        with self._lock:
            entries = self._index.by_handler.get(handler, ())
            return list(dict.fromkeys(entry.bare_name for entry in entries if not self.tables.hides(entry)))

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
        """Returns the items that count against a limit of tools: each offered name, and each tool that waits."""
        return [*self.offers(handler), *self.waits(handler)]

    def waiting(self, role: str | None = None) -> list[ToolListing]:
        """Returns the listings of the tools that wait, for one role that does not exist or for all, by their places."""
        with self._lock:
            tables = self.tables.hidden()
            listings = (listing for table in tables if role in (None, table.role) for listing in build([table]))
            own = (listing for listing in listings if listing.tool.role == listing.entry.table.role)
            return sorted(own, key=lambda listing: listing.place)

    def declared_by(self, handler: Handler) -> list[Tool]:
        """Returns the tools that a handler offers now as it declared them, each once."""
        with self._lock:
            declared = (
                declaration.tool
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
        """Returns where a handler's tools stand: (role, None for roles that are added later; position in listings)."""
        with self._lock:
            return tuple((entry.table.role, entry.place) for entry in self._index.by_handler.get(handler, ()))

    # -- room ---------------------------------------------------------------------------------------------------

    def has_room(self, role: str, source: str, more: int = 1) -> bool:
        """Tells whether a role, or with "" any role, has room for so many further names of a source."""
        with self._lock:
            return self.tables.has_room(role, source, more)

    def check_room(self, offered: Sequence[CompiledTool], source: str, *, qualified: bool) -> None:
        """Checks that each tool finds room in a role, all of them together.

        Raises:
            LimitExceeded: naming the first that does not.
        """
        with self._lock:
            self.tables.check_room(offered, source, qualified=qualified)
