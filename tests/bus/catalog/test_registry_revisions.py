from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.bus.catalog.registry_cases import V1, current, names, offers
from tests.support.core_model import Core, PeerDouble, offered, tool
from toolbus.bus.catalog.changes import MAX_CHANGES
from toolbus.bus.catalog.registry import Registry
from toolbus.errors import Code
from toolbus.protocol.tool import Annotations, Tool

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


def test_register_unregister_and_find_cost_the_same_with_5_000_tools_as_with_100() -> None:
    def costs(size: int) -> Iterator[int]:
        registry = Registry()
        one = offers(registry, "one", *(tool(f"t{number}") for number in range(size)))
        extra = offered(tool("extra"))
        yield lines_run(lambda: registry.register(one, extra))
        yield lines_run(lambda: registry.find("t50"))
        yield lines_run(lambda: registry.unregister("extra"))

    assert all(abs(few - many) < 10 for few, many in zip(costs(100), costs(5_000), strict=True))


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
    handlers = [offers(registry, f"source{number}", V1) for number in range(10)]
    assert list(registry._index.by_source) == [f"source{number}" for number in range(2, 10)], "no more wait than 7"
    for handler in handlers:
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
