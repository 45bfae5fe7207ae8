"""The catalog as a caller sees it: listings for users, and the events of watchers when the rules change."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.core_model import Core, PeerDouble, offered, tool
from tests.support.examples import examples
from toolbus.bus.catalog.catalog_view import MAX_BEHIND, MAX_CACHED, CatalogView
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.policy import MAX_USER, AccessRules, Policy
from toolbus.errors import Code, UnknownRole
from toolbus.v1 import tool_pb2 as pb


def permit(core: Core, **tables: dict[str, list[str]]) -> CatalogView:
    view = core.dispatcher.view
    view.permit(AccessRules.read(tables))
    return view


def named(listings: tuple[ToolListing, ...]) -> list[str]:
    return [listing.tool.name for listing in listings]


def names_in(changes: CatalogChanges) -> tuple[list[str], list[str], list[str]]:
    """What a watcher hears: names added, changed and removed."""
    return named(changes.added), named(changes.changed), [name for name, _ in changes.removed]


def three() -> Core:
    core = Core(roles=("r1", "r2"))
    core.plugin("p", tool("a"), tool("b"), tool("c", role="r2"))
    return core


# -- listings --------------------------------------------------------------------------------------------------------


def test_without_rules_everyone_sees_the_same_list_which_is_built_once() -> None:
    view = three().dispatcher.view
    assert named(view.listings()) == ["a", "b", "c"]
    assert view.listings(user_id="ann") is view.listings(user_id="bob") is view.listings()


def test_cached_listings_do_not_keep_a_withdrawn_tool_in_memory_for_long() -> None:
    core = three()
    view = permit(core, tools={"a": ["ann"]})
    core.plugin("q", tool("gone"))
    for user in ("ann", "bob", "cid"):
        assert "gone" in named(view.listings(user_id=user))
    core.registry.clear("q")
    for _ in range(MAX_BEHIND + 1):
        core.registry.suspend([], "a change of the catalog")
    assert "gone" not in named(view.listings(user_id="dan"))
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, ToolListing) and each.tool.name == "gone"]


def test_a_user_sees_what_they_may_call_in_the_order_in_which_names_came() -> None:
    core = three()
    view = permit(core, tools={"a": ["ann"], "c": ["ann", "bob"]})
    assert [named(view.listings(user_id=user)) for user in ("ann", "bob", "")] == [["a", "b", "c"], ["b", "c"], ["b"]]
    assert view.permissions.as_tables()["tools"] == {"a": ["ann"], "c": ["ann", "bob"]}
    with pytest.raises(UnknownRole):
        view.listings("nobody", "ann")


def test_a_listing_shows_the_roles_in_which_the_tool_may_be_called_and_the_tool_as_it_is_there() -> None:
    core = Core(roles=("r1", "r2"))
    core.plugin("p", tool("t", role="r1", metadata_json='{"a":1}'))
    core.plugin("p", tool("t", role="r2"))
    view = permit(core, roles={"r1": ["ann"]})
    (line,) = view.listings(user_id="bob")
    assert (line.roles, line.entry.table.role, line.tool.role) == (("r2",), "r2", "r2")
    (line,) = view.listings(user_id="ann")
    assert line.roles == ("r1", "r2")


def test_a_caller_that_may_omit_the_user_sees_everything_without_one() -> None:
    core = three()
    view = permit(core, sources={"p": []})
    host = core.peer("host")
    host.principal = replace(host.principal, may_omit_user=True)
    assert named(view.listings(principal=host.principal)) == ["a", "b", "c"]
    assert view.listings(user_id="ann", principal=host.principal) == view.listings() == ()


def test_offline_tools_are_shown_to_those_who_may_call_them() -> None:
    core = Core()
    core.lose(core.plugin("p", tool("t")))
    view = permit(core, tools={"t": ["ann"]})
    assert named(view.listings(user_id="ann", include_offline=True)) == ["t"]
    assert view.listings(user_id="ann") == view.listings(include_offline=True) == ()


def test_the_tools_of_the_bus_are_listed_for_administrators_only_and_only_by_themselves() -> None:
    core = three()
    core.registry.register(core.peer("toolbus", shares=False), offered(tool("drain")), qualified=True)
    view = permit(core, tools={"toolbus:drain": [], "drain": []})
    guest = core.peer("guest")
    guest.principal = replace(guest.principal, is_admin=False)
    assert (named(view.own()), view.own(guest.principal)) == (["toolbus:drain"], ())
    assert named(view.listings()) == ["a", "b", "c"]


def test_the_cache_of_listings_is_bounded_in_users_and_in_the_length_of_their_names() -> None:
    core = three()
    view = permit(core, tools={"a": ["ann"]})
    for number in range(MAX_CACHED * 2):
        assert named(view.listings(user_id=str(number))) == ["b", "c"]
    assert named(view.listings(user_id="x" * (MAX_USER + 1))) == ["b", "c"]
    assert view.cached <= MAX_CACHED
    before = view.cached
    assert named(view.listings(user_id="y" * (MAX_USER + 1))) == ["b", "c"]
    assert view.cached == before


# -- a change of the rules -------------------------------------------------------------------------------------------


def test_a_change_of_the_rules_applies_to_the_next_call_and_listing_of_earlier_callers() -> None:
    core = three()
    host = core.peer("host")
    ann = pb.CallContext(user_id="ann")
    view = core.dispatcher.view
    for users, may in ((None, True), ([], False), (["ann"], True), (["bob"], False), (["*"], True)):
        permit(core, **({} if users is None else {"tools": {"a": users}}))
        for _ in range(2):
            call_id = core.call(host, "a", context=ann)
            assert (call_id in host.in_flight) is may
            assert ("a" in named(view.listings(user_id="ann"))) is may
    assert {result.error.code for (result,) in host.results.values() if result.error} == {Code.PERMISSION_DENIED}


def test_listings_built_in_the_middle_of_a_change_are_not_cached_beyond_it() -> None:
    core = three()
    view, host = core.dispatcher.view, core.peer("host")

    def somebody_asks_just_before() -> None:
        assert named(view.listings()) == ["a", "b", "c"]
        core.call(host, "a", call_id="before")
        core.policy.permissions = AccessRules.read({"tools": {"a": []}})

    core.registry.change_view(somebody_asks_just_before, lambda entry: True)
    assert named(view.listings()) == ["b", "c"]
    assert core.refusal(host, "a", call_id="after").code is Code.PERMISSION_DENIED


def test_listings_built_while_the_first_rule_is_added_are_not_shown_to_another_user() -> None:
    core = three()
    view = core.dispatcher.view

    class Hurried(Policy):
        """Gets its first rule right after it was asked whether there is one."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "permissions" and not value and not rules:
                rules.append(AccessRules.read({"tools": {"a": ["ann"]}}))
                view.permit(rules[0])
            return value

    rules: list[AccessRules] = []
    core.policy.__class__ = Hurried
    view.listings(user_id="ann")
    assert named(view.listings()) == ["b", "c"]


