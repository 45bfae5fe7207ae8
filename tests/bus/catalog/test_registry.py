from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.core_model import Core, PeerDouble, offered, tool
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import MAX_CHANGES, Outcome
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.errors import Code, UnknownRole
from toolbus.tool import Annotations, Tool

V1, V2 = tool("t", "first"), tool("t", "second")


def names(registry: Registry, role: str | None = None, *, include_offline: bool = False) -> list[str]:
    return [listing.tool.name for listing in registry.listings(role, include_offline=include_offline)]


def offers(registry: Registry, source: str, *tools: Tool, **more: Any) -> PeerDouble:
    handler = PeerDouble(source, **more)
    registry.register(handler, offered(*tools), qualified=handler.qualified)
    return handler


def current(registry: Registry, name: str = "t", role: str = "") -> tuple[str, Tool]:
    entry = registry.find(name, role)
    assert entry is not None
    assert entry.current is not None
    return entry.source, entry.current.tool


# -- one table a role ------------------------------------------------------------------------------------------------


def test_the_last_writer_wins_keeps_the_place_and_the_owner_is_notified() -> None:
    registry = Registry()
    first = offers(registry, "one", tool("a"), V1, tool("z"))
    outcome = registry.register(PeerDouble("two"), offered(V2))
    assert names(registry) == ["a", "t", "z"]
    assert current(registry) == ("two", V2)
    (notice,) = outcome.lost
    assert (notice.handler, notice.name, notice.roles, notice.by_source) == (first, "t", ("default",), "two")


def test_an_overwritten_tool_never_comes_back_by_itself() -> None:
    registry = Registry()
    offers(registry, "one", V1)
    two = offers(registry, "two", V2)
    registry.withdraw(two)
    assert registry.find("t") is None


@pytest.mark.parametrize("qualified", [False, True])
def test_withdrawing_by_name_looks_at_the_tools_of_that_name_alone(qualified: bool) -> None:
    registry = Registry(("r1", "r2"))
    other = offers(registry, "other", tool("t5"), qualified=True)
    owner = offers(registry, "one", *(tool(f"t{number}") for number in range(100)), qualified=qualified)
    looked_at: list[str] = []

    def asked(entry: Entry) -> bool:
        looked_at.append(entry.bare_name)
        return True

    assert registry.withdraw(owner, asked, names={"t5", "unknown"}).names == ("t5",)
    assert set(looked_at) == {"t5"}
    assert "t5" not in registry.offers(owner)
    assert registry.offers(other) == ["t5"]
    assert registry.withdraw(other, names={"t4"}).names == ()


def test_removing_for_one_role_removes_only_there() -> None:
    registry = Registry(("r1", "r2"))
    owner = offers(registry, "one", V1)
    outcome = registry.unregister("t", "r1")
    assert (names(registry, "r1"), names(registry, "r2")) == ([], ["t"])
    assert outcome == Outcome(("t",), ("r1",), count=1, lost=outcome.lost)
    assert [(notice.handler, notice.roles, notice.by_source) for notice in outcome.lost] == [(owner, ("r1",), None)]


def test_clearing_removes_a_source_only_and_counts_once_per_role() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "one", tool("a"), tool("b", role="r2"))
    offers(registry, "two", tool("c"))
    outcome = registry.clear("one")
    assert (outcome.count, outcome.names, outcome.roles) == (3, ("a", "b"), ("r1", "r2"))
    assert names(registry) == ["c"]
    assert registry.clear("one") == Outcome()


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


# -- revisions -------------------------------------------------------------------------------------------------------


def test_an_attach_without_tools_does_not_change_the_catalog() -> None:
    registry = Registry()
    revision = registry.revision
    registry.register(PeerDouble("host"), [], declare=True)
    assert registry.revision == revision


def test_an_attach_that_drops_all_tools_changes_the_catalog() -> None:
    registry = Registry()
    one = offers(registry, "one", V1)
    revision = registry.revision
    registry.register(one, [], declare=True)
    assert registry.since(revision).removed == (("t", "one"),)


def test_without_its_last_role_the_bus_lists_and_finds_the_tools_for_roles_that_are_added_later() -> None:
    registry = Registry(("r1",))
    offers(registry, "one", V1)
    registry.unregister("t", "r1")
    revision = registry.revision
    registry.remove_role("r1")
    assert [line.tool.name for line in registry.since(revision).added] == names(registry) == ["t"]
    assert current(registry)[0] == "one"


