"""Builds listings: the lines of the catalog as callers see them.

Stateless: the registry decides when listings are built, and holds its lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolbus.bus.catalog.entry import Entry, RoleTable, ToolListing
from toolbus.bus.catalog.handler import LENT_MODEL, is_operators


def is_public(listing: ToolListing) -> bool:
    """Tells whether a tool belongs into listings: not one for operators, nor a model that a host lends."""
    return not is_operators(listing.source) and listing.tool.name != LENT_MODEL


def build(tables: Sequence[RoleTable]) -> Iterable[ToolListing]:
    """Yields a listing for each tool, in the order in which names came; one for all roles that have the same tool."""
    if len(tables) == 1:
        for entry in tables[0].entries.values():
            yield _own_listing(entry)
        return
    grouped: dict[tuple[str, str, str, bool], list[Entry]] = {}
    for table in tables:
        for entry in table.entries.values():
            key = (entry.name, entry.source, entry.tool.schema_hash, entry.current is None)
            grouped.setdefault(key, []).append(entry)
    listings = map(_shared_listing, grouped.values())
    yield from sorted(listings, key=lambda listing: listing.place)


def describe(tables: Iterable[RoleTable], name: str, source: str) -> list[ToolListing]:
    """Returns the listings of one name of one source, as far as it is offered."""
    by_hash: dict[str, list[Entry]] = {}
    for table in tables:
        entry = table.entries.get(name)
        if entry is not None and entry.source == source and entry.current is not None:
            by_hash.setdefault(entry.tool.schema_hash, []).append(entry)
    return [listing_of(entries) for entries in by_hash.values()]


def listing_of(entries: Sequence[Entry]) -> ToolListing:
    """Returns the listing of a tool that several roles have."""
    first = entries[0]
    roles = tuple(entry.table.role for entry in entries if entry.table.role is not None)
    return ToolListing(first.tool.renamed(first.name), first.source, roles, tuple(entries))


# Entries cache their listings: with 100,000 tools, new ones for all of them after every change would cost a pass of the
# garbage collector over everything that the process holds, each time a caller lists.


def _own_listing(entry: Entry) -> ToolListing:
    """Returns the listing of an entry alone."""
    tool, cached = entry.tool, entry.listing
    if cached is None or cached[0] is not tool:
        cached = entry.listing = (tool, listing_of((entry,)))
    return cached[1]


def _shared_listing(entries: Sequence[Entry]) -> ToolListing:
    """Returns the listing of a tool that several roles have; the first entry caches it, the others drop theirs."""
    first, *others = entries
    for entry in others:
        entry.shared_listing = None
    if not others:
        first.shared_listing = None
        return _own_listing(first)
    tool, cached = first.tool, first.shared_listing
    if cached is None or cached[0] is not tool or cached[1].entries != tuple(entries):
        cached = first.shared_listing = (tool, listing_of(entries))
    return cached[1]
