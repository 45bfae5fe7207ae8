from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bus.catalog.registry_cases import V1, V2, current, names, offers
from tests.support.core_model import PeerDouble, offered, tool
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.entry import Entry, Trust
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.errors import UnknownRole

# -- one table a role ------------------------------------------------------------------------------------------------


def test_the_last_writer_wins_keeps_the_place_and_the_owner_is_notified() -> None:
    registry = Registry()
    first = offers(registry, "one", tool("a"), V1, tool("z"))
    outcome = registry.register(PeerDouble("two"), offered(V2))
    assert names(registry) == ["a", "t", "z"]
    assert current(registry) == ("two", V2)
    (notice,) = outcome.lost
    assert (notice.handler, notice.name, notice.roles, notice.by_source) == (first, "t", ("default",), "two")


@pytest.mark.parametrize("has", Trust)
@pytest.mark.parametrize("wants", Trust)
def test_no_source_takes_a_name_from_one_that_is_trusted_more(has: Trust, wants: Trust) -> None:
    registry = Registry()
    offers(registry, "one", V1, tool("free"), trust=has)
    two = PeerDouble("two", trust=wants)
    outcome = registry.register(two, offered(V2, tool("own")))
    assert outcome.accepted
    if wants >= has:
        assert current(registry) == ("two", V2)
        return
    assert current(registry) == ("one", V1)
    assert names(registry) == ["t", "free", "two:t", "own"]
    assert not outcome.lost
    entry = registry.find("two:t")
    assert entry is not None
    (warning,) = entry.all_warnings
    assert warning == "it is listed as 'two:t': 'one', which is trusted more, has the name 't'"
    registry.unregister("t", source="two")  # by the name that it was declared with
    assert names(registry) == ["t", "free", "own"]


def test_a_name_of_a_trusted_source_is_kept_while_that_reconnects_and_is_free_when_it_is_gone() -> None:
    registry = Registry(grace_seconds=5.0)
    one = offers(registry, "one", V1)
    registry.lose(one, "killed", 10.0)
    two = offers(registry, "two", V2, trust=Trust.SANDBOXED)
    assert names(registry) == ["two:t"]
    registry.expire(16.0)
    registry.register(two, offered(V2), declare=True)
    assert current(registry) == ("two", V2)
    assert names(registry) == ["t"]


@pytest.mark.parametrize("waited_first", [False, True])
def test_a_role_that_is_added_later_gives_the_name_to_the_source_that_is_trusted_more(waited_first: bool) -> None:
    registry = Registry(("r1",))
    rogue = PeerDouble("two", trust=Trust.SANDBOXED)
    if waited_first:
        registry.register(rogue, offered(replace(V2, role="later")))
    offers(registry, "one", V1)
    if not waited_first:
        registry.register(rogue, offered(replace(V2, role="later")))
    registry.add_role("later")
    assert current(registry, role="later") == ("one", V1)
    if not waited_first:
        assert current(registry, "two:t", role="later")[0] == "two"
    registry.register(rogue, offered(V2))
    assert current(registry, role="later") == ("one", V1)


def test_what_waits_for_a_role_is_not_taken_by_a_source_that_is_trusted_less() -> None:
    registry = Registry(("r1",))
    offers(registry, "one", replace(V1, role="later"))
    offers(registry, "two", V2, trust=Trust.MOUNT)
    assert [each.source for each in registry.waiting("later")] == ["one"]


@pytest.mark.parametrize("way", ["withdrawn", "cleared", "killed"])
def test_a_name_goes_back_to_its_earlier_owner_in_its_place_when_the_later_one_is_gone(way: str) -> None:
    registry = Registry(("r1", "r2"), grace_seconds=5.0)
    one = offers(registry, "one", tool("a"), V1, tool("z"))
    offers(registry, "gone", V2)
    two = offers(registry, "two", V2)
    registry.clear("gone")
    entry = registry.find("t")
    assert entry is not None
    assert entry.all_warnings == ("contested: 'one' also offers it, and has the name again when 'two' withdraws it",)
    assert (registry.offers(one), registry.counted(one)) == (["a", "z"], ["a", "z", "t"])
    revision = registry.revision
    if way == "killed":
        registry.lose(two, "killed", 10.0)
        assert names(registry) == ["a", "z"], "it may reconnect within its grace period"
        registry.expire(16.0)
    elif way == "withdrawn":
        registry.withdraw(two)
    else:
        registry.clear("two")
    assert (names(registry), current(registry, role="r2")) == (["a", "t", "z"], ("one", V1))
    assert ("t", "one") in {(each.tool.name, each.source) for each in registry.since(revision).added}
    assert registry.take_reviewed() == {one: {("t", "r1"): True, ("t", "r2"): True}}, "its session is notified"
    assert not registry.find("t").all_warnings  # type: ignore[union-attr]
    registry.withdraw(one)
    assert not registry._index.by_handler


