from __future__ import annotations

import json

import pytest

from tests.support.core_model import (
    IDEMPOTENT,
    Core,
    error_of,
    nested,
    one_call,
    outputs,
    tool,
)
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Annotations

# -- a plugin is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handed_over", "annotations", "moves"),
    [
        (False, Annotations(), True),
        (True, Annotations(), False),
        (True, IDEMPOTENT, True),
        (True, Annotations(read_only=True), True),
        (True, Annotations(destructive=True), False),
    ],
)
def test_a_lost_call_is_retried_by_another_session_only_if_it_cannot_run_twice(
    handed_over: bool, annotations: Annotations, moves: bool
) -> None:
    core = Core()
    declared = tool("t", annotations=annotations)
    host, first = core.peer("host"), core.plugin("p", declared)
    call_id = core.call(host, "t")
    second = core.plugin("p", declared)
    if handed_over:
        first.hand_over()
    core.lose(first, "its connection broke")
    assert len(second.hand_over()) == moves
    if moves:
        core.answer(second)
        assert outputs(host) == ["1"]
    else:
        error = error_of(host, call_id)
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.DISPATCHED, False)
        assert "its connection broke" in error.message
        assert "not tried again" in error.message
    assert (core.held, first.pending, second.pending) == (0, {}, {})


def test_a_lost_call_without_another_session_ends_and_says_whether_to_retry() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t")
    core.lose(plugin)
    error = error_of(host, call_id)
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)


def test_a_lost_call_is_not_retried_past_its_deadline_nor_by_a_session_that_cannot_receive_it() -> None:
    core = Core()
    declared = tool("t", annotations=IDEMPOTENT)
    host, first = core.peer("host"), core.plugin("p", declared)
    core.plugin("p", declared, max_item_bytes=100)
    first.max_in_flight = 1_000
    call_id = core.call(host, "t", json.dumps({"x": "y" * 500}))
    assert len(first.pending) == 1
    core.lose(first)
    assert error_of(host, call_id).code is Code.UNAVAILABLE


def test_the_nested_calls_of_a_lost_run_end_and_the_call_itself_is_retried() -> None:
    core = Core()
    declared = tool("t", annotations=IDEMPOTENT)
    host, first, other = core.peer("host"), core.plugin("p", declared), core.plugin("o", tool("o"))
    core.call(host, "t")
    second = core.plugin("p", declared)
    first.hand_over()
    nested(core, first, "o")
    other.hand_over()
    core.lose(first)
    assert len(other.cancelled) == 1
    core.answer(second)
    assert outputs(host) == ["1"]


def test_a_lost_plugin_with_a_call_and_its_nested_one_pending_frees_nothing_twice() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", "{}")
    (parent,) = plugin.hand_over()
    core.call(plugin, "t", call_id="child", parent_call_id=parent.id)
    core.lose(plugin)
    assert (core.held, plugin.budget.held, host.budget.held, plugin.stuck) == (0, 0, 0, 0)


def test_the_calls_of_a_lost_caller_are_cancelled_without_an_answer() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", call_id="a")
    plugin.hand_over()
    core.call(host, "t", call_id="b")
    core.lose(host)
    assert [reason for _, reason in plugin.cancelled] == ["caller gone"]
    assert plugin.hand_over() == []
    assert host.results == {}
    core.answer(plugin)
    assert (core.held, plugin.stuck) == (0, 0)
