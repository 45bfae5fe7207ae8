"""Counts of tools are exact, durations are within a factor of two, and neither names nor tools fill the memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from tests.support.core_model import Core, KeeperDouble, PeerDouble, one_call, tool
from toolbus.bus.catalog.entry import BUS_SOURCE, Slots
from toolbus.bus.metrics.call_counts import BUCKETS, FORGET_SECONDS, CallCounts, CallMetrics, bound_of, bucket_of
from toolbus.errors import Code
from toolbus.protocol.questions import INPUT_REQUIRED
from toolbus.v1 import tool_pb2 as pb


def known(source: str, name: str) -> bool:
    return True


def gone(source: str, name: str) -> bool:
    return False


def counted(core: Core, name: str = "t", source: str = "plugin") -> CallCounts:
    counts = core.metrics.of(source, name)
    assert counts is not None
    return counts


def frame(core: Core, host: PeerDouble, plugin: PeerDouble, names: list[str], seconds: float) -> None:
    """Has calls of some tools made in one frame and answered in one frame."""
    begun = len(host.results)
    calls = [pb.ToolCall(call_id=f"c{begun + each}", name=name) for each, name in enumerate(names)]
    core.dispatcher.calls(host, calls, core.now)
    core.now += seconds
    plugin.hand_over()
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=each) for each in list(plugin.pending)], core.now)


@pytest.mark.parametrize("names", [["t"], ["t", "t"], ["t"] * 128, ["t", "u"] * 20, ["u", "t", "t", "t", "u"]])
def test_each_call_of_a_frame_is_counted_for_its_tool(names: list[str]) -> None:
    core, host, plugin = one_call(tool("t"), tool("u"))
    for _ in range(3):
        frame(core, host, plugin, names, 0.25)
    for name in set(names):
        counts = counted(core, name)
        assert (counts.calls, counts.failed) == (3 * names.count(name), 0)
        assert counts.outcomes == {"OK": counts.calls}
        assert sum(counts.histogram) == counts.calls
        assert counts.seconds == pytest.approx(0.25 * counts.calls)
        assert counts.last_ended == core.now


def test_how_calls_end_is_counted_by_outcome() -> None:
    core, host, plugin = one_call(tool("t", timeout_seconds=2.0))
    core.call(host, "t")
    core.answer(plugin)
    core.call(host, "t")
    core.answer(plugin, is_error=True)
    core.call(host, "t")
    core.advance(3.0)
    core.call(host, "t", "[]")
    assert counted(core).outcomes == {"OK": 1, "TOOL": 1, "DEADLINE_EXCEEDED": 1, "INVALID_ARGUMENTS": 1}
    assert counted(core).failed == 3
    assert sum(counted(core).histogram) == 3  # what was refused took no time
    assert core.metrics.refused == {Code.INVALID_ARGUMENTS: 1}


def test_a_call_that_ends_with_questions_has_not_failed() -> None:
    counts = CallCounts("p", "t")
    counts.add(INPUT_REQUIRED, 1.0, 0.5)
    assert (counts.calls, counts.failed, counts.outcomes) == (1, 0, {"INPUT_REQUIRED": 1})


def test_a_code_of_a_newer_protocol_counts_as_internal() -> None:
    counts = CallCounts("p", "t")
    for code in range(1_000, 1_100):
        counts.add(code, 1.0, 0.5)
    assert counts.outcomes == {"INTERNAL": 100}


def test_names_that_no_tool_has_are_counted_together() -> None:
    core, host, _ = one_call()
    for number in range(200):
        core.call(host, f"made-up-{number}", call_id=f"x{number}", role="" if number % 2 else "no-such-role")
    assert len(core.metrics) == 0
    assert core.metrics.unknown.calls == 200
    assert sum(core.metrics.refused.values()) == 200


def test_a_call_that_ended_in_its_own_frame_took_no_time() -> None:
    core, host, plugin = one_call()
    frame(core, host, plugin, ["t"] * 3, 0.0)
    assert counted(core).histogram[0] == 3
    assert counted(core).quantiles(0.99) == [0.0]


@pytest.mark.parametrize("exponent", range(-30, 30))
def test_a_duration_is_counted_in_the_bucket_that_ends_above_it(exponent: int) -> None:
    for seconds in (2.0**exponent, 1.5 * 2.0**exponent, 1.9999 * 2.0**exponent):
        index = bucket_of(seconds)
        assert 0 < index < BUCKETS
        assert bound_of(index) / 2.0 <= seconds < bound_of(index)
        counts = CallCounts("p", "t")
        counts.add(0, 10.0, seconds)
        (longest,) = counts.quantiles(1.0)
        assert longest is not None
        assert bound_of(index) / 2.0 <= longest <= bound_of(index) * 1.001


def _frames(kind: str, rng: random.Random) -> Iterator[tuple[list[float], float]]:
    """Yields frames of results with the durations of their calls: (starts, end)."""
    now = 1e5
    for _ in range(1_000):
        now += rng.expovariate(10.0)
        size = rng.randint(1, 128)
        spread = {
            "alike": [now - 0.02 * rng.uniform(0.9, 1.1) for _ in range(size)],
            "of many lengths": [now - rng.lognormvariate(-4.0, 1.5) for _ in range(size)],
            # A plugin that answers all ten times a second, in the order of the calls: the halves differ.
            "in order": sorted(now - rng.uniform(0.0005, 0.1) for _ in range(size)),
            "two kinds": [now - rng.choice((0.001, 4.0)) for _ in range(size)],
        }
        yield spread[kind], now


@pytest.mark.parametrize("kind", ["alike", "of many lengths", "in order", "two kinds"])
def test_quantiles_are_within_a_bucket_of_exact_ones(kind: str) -> None:
    rng = random.Random(7)
    counts, exact = CallCounts("p", "t"), []
    for starts, end in _frames(kind, rng):
        if len(starts) == 1:
            counts.add_one(starts[0], end)
        else:
            counts.add_run(starts, end)
        exact += [end - started for started in starts]
    exact.sort()
    assert counts.calls == len(exact)
    assert counts.seconds == pytest.approx(sum(exact), rel=1e-6)
    for q in (0.05, 0.45, 0.9, 0.95, 0.99):
        (value,) = counts.quantiles(q)
        assert value is not None
        assert abs(bucket_of(value) - bucket_of(exact[int(q * len(exact))])) <= 1, (q, value)


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.25, 1.5), (0.0, 0.0)])
def test_calls_of_one_bucket_have_their_mean_as_every_quantile(seconds: tuple[float, ...]) -> None:
    counts = CallCounts("p", "t")
    for each in seconds:
        counts.add(0, 10.0, each)
    assert counts.quantiles(0.5, 0.95) == [pytest.approx(sum(seconds) / len(seconds))] * 2


def test_a_quantile_stays_in_the_one_bucket_that_was_observed() -> None:
    while True:  # of the first two calls one is drawn: 64 s are in the sum at any rate
        counts = CallCounts("p", "t")
        counts.add_run([99.0, 36.0, 99.0, 99.0], 100.0)
        if counts.histogram[bucket_of(1.0)] == 4:
            break
    assert counts.quantiles(0.5) == [2.0]


def test_a_tool_whose_calls_were_all_refused_has_no_quantile() -> None:
    counts = CallCounts("p", "t")
    counts.add(Code.OVERLOADED, 1.0, None)
    assert counts.quantiles(0.5) == [None]


def test_a_mark_finds_the_tools_that_were_called_since() -> None:
    metrics = CallMetrics()
    one, two = metrics.take("p", "one"), metrics.take("p", "two")
    one.add_one(0.0, 1.0)
    mark, found = metrics.changed(0)
    assert found == [one]
    assert metrics.changed(mark) == (mark + 1, [])
    two.add(Code.TOOL, 2.0, 0.5)
    assert metrics.changed(mark)[1] == [two]  # of another reader, who was not there meanwhile
    assert set(metrics.changed(0)[1]) == {one, two}


# -- series that are bounded and never go backwards ------------------------------------------------------------------


def shown(metrics: CallMetrics) -> dict[str, int]:
    """Returns what the series show now."""
    return {each.name: each.series.calls for each in metrics.with_series()} | {"other": metrics.others.calls}


def test_tools_beyond_the_cap_share_a_series() -> None:
    metrics = CallMetrics(2)
    for number in range(5):
        metrics.take("p", f"t{number}").add_one(0.0, 1.0)
    assert shown(metrics) == {"t0": 1, "t1": 1, "other": 3}


def test_a_tool_with_twice_the_calls_takes_a_series_that_begins_at_zero() -> None:
    metrics = CallMetrics(1)
    few, many = metrics.take("p", "few"), metrics.take("p", "many")
    few.add_run([0.0] * 10, 1.0)
    many.add_run([0.0] * 20, 1.0)
    assert shown(metrics) == {"few": 10, "other": 20}
    many.add_one(0.0, 1.0)
    assert shown(metrics) == {"many": 0, "other": 21}
    many.add_run([0.0] * 5, 3.0)
    few.add_one(0.0, 1.0)
    assert shown(metrics) == {"many": 5, "other": 22}
    assert (many.calls, few.calls) == (26, 11)  # all of them, for those who ask for the tool


def test_no_series_ever_goes_backwards() -> None:
    rng, metrics = random.Random(3), CallMetrics(4)
    before: dict[str, int] = {}
    for step in range(400):
        for _ in range(20):
            counts = metrics.take("p", f"t{min(int(rng.expovariate(0.3)), 15) * (1 + step // 100)}")
            starts = [float(step)] * rng.randint(2, 9)
            if rng.random() < 0.3:
                counts.add_one(0.0, 1.0)
            elif rng.random() < 0.3:
                counts.add(Code.TOOL, 1.0, 1.0)
            else:
                counts.add_run(starts, float(step) + 1.0)
        if rng.random() < 0.1:
            metrics.forget(step * 400.0, lambda source, name: rng.random() < 0.7)
        now = shown(metrics)
        assert len(now) <= 5
        for name in now.keys() & before.keys():
            assert now[name] >= before[name], (step, name)
        before = now


def test_what_others_count_is_the_sum_of_what_has_no_series() -> None:
    metrics = CallMetrics(0)
    for number in range(40):
        counts = metrics.take("p", f"t{number % 7}")
        counts.add_one(0.0, 0.5)
        counts.add(Code.TOOL, 1.0, 0.25)
        counts.add_run([0.0, 0.5], 1.0)
    assert shown(metrics) == {"other": 160}
    assert metrics.others.outcomes == {"OK": 120, "TOOL": 40}
    assert sum(metrics.others.histogram) == 160
    assert metrics.others.seconds == pytest.approx(40 * (0.5 + 0.25 + 1.5))


def test_a_tool_that_left_the_catalog_loses_its_series_after_an_hour() -> None:
    metrics = CallMetrics(1)
    metrics.take("p", "gone").add_one(99.0, 100.0)
    metrics.take("p", "stays").add_one(99.0, 100.0)
    metrics.forget(200.0, known)
    is_known = {"stays"}.__contains__
    metrics.forget(200.0 + FORGET_SECONDS, lambda source, name: is_known(name))
    assert metrics.of("p", "gone") is not None
    metrics.forget(201.0 + FORGET_SECONDS, lambda source, name: is_known(name))
    assert metrics.of("p", "gone") is None
    assert shown(metrics) == {"stays": 0, "other": 1}  # it has the place that is free now


def test_a_tool_that_comes_back_within_the_hour_goes_on() -> None:
    core, host, plugin = one_call()
    frame(core, host, plugin, ["t"], 0.1)
    core.lose(plugin)
    core.advance(60.0)
    core.registry.expire(core.now)
    core.metrics.forget(core.now, gone)
    frame(core, host, core.plugin("plugin", tool("t")), ["t"], 0.1)
    assert counted(core).calls == 2


def test_it_looks_at_some_tools_each_time_and_at_all_in_turn() -> None:
    metrics = CallMetrics()
    for number in range(10):
        metrics.take("p", f"t{number}")
    asked: list[str] = []

    def note(source: str, name: str) -> bool:
        asked.append(name)
        return True

    for _ in range(4):
        metrics.forget(0.0, note, most=3)
    assert asked[:10] == [f"t{number}" for number in range(10)]


def test_more_names_than_are_counted_one_by_one_fill_neither_memory_nor_the_exposition() -> None:
    metrics = CallMetrics(most=100)
    for number in range(10_000):
        metrics.take("p", f"t{number}").add_one(0.0, 1.0)
    assert len(metrics) == 100
    assert len(metrics.with_series()) <= 200
    assert sum(shown(metrics).values()) == 10_000


def test_the_counts_of_a_tool_take_six_kilobytes_at_most() -> None:
    counts = CallMetrics().take("p", "t")
    for number in range(100_000):
        counts.add_one(0.0, 0.001 * 1.01 ** (number % 1_000))
        if not number % 10:
            counts.add(1 + number % 20, 1.0, 1.0)
    parts = (counts, counts.histogram, *counts.histogram, counts.failures)
    assert sum(sys.getsizeof(part) for part in parts) + 32 * 32 < 6_000


def test_a_task_is_counted_once_when_it_ends() -> None:
    core, host, plugin = one_call()
    KeeperDouble(core)
    core.call(host, "t", background_after_seconds=1.0)
    core.advance(2.0)
    assert core.metrics.of("plugin", "t") is None
    core.advance(3.0)
    core.answer(plugin)
    assert counted(core).calls == 1
    assert counted(core).seconds == pytest.approx(5.0)


def test_a_traced_call_is_the_example_of_its_bucket() -> None:
    core, host, plugin = one_call()
    core.dispatcher.traces.start(lambda span: None)
    core.call(host, "t", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    core.now += 0.25
    core.answer(plugin)
    assert counted(core).exemplars == {bucket_of(0.25): ("ab" * 16, 0.25, core.now)}


def test_without_metrics_nothing_is_counted() -> None:
    core = Core(metrics=False)
    host, plugin = core.peer("host"), core.plugin("plugin", tool("t"))
    frame(core, host, plugin, ["t"] * 3, 0.1)
    core.call(host, "nothing")
    assert core.metrics.of("plugin", "t") is None
    assert core.metrics.changed(0)[1] == []
    assert not core.metrics.refused


class BrokenSlots(Slots):
    """Stands for any fault of the bus."""

    def offer(self, *_: object) -> int:
        raise RuntimeError("broken")


def test_a_call_that_meets_a_fault_of_the_bus_is_recorded_and_counted() -> None:
    core, host, plugin = one_call()
    plugin.slots = BrokenSlots()
    assert core.refusal(host, "t").code is Code.INTERNAL
    assert next(iter(core.records)).code is Code.INTERNAL
    assert core.metrics.refused == {Code.INTERNAL: 1}
    assert counted(core).outcomes == {"INTERNAL": 1}


def test_a_traced_call_of_an_operators_reading_tool_is_no_example_since_it_is_not_counted() -> None:
    core = Core()
    spans: list[object] = []
    core.dispatcher.traces.start(spans.append)
    host, bus = core.peer("host"), core.plugin(BUS_SOURCE, tool("stats"))
    core.call(host, "stats", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    core.answer(bus)
    assert (len(spans), core.metrics.of(BUS_SOURCE, "stats")) == (1, None)