def test_what_is_unregistered_by_name_alone_does_not_come_back_as_another_source_s() -> None:
    registry = Registry()
    offers(registry, "one", V1)
    offers(registry, "two", V2)
    assert registry.unregister("t").count == 1
    assert (names(registry), registry.sources()) == ([], {})


def test_a_bus_whose_names_stay_with_the_first_owner_lists_later_ones_under_their_sources() -> None:
    registry = Registry(first_owner=True)
    one = offers(registry, "one", V1)
    offers(registry, "two", V2)
    offers(registry, "one", V2)  # another session of it
    assert (current(registry), names(registry)) == (("one", V2), ["t", "two:t"])
    (warning,) = registry.find("two:t").all_warnings  # type: ignore[union-attr]
    assert warning == "it is listed as 'two:t': 'one', which had it first, has the name 't'"
    registry.withdraw(one)
    registry.clear("one")
    assert current(registry) == ("two", V2), "it answers to the bare name now"


@pytest.mark.parametrize("qualified", [False, True])
def test_withdrawing_by_name_looks_at_the_tools_of_that_name_alone(qualified: bool) -> None:
    registry = Registry(("r1", "r2"))
    other = offers(registry, "other", tool("t5"), qualified=True)
    owner = offers(registry, "one", *(tool(f"t{number}") for number in range(100)), qualified=qualified)
    looked_at: list[str] = []

    def predicate(entry: Entry) -> bool:
        looked_at.append(entry.bare_name)
        return True

    assert registry.withdraw(owner, predicate, names={"t5", "unknown"}).names == ("t5",)
    assert set(looked_at) == {"t5"}
    assert "t5" not in registry.offers(owner)
    assert registry.offers(other) == ["t5"]
    assert registry.withdraw(other, names={"t4"}).names == ()


def test_removing_for_one_role_removes_only_there() -> None:
    registry = Registry(("r1", "r2"))
    owner = offers(registry, "one", V1)
    outcome = registry.unregister("t", "r1")
    assert (names(registry, "r1"), names(registry, "r2")) == ([], ["t"])
    assert outcome == ChangeOutcome(("t",), ("r1",), count=1, lost=outcome.lost)
    assert [(notice.handler, notice.roles, notice.by_source) for notice in outcome.lost] == [(owner, ("r1",), None)]


def test_clearing_removes_a_source_only_and_counts_once_per_role() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "one", tool("a"), tool("b", role="r2"))
    offers(registry, "two", tool("c"))
    outcome = registry.clear("one")
    assert (outcome.count, outcome.names, outcome.roles) == (3, ("a", "b"), ("r1", "r2"))
    assert names(registry) == ["c"]
    assert registry.clear("one") == ChangeOutcome()


def test_a_role_added_later_gets_the_tools_without_role_and_no_others() -> None:
    registry = Registry(("r1",))
    offers(registry, "one", tool("all"), tool("own", role="r1"))
    registry.add_role("r2")
    assert names(registry, "r2") == ["all"]


def test_a_role_added_later_gets_offline_tools_for_the_rest_of_their_grace_period() -> None:
    registry = Registry(("r1",), grace_seconds=5.0)
    early, late = offers(registry, "one", tool("early")), offers(registry, "two", tool("late"))
    registry.lose(early, "broke", 0.0)
    registry.lose(late, "broke", 3.0)
    registry.add_role("r2")
    entry = registry.find("early", "r2")
    assert entry is not None
    assert entry.last_error == "broke"
    registry.expire(5.0)
    assert registry.find("early", "r2") is None
    assert registry.find("late", "r2") is not None


def test_a_call_without_role_means_the_first_role_in_order_that_offers_the_tool() -> None:
    registry = Registry(("r1", "r2", "r3"))
    lost = offers(registry, "one", tool("t", "for r1", role="r1"))
    offers(registry, "two", tool("t", "for r2", role="r2"))
    offers(registry, "three", tool("t", "for r3", role="r3"))
    assert current(registry)[0] == "one"
    registry.lose(lost, "broke", 0.0)
    assert current(registry)[0] == "two"


