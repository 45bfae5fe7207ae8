"""Calls that outlive their soft deadline: who gets what, when, and what is left over."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.core_model import (
    IDEMPOTENT,
    Core,
    KeeperDouble,
    PeerDouble,
    answer,
    call,
    error_of,
    nested,
    outputs,
    tool,
)
from toolbus.errors import Code
from toolbus.protocol.tool import TASK_SECONDS, Limits, Tool
from toolbus.v1 import tool_pb2 as pb


def setup(
    *tools: Tool, room: int = 1_000, limits: Limits | None = None
) -> tuple[Core, PeerDouble, PeerDouble, KeeperDouble]:
    """Returns a core with a host, a plugin and a background that adopts calls."""
    core = Core(limits=limits)
    return core, core.peer("host"), core.plugin("plugin", *(tools or (tool("t"),))), KeeperDouble(core, room)


def adopted(*tools: Tool, **more: Any) -> tuple[Core, PeerDouble, PeerDouble, KeeperDouble]:
    """The same, with a call of the plugin's first tool that has just been adopted."""
    core, host, plugin, keeper = setup(*tools)
    core.call(host, tools[0].name if tools else "t", call_id="1", background_after_seconds=2.0, **more)
    plugin.hand_over()
    core.advance(2.0)
    assert outputs(host) == ['{"task_id":"task1"}']
    return core, host, plugin, keeper


# -- the soft deadline -----------------------------------------------------------------------------------------------


def test_at_the_soft_deadline_a_caller_gets_one_result_and_the_call_goes_on_as_a_task() -> None:
    core, host, plugin, keeper = setup()
    core.call(host, "t", call_id="1", background_after_seconds=2.0)
    plugin.hand_over()
    core.advance(1.99)
    assert (list(host.in_flight), keeper.adopted) == (["1"], [])
    core.advance(0.02)
    assert outputs(host) == ['{"task_id":"task1"}']
    assert (host.in_flight, list(keeper.peer.in_flight), plugin.cancelled, len(plugin.pending)) == (
        {},
        ["task1"],
        [],
        1,
    )
    core.advance(10_000.0)
    core.answer(plugin, '"done"')
    assert outputs(keeper.peer) == ['"done"']
    assert outputs(host) == ['{"task_id":"task1"}']
    assert (core.held, keeper.peer.in_flight, plugin.pending, core.dispatcher.in_flight.active) == (0, {}, {}, 0)


def test_a_call_that_ends_before_its_soft_deadline_is_a_call_like_any_other() -> None:
    core, host, plugin, keeper = setup()
    for call_id, is_error in (("1", False), ("2", True)):
        core.call(host, "t", call_id=call_id, background_after_seconds=2.0)
        core.answer(plugin, '"done"', is_error=is_error)
    core.advance(10.0)
    assert outputs(host) == ['"done"', '"done"']
    assert keeper.adopted == []


def test_an_ended_call_holds_no_memory_until_its_soft_deadline() -> None:
    core, host, plugin, _ = setup()
    for call_id in "abcd":
        core.call(
            host, "t", call_id=call_id, background_after_seconds=200.0, timeout_seconds=1.0 if call_id == "a" else 0
        )
    assert len(core.dispatcher.in_flight.soft_deadlines) == 4
    core.advance(1.5)
    core.cancel(host, "b")
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=host.in_flight["c"].id)], core.now)
    core.lose(plugin)
    assert sorted(host.results) == ["a", "b", "c", "d"]
    assert core.dispatcher.in_flight.soft_deadlines == {}


def test_the_timer_is_armed_for_a_soft_deadline_that_comes_first() -> None:
    core, host, _, _ = setup()
    core.call(host, "t", background_after_seconds=7.0)
    assert core.armed_at == core.now + 7.0
    core.call(host, "t", background_after_seconds=9.0, timeout_seconds=3.0)
    assert core.armed_at == core.now + 3.0


def test_a_caller_may_use_the_id_of_an_adopted_call_again() -> None:
    core, host, plugin, keeper = adopted()
    core.call(host, "t", call_id="1")
    newer = list(plugin.pending)[-1]
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=newer, output_json="2")], core.now)
    core.answer(plugin, "1")
    assert [result.output_json for result in host.results["1"]] == ['{"task_id":"task1"}', "2"]
    assert outputs(keeper.peer) == ["1"]


def test_progress_after_adoption_goes_to_the_adopter() -> None:
    core, host, plugin, keeper = adopted()
    core.progress(plugin, next(iter(plugin.pending)), message="half")
    assert (host.signs, [(sign.call_id, sign.message) for sign in keeper.peer.signs]) == ([], [("task1", "half")])