def test_a_watcher_too_far_behind_or_of_another_boot_gets_the_whole_list() -> None:
    registry = Registry(first_revision=1_000)
    offers(registry, "one", V1)
    for revision in (5, 999, 1_000_000):
        changes = registry.since(revision)
        assert (changes.full, [line.tool.name for line in changes.added]) == (True, ["t"])
    start = registry.revision
    for number in range(MAX_CHANGES // 2):  # each is a change for the role and for roles to come
        offers(registry, "two", tool(f"n{number}"))
    assert not registry.since(start).full
    offers(registry, "two", tool("one-more"))
    assert registry.since(start).full
    assert not registry.since(start + 1).full


def test_a_change_of_state_is_announced_to_watchers() -> None:
    registry = Registry()
    one = offers(registry, "one", V1)
    revision = registry.revision
    registry.touch(one)
    assert [line.tool.name for line in registry.since(revision).changed] == ["t"]


def test_the_hash_of_a_declaration_depends_on_content_only() -> None:
    one = Tool("t", parameters_json='{"type": "object", "properties": {"a": {}, "b": {}}}', timeout_seconds=3.0)
    two = Tool("t", parameters_json='{"properties":{"b":{},"a":{}},"type":"object"}', annotations=Annotations(True))
    assert one.schema_hash == two.schema_hash != tool("t").schema_hash


# -- cost and threads ------------------------------------------------------------------------------------------------


def lines_run(work: Callable[[], object]) -> int:
    """Counts the lines of Python that some work runs: a cost that no other process disturbs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_register_unregister_and_find_cost_the_same_with_20_000_tools_as_with_100() -> None:
    def costs(size: int) -> Iterator[int]:
        registry = Registry()
        one = offers(registry, "one", *(tool(f"t{number}") for number in range(size)))
        extra = offered(tool("extra"))
        yield lines_run(lambda: registry.register(one, extra))
        yield lines_run(lambda: registry.find("t50"))
        yield lines_run(lambda: registry.unregister("extra"))

    assert all(abs(few - many) < 10 for few, many in zip(costs(100), costs(20_000), strict=True))


def test_lookups_and_listings_hold_from_any_thread_while_others_write() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "steady", tool("steady"))
    faults: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as fault:
                faults.append(fault)

        return run

    def write(source: str) -> None:
        chance = random.Random(source)
        handler = PeerDouble(source, instance=source, qualified=True)
        for number in range(400):
            registry.register(handler, offered(tool(f"t{chance.randrange(4)}")), qualified=True, declare=True)
            registry.lose(handler, "broke", 0.0) if number % 2 else registry.withdraw(handler)
            registry.expire(1_000.0)

    def read() -> None:
        while not done.is_set():
            for name in ("t0", "t1", "t2", "t3", "steady"):
                registry.find(name)
            listed = [line.tool.name for line in registry.listings(include_offline=True)]
            assert listed.count("steady") == 1
            registry.since(registry.revision - 5)

    writers = [threading.Thread(target=guarded(lambda source=source: write(source))) for source in "abc"]  # type: ignore[misc]
    readers = [threading.Thread(target=guarded(read)) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join(30)
        done.set()
        for thread in readers:
            thread.join(20)
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
    assert names(registry) == ["steady"]


def test_a_source_that_is_gone_leaves_nothing_behind() -> None:
    registry = Registry()
    for number in range(3):
        handler = offers(registry, f"source{number}", V1)
    assert list(registry._index.by_source) == ["source2"]
    registry.lose(handler, "gone", 0.0)
    registry.expire(10.0)
    assert not registry._index.by_source
    assert not registry._index.by_handler


def test_a_bare_name_waits_for_the_extension_that_had_it_first_and_passes_on_when_that_is_gone() -> None:
    core = Core(grace_seconds=5.0)
    first = core.plugin("kb", tool("search"), qualified=True)
    core.plugin("other", tool("search"), qualified=True)
    host = core.peer("host")
    core.lose(first, "it crashed")
    error = core.refusal(host, "search")
    assert (error.code, error.retry_safe) == (Code.UNAVAILABLE, True), "another's tool must not run in its place"
    back = core.plugin("kb", tool("search"), qualified=True)
    core.call(host, "search")
    assert len(back.pending) == 1
    core.lose(back, "it crashed again")
    core.now += 6.0
    core.registry.expire(core.now)
    assert core.registry.find("search").source == "other"  # type: ignore[union-attr]
