"""Filtering items by access level and user."""

from typing import Any

import pytest

from toolbus.dropin import env_of, may_see, visible
from toolbus.functions.call_context import CallContext
from toolbus.functions.scope import ToolScope

ANN: dict[str, Any] = {"user_id": "ann", "level": 50}


@pytest.mark.parametrize(
    ("min_level", "users", "seen"),
    [
        (0, None, True),
        (None, None, True),
        (50, None, True),
        (51, None, False),
        (0, ["ann", "bob"], True),
        (0, ("bob",), False),
        (0, [], False),
        (50, {"ann"}, True),
        (51, {"ann"}, False),
    ],
)
def test_level_and_user_both_have_to_match(min_level: Any, users: Any, seen: bool) -> None:
    assert may_see(ANN, min_level, users) is seen


@pytest.mark.parametrize("min_level", [-1, "0", 0.0, True, [], {}, float("nan")])
def test_an_invalid_level_hides_the_item(min_level: Any) -> None:
    assert not may_see(ANN, min_level)


@pytest.mark.parametrize("users", ["ann", "annabel", {"ann": True}, ["ann", 7], 7, True, b"ann"])
def test_users_that_are_not_a_list_of_texts_hide_the_item(users: Any) -> None:
    assert not may_see(ANN, 0, users)


@pytest.mark.parametrize(
    "env", [{}, {"level": "99", "user_id": None}, {"level": True}, {"level": 9.5}, {"user_id": "", "level": 0}]
)
def test_without_a_user_the_level_is_the_lowest_and_no_list_matches(env: dict[str, Any]) -> None:
    assert may_see(env)
    assert not may_see(env, 1)
    assert not may_see(env, 0, ["", "ann", "None"])


def test_rows_are_filtered_by_all_their_rules_and_returned_unchanged() -> None:
    rows: list[Any] = [
        {"name": "open"},
        {"name": "staff", "min_level": 50},
        {"name": "boss", "min_level": 90},
        {"name": "mine", "users": ["ann"]},
        {"name": "both", "users": ["ann"], "allowed_users": ["bob"]},
        {"name": "null", "min_level": None, "allowed_users": None},
        {"name": "broken", "min_level": "50"},
        "no row",
    ]
    assert [row["name"] for row in visible(rows, ANN)] == ["open", "staff", "mine", "null"]
    assert [row["name"] for row in visible(rows, {})] == ["open", "null"]
    assert visible(rows, ANN)[1] is rows[1]


def test_the_env_of_a_call_has_level_and_user() -> None:
    scope = ToolScope(context=CallContext(user_id="ann", attributes={"level": "50"}))
    assert may_see(env_of(scope), 50, ["ann"])
    assert not may_see(env_of(ToolScope()), 1)