def test_the_result_of_a_task_may_be_larger_than_its_first_caller_could_receive() -> None:
    core, _, plugin, keeper = setup()
    small = core.peer("small", max_item_bytes=500)
    core.call(small, "t", background_after_seconds=1.0)
    core.advance(1.0)
    core.answer(plugin, f'"{"x" * 2_000}"')
    assert len(outputs(keeper.peer)[0]) == 2_002


def test_over_a_stream_the_first_result_and_the_work_take_separate_ways() -> None:
    core = Core()
    keeper = KeeperDouble(core)
    plugin, host = core.attached("p", tool("t")), core.attached("h")
    host.read("attached")
    call(host, "t", background_after_seconds=2.0)
    (sent,) = plugin.read("calls")
    assert sent.timeout_seconds == TASK_SECONDS
    core.advance(2.0)
    assert [(result.call_id, result.output_json) for result in host.read("results")] == [("1", '{"task_id":"task1"}')]
    host.end()
    assert plugin.read("cancels") == []
    answer(plugin, sent.call_id, "7")
    assert outputs(keeper.peer) == ["7"]


# -- who may end it --------------------------------------------------------------------------------------------------


def test_a_cancel_before_the_soft_deadline_ends_the_call_and_it_is_not_adopted() -> None:
    core, host, plugin, keeper = setup()
    core.call(host, "t", call_id="1", background_after_seconds=2.0)
    plugin.hand_over()
    core.cancel(host, "1")
    core.advance(10.0)
    assert error_of(host, "1").code is Code.CANCELLED
    assert (keeper.adopted, len(plugin.cancelled)) == ([], 1)


def test_after_adoption_only_the_adopter_can_cancel_the_call() -> None:
    core, host, plugin, keeper = adopted()
    core.cancel(host, "1")
    assert (plugin.cancelled, list(keeper.peer.in_flight)) == ([], ["task1"])
    core.cancel(keeper.peer, "task1", "not needed")
    assert error_of(keeper.peer, "task1").code is Code.CANCELLED
    assert [reason for _, reason in plugin.cancelled] == ["not needed"]
    core.answer(plugin)
    assert (core.held, plugin.stuck, len(host.results["1"])) == (0, 0, 1)


@pytest.mark.parametrize("after", [False, True])
def test_a_caller_that_goes_takes_its_call_along_only_until_it_is_adopted(after: bool) -> None:
    core, host, plugin, keeper = setup()
    core.call(host, "t", background_after_seconds=2.0)
    plugin.hand_over()
    core.advance(2.0 if after else 1.0)
    core.lose(host)
    core.advance(5.0)
    assert [reason for _, reason in plugin.cancelled] == ([] if after else ["caller gone"])
    core.answer(plugin, "7")
    assert outputs(keeper.peer) == (["7"] if after else [])


def test_a_plugin_that_dies_ends_the_calls_that_were_adopted() -> None:
    core, host, plugin, keeper = adopted()
    core.lose(plugin)
    assert error_of(keeper.peer, "task1").code is Code.UNAVAILABLE
    assert (core.held, keeper.peer.in_flight, outputs(host)) == (0, {}, ['{"task_id":"task1"}'])


@pytest.mark.parametrize("after", [False, True])
def test_a_call_that_moves_to_another_plugin_keeps_its_soft_deadline_and_its_keeper(after: bool) -> None:
    core, host, plugin, keeper = setup(tool("t", annotations=IDEMPOTENT))
    core.call(host, "t", background_after_seconds=2.0)
    other = core.plugin("plugin", tool("t", annotations=IDEMPOTENT))
    plugin.hand_over()
    core.advance(2.0 if after else 1.0)
    core.lose(plugin)
    core.advance(1.0)
    assert (len(other.pending), outputs(host)) == (1, ['{"task_id":"task1"}'])
    core.answer(other, "7")
    assert outputs(keeper.peer) == ["7"]


def test_a_bus_that_stops_ends_tasks_too() -> None:
    core, _, plugin, keeper = adopted()
    core.dispatcher.stop(core.now)
    assert error_of(keeper.peer, "task1").code is Code.UNAVAILABLE
    core.answer(plugin)
    assert (core.held, core.dispatcher.in_flight.active, core.dispatcher.in_flight.stuck) == (0, 0, 0)