def test_calls_in_flight_go_on_after_a_change_of_the_rules() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.plugin("p", tool("t"))
    call_id = core.call(host, "t")
    permit(core, tools={"t": []})
    core.answer(plugin, "7")
    assert host.results[call_id][0].output_json == "7"


def test_a_watcher_is_notified_of_what_callers_without_a_user_can_and_cannot_call_any_more() -> None:
    core = three()
    view = core.dispatcher.view
    revisions = [view.revision]
    closed: list[str] = []
    for tables in (
        {"tools": {"a": ["ann"]}},
        {"sources": {"p": closed}},
        {"sources": {"p": ["*"]}, "tools": {"b": closed}},
    ):
        permit(core, **tables)
        revisions.append(view.revision)
    assert revisions == sorted(set(revisions))
    assert [names_in(view.since(revision)) for revision in revisions] == [
        ([], ["a", "c"], ["b"]),  # came and went meanwhile
        (["a"], ["c"], ["b"]),
        (["a", "c"], [], []),
        ([], [], []),
    ]
    assert names_in(view.since(-1)) == (["a", "c"], [], [])
    assert view.since(-1).full


def test_a_watcher_is_never_notified_of_a_tool_that_it_cannot_see() -> None:
    core = Core()
    view = permit(core, sources={"p": ["ann"]})
    for change in ("comes", "changes", "is lost", "goes"):
        revision = view.revision
        if change == "comes":
            plugin = core.plugin("p", tool("t"))
        elif change == "changes":
            core.registry.register(plugin, offered(tool("t", "other")))
        elif change == "is lost":
            core.lose(plugin)
        else:
            core.registry.expire(core.now + 100.0)
        assert view.revision > revision
        assert names_in(view.since(revision)) == ([], [], [])