def test_a_list_without_role_is_in_the_order_in_which_names_came() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "one", tool("second-role", role="r2"), tool("both"), tool("first-role", role="r1"))
    assert names(registry) == ["second-role", "both", "first-role"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda it: it.find("t", "nobody"),
        lambda it: it.listings("nobody"),
        lambda it: it.unregister("t", "nobody"),
        lambda it: it.clear("one", "nobody"),
        lambda it: it.remove_role("nobody"),
        lambda it: it.register(PeerDouble("two", waits=False), offered(tool("x"), tool("y", role="nobody"))),
    ],
)
def test_an_unknown_role_is_refused_and_nothing_has_changed(ask: Callable[[Registry], object]) -> None:
    registry = Registry()
    offers(registry, "one", V1)
    revision = registry.revision
    with pytest.raises(UnknownRole, match="nobody"):
        ask(registry)
    assert (registry.revision, names(registry)) == (revision, ["t"])


def test_an_empty_role_means_every_role() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "one", tool("t", role=""))
    assert names(registry, "r1") == names(registry, "r2") == ["t"]


def test_without_roles_tools_wait_for_roles_that_are_added_later() -> None:
    registry = Registry(())
    outcome = registry.register(PeerDouble("one"), offered(V1))
    assert (outcome.accepted, outcome.roles, outcome.names) == (True, (), ("t",))
    registry.add_role("r1")
    assert names(registry, "r1") == ["t"]


def test_the_first_role_removes_for_watchers_what_was_listed_without_roles_and_loses_its_name() -> None:
    registry = Registry(())
    offers(registry, "two", tool("t"), tool("u"))
    registry.register(PeerDouble("one"), offered(tool("t", role="r1")))
    known = registry.revision
    registry.add_role("r1")
    changes = registry.since(known)
    assert ([(each.tool.name, each.source) for each in changes.added], changes.removed) == (
        [("t", "one")],
        (("t", "two"),),
    )


def test_a_full_role_is_named_with_tool_and_limit_and_the_others_take_the_tool() -> None:
    registry = Registry(("r1", "r2"), tools_per_role=1)
    offers(registry, "one", tool("a", role="r1"))
    outcome = registry.register(PeerDouble("two"), offered(tool("b")))
    (failed,) = outcome.failed
    assert failed[:2] == ("r1", "b")
    assert "tools_per_role" in failed[2]
    assert (outcome.accepted, outcome.roles, names(registry, "r2")) == (True, ("r2",), ["b"])


# -- sessions of one source ------------------------------------------------------------------------------------------


def test_the_newest_declaration_is_offered_and_the_older_again_when_the_newest_one_ends() -> None:
    registry = Registry()
    offers(registry, "one", V1)
    newer = offers(registry, "one", V2)
    assert current(registry)[1] == V2
    entry = registry.find("t")
    assert entry is not None
    assert list(entry.declarations) == [V1.schema_hash, V2.schema_hash]
    registry.lose(newer, "broke", 0.0)
    assert current(registry)[1] == V1


def test_the_handler_with_the_fewest_calls_takes_the_next_one_within_its_own_limit() -> None:
    registry = Registry()
    busy = offers(registry, "one", V1)
    free = offers(registry, "one", V1, max_in_flight=1)
    entry = registry.find("t")
    assert entry is not None
    assert entry.current is not None
    busy.pending["1"] = None
    assert entry.current.pick() is free
    free.pending["1"] = None
    assert entry.current.pick() is busy
    busy.takes_calls = False
    assert entry.current.pick() is None


def test_above_sixteen_sessions_the_load_still_spreads_and_a_single_free_one_is_found() -> None:
    registry = Registry()
    sessions = [offers(registry, "one", V1) for _ in range(40)]
    entry = registry.find("t")
    assert entry is not None
    assert entry.current is not None
    for number in range(4_000):
        handler = entry.current.pick()
        assert handler is not None
        handler.pending[str(number)] = None
        if len(handler.pending) == 256:
            break
    loads = [len(session.pending) for session in sessions]
    assert max(loads) - min(loads) < 40
    for session in sessions[1:]:
        session.takes_calls = False
    assert {entry.current.pick() for _ in range(50)} == {sessions[0]}


def test_a_local_function_is_replaced_by_the_newer_one_of_its_source() -> None:
    registry = Registry()
    older = offers(registry, "local", V1, shares=False)
    newer = offers(registry, "local", V1, shares=False)
    entry = registry.find("t")
    assert entry is not None
    assert entry.handlers() == [newer]
    assert registry.offers(older) == []