def test_what_a_task_calls_is_for_its_user_and_ends_with_it() -> None:
    core, host, plugin, keeper = setup()
    other = core.plugin("other", tool("o"))
    core.call(host, "t", background_after_seconds=2.0, context=pb.CallContext(user_id="ann"))
    plugin.hand_over()
    core.advance(400.0)
    nested(core, plugin, "o")
    (child,) = other.hand_over()
    assert child.context is not None
    assert (child.context.user_id, child.deadline - core.now) == ("ann", 30.0)
    core.cancel(keeper.peer, "task1")
    assert error_of(plugin, "child").code is Code.CANCELLED
    assert [reason for _, reason in other.cancelled] == ["parent ended"]


# -- without adoption -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout", "limit"), [(0.0, 300.0), (1_000.0, 300.0), (math.inf, 300.0), (50.0, 50.0)])
def test_where_there_is_no_room_for_a_task_the_caller_waits_on_for_300_s_at_most(timeout: float, limit: float) -> None:
    core, host, plugin, keeper = setup(room=0)
    core.call(host, "t", call_id="1", background_after_seconds=20.0, timeout_seconds=timeout)
    core.call(host, "t", call_id="2", background_after_seconds=20.0, timeout_seconds=timeout)
    core.advance(30.0)
    assert (sorted(host.in_flight), keeper.adopted) == (["1", "2"], [])
    core.answer(plugin, '"late"')
    core.advance(limit - 30.01)
    assert list(host.in_flight) == ["2"]
    core.advance(0.02)
    error = error_of(host, "2")
    assert (error.code, error.limit) == (Code.DEADLINE_EXCEEDED, ("timeout_seconds", limit))
    assert host.results["1"][0].output_json == '"late"'


