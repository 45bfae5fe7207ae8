"""Which tools are offered, by whom, for whom, in which order.

One table per role and one for roles still to come. A table maps a listed name to an Entry; an entry holds the
declarations of its source, each with the handlers that made it, newest last. An *offer* is such a pair of handler and
declaration. The registry knows nothing of streams or calls: a handler is whoever runs a tool and counts what it owes.

Writers share one lock. Lookups read the live tables without it: every change replaces a value in one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.catalog import listings
from toolbus.bus.catalog.entry import (
    BUS_SOURCE,
    CatalogChanges,
    Declaration,
    Entry,
    Handler,
    Notice,
    Outcome,
    Table,
    ToolListing,
)
from toolbus.bus.catalog.offer import Offered
from toolbus.errors import UnknownRole


class Registry:
    """The catalog of the bus. See the module's docstring."""

    def __init__(
        self,
        roles: Sequence[str] = ("default",),
        *,
        tools_per_role: int = 250_000,
        grace_seconds: float = 5.0,
        first_revision: int = 1,
    ) -> None:
        self._lock = threading.RLock()
        self._tables: dict[str, Table] = {role: Table(role) for role in roles}
        self._to_come = Table(None)
        self._absent: dict[str, Table] = {}  # like roles, but nobody has configured them: what is kept waits there
        self._by_handler: dict[Handler, dict[Entry, None]] = {}
        self._by_source: dict[str, dict[Entry, None]] = {}
        self._offline: dict[Entry, tuple[float, str]] = {}  # entry → (when it goes, instance it was lost with)
        self._journal = listings.Journal(first_revision)
        self._last_place = 0  # the place of the newest name
        self._moved: dict[Handler, None] = {}  # kept handlers whose offers changed since `take_moved`
        # by role and whether offline tools are in it, with the revision that it shows
        self._lists: dict[tuple[str | None, bool], tuple[int, tuple[ToolListing, ...]]] = {}
        self.first = self._first()  # the live table of the first role: where most calls find their tool
        self.shows: Callable[[Entry], bool] = lambda entry: True  # whether watchers may know of a tool: View's to say
        self.tools_per_role = tools_per_role
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
        """The configured roles and those that tools wait for."""
        return (*self._tables, *self._absent)

    def find(self, name: str, role: str = "") -> Entry | None:
        """Returns who has a name: in a role, or in the first role in order that offers it.

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
        """Returns what a source has under a name of its own, in each role in order."""
        with self._lock:
            found = []
            for table in self._shown():
                for name in (bare_name, f"{source}:{bare_name}"):
                    entry = table.entries.get(name)
                    if entry is not None and entry.source == source and entry.bare_name == bare_name:
                        found.append(entry)
            return found

    def offered_by(self, source: str) -> list[Entry]:
        """Returns what a source offers, in every role, offline tools included."""
        with self._lock:
            return list(self._by_source.get(source, ()))

    def find_all(self, name: str) -> list[Entry]:
        """Returns who offers a name, in each role in order."""
        found = (table.get(name) for table in self._shown())
        return [entry for entry in found if entry is not None and entry.current is not None]

    def listings(self, role: str | None = None, *, include_offline: bool = False) -> tuple[ToolListing, ...]:
        """Returns the catalog, of one role or of all, in the order in which names came.

        Raises:
            UnknownRole: the role is not configured.
        """
        key = (role, include_offline)
        cached = self._lists.get(key)
        if cached is None or cached[0] != self.revision:
            with self._lock:
                built = self._build(role)
                kept = built if include_offline else (item for item in built if item.entry.current is not None)
                cached = (self.revision, tuple(kept))
                self._lists[key] = cached
        return cached[1]

    def _build(self, role: str | None) -> Iterable[ToolListing]:
        if role is not None and role not in self._tables:
            raise UnknownRole(role)
        return listings.build([self._tables[role]] if role is not None else self._shown())

    def _shown(self) -> list[Table]:
        """The tables of all roles; where there is none, what waits for roles to come."""
        return list(self._tables.values()) or [self._to_come]

    def since(self, revision: int) -> CatalogChanges:
        """Returns what a watcher that knows a revision has to learn."""
        with self._lock:
            now = self.revision
            if revision == now:
                return CatalogChanges(now, full=False)
            was_there = self._journal.since(revision) if revision < now else None
            if was_there is None:
                public = tuple(listing for listing in self.listings() if listing.source != BUS_SOURCE)
                return CatalogChanges(now, full=True, added=public)
            added: list[ToolListing] = []
            changed: list[ToolListing] = []
            removed: list[tuple[str, str]] = []
            for (name, source), existed in was_there.items():
                lines = listings.describe(self._shown(), name, source)
                if lines:
                    (changed if existed else added).extend(lines)
                elif existed:
                    removed.append((name, source))
            return CatalogChanges(now, False, tuple(added), tuple(changed), tuple(removed))

    def offers(self, handler: Handler) -> list[str]:
        """The bare names that a handler offers now, each once."""
        with self._lock:
            return list(dict.fromkeys(entry.bare_name for entry in self._by_handler.get(handler, ())))

    def most_offered(self, handler: Handler) -> int:
        """At least as many as `offers` returns, at a flat cost: a tool counts once per role."""
        return len(self._by_handler.get(handler, ()))

    def places(self, handler: Handler) -> tuple[tuple[str | None, int], ...]:
        """Where a handler's tools stand: (role, or None for roles to come; place in listings) of each."""
        with self._lock:
            return tuple((entry.table.role, entry.place) for entry in self._by_handler.get(handler, ()))

    def take_moved(self) -> list[Handler]:
        """Returns the kept handlers whose offers changed since the last time."""
        if not self._moved:
            return []
        with self._lock:
            moved, self._moved = list(self._moved), {}
            return moved

    # -- changing -----------------------------------------------------------------------------------------------

    def register(
        self,
        handler: Handler,
        offered: Sequence[Offered],
        *,
        qualified: bool = False,
        declare: bool = False,
        needs_role: bool = False,
        roles: Sequence[str | None] | None = None,
    ) -> Outcome:
        """Offers tools of a handler; the last writer wins and the place in the list is kept (REST-5).

        Args:
            declare: these tools replace everything that this handler, or an offline one of the same source and
                instance, offered before.
            needs_role: a tool that no role takes does not wait for roles to come either (REST-4, REST-12).
            roles: exactly these, None being the roles to come, instead of those that the tools name.

        Raises:
            UnknownRole: a tool is for a role that is not configured. Nothing has changed then.
        """
        with self._lock:
            if roles is None:
                self.check_roles(offered)
            before = self._declared(handler) if declare else {}
            affected: dict[str, None] = {}
            failed: list[tuple[str, str, str]] = []
            notices: dict[tuple[Handler, str], list[str]] = {}
            refused: set[str] = set()
            self.revision += bool(offered or before)  # a host that attaches changes nothing
            for item in offered:
                taken = False
                for table in self._tables_for(item.tool.role or None) if roles is None else self._exactly(roles):
                    if table.role not in self._tables and needs_role and not taken:
                        continue
                    entry = self._place(table, handler, item, qualified, notices)
                    if entry is None:
                        if table.role not in self._absent:
                            failed.append((table.role or "", item.tool.name, self._full()))
                        continue
                    taken = True
                    before.pop(entry, None)
                    if table.role is not None:
                        affected[table.role] = None
                if not taken:
                    refused.add(item.tool.name)
            for entry in before:
                self._take_away(entry, handler)
            return Outcome(
                names=tuple(item.tool.name for item in offered if item.tool.name not in refused),
                roles=self._in_order(affected),
                failed=tuple(failed),
                notices=tuple(
                    Notice(owner, name, self._in_order(dict.fromkeys(roles)), handler.source)
                    for (owner, name), roles in notices.items()
                ),
                accepted=not refused,
            )

    def check_roles(self, offered: Sequence[Offered]) -> None:
        """Checks that every role is configured.

        Raises:
            UnknownRole: naming the first that is not.
        """
        for item in offered:
            if item.tool.role and item.tool.role not in self._tables:
                raise UnknownRole(item.tool.role)

    def unregister(self, name: str, role: str = "", source: str = "") -> Outcome:
        """Withdraws one tool, in one role or in all; with a source only where that source has it.

        Raises:
            UnknownRole: the role is not configured.
        """
        with self._lock:
            entries = []
            for table in self._tables_for(role or None):
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

    def withdraw(self, handler: Handler) -> Outcome:
        """Takes all offers of a handler away at once: it said goodbye."""
        with self._lock:
            entries = list(self._by_handler.get(handler, ()))
            if entries:
                self.revision += 1
            for entry in entries:
                self._take_away(entry, handler)
            return Outcome(names=tuple(dict.fromkeys(entry.bare_name for entry in entries)))

    def lose(self, handler: Handler, why: str, now: float) -> list[str]:
        """A handler broke off: its tools stay in the list as offline for the grace period.

        Returns:
            The names that nobody offers any more.
        """
        with self._lock:
            entries = list(self._by_handler.pop(handler, ()))
            if entries:
                self.revision += 1
            gone = []
            for entry in entries:
                known = self._known(entry)
                if entry.remove(handler):
                    self._note(entry, known)
                if entry.current is None:
                    entry.last_error = why
                    gone.append(entry.name)
                if entry.current is None and entry.suspended is None:
                    self._offline.pop(entry, None)
                    self._offline[entry] = (now + self.grace_seconds, handler.instance)
            return list(dict.fromkeys(gone))

    def suspend(self, handlers: Iterable[Handler], why: str) -> list[str]:
        """Handlers are away and may come back whenever they like: their tools stay in the list as offline.

        Returns:
            The names that nobody offers any more.
        """
        with self._lock:
            gone = []
            self.revision += 1
            for handler in handlers:
                for entry in self._by_handler.get(handler, ()):
                    known = self._known(entry)
                    if entry.suspend(handler):
                        self._note(entry, known)
                    if entry.current is None:
                        entry.last_error = why
                        gone += [entry.name] if known is not None else []
            return list(dict.fromkeys(gone))

    def resume(self, handlers: Iterable[Handler]) -> list[str]:
        """Suspended handlers are back. Returns the names that are offered again."""
        with self._lock:
            back = []
            self.revision += 1
            for handler in handlers:
                for entry in list(self._by_handler.get(handler, ())):
                    if entry.suspended is None or handler not in entry.suspended.handlers:
                        continue
                    if entry.resume():
                        self._note(entry, False)
                        back.append(entry.name)
            return list(dict.fromkeys(back))

    def warn(self, entry: Entry, about: str, text: str) -> None:
        """Sets, or with "" clears, what an operator should know about a tool.

        Args:
            about: who says it.
        """
        with self._lock:
            if entry.warnings.get(about, "") != text:
                warnings = {**entry.warnings, about: text}
                entry.warnings = {who: said for who, said in warnings.items() if said}
                self.revision += 1
                self._note(entry, self._known(entry))

    def expire(self, now: float) -> list[str]:
        """Drops the tools whose grace period has passed. Returns their names."""
        gone = []
        with self._lock:
            while self._offline:
                entry, (when, _) = next(iter(self._offline.items()))
                if when > now:
                    break
                gone.append(entry.name)
                self.revision += 1
                self._drop(entry, self._known(entry))
        return list(dict.fromkeys(gone))

    def touch(self, handler: Handler) -> None:
        """A handler's state changed (suspect, back): its tools are announced as changed."""
        with self._lock:
            entries = self._by_handler.get(handler)
            if entries:
                self.revision += 1
                for entry in entries:
                    self._note(entry, self._known(entry))

    def change_view(self, change: Callable[[], None], concerns: Callable[[Entry], bool]) -> None:
        """CatalogChanges what is shown to whom, and notes what watchers have to be told.

        Args:
            change: does it.
            concerns: whether a tool may be seen by others than before.
        """
        with self._lock:
            self.revision += 1
            for table in self._shown():
                for entry in table.entries.values():
                    if entry.current is not None and concerns(entry):
                        self._note(entry, self._known(entry))
            change()
            self.revision += 1  # once more: an answer that was kept in between is from before

    def add_role(self, role: str) -> None:
        """Adds a role; it gets every tool that was registered for all roles (REST-12)."""
        with self._lock:
            if role in self._tables:
                return
            self.revision += 1
            table = self._absent.pop(role, None) or self._filled(role)
            for entry in table.entries.values():
                self._note(entry, False)  # while what is shown is what watchers know
            self._tables = {**self._tables, role: table}
            self.first = self._first()

    def reserve(self, role: str) -> None:
        """Lets tools wait for a role that nobody has configured: it is like the others, but shown to nobody."""
        with self._lock:
            if role not in self._tables and role not in self._absent:
                self._absent[role] = self._filled(role)

    def _filled(self, role: str) -> Table:
        table = Table(role)
        for known in self._to_come.entries.values():
            entry = Entry(table, known.name, known.bare_name, known.source, known.place)
            entry.former, entry.last_error = dict(known.former), known.last_error
            for declaration in known.declarations.values():
                for handler in declaration.handlers:
                    entry.add(declaration.for_handler(), handler)
                    self._own(handler, entry)
            if known.suspended is not None:
                entry.suspended = known.suspended.for_handler(*known.suspended.handlers)
                self._own(known.suspended.handlers[0], entry)
            table.put(entry)
            self._by_source.setdefault(entry.source, {})[entry] = None
            if known in self._offline:
                self._offline[entry] = self._offline[known]
        self._offline = dict(sorted(self._offline.items(), key=lambda item: item[1]))
        return table

    def remove_role(self, role: str) -> None:
        """Removes a role and the tools it has.

        Raises:
            UnknownRole: there is no such role.
        """
        with self._lock:
            table = self._tables.get(role)
            if table is None:
                raise UnknownRole(role)
            self.revision += 1
            for entry in list(table.entries.values()):
                for handler in entry.handlers():
                    self._forget(handler, entry)
                self._drop(entry, self._known(entry))
            self._tables = {name: other for name, other in self._tables.items() if name != role}
            self._lists = {key: built for key, built in self._lists.items() if key[0] != role}
            for entry in () if self._tables else self._to_come.entries.values():
                self._note(entry, False)  # without roles, what waits for them is listed
            self.first = self._first()

    def _first(self) -> dict[str, Entry]:
        return next((table.entries for table in self._tables.values()), {})

    # -- inside the lock ----------------------------------------------------------------------------------------

    def _tables_for(self, role: str | None) -> list[Table]:
        if role is None:
            return [*self._tables.values(), *self._absent.values(), self._to_come]
        if role not in self._tables:
            raise UnknownRole(role)
        return [self._tables[role]]

    def _exactly(self, roles: Sequence[str | None]) -> list[Table]:
        known = {table.role: table for table in (*self._tables.values(), *self._absent.values(), self._to_come)}
        return [known[role] for role in roles if role in known]

    def _declared(self, handler: Handler) -> dict[Entry, None]:
        """Entries that an attach of this handler replaces: its own, and those lost with the same instance."""
        before = dict(self._by_handler.get(handler, {}))
        if handler.instance:
            for entry in self._by_source.get(handler.source, ()):
                if entry in self._offline and self._offline[entry][1] == handler.instance:
                    before[entry] = None
        return before

    def _place(
        self,
        table: Table,
        handler: Handler,
        item: Offered,
        qualified: bool,
        notices: dict[tuple[Handler, str], list[str]],
    ) -> Entry | None:
        tool = item.tool
        name = f"{handler.source}:{tool.name}" if qualified else tool.name
        entry = table.entries.get(name)
        known = self._known(entry) if entry is not None else None
        if entry is None and self._is_full(table, handler.source):
            return None
        if entry is not None and entry.source != handler.source:
            self._note(entry, known)  # gone, for those who knew it under its old source
            for owner in entry.handlers():
                if table.role in self._tables:
                    notices.setdefault((owner, entry.bare_name), []).append(table.role)
                self._forget(owner, entry)
            self._leave_source(entry)
            self._offline.pop(entry, None)
            entry, known = Entry(table, name, tool.name, handler.source, entry.place), None
        if entry is None:
            self._last_place += 1
            entry = Entry(table, name, tool.name, handler.source, self._last_place)
        for old in entry.handlers():
            if old is not handler and not (old.shares and handler.shares):
                self._forget(old, entry)
        if entry.suspended is not None:  # whoever registers takes the place of one that is away
            self._forget(entry.suspended.handlers[0], entry)
            entry.suspended = None
        changed = entry.add(Declaration(tool, item.checker, item.strips), handler)
        table.put(entry)
        self._by_source.setdefault(handler.source, {})[entry] = None
        self._own(handler, entry)
        self._offline.pop(entry, None)
        if changed:
            self._note(entry, known)
        return entry

    def _take_away(self, entry: Entry, handler: Handler) -> None:
        known = self._known(entry)
        self._forget(handler, entry)
        changed = entry.remove(handler)
        if entry.current is None and entry.suspended is None:
            self._drop(entry, known)
        elif changed:
            self._note(entry, known)

    def _withdraw(self, entries: Sequence[Entry]) -> Outcome:
        if not entries:
            return Outcome()
        self.revision += 1
        affected: dict[str, None] = {}
        notices: dict[tuple[Handler, str], list[str]] = {}
        for entry in entries:
            role = entry.table.role
            for handler in entry.handlers():
                if role in self._tables:
                    notices.setdefault((handler, entry.bare_name), []).append(role)
                self._forget(handler, entry)
            if role is not None:
                affected[role] = None
            self._drop(entry, self._known(entry))
        counted = sum(1 for entry in entries if entry.table.role in self._tables)
        return Outcome(
            names=tuple(dict.fromkeys(entry.bare_name for entry in entries)),
            roles=self._in_order(affected),
            count=counted,
            notices=tuple(
                Notice(owner, name, self._in_order(dict.fromkeys(roles))) for (owner, name), roles in notices.items()
            ),
        )

    def _drop(self, entry: Entry, known: bool | None) -> None:
        entry.table.drop(entry)
        self._leave_source(entry)
        self._offline.pop(entry, None)
        entry.current = entry.suspended = None
        if known is not None:
            self._note(entry, known)

    def _own(self, handler: Handler, entry: Entry) -> None:
        self._by_handler.setdefault(handler, {})[entry] = None
        if handler.kept:
            self._moved[handler] = None

    def _forget(self, handler: Handler, entry: Entry) -> None:
        if handler.kept:
            self._moved[handler] = None
        known = self._by_handler.get(handler)
        if known is not None:
            known.pop(entry, None)
            if not known:
                del self._by_handler[handler]

    def _leave_source(self, entry: Entry) -> None:
        known = self._by_source[entry.source]
        known.pop(entry, None)
        if not known:  # else every source that ever came would stay
            del self._by_source[entry.source]

    def _known(self, entry: Entry) -> bool | None:
        """Whether watchers may know of an entry as it is now; None where it is not offered."""
        return None if entry.current is None else self.shows(entry)

    def _note(self, entry: Entry, known: bool | None) -> None:
        """Notes that an entry changes, and whether watchers saw its name as its source's before: here or elsewhere.

        Args:
            known: of the entry itself, as `_known` said before the change.
        """
        shown = self._shown()
        others = [table.entries.get(entry.name) for table in shown if table is not entry.table]
        existed = (known is True and entry.table in shown) or any(
            other.source == entry.source and other.current is not None and self.shows(other)
            for other in others
            if other is not None
        )
        self._journal.note(self.revision, entry.name, entry.source, existed)

    def _in_order(self, roles: Iterable[str]) -> tuple[str, ...]:
        wanted = set(roles)
        return tuple(role for role in self._tables if role in wanted)

    def _is_full(self, table: Table, source: str) -> bool:
        """Whether a role has no room for a tool of a source; the bus's own tools take none."""
        if len(table.entries) < self.tools_per_role or source == BUS_SOURCE:
            return False
        own = sum(entry.table is table for entry in self._by_source.get(BUS_SOURCE, ()))
        return len(table.entries) - own >= self.tools_per_role

    def _full(self) -> str:
        return f"LimitExceeded: the role has {self.tools_per_role} tools (limit tools_per_role): unregister some"