def test_a_tool_that_is_opened_in_all_its_roles_is_added_for_a_watcher() -> None:
    core = three()
    view = permit(core, tools={"a": []})
    revision = view.revision
    permit(core)
    assert names_in(view.since(revision)) == (["a"], [], [])


def test_a_tool_that_is_closed_in_one_of_its_roles_has_changed() -> None:
    core = Core(roles=("r1", "r2"))
    core.plugin("p", tool("t", "for r1", role="r1"))
    core.plugin("p", tool("t", "for r2", role="r2"))
    view = core.dispatcher.view
    revision = view.revision
    permit(core, roles={"r1": []})
    changes = view.since(revision)
    assert names_in(changes) == ([], ["t"], [])
    assert [line.tool.description for line in changes.changed] == ["for r2"]


# -- watchers, whatever happens --------------------------------------------------------------------------------------

Picture = dict[tuple[str, str], set[tuple[str, tuple[str, ...]]]]


def painted(listings: tuple[ToolListing, ...]) -> Picture:
    picture: Picture = {}
    for line in listings:
        lines = picture.setdefault((line.tool.name, line.source), set())
        lines.add((line.tool.schema_hash, line.roles))
    return picture


class WatchersMachine(RuleBasedStateMachine):
    """Watchers that look now and then always have the list, and are told of nothing that they did not see."""

    @initialize()
    def begin(self) -> None:
        self.core = Core(roles=("r1", "r2"))
        self.view = self.core.dispatcher.view
        self.plugins: dict[str, PeerDouble] = {}
        self.watchers: list[tuple[int, Picture]] = [(self.view.revision, {}) for _ in range(3)]

    @rule(
        source=st.sampled_from(["a", "b"]),
        name=st.sampled_from(["x", "y"]),
        role=st.sampled_from(["", "r1", "r2"]),
        says=st.sampled_from(["", "other"]),
    )
    def a_plugin_offers(self, source: str, name: str, role: str, says: str) -> None:
        plugin = self.plugins.setdefault(source, self.core.peer(source, trusted=False))
        self.core.registry.register(plugin, offered(tool(name, says, role=role)), qualified=source == "b")

    @rule(source=st.sampled_from(["a", "b"]), name=st.sampled_from(["x", "y"]), role=st.sampled_from(["", "r1"]))
    def a_tool_is_withdrawn(self, source: str, name: str, role: str) -> None:
        self.core.registry.unregister(name, role, source)

    @rule(source=st.sampled_from(["a", "b"]), lost=st.booleans())
    def a_plugin_goes(self, source: str, lost: bool) -> None:
        plugin = self.plugins.pop(source, None)
        if plugin is not None and lost:
            self.core.lose(plugin)
        elif plugin is not None:
            self.core.registry.withdraw(plugin)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.core.advance(seconds)
        self.core.registry.expire(self.core.now)

    @rule(
        kind=st.sampled_from([("tools", "x"), ("tools", "b:x"), ("roles", "r1"), ("roles", "r2"), ("sources", "a")]),
        users=st.sampled_from([None, [], ["ann"], ["*"]]),
    )
    def an_operator_changes_a_rule(self, kind: tuple[str, str], users: Any) -> None:
        self.view.permit(self.view.permissions.changed(*kind, users))

    @rule(which=st.integers(0, 2))
    def a_watcher_looks(self, which: int) -> None:
        revision, picture = self.watchers[which]
        changes = self.view.since(revision)
        added, changed = painted(changes.added), painted(changes.changed)
        assert not changes.full
        assert not added.keys() & picture.keys()
        assert not changed.keys() - picture.keys()
        assert len(set(changes.removed)) == len(changes.removed)
        assert set(changes.removed) <= picture.keys() - changed.keys()
        picture = {key: lines for key, lines in {**picture, **added, **changed}.items() if key not in changes.removed}
        assert picture == painted(self.view.listings())
        self.watchers[which] = (changes.revision, picture)

    @invariant()
    def the_whole_list_is_what_a_new_watcher_gets(self) -> None:
        assert painted(self.view.since(-1).added) == painted(self.view.listings())


WatchersMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
test_watchers_always_have_the_list_and_hear_of_nothing_else = WatchersMachine.TestCase