def test_an_adopter_that_fails_costs_no_call_and_no_deadline(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def adopt(self, call: object, now: float, cancel: object, calls: object) -> None:
            raise RuntimeError("of the keeper's making")

    core, host, plugin, _ = setup()
    core.dispatcher.seams.background = Broken()
    core.call(host, "t", call_id="1", background_after_seconds=2.0)
    core.call(host, "t", call_id="2", timeout_seconds=3.0)
    core.advance(3.5)
    assert error_of(host, "2").code is Code.DEADLINE_EXCEEDED
    core.answer(plugin, "7")
    assert host.results["1"][0].output_json == "7"
    assert "of the keeper's making" in caplog.text


@pytest.mark.parametrize("why", ["nested", "no_background", "no background"])
def test_some_calls_never_become_tasks_and_have_300_s_at_most(why: str) -> None:
    core, host, plugin, keeper = setup(tool("t", no_background=why == "no_background"))
    if why == "no background":
        core.dispatcher.seams.background = None
    caller: PeerDouble = host
    more: dict[str, str] = {}
    if why == "nested":
        core.call(host, "t", call_id="root", background_after_seconds=1.0)
        caller, more = plugin, {"parent_call_id": next(iter(plugin.pending))}
    call_id = core.call(caller, "t", call_id="1", background_after_seconds=2.0, timeout_seconds=1_000.0, **more)
    assert caller.in_flight[call_id].timeout == 300.0
    call_id = core.call(caller, "t", call_id="2", background_after_seconds=2.0, **more)
    assert caller.in_flight[call_id].timeout == 30.0
    core.advance(20.0)
    assert sorted(caller.in_flight) == ["1", "2"]
    assert len(keeper.adopted) == (why == "nested")


# -- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft_deadline", "timeout"),
    [
        (math.nan, 0.0),
        (-1.0, 0.0),
        (-math.inf, 0.0),
        (5.0, math.nan),
        (5.0, -1.0),
        (5.0, -math.inf),
        (math.nan, math.nan),
    ],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_an_invalid_soft_deadline_is_refused(soft_deadline: float, timeout: float, keeps: bool) -> None:
    core, host, plugin, _ = setup()
    if not keeps:
        core.dispatcher.seams.background = None
    error = core.refusal(host, "t", background_after_seconds=soft_deadline, timeout_seconds=timeout)
    assert error.code is Code.INVALID_ARGUMENTS
    assert "timeout_seconds" in error.message
    assert f"{soft_deadline:g}" in error.message or f"{timeout:g}" in error.message
    assert (plugin.pending, core.held, core.dispatcher.in_flight.soft_deadlines) == ({}, 0, {})


@pytest.mark.parametrize(
    ("soft_deadline", "waits"), [(0.001, 0.005), (1.0, 1.0), (301.0, 300.0), (1e9, 300.0), (math.inf, 300.0)]
)
def test_a_caller_never_waits_longer_than_300_s_for_its_first_result(soft_deadline: float, waits: float) -> None:
    core, host, _, _ = setup()
    core.call(host, "t", background_after_seconds=soft_deadline)
    core.advance(waits - 0.003)
    core.advance(0.006)
    assert len(host.results) == 1
    if soft_deadline >= 1.0:
        core.call(host, "t", call_id="again", background_after_seconds=soft_deadline)
        core.advance(waits - 0.003)
        assert "again" in host.in_flight


def test_a_soft_deadline_of_0_means_none() -> None:
    core, host, _, keeper = setup()
    core.call(host, "t", call_id="1", background_after_seconds=0.0)
    core.advance(31.0)
    assert error_of(host, "1").code is Code.DEADLINE_EXCEEDED
    assert keeper.adopted == []


@pytest.mark.parametrize(
    ("timeout", "limit"),
    [(0.0, TASK_SECONDS), (1e9, TASK_SECONDS), (math.inf, TASK_SECONDS), (1_000.0, 1_000.0), (3.0, 3.0)],
)
def test_the_work_of_a_task_is_bounded_by_its_timeout_or_24_hours_counted_from_its_start(
    timeout: float, limit: float
) -> None:
    core, _, plugin, keeper = adopted(tool("t", timeout_seconds=20.0), timeout_seconds=timeout)
    core.advance(limit - 2.01)
    assert list(keeper.peer.in_flight) == ["task1"]
    core.advance(0.02)
    error = error_of(keeper.peer, "task1")
    assert (error.code, error.limit) == (Code.DEADLINE_EXCEEDED, ("timeout_seconds", limit))
    assert [reason for _, reason in plugin.cancelled] == ["timeout_seconds"]


def test_work_that_ends_before_the_patience_of_its_caller_does_ends_as_a_call() -> None:
    core, host, _, keeper = setup()
    core.call(host, "t", call_id="1", background_after_seconds=5.0, timeout_seconds=3.0)
    core.call(host, "t", call_id="2", background_after_seconds=5.0, timeout_seconds=5.0)
    core.advance(6.0)
    assert [error_of(host, call_id).code for call_id in "12"] == [Code.DEADLINE_EXCEEDED] * 2
    assert keeper.adopted == []


def test_a_task_that_shows_no_sign_of_life_ends_like_a_call() -> None:
    core, _, plugin, keeper = adopted(tool("t", idle_timeout_seconds=5.0))
    core.progress(plugin, next(iter(plugin.pending)))
    core.advance(4.9)
    assert list(keeper.peer.in_flight) == ["task1"]
    core.advance(0.2)
    assert error_of(keeper.peer, "task1").limit == ("idle_timeout_seconds", 5.0)


@pytest.mark.parametrize(("timeout", "limit"), [(0, 30), (301, 301), (math.inf, 3_600)])
def test_a_caller_that_may_wait_longer_gets_what_it_asks_for_up_to_its_own_limit(timeout: float, limit: float) -> None:
    core, host, _, _ = setup()
    host.longest_timeout = 3_600.0
    assert host.in_flight[core.call(host, "t", timeout_seconds=timeout)].timeout == limit


# -- the books -------------------------------------------------------------------------------------------------------


def test_what_is_held_for_a_call_moves_with_it_and_comes_out_at_zero() -> None:
    core, host, plugin, keeper = setup()
    text = '{"x": "0123456789"}'
    for _ in range(3):
        core.call(host, "t", text, background_after_seconds=2.0)
    core.call(host, "t", text)
    assert (host.budget.held, keeper.peer.budget.held) == (4 * len(text), 0)
    core.advance(2.0)
    assert (host.budget.held, keeper.peer.budget.held, core.held) == (len(text), 3 * len(text), 4 * len(text))
    core.answer(plugin)
    core.cancel(keeper.peer, next(iter(keeper.peer.in_flight)))
    core.lose(plugin)
    assert (host.budget.held, keeper.peer.budget.held, core.held, core.dispatcher.in_flight.active) == (0, 0, 0, 0)


def test_a_task_leaves_one_record_with_the_user_and_the_whole_time() -> None:
    core, host, plugin, _ = setup()
    core.call(host, "t", background_after_seconds=2.0, context=pb.CallContext(user_id="ann"))
    core.advance(2.0)
    assert len(core.records) == 0
    core.advance(98.0)
    core.answer(plugin, '"done"')
    (record,) = core.records
    assert (record.call_id, record.outcome, record.user_id, record.seconds) == ("task1", "OK", "ann", 100.0)
    assert core.records.outcomes == {0: 1}
