"""Maps names to entries for one role.

The registry has one role table for each role, and one for roles that are added later. A table answers to listed names,
and to the bare names of qualified tools where no listed name matches.
"""

from __future__ import annotations

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.handler import LENT_MODEL, is_operators


class RoleTable:
    """Holds the entries of one role, in the order in which their names came."""

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
