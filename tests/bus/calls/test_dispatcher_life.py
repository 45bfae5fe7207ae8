"""From the moment a call was sent: time, cancels, nested calls, lost plugins, and all of it in any order."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.support.core_model import (
    IDEMPOTENT,
    Core,
    KeeperDouble,
    PeerDouble,
    error_of,
    nested,
    one_call,
    tool,
)
from tests.support.examples import examples
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_pb2 as pb

# -- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "declared", "limit"),
    [(0, 0, 30), (0, 7, 7), (5, 7, 5), (9, 7, 9), (301, 7, 300), (math.inf, 0, 300)],
)
def test_a_calls_timeout_overrides_the_tools_the_tools_30_s_and_none_exceeds_300_s(
    timeout: float, declared: float, limit: float
) -> None:
    core, host, plugin = one_call(tool("t", timeout_seconds=declared))
    call_id = core.call(host, "t", timeout_seconds=timeout)
    plugin.hand_over()
    core.advance(limit - 0.01)
    assert call_id in host.in_flight
    core.advance(0.02)
    error = error_of(host, call_id)
    assert (error.code, error.limit) == (Code.DEADLINE_EXCEEDED, ("timeout_seconds", limit))
    assert (error.stage, error.retry_safe) == (Stage.DISPATCHED, False)
    assert f"within {limit:g} s" in error.message
    assert plugin.cancelled == [(next(iter(plugin.pending)), "timeout_seconds")]


@pytest.mark.parametrize("timeout", [-1.0, math.nan])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    core, host, plugin = one_call()
    error = core.refusal(host, "t", timeout_seconds=timeout)
    assert (error.code, "timeout_seconds" in error.message) == (Code.INVALID_ARGUMENTS, True)
    assert (plugin.pending, core.held) == ({}, 0)


def test_an_idle_timeout_is_reset_by_progress_and_the_error_names_it() -> None:
    core, host, plugin = one_call(tool("t", idle_timeout_seconds=2.0))
    call_id = core.call(host, "t")
    plugin.hand_over()
    for _ in range(5):
        core.advance(1.9)
        core.progress(plugin, next(iter(plugin.pending)), message="still here")
    assert len(host.signs) == 5
    assert {sign.call_id for sign in host.signs} == {call_id}
    core.advance(2.1)
    error = error_of(host, call_id)
    assert (error.code, error.limit) == (Code.DEADLINE_EXCEEDED, ("idle_timeout_seconds", 2.0))
    assert error.stage is Stage.ACCEPTED


def test_the_first_progress_even_an_empty_one_makes_a_call_accepted() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t")
    plugin.hand_over()
    core.progress(plugin, next(iter(plugin.pending)))
    core.cancel(host, call_id)
    assert error_of(host, call_id).stage is Stage.ACCEPTED


def test_many_deadlines_share_one_timer_that_is_always_armed_for_the_nearest() -> None:
    core, host, plugin = one_call()
    for seconds in (9.0, 3.0, 6.0):
        core.call(host, "t", call_id=str(seconds), timeout_seconds=seconds)
    assert core.armed_at == core.now + 3.0
    plugin.hand_over()
    core.advance(6.5)
    assert sorted(host.results) == ["3.0", "6.0"]
    core.advance(3.0)
    assert sorted(host.results) == ["3.0", "6.0", "9.0"]


# -- cancelled and stuck ---------------------------------------------------------------------------------------------


def test_a_cancel_ends_the_call_for_its_caller_at_once_and_travels_to_the_plugin() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t", "{}")
    plugin.hand_over()
    core.cancel(host, call_id, "the user left")
    error = error_of(host, call_id)
    assert (error.code, error.stage, error.retry_safe) == (Code.CANCELLED, Stage.DISPATCHED, False)
    assert [reason for _, reason in plugin.cancelled] == ["the user left"]
    assert (plugin.stuck, len(plugin.pending), core.dispatcher.in_flight.stuck) == (1, 1, 1)
    core.answer(plugin)
    assert (plugin.stuck, plugin.pending, core.held, core.records.late) == (0, {}, 0, 1)
    assert len(host.results[call_id]) == 1
    core.cancel(host, call_id)
    core.cancel(host, "never heard of")
    assert len(host.results) == 1


def test_a_cancelled_call_that_still_waits_never_reaches_the_plugin() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t")
    core.cancel(host, call_id)
    error = error_of(host, call_id)
    assert (error.stage, error.retry_safe) == (Stage.NOT_DISPATCHED, True)
    assert (plugin.hand_over(), plugin.cancelled, plugin.pending, plugin.stuck, core.held) == ([], [], {}, 0, 0)


def test_a_stuck_call_holds_its_slot_until_60_s_after_the_cancel_whatever_else_is_in_flight() -> None:
    core, host, plugin = one_call(tool("t"), limits=Limits(calls_in_flight=2))
    plugin.max_in_flight = 2
    call_id = core.call(host, "t", timeout_seconds=1.0)
    core.call(host, "t", call_id="long", timeout_seconds=300.0)
    plugin.hand_over()
    core.advance(1.5)
    assert error_of(host, call_id).code is Code.DEADLINE_EXCEEDED
    assert core.refusal(host, "t", call_id="full").code is Code.OVERLOADED
    core.advance(59.0)
    assert plugin.stuck == 1
    core.advance(1.0)
    assert (plugin.stuck, len(plugin.pending), core.dispatcher.in_flight.stuck) == (0, 1, 0)
    core.dispatcher.results(plugin, [pb.ToolResult(call_id="1")], core.now)
    assert core.records.unexpected == 1


def test_results_and_progress_of_unknown_calls_are_dropped_and_counted() -> None:
    core, host, plugin = one_call()
    core.dispatcher.results(plugin, [pb.ToolResult(call_id="x"), pb.ToolResult(call_id="")], core.now)
    core.progress(plugin, "x")
    assert (core.records.unexpected, host.results) == (3, {})


# -- nested calls ----------------------------------------------------------------------------------------------------


def test_a_nested_call_ends_no_later_than_its_parent_and_is_cancelled_with_it() -> None:
    core, host, plugin = one_call()
    other = core.plugin("other", tool("o"))
    core.call(host, "t", timeout_seconds=10.0)
    plugin.hand_over()
    core.advance(4.0)
    for call_id in ("a", "b", "c"):
        nested(core, plugin, "o", call_id, timeout_seconds=100.0)
    assert [call.deadline - core.now for call in other.waiting.values()] == [6.0, 6.0, 6.0]
    core.answer(plugin)
    assert [error_of(plugin, call_id).code for call_id in "abc"] == [Code.CANCELLED] * 3
    assert (other.hand_over(), plugin.in_flight, core.held) == ([], {}, 0)


def test_a_nested_call_is_cancelled_with_its_parent_at_the_plugin_too() -> None:
    core, host, plugin = one_call()
    other = core.plugin("other", tool("o"))
    call_id = core.call(host, "t")
    plugin.hand_over()
    nested(core, plugin, "o")
    other.hand_over()
    core.cancel(host, call_id)
    assert [reason for _, reason in other.cancelled] == ["parent ended"]
    assert error_of(plugin, "child").code is Code.CANCELLED


@pytest.mark.parametrize("parent", ["not in flight", "ended"])
def test_a_parent_must_be_a_pending_call_of_the_session(parent: str) -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t")
    (call,) = plugin.hand_over()
    core.cancel(host, call_id)
    error = core.refusal(plugin, "t", parent_call_id="x" if parent == "not in flight" else call.id)
    assert (error.code, "parent_call_id" in error.message) == (Code.INVALID_ARGUMENTS, True)


def test_a_chain_of_eight_calls_is_accepted_and_the_ninth_ends_in_an_error() -> None:
    core, host, plugin = one_call()
    core.call(host, "t")
    for depth in range(2, 9):
        newest = list(plugin.pending)[-1]
        core.call(plugin, "t", call_id=f"d{depth}", parent_call_id=newest)
    assert len(plugin.pending) == 8
    error = core.refusal(plugin, "t", parent_call_id=list(plugin.pending)[-1])
    assert (error.code, error.limit) == (Code.PERMISSION_DENIED, ("call_depth", 8))
    assert "8 deep" in error.message


def test_while_draining_only_nested_calls_are_accepted() -> None:
    core, host, plugin = one_call()
    core.plugin("other", tool("o"))
    core.call(host, "t")
    core.dispatcher.draining = True
    error = core.refusal(host, "t")
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    nested(core, plugin, "o")
    assert "child" in plugin.in_flight


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_full_plugin_and_a_caller_with_too_many_calls_get_different_errors_with_a_retry_hint() -> None:
    core = Core()
    host, other = core.peer("host", max_in_flight=2), core.peer("other")
    plugin = core.plugin("plugin", tool("t"), max_in_flight=3)
    core.call(host, "t")
    core.call(host, "t")
    mine = core.refusal(host, "t")
    core.call(other, "t")
    theirs = core.refusal(other, "t")
    for error, limit in ((mine, 2.0), (theirs, 3.0)):
        assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
        assert error.limit == ("calls_in_flight", limit)
        assert error.retry_after_seconds > 0
    assert "'host' has 2 calls" in mine.message
    assert "'t' has 3 calls" in theirs.message
    assert len(plugin.pending) == 3


def test_held_arguments_are_bounded_for_a_source_and_for_the_bus() -> None:
    core = Core(limits=Limits(held_bytes=250, held_bytes_per_source=100))
    core.plugin("plugin", tool("t"))
    hosts = [core.peer("a"), core.peer("a"), core.peer("b"), core.peer("c")]
    text = json.dumps({"x": "y" * 72})
    assert len(text) == 81
    core.call(hosts[0], "t", text)
    assert core.refusal(hosts[1], "t", text).limit == ("held_bytes_per_source", 100)
    core.call(hosts[2], "t", text)
    core.call(hosts[3], "t", text)
    assert core.refusal(core.peer("d"), "t", text).limit == ("held_bytes", 250)
    core.cancel(hosts[0], next(iter(hosts[0].in_flight)))
    core.call(hosts[1], "t", text)
    assert core.held == 243


def test_arguments_above_their_limit_or_above_what_the_plugin_receives_are_refused_by_bytes_not_characters() -> None:
    core = Core(limits=Limits(arguments_bytes=1_000))
    host = core.peer("host")
    core.plugin("plugin", tool("t"))
    core.plugin("small", tool("s"), max_item_bytes=500)
    text = json.dumps({"x": "é" * 300}, ensure_ascii=False)
    core.call(host, "t", text)
    error = core.refusal(host, "t", json.dumps({"x": "é" * 500}, ensure_ascii=False))
    assert (error.code, error.limit) == (Code.INVALID_ARGUMENTS, ("arguments_bytes", 1_000))
    error = core.refusal(host, "s", text)
    assert (error.code, error.limit) == (Code.INVALID_ARGUMENTS, ("max_message_bytes", 500))


def test_calls_go_to_the_session_with_the_fewest_in_flight() -> None:
    core = Core()
    host = core.peer("host")
    plugins = [core.plugin("p", tool("t")) for _ in range(3)]
    for _ in range(7):
        core.call(host, "t")
    assert sorted(len(plugin.pending) for plugin in plugins) == [2, 2, 3]


# -- any order of things ---------------------------------------------------------------------------------------------

SEVERAL = st.integers(0, 2)


class CallsMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: one result a call, at most one run, and nothing is left over."""

    known = Bundle("known")

    @initialize()
    def begin(self) -> None:
        self.core = Core(limits=Limits(call_depth=3))
        self.hosts = [self.core.peer(f"host{number}", max_in_flight=6) for number in range(3)]
        self.tools = [tool("once", idle_timeout_seconds=3.0), tool("again", annotations=IDEMPOTENT)]
        self.plugins = [self.core.plugin("p", *self.tools, max_in_flight=4) for _ in range(3)]
        self.keeper = KeeperDouble(self.core, room=3)
        self.everyone = [*self.hosts, *self.plugins, self.keeper.peer]
        self.in_flight: dict[tuple[PeerDouble, str], str] = {}  # call → tool, for callers that were not lost
        self.count = 0

    def ask(self, caller: PeerDouble, name: str, **more: Any) -> None:
        self.count += 1
        self.in_flight[caller, f"c{self.count}"] = name
        arguments = json.dumps({"c": f"{id(caller)}/{self.count}"})
        self.core.call(caller, name, arguments, call_id=f"c{self.count}", **more)

    @rule(
        target=known,
        host=SEVERAL,
        name=st.sampled_from(["once", "again", "nobody"]),
        timeout=st.sampled_from([0, 2]),
        patience=st.sampled_from([0, 0, 1, 5]),
    )
    def a_host_calls(self, host: int, name: str, timeout: float, patience: float) -> Any:
        self.ask(self.hosts[host], name, timeout_seconds=timeout, background_after_seconds=patience)
        return self.hosts[host], f"c{self.count}"

    @rule(target=known, plugin=SEVERAL, which=st.integers(0, 3), name=st.sampled_from(["once", "again"]))
    def a_plugin_calls_while_it_answers(self, plugin: int, which: int, name: str) -> Any:
        peer = self.plugins[plugin]
        if not peer.pending:
            return multiple()
        self.ask(peer, name, parent_call_id=list(peer.pending)[which % len(peer.pending)])
        return peer, f"c{self.count}"

    @rule(plugin=SEVERAL)
    def the_writer_writes(self, plugin: int) -> None:
        self.plugins[plugin].hand_over()

    @rule(plugin=SEVERAL, which=st.integers(0, 3), is_error=st.booleans(), twice=st.booleans())
    def a_plugin_answers(self, plugin: int, which: int, is_error: bool, twice: bool) -> None:
        peer = self.plugins[plugin]
        peer.hand_over()
        if peer.pending:
            result = pb.ToolResult(
                call_id=list(peer.pending)[which % len(peer.pending)], output_json="1", is_error=is_error
            )
            self.core.dispatcher.results(peer, [result, *([result] if twice else [])], self.core.now)

    @rule(plugin=SEVERAL, which=st.integers(0, 3))
    def a_plugin_shows_progress(self, plugin: int, which: int) -> None:
        peer = self.plugins[plugin]
        if peer.pending:
            self.core.progress(peer, list(peer.pending)[which % len(peer.pending)])

    @rule(call=consumes(known))
    def a_caller_cancels(self, call: Any) -> None:
        self.core.cancel(*call)

    @rule(which=st.integers(0, 2))
    def a_task_is_cancelled(self, which: int) -> None:
        tasks = list(self.keeper.peer.in_flight)
        if tasks:
            self.core.cancel(self.keeper.peer, tasks[which % len(tasks)])

    @rule(seconds=st.sampled_from([0.5, 2.5, 31.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.core.advance(seconds)

    @rule(plugin=SEVERAL)
    def a_plugin_breaks_off_and_another_comes(self, plugin: int) -> None:
        lost = self.plugins[plugin]
        self.core.lose(lost)
        self.in_flight = {call: name for call, name in self.in_flight.items() if call[0] is not lost}
        self.plugins[plugin] = self.core.plugin("p", *self.tools, max_in_flight=4)
        self.everyone.append(self.plugins[plugin])

    @rule(plugin=SEVERAL)
    def a_plugin_says_goodbye_and_another_comes(self, plugin: int) -> None:
        leaving = self.plugins[plugin]  # what is in flight there it may still answer, or not
        leaving.hand_over()
        self.core.registry.withdraw(leaving)
        leaving.takes_calls = False
        self.plugins[plugin] = self.core.plugin("p", *self.tools, max_in_flight=4)
        self.everyone.append(self.plugins[plugin])

    @rule(drains=st.booleans())
    def the_bus_drains_or_goes_on(self, drains: bool) -> None:
        self.core.dispatcher.draining = drains

    @rule(host=SEVERAL)
    def a_host_breaks_off_and_another_comes(self, host: int) -> None:
        lost = self.hosts[host]
        self.core.lose(lost)
        self.in_flight = {call: name for call, name in self.in_flight.items() if call[0] is not lost}
        self.hosts[host] = self.core.peer(f"host{host}", max_in_flight=6)
        self.everyone.append(self.hosts[host])

    @invariant()
    def the_books_balance(self) -> None:
        calls = [call for peer in self.everyone for call in peer.pending.values()]
        active = [call for call in calls if call.active]
        assert {id(call) for call in active} == {id(call) for peer in self.everyone for call in peer.in_flight.values()}
        assert self.core.held == sum(call.size for call in calls)
        assert self.core.dispatcher.in_flight.active == len(active)
        assert self.core.dispatcher.in_flight.stuck == len(calls) - len(active)
        for peer in self.everyone:
            assert peer.stuck == sum(not call.active for call in peer.pending.values())
            assert len(peer.pending) <= peer.max_in_flight
            assert peer.budget.held == sum(call.size for call in calls if call.caller.budget is peer.budget)

    @invariant()
    def a_call_has_one_result_or_is_in_flight(self) -> None:
        for (caller, call_id), _ in self.in_flight.items():
            assert len(caller.results.get(call_id, [])) + (call_id in caller.in_flight) == 1
        tasks = self.keeper.peer
        for number in range(1, len(self.keeper.adopted) + 1):
            assert len(tasks.results.get(f"task{number}", [])) + (f"task{number}" in tasks.in_flight) == 1

    @invariant()
    def what_may_not_run_twice_was_handed_over_once(self) -> None:
        seen = [call.arguments_json for peer in self.everyone for call in peer.received if call.entry.name == "once"]
        assert len(seen) == len(set(seen))

    @invariant()
    def no_child_outlives_its_parent(self) -> None:
        for peer in self.everyone:
            for call in peer.in_flight.values():
                assert call.parent is None or (call.parent.active and call.deadline <= call.parent.deadline)

    @invariant()
    def the_timer_is_set_for_whatever_ends_next(self) -> None:
        calls = [call for peer in self.everyone for call in peer.pending.values()]
        soft_deadlines = self.core.dispatcher.in_flight.soft_deadlines
        assert all(call.active for call in soft_deadlines)
        ends = [
            min(call.deadline, soft_deadlines.get(call, math.inf)) if call.active else call.freed_at for call in calls
        ]
        assert self.core.armed_at <= min(ends, default=math.inf) + 0.01

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.advance(90_000.0)
        assert (self.core.held, self.core.dispatcher.in_flight.active, self.core.dispatcher.in_flight.stuck) == (
            0,
            0,
            0,
        )
        assert all(not peer.pending and not peer.in_flight and not peer.stuck for peer in self.everyone)
        assert all(peer.budget.held == 0 for peer in self.everyone)
        assert all(len(caller.results[call_id]) == 1 for caller, call_id in self.in_flight)
        assert self.core.armed_at == math.inf


CallsMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=40)


test_every_call_ends_once_and_leaves_nothing_behind = CallsMachine.TestCase


def test_a_retried_call_never_reports_that_it_was_not_sent() -> None:
    core = Core()
    first = core.plugin("p", tool("t", annotations=IDEMPOTENT), instance="1")
    second = core.plugin("p", tool("t", annotations=IDEMPOTENT), instance="2")
    host = core.peer("host")
    call_id = core.call(host, "t")
    had, other = (first, second) if first.pending else (second, first)
    had.hand_over()
    core.lose(had)
    assert list(other.pending), "it moved"
    core.lose(other, "it crashed before it read the call")
    error = error_of(host, call_id)
    assert (error.stage, error.retry_safe) == (Stage.DISPATCHED, True)
    core.advance(60.0)
    assert core.dispatcher.in_flight.retried == {}
