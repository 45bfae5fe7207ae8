from __future__ import annotations

from collections.abc import Callable

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name
from tests.faults.conftest import Connect, address, bus, connect, grace_seconds, limits, timings
from tests.faults.raw_peer import tool as raw_tool
from tests.support.core_model import Core, StreamDouble, tool
from tests.support.waiting import until
from toolbus.bus.streams.invoke_stream import FEW, HOLD_SECONDS, MANY, ROW, ROW_SECONDS, HeldOutboxes, JoinedResults
from toolbus.protocol.tool import Tool
from toolbus.v1 import tool_pb2 as pb

CALLS = 32


class Bench:
    """A plugin that answers in messages as a test wants, the host that calls it, and the timer of what is held."""

    def __init__(self, calls: int = CALLS, *host_tools: Tool) -> None:
        self.core = Core()
        self.plugin = self.core.attached("plugin", tool("t"))
        self.host = self.core.attached("host", *host_tools)
        self.timers: list[Callable[[], None]] = []
        self.results = JoinedResults(self.plugin.peer, self.core.dispatcher, HeldOutboxes(self._later))
        self.plugin.read("attached")
        self.host.read("attached")
        self.host.send(calls=[pb.ToolCall(call_id=f"c{number}", name="t") for number in range(calls)])
        self.ids = [call.call_id for call in self.plugin.read("calls")]

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        assert seconds == HOLD_SECONDS
        self.timers.append(do)

    def answer(self, count: int = 1, apart: float = 0.0, **fields: object) -> None:
        """Takes a message with results of the oldest calls."""
        self.core.now += apart
        ids, self.ids = self.ids[:count], self.ids[count:]
        self.results.take([pb.ToolResult(call_id=each, **fields) for each in ids], self.core.now)  # type: ignore[arg-type]

    def begin_a_row(self) -> None:
        for _ in range(ROW - 1):
            self.answer()
            assert not self.host.peer.outbox.held
        assert len(written(self.host)) == ROW - 1


def written(stream: StreamDouble) -> list[str]:
    """Returns the ids of the results that the stream's writer takes now: none while it is held."""
    return [] if stream.peer.outbox.held else [result.call_id for result in stream.read("results")]


def test_results_of_small_messages_in_a_row_wait_for_each_other_until_the_timer() -> None:
    bench = Bench()
    bench.begin_a_row()
    for _ in range(5):
        bench.answer()
    assert written(bench.host) == []
    (end,) = bench.timers
    end()
    assert written(bench.host) == ["c2", "c3", "c4", "c5", "c6"]
    bench.answer()
    assert len(bench.timers) == 2


def test_the_writer_is_told_once_when_what_was_held_is_released() -> None:
    bench = Bench()
    bench.begin_a_row()
    bench.answer()
    woken: list[bool] = []
    bench.host.peer.outbox.wake = lambda: woken.append(bench.host.peer.outbox.held)
    bench.answer(2)
    bench.timers[0]()
    assert woken == [False]


def test_a_caller_that_waits_for_few_calls_gets_each_result_at_once() -> None:
    bench = Bench(MANY)
    for number in range(MANY):
        bench.answer()
        assert written(bench.host) == [f"c{number}"]
    assert not bench.timers


def test_the_last_result_of_a_peer_releases_those_before() -> None:
    bench = Bench()
    other = bench.core.attached("other", tool("slow"))
    bench.host.send(calls=[pb.ToolCall(call_id=f"s{number}", name="slow") for number in range(MANY)])
    assert len(other.read("calls")) == MANY
    bench.begin_a_row()
    while len(bench.ids) > 1:
        bench.answer()
    assert written(bench.host) == []
    bench.answer()
    assert len(written(bench.host)) == CALLS - ROW + 1


def test_results_that_come_together_or_seldom_do_not_wait() -> None:
    together = Bench()
    for _ in range(ROW + 1):
        together.answer(FEW + 1)
        assert len(written(together.host)) == FEW + 1
    seldom = Bench()
    for _ in range(ROW + 3):
        seldom.answer(apart=ROW_SECONDS)
        assert len(written(seldom.host)) == 1
    assert not together.timers + seldom.timers


def test_whatever_else_is_for_a_held_peer_goes_out_at_once() -> None:
    def held(*host_tools: Tool) -> Bench:
        bench = Bench(CALLS, *host_tools)
        bench.begin_a_row()
        bench.answer()
        assert bench.host.peer.outbox.held
        return bench

    progress = held()
    progress.plugin.send(progress=[pb.ToolProgress(call_id=progress.ids[0])])
    call = held(tool("mine"))
    call.core.attached("another").send(calls=[pb.ToolCall(call_id="1", name="mine")])
    elsewhere = held()
    elsewhere.plugin.send(results=[pb.ToolResult(call_id=elsewhere.ids[0])])  # of a message that is in no row
    for bench in (progress, call, elsewhere):
        assert not bench.host.peer.outbox.held


async def test_a_plugin_that_answers_one_by_one_and_then_stops_has_all_its_results_delivered(connect: Connect) -> None:
    plugin, host = await connect("plugin", raw_tool("t")), await connect("host")
    await host.start(*[host.ask("t") for _ in range(CALLS)])
    await until(lambda: len(plugin.calls) == CALLS, "the calls")
    answered = plugin.calls[: CALLS - MANY]
    for call in answered:
        await plugin.send(results=[pb.ToolResult(call_id=call.call_id, output_json="1")])
    await until(lambda: len(host.results) == len(answered), "the results")
    await plugin.send(drain={"reason": "done"}, results=[pb.ToolResult(call_id=plugin.calls[-1].call_id)])
    await until(lambda: len(host.results) == len(answered) + 1, "the last result")
    assert len({result.call_id for result in host.results}) == len(host.results)