def test_a_session_replaces_a_function_or_callback_of_its_source_and_the_other_way_round() -> None:
    registry = Registry()
    function = offers(registry, "one", V1, shares=False)
    sessions = [offers(registry, "one", V1), offers(registry, "one", V1)]
    entry = registry.find("t")
    assert entry is not None
    assert entry.handlers() == sessions
    assert registry.offers(function) == []
    again = offers(registry, "one", V1, shares=False)
    assert entry.handlers() == [again]
    assert [registry.offers(each) for each in sessions] == [[], []]


def test_declaring_replaces_what_the_handler_offered_and_nothing_of_others() -> None:
    registry = Registry()
    one = offers(registry, "one", tool("a"), tool("b"))
    other = offers(registry, "one", tool("b"))
    registry.register(one, offered(tool("c"), tool("a")), declare=True)
    assert names(registry) == ["a", "b", "c"]
    entry = registry.find("b")
    assert entry is not None
    assert entry.handlers() == [other]


# -- offline and back ------------------------------------------------------------------------------------------------


def test_a_handler_that_disconnects_leaves_its_tools_offline_in_their_place_until_the_grace_period_ends() -> None:
    registry = Registry(grace_seconds=5.0)
    one = offers(registry, "one", V1)
    offers(registry, "two", tool("z"))
    assert registry.lose(one, "its connection broke", 100.0) == ["t"]
    assert names(registry) == ["z"]
    assert names(registry, include_offline=True) == ["t", "z"]
    (listing, _) = registry.listings(include_offline=True)
    assert listing.entry.last_error == "its connection broke"
    assert registry.expire(104.9) == []
    registry.register(PeerDouble("one", instance="x"), offered(V1), declare=True)
    assert names(registry) == ["t", "z"]
    assert registry.expire(1_000.0) == []


def test_tools_that_stay_offline_expire_when_the_grace_period_ends() -> None:
    registry = Registry(grace_seconds=5.0)
    registry.lose(offers(registry, "one", V1), "broke", 100.0)
    revision = registry.revision
    assert registry.expire(105.0) == ["t"]
    assert registry.find("t") is None
    assert registry.revision > revision


def test_an_instance_that_reconnects_takes_its_tools_back_and_drops_those_it_no_longer_declares() -> None:
    registry = Registry()
    one = offers(registry, "one", tool("a"), tool("b"), instance="i")
    registry.lose(one, "broke", 0.0)
    registry.register(PeerDouble("one", instance="i"), offered(tool("b")), declare=True)
    assert names(registry, include_offline=True) == ["b"]


def test_an_offline_tool_that_another_source_takes_is_lost_to_its_old_one() -> None:
    registry = Registry()
    registry.lose(offers(registry, "one", V1), "broke", 0.0)
    outcome = registry.register(PeerDouble("two"), offered(V2))
    assert outcome.lost == ()
    assert registry.expire(1_000.0) == []
    assert current(registry)[0] == "two"


# -- qualified sources -----------------------------------------------------------------------------------------------


def test_a_qualified_tool_is_listed_under_its_source_and_answers_to_the_bare_name_if_it_is_free() -> None:
    registry = Registry()
    offers(registry, "far", V1, qualified=True)
    offers(registry, "farther", V2, qualified=True)
    assert names(registry) == ["far:t", "farther:t"]
    assert current(registry)[0] == "far"
    plain = offers(registry, "near", tool("t"))
    assert current(registry)[0] == "near"
    registry.withdraw(plain)
    assert current(registry)[0] == "far"
    assert registry.listings()[0].tool.schema_hash == V1.schema_hash


def test_unregistering_by_the_bare_name_reaches_a_qualified_tool_of_that_source_only() -> None:
    registry = Registry()
    offers(registry, "far", V1, qualified=True)
    assert registry.unregister("t", source="other").names == ()
    assert registry.unregister("t", source="far").names == ("t",)
    assert names(registry) == []


def test_the_tools_of_the_bus_never_answer_to_a_bare_name() -> None:
    registry = Registry()
    offers(registry, "toolbus", tool("drain"), qualified=True, shares=False)
    assert registry.find("drain") is None
    assert registry.find("toolbus:drain") is not None
    assert CatalogView(registry, Policy()).listings() == ()
    assert registry.since(-1).added == ()
