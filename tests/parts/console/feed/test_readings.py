"""Tests what digests read of a bus: bounded in rows and in time, whatever the bus holds."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.core_model import Core, nested, one_call, row, tool
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.metrics.call_counts import FORGET_SECONDS, CallMetrics
from toolbus.errors import Code
from toolbus.parts.console.feed import MAX_CALLED, MAX_STALE, MAX_TOOLS, CalledTools, ToolCounts
from toolbus.protocol.questions import INPUT_REQUIRED


def records_of(*codes: int, keep: int = 1_000) -> CallRecords:
    records = CallRecords(keep)
    for number, code in enumerate(codes, 1):
        records.add(row(str(number), "t", float(number), float(number), code))
    return records


def test_the_newest_calls_come_first_and_of_the_others_those_that_failed() -> None:
    records = records_of(Code.TOOL, 0, INPUT_REQUIRED, Code.INTERNAL, 0, 0, 0)
    batch = records.latest(0, newest=2, failed=1)
    assert [record.number for record in batch.records] == [7, 6, 4]
    assert (batch.lost, batch.position) == (0, 7)
    assert [record.number for record in records.latest(5, newest=9, failed=9).records] == [7, 6]
    assert records.latest(7, newest=9, failed=9).records == []


def test_what_was_overwritten_before_a_digest_is_counted_as_lost() -> None:
    batch = records_of(*(0,) * 10, keep=3).latest(2, newest=5, failed=5)
    assert [record.number for record in batch.records] == [10, 9, 8]
    assert batch.lost == 5


def test_the_rate_of_a_first_digest_is_that_of_the_calls_whose_records_are_there() -> None:
    records = records_of(0, Code.TOOL, 0, INPUT_REQUIRED)
    assert records.recent(0.0) == (4, 1, 0.0)
    assert records.recent(2.0) == (2, 0, 2.0)
    assert records_of(0, 0, 0, 0, keep=2).recent(0.0) == (1, 0, 3.0)  # from the oldest record on


def test_the_oldest_calls_in_flight_of_all_callers_come_first() -> None:
    core = Core()
    plugin = core.plugin("plugin", tool("t"), tool("u"))
    hosts = [core.peer(f"host-{number}") for number in range(3)]
    for step in range(6):
        core.call(hosts[step % 3], "t", call_id=str(step))
        core.advance(0.001)
    oldest = core.dispatcher.in_flight.oldest(4)
    assert [(call.caller.source, call.call_id) for call in oldest] == [
        ("host-0", "0"), ("host-1", "1"), ("host-2", "2"), ("host-0", "3")
    ]  # fmt: skip
    plugin.hand_over()
    core.answer(plugin)
    assert [call.call_id for call in core.dispatcher.in_flight.oldest(9)] == ["1", "2", "3", "4", "5"]


def test_a_nested_call_names_its_parent_in_flight() -> None:
    core, host, plugin = one_call(tool("t"), tool("u"))
    core.call(host, "t")
    parent = plugin.hand_over()[0]
    nested(core, plugin, "u")
    assert [call.parent for call in core.dispatcher.in_flight.oldest(9)] == [None, parent]


async def test_a_source_with_very_many_tools_is_counted_bit_by_bit() -> None:
    core = Core()
    core.plugin("small", *(tool(f"s{number}") for number in range(4)))
    core.plugin("large", *(tool(f"l{number}") for number in range(50)))
    sizes = core.registry.sources()
    counts = ToolCounts(core.registry, at_once=10)
    counts.begin()
    assert counts.of("small", sizes["small"]) == 4
    assert counts.of("large", sizes["large"]) is None  # not on the way to a digest
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    await counts.count_long("large", sizes["large"])
    watching.cancel()
    assert turns >= sizes["large"] // 10
    assert counts.of("large", sizes["large"]) == 50
    assert counts.of("large", sizes["large"] + 2) == 50  # until it is counted again


def metrics_of(**calls: int) -> CallMetrics:
    metrics = CallMetrics()
    for name, count in calls.items():
        for _ in range(count):
            metrics.take("plugin", name).add(0, 5.0, 0.25)
    return metrics


def rows(given: list[Any]) -> list[tuple[str, int]]:
    return [(row[1], row[2]) for row in given]


def test_called_tools_are_in_one_digest_and_again_after_the_next_call() -> None:
    metrics = metrics_of(one=1, two=2)
    tools = CalledTools(metrics, began=100.0)
    assert rows(tools.begin()) == [("two", 2), ("one", 1)]
    assert tools.changed() == []
    metrics.take("plugin", "one").add(Code.TOOL, 6.0, 0.25)
    assert [row[:4] for row in tools.changed()] == [("plugin", "one", 2, 1)]
    (source, name, calls, failed, median, most, last) = tools.most_called()[0]
    assert median is not None
    assert most is not None
    assert 0.125 <= median <= most <= 0.5  # within a factor of two
    assert last in (105.0, 106.0)
    assert (source, calls >= 2, failed <= 1, name in ("one", "two")) == ("plugin", True, True, True)


async def test_of_very_many_tools_some_are_in_this_digest_and_the_others_in_later_ones() -> None:
    metrics = metrics_of(**{f"t{number}": 1 for number in range(MAX_TOOLS + 10)})
    tools = CalledTools(metrics, began=0.0)
    await tools.prepare()
    assert len(tools.begin()) == MAX_TOOLS
    for number in range(MAX_CALLED + 5):
        metrics.take("plugin", f"t{number}").add(0, 6.0, 0.1)
    first, second = tools.changed(), tools.changed()
    assert (len(first), len(second)) == (MAX_CALLED, 5)
    assert len({row[1] for row in [*first, *second]}) == MAX_CALLED + 5
    assert tools.changed() == []


def test_rows_of_tools_that_the_metrics_forgot_go() -> None:
    metrics = CallMetrics(most=1_500)
    called = CalledTools(metrics, 0.0)
    called.begin()
    for generation in range(4):
        for number in range(1_500):
            metrics.take("p", f"t{generation}-{number}").add(0, generation * 2.0 * FORGET_SECONDS, 0.001)
        while called.changed():
            pass
        assert len(called) <= 1_500 + MAX_STALE + MAX_CALLED
        for _ in range(3):
            metrics.forget((generation * 2 + 1.5) * FORGET_SECONDS, lambda source, name: False)
        assert len(metrics) == 0
