"""Tests the guard against repeated calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.loop.scripted_model import failed
from toolbus.errors import Code, Stage
from toolbus.parts.models.loop.approval import Key, RepeatGuard
from toolbus.protocol.tool import Result, Tool

TOOL = Tool("add")
DONE = Result(output_json="1")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def key(guard: RepeatGuard, arguments: object, tool: Tool = TOOL) -> Key:
    guard_key = guard.key(tool, arguments)
    assert guard_key is not None
    return guard_key


def test_the_third_success_is_refused_with_a_helpful_error() -> None:
    guard = RepeatGuard(2)
    same = key(guard, {"a": 1})
    for _ in range(2):
        assert guard.refusal(same) is None
        guard.ended(same, DONE)
    result = guard.refusal(same)
    assert result is not None
    assert result.error is not None
    assert (result.is_error, result.error.code, result.error.retry_safe) == (True, Code.REPEATED, False)
    assert (result.error.stage, result.error.limit) == (Stage.NOT_DISPATCHED, ("repeats", 2.0))
    assert "its result stands above" in result.error.message
    assert guard.refusal(key(guard, {"a": 2})) is None


@pytest.mark.parametrize("failure", [failed(Code.TOOL, "no"), Result(is_error=True), failed(Code.UNAVAILABLE, "no")])
def test_failures_are_not_counted(failure: Result) -> None:
    guard = RepeatGuard(1)
    same = key(guard, {})
    for _ in range(5):
        guard.ended(same, failure)
    assert guard.refusal(same) is None


def test_a_tool_that_may_be_repeated_is_not_guarded() -> None:
    assert RepeatGuard(2).key(Tool("poll", allow_repeat=True), {}) is None


def test_zero_disables_the_guard() -> None:
    assert RepeatGuard(0).key(TOOL, {}) is None


def test_two_tools_with_the_same_arguments_are_two_calls() -> None:
    guard = RepeatGuard(2)
    assert key(guard, {}) != key(guard, {}, Tool("other"))


@given(arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_the_order_of_keys_makes_no_difference(arguments: dict[str, object]) -> None:
    guard = RepeatGuard(2)
    assert key(guard, arguments) == key(guard, dict(reversed(arguments.items())))


@pytest.mark.parametrize(
    ("one", "other"), [({"a": 1}, {"a": "1"}), ({"a": 1}, {"a": True}), ({"a": [1, 2]}, {"a": [2, 1]})]
)
def test_other_values_are_other_calls(one: object, other: object) -> None:
    guard = RepeatGuard(2)
    assert key(guard, one) != key(guard, other)
