"""The catalog as lines: built from the tables of the registry, and what changed since a revision.

Pure: it is handed tables and remembers names. The registry decides when, and holds its lock meanwhile.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from toolbus.bus.catalog.entry import BUS_SOURCE, Entry, Table, ToolListing

CHANGES_KEPT = 10_000  # a watcher further behind gets the whole list


class Journal:
    """Which names changed at which revision, for as long as it reaches back."""

    def __init__(self, first_revision: int) -> None:
        self._changes: deque[tuple[int, str, str, bool]] = deque(maxlen=CHANGES_KEPT)
        self._floor = first_revision  # the oldest revision from which changes are known

    def __repr__(self) -> str:
        return f"<Journal changes={len(self._changes)} since={self._floor}>"

    def note(self, revision: int, name: str, source: str, existed: bool) -> None:
        """Notes that a name of a source changes, and whether it was listed before."""
        if len(self._changes) == CHANGES_KEPT:
            self._floor = self._changes[0][0]
        self._changes.append((revision, name, source, existed))

    def since(self, revision: int) -> dict[tuple[str, str], bool] | None:
        """Returns (name, source) of what changed, and whether it was there then; None: too long ago to know."""
        if revision < self._floor:
            return None
        newer = itertools.takewhile(lambda change: change[0] > revision, reversed(self._changes))
        was_there: dict[tuple[str, str], bool] = {}
        for _, name, source, existed in reversed(list(newer)):
            if source != BUS_SOURCE:
                was_there.setdefault((name, source), existed)
        return was_there


def build(tables: Sequence[Table]) -> Iterable[ToolListing]:
    """Yields a line for each tool, in the order in which names came; one for all roles that have the same."""
    if len(tables) == 1:
        for entry in tables[0].entries.values():
            yield _own_line(entry)
        return
    grouped: dict[tuple[str, str, str, bool], list[Entry]] = {}
    for table in tables:
        for entry in table.entries.values():
            key = (entry.name, entry.source, entry.tool.schema_hash, entry.current is None)
            grouped.setdefault(key, []).append(entry)
    lines = map(_shared_line, grouped.values())
    yield from sorted(lines, key=lambda listing: listing.place)


def describe(tables: Iterable[Table], name: str, source: str) -> list[ToolListing]:
    """Returns the lines of one name of one source, as far as it is offered."""
    found: dict[str, list[Entry]] = {}
    for table in tables:
        entry = table.entries.get(name)
        if entry is not None and entry.source == source and entry.current is not None:
            found.setdefault(entry.tool.schema_hash, []).append(entry)
    return [line_of(entries) for entries in found.values()]


def line_of(entries: Sequence[Entry]) -> ToolListing:
    """Returns the line that stands for a tool in several roles."""
    first = entries[0]
    roles = tuple(entry.table.role for entry in entries if entry.table.role is not None)
    return ToolListing(first.tool.renamed(first.name), first.source, roles, tuple(entries))


# Lines are kept where nothing in them has changed: with 100,000 tools, new ones for all of them after one change would
# cost a pass of the garbage collector over everything that the process holds, as often as somebody lists.


def _own_line(entry: Entry) -> ToolListing:
    """Returns the line of an entry alone."""
    tool, kept = entry.tool, entry.line
    if kept is None or kept[0] is not tool:
        kept = entry.line = (tool, line_of((entry,)))
    return kept[1]


def _shared_line(entries: Sequence[Entry]) -> ToolListing:
    """Returns the line of what several roles have alike; the first of them keeps it, and nobody an older one."""
    first, *others = entries
    for entry in others:
        entry.shared_line = None
    if not others:
        first.shared_line = None
        return _own_line(first)
    tool, kept = first.tool, first.shared_line
    if kept is None or kept[0] is not tool or kept[1].entries != tuple(entries):
        kept = first.shared_line = (tool, line_of(entries))
    return kept[1]
