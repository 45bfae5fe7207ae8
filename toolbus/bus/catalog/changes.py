"""Describes changes of the catalog.

`ChangeOutcome` is the outcome of one change. The journal stores which names changed at which revision, and
`CatalogChanges` are the changes since the revision that a watcher knows.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from toolbus.bus.catalog.entry import LENT_MODEL, CompiledTool, Handler, ToolListing, is_operators

MAX_CHANGES = 10_000  # changes that the journal remembers; a watcher further behind gets the whole catalog


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """The changes since a revision. ``full``: that is too long ago, so ``added`` is the whole catalog."""

    revision: int
    full: bool
    added: tuple[ToolListing, ...] = ()
    changed: tuple[ToolListing, ...] = ()
    removed: tuple[tuple[str, str], ...] = ()  # (listed name, source)


@dataclass(frozen=True, slots=True)
class LostTool:
    """Says that a handler lost a tool in these roles, and to which source (None: the tool was withdrawn)."""

    handler: Handler
    name: str
    roles: tuple[str, ...]
    by_source: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """The outcome of one change of the catalog.

    Attributes:
        names: the tools concerned, by bare name.
        roles: the roles concerned, in configured order.
        failed: (role, tool, error) where a role could not take a tool.
        count: tools withdrawn, each counted once per role.
        lost: the handlers that lost a tool, each with the tool and the roles.
        refused: the tools that no role took.
        waiting: (name, role) of the tools that wait for a role that does not exist.
        forgotten: refused declarations that were forgotten.
    """

    names: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    count: int = 0
    lost: tuple[LostTool, ...] = ()
    refused: tuple[CompiledTool, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    forgotten: int = 0

    @property
    def accepted(self) -> bool:
        """Whether every tool is offered in at least one role, or waits for roles that are added later."""
        return not self.refused


class Journal:
    """Stores which names changed at which revision, the newest MAX_CHANGES of them."""

    def __init__(self, first_revision: int) -> None:
        self._changes: deque[tuple[int, str, str, bool]] = deque(maxlen=MAX_CHANGES)
        self._floor = first_revision  # the oldest revision from which changes are known

    def __repr__(self) -> str:
        return f"<Journal changes={len(self._changes)} since={self._floor}>"

    def begin_at(self, revision: int) -> None:
        """Forgets the changes so far: a watcher that knows an earlier revision gets the whole catalog."""
        self._changes.clear()
        self._floor = revision

    def note(self, revision: int, name: str, source: str, existed: bool) -> None:
        """Adds the change of a name of a source, and whether it was listed before."""
        if len(self._changes) == MAX_CHANGES:
            self._floor = self._changes[0][0]
        self._changes.append((revision, name, source, existed))

    def since(self, revision: int) -> dict[tuple[str, str], bool] | None:
        """Returns (name, source) of what changed since, and whether it was listed then; None: too long ago."""
        if revision < self._floor:
            return None
        newer = itertools.takewhile(lambda change: change[0] > revision, reversed(self._changes))
        was_listed: dict[tuple[str, str], bool] = {}
        for _, name, source, existed in reversed(list(newer)):
            if not is_operators(source) and name != LENT_MODEL:
                was_listed.setdefault((name, source), existed)
        return was_listed
