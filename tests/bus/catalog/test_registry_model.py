"""The registry against a model that is as plain as it can be written, under whatever happens to a catalog."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.core_model import PeerDouble, offered, tool
from tests.support.examples import examples
from toolbus.bus.catalog.entry import CompiledTool, ToolListing
from toolbus.bus.catalog.registry import Registry
from toolbus.errors import UnknownRole
from toolbus.protocol.tool import Tool


class Seen(NamedTuple):
    """What a line of the catalog shows."""

    name: str
    source: str
    tool: Tool
    roles: tuple[str, ...]
    online: bool


def seen(listing: ToolListing) -> Seen:
    online = listing.entry.current is not None
    return Seen(listing.tool.name, listing.source, listing.tool, listing.roles, online)


class Line:
    """One name in one role: declarations newest last, each a tool and the handlers that offer it so."""

    def __init__(self, name: str, bare: str, source: str, place: int) -> None:
        self.name, self.bare, self.source, self.place = name, bare, source, place
        self.declared: list[tuple[Tool, list[PeerDouble]]] = []
        self.last: Tool | None = None  # what was dropped last
        self.goes_at, self.instance = math.inf, ""
        self.behind: list[Line] = []  # of sources that had the name before, newest last

    @property
    def tool(self) -> Tool:
        line = self.declared[-1][0] if self.declared else self.last
        assert line is not None
        return line

    def handlers(self) -> list[PeerDouble]:
        return [handler for _, handlers in self.declared for handler in handlers]

    def join(self, handler: PeerDouble, tool: Tool) -> None:
        for index, (known, handlers) in enumerate(self.declared):
            if known.schema_hash == tool.schema_hash and handler in handlers:
                self.declared[index] = (tool, handlers)
                return
        self.leave(handler)
        for other in [each for each in self.handlers() if not (each.shares and handler.shares)]:
            self.leave(other)
        same = [handlers for known, handlers in self.declared if known.schema_hash == tool.schema_hash]
        self.declared = [each for each in self.declared if each[0].schema_hash != tool.schema_hash]
        self.declared.append((tool, [*(same[0] if same else ()), handler]))
        self.goes_at = math.inf

    def leave(self, handler: PeerDouble) -> None:
        for known, handlers in self.declared:
            if handlers == [handler]:
                self.last = known
        left = [(known, [each for each in handlers if each is not handler]) for known, handlers in self.declared]
        self.declared = [(known, handlers) for known, handlers in left if handlers]


class RegistryModel:
    """What the registry promises, without indexes, revisions or caches: one list of lines a role."""

    def __init__(self, roles: Sequence[str], grace_seconds: float) -> None:
        self.tables: dict[str, list[Line]] = {role: [] for role in roles}
        self.to_come: list[Line] = []
        self.waiting: dict[str, list[Line]] = {}  # by role that does not exist
        self.grace = grace_seconds
        self._places = itertools.count()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.tables)

    def _for(self, role: str | None, *, hidden: bool = False) -> list[list[Line]]:
        if not role:
            return [*self.tables.values(), *self.waiting.values(), self.to_come]
        if hidden and role in self.waiting:
            return [self.waiting[role]]
        if role not in self.tables:
            raise UnknownRole(role)
        return [self.tables[role]]

    def forget_empty(self) -> None:
        self.waiting = {role: table for role, table in self.waiting.items() if table}

    @staticmethod
    def _lines(table: list[Line]) -> list[Line]:
        return [*(each for line in table for each in line.behind), *table]

    @staticmethod
    def _drop(table: list[Line], line: Line) -> None:
        owner = next(each for each in table if each.name == line.name)
        if line is not owner:
            owner.behind.remove(line)
        elif line.behind:
            table[table.index(line)] = back = line.behind.pop()
            back.behind, line.behind = line.behind, []
        else:
            table.remove(line)

    @staticmethod
    def _take_over(old: Line, new: Line, *, kept: bool) -> Line:
        """Puts a line, or the one that its source has behind, before the line that has the name."""
        own = next((each for each in old.behind if each.source == new.source), new)
        own.place = old.place
        own.behind, old.behind = [each for each in old.behind if each is not own], []
        if kept and old.declared:
            own.behind.append(old)
        return own

    def register(
        self, handler: PeerDouble, tools: Sequence[CompiledTool], *, qualified: bool = False, declare: bool = False
    ) -> None:
        for item in tools:
            if not handler.awaits_roles:
                self._for(item.tool.role)
        stays = set()
        for item in tools:
            name = f"{handler.source}:{item.tool.name}" if qualified else item.tool.name
            role = item.tool.role
            if role and role not in self.tables:
                self.waiting.setdefault(role, [])
            for table in self._for(role, hidden=True) if role else [*self.tables.values(), self.to_come]:
                line = next((line for line in table if line.name == name), None)
                if line is None:
                    line = Line(name, item.tool.name, handler.source, next(self._places))
                    table.append(line)
                elif line.source != handler.source:
                    new = Line(name, item.tool.name, handler.source, line.place)
                    waits = any(table is each for each in self.waiting.values())
                    table[table.index(line)] = line = self._take_over(line, new, kept=not waits)
                line.join(handler, item.tool)
                stays.add(line)
            for table in () if role else self.waiting.values():
                for line in [line for line in table if line.name == name]:
                    self._replace(table, line, handler)
        for table in self._for(None) if declare else ():
            for line in self._lines(table):
                own = handler in line.handlers()
                lost = not line.declared and line.source == handler.source and line.instance == handler.instance != ""
                if (own or lost) and line not in stays:
                    line.leave(handler)
                    if not line.declared:
                        self._drop(table, line)

    def _replace(self, table: list[Line], line: Line, handler: PeerDouble) -> None:
        """A tool for all roles replaces what waits, but for other sessions of its own source."""
        if line.source != handler.source:
            table.remove(line)
            return
        for other in line.handlers():
            if other is handler or not (other.shares and handler.shares):
                line.leave(other)
                if not line.declared:
                    table.remove(line)

    def unregister(self, name: str, role: str, source: str, *, hidden: bool = False) -> None:
        for table in self._for(role, hidden=hidden):
            fits = [line for line in self._lines(table) if line.name == name and source in ("", line.source)]
            fits = fits or [line for line in table if source and line.name == f"{source}:{name}"]
            for line in fits:
                self._drop(table, line)

    def clear(self, source: str, role: str) -> None:
        for table in self._for(role):
            for line in [line for line in self._lines(table) if line.source == source]:
                self._drop(table, line)

    def withdraw(self, handler: PeerDouble) -> None:
        for table in self._for(None):
            for line in [line for line in self._lines(table) if handler in line.handlers()]:
                line.leave(handler)
                if not line.declared:
                    self._drop(table, line)

    def lose(self, handler: PeerDouble, why: str, now: float) -> None:
        for table in self._for(None):
            for line in [line for line in self._lines(table) if handler in line.handlers()]:
                line.leave(handler)
                if not line.declared and line not in table:
                    self._drop(table, line)
                elif not line.declared:
                    line.goes_at, line.instance = now + self.grace, handler.instance

    def expire(self, now: float) -> None:
        for table in self._for(None):
            for line in [line for line in table if not line.declared and line.goes_at <= now]:
                self._drop(table, line)

    def add_role(self, role: str) -> None:
        if role not in self.tables:
            table = copy.deepcopy(self.to_come, {id(each): each for each in self._everyone()})
            for line in self.waiting.pop(role, []):
                other = next((each for each in table if each.name == line.name), None)
                if other is not None and other.source == line.source:
                    for declared, handlers in line.declared:
                        for handler in handlers:
                            other.join(handler, declared)
                    continue
                if other is not None:
                    table.remove(other)
                    line.place = other.place
                    line.behind = [*(each for each in other.behind if each.source != line.source)]
                    line.behind += [other] if other.source != line.source else []
                table.append(line)
            self.tables[role] = sorted(table, key=lambda line: line.place)

    def _everyone(self) -> list[PeerDouble]:
        return [handler for line in self._lines(self.to_come) for handler in line.handlers()]

    def remove_role(self, role: str) -> None:
        [table] = self._for(role)
        del self.tables[role]
        for line in table:
            line.behind = []
            was_offline = not line.declared
            for handler in line.handlers():
                mine = [known for known, handlers in line.declared if handler in handlers]
                if not handler.awaits_roles or mine[0].role != role:
                    line.leave(handler)
            if line.declared or (was_offline and line.tool.role == role):
                self.waiting.setdefault(role, []).append(line)

    def find(self, name: str, role: str) -> tuple[str, str, bool] | None:
        matches = []
        for table in [self.tables[role]] if role else list(self.tables.values()) or [self.to_come]:
            exact = [line for line in table if line.name == name]
            alias = [line for line in table if line.bare == name]
            best = exact or sorted(alias, key=lambda line: not line.declared)
            matches += [(line.name, line.source, bool(line.declared)) for line in best[:1]]
        return next((each for each in matches if each[2]), matches[0] if matches else None)

    def listings(self, role: str | None, offline: bool) -> list[Seen]:
        tables = {role: self.tables[role]} if role else self.tables or {"": self.to_come}
        merged: dict[tuple[str, str, str, bool], list[tuple[int, str, Line]]] = {}
        for name, table in tables.items():
            for line in table:
                key = (line.name, line.source, line.tool.schema_hash, bool(line.declared))
                merged.setdefault(key, []).append((line.place, name, line))
        lines = sorted(merged.values(), key=lambda each: min(place for place, _, _ in each))
        return [
            Seen(
                line[0][2].name,
                line[0][2].source,
                line[0][2].tool.renamed(line[0][2].name),
                tuple(name for _, name, _ in line if name),
                bool(line[0][2].declared),
            )
            for line in lines
            if offline or line[0][2].declared
        ]

    def offers(self, handler: PeerDouble) -> set[str]:
        tables = [*self.tables.values(), self.to_come]
        return {line.bare for table in tables for line in table if handler in line.handlers()}

    def waits(self, handler: PeerDouble) -> set[tuple[str, str]]:
        return {
            (line.bare, role) for role, table in self.waiting.items() for line in table if handler in line.handlers()
        }


# Small on purpose: collisions are what the registry is about.
TOOLS = st.builds(
    Tool,
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["", "other"]),
    role=st.sampled_from([None, None, "r1", "r2"]),
    timeout_seconds=st.sampled_from([0.0, 9.0]),
)
TOOL_LISTS = st.lists(TOOLS, min_size=1, max_size=4, unique_by=lambda each: (each.name, each.role))
HANDLERS = st.integers(0, 7)
ROLES = st.sampled_from(["", "r1", "r2", "r3"])


class CatalogueMachine(RuleBasedStateMachine):
    """Whatever happens to the catalog, it is what the model says, and a watcher can follow it."""

    @initialize(roles=st.sampled_from([("r1",), ("r1", "r2"), ()]))
    def begin(self, roles: tuple[str, ...]) -> None:
        self.now = 0.0
        self.registry = Registry(roles, grace_seconds=5.0, tools_per_role=1_000)
        self.model = RegistryModel(roles, grace_seconds=5.0)
        self.handlers = [
            PeerDouble("one", instance="i"),
            PeerDouble("one", instance="j"),
            PeerDouble("one"),
            PeerDouble("two", instance="i"),
            PeerDouble("local", shares=False),
            PeerDouble("local", shares=False),
            PeerDouble("local"),
            PeerDouble("far", instance="i", qualified=True),
        ]
        self.known: list[tuple[int, dict[tuple[str, str], set[Seen]]]] = []  # what watchers know, by revision
        self.remember()
        for index in (0, 1, 3):
            self.register(index, [tool("a", str(index)), tool("b")], True)

    def remember(self) -> None:
        self.known.append((self.registry.revision, self.view()))

    def view(self) -> dict[tuple[str, str], set[Seen]]:
        view: dict[tuple[str, str], set[Seen]] = {}
        for line in map(seen, self.registry.listings()):
            view.setdefault((line.name, line.source), set()).add(line)
        return view

    def both(self, change: Callable[[Any], Any]) -> None:
        """Does the same to registry and model: same refusal or none, and a higher revision where something changed."""
        revision, before = self.registry.revision, self.listings()
        raised = []
        for target in (self.registry, self.model):
            try:
                change(target)
                self.model.forget_empty()
                raised.append(False)
            except UnknownRole:
                raised.append(True)
        assert raised[0] == raised[1]
        changed = self.listings() != before
        assert self.registry.revision > revision if changed else self.registry.revision >= revision

    def listings(self) -> list[list[Seen]]:
        return [list(map(seen, self.registry.listings(None, include_offline=True)))]

    @rule(index=HANDLERS, tools=TOOL_LISTS, declare=st.booleans())
    def register(self, index: int, tools: list[Tool], declare: bool) -> None:
        handler = self.handlers[index]
        self.both(lambda it: it.register(handler, offered(*tools), qualified=handler.qualified, declare=declare))

    @rule(index=st.integers(0, 2), description=st.sampled_from(["", "other"]))
    def a_session_of_the_same_source_joins(self, index: int, description: str) -> None:
        self.register(index, [tool("a", description), tool("b", description)], False)

    @rule(indexes=st.lists(HANDLERS, min_size=2, max_size=4))
    def several_attach(self, indexes: list[int]) -> None:
        for index in indexes:
            self.register(
                index, [tool("a", str(index % 2)), tool("c", role=next(iter(self.registry.roles), None))], True
            )

    @rule(
        name=st.sampled_from(["a", "b", "far:a"]),
        source=st.sampled_from(["", "one", "local", "far"]),
        role=ROLES,
        everything=st.booleans(),
    )
    def somebody_withdraws(self, name: str, source: str, role: str, everything: bool) -> None:
        if everything and source:
            self.both(lambda it: it.clear(source, role))
        else:
            self.both(lambda it: it.unregister(name, role, source, hidden=bool(source)))

    @rule(index=HANDLERS, drains=st.booleans())
    def one_leaves(self, index: int, drains: bool) -> None:
        handler = self.handlers[index]
        self.both(lambda it: it.withdraw(handler) if drains else it.lose(handler, "broke", self.now))

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.both(lambda it: it.expire(self.now))

    @rule(role=st.sampled_from(["r1", "r2", "r3"]), add=st.sampled_from([True, True, False]))
    def roles_change(self, role: str, add: bool) -> None:
        self.both(lambda it: it.add_role(role) if add else it.remove_role(role))

    @precondition(lambda self: len(self.known) < 12)
    @rule()
    def somebody_lists(self) -> None:
        self.remember()

    @invariant()
    def it_lists_the_same_in_the_same_order(self) -> None:
        assert self.registry.roles == self.model.roles
        for role in (None, *self.registry.roles):
            for offline in (False, True):
                listed = [seen(line) for line in self.registry.listings(role, include_offline=offline)]
                assert listed == self.model.listings(role, offline)

    @invariant()
    def it_finds_the_same(self) -> None:
        for role in ("", *self.registry.roles):
            for name in ("a", "b", "c", "far:a", "far:b", "nobody"):
                entry = self.registry.find(name, role)
                match = None if entry is None else (entry.name, entry.source, entry.current is not None)
                assert match == self.model.find(name, role)

    @invariant()
    def what_is_listed_can_be_found(self) -> None:
        for role in (None, *self.registry.roles):
            for line in self.registry.listings(role):
                entry = self.registry.find(line.tool.name, role or "")
                assert entry is not None
                assert entry.current is not None

    @invariant()
    def a_watcher_that_applies_the_changes_knows_the_listing(self) -> None:
        now = self.view()
        for revision, view in self.known:
            changes = self.registry.since(revision)
            assert changes.revision == self.registry.revision
            followed = {} if changes.full else dict(view)
            for key in changes.removed:
                followed.pop(key)  # it knew it
            for expected, lines in ((False, changes.added), (True, changes.changed)):
                fresh: dict[tuple[str, str], set[Seen]] = {}
                for line in map(seen, lines):
                    fresh.setdefault((line.name, line.source), set()).add(line)
                for key, value in fresh.items():
                    assert (key in followed) is expected
                    followed[key] = value
            assert followed == now

    @invariant()
    def a_handler_knows_what_it_offers(self) -> None:
        for handler in self.handlers:
            assert sorted(self.registry.offers(handler)) == sorted(self.model.offers(handler))
            assert sorted(self.registry.waits(handler)) == sorted(self.model.waits(handler))
        waiting = [(line.entry.table.role, seen(line)) for line in self.registry.waiting()]
        assert {role for role, _ in waiting} == set(self.model.waiting)


CatalogueMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
test_the_catalog_is_what_the_model_says = CatalogueMachine.TestCase
