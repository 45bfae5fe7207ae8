"""Notifications in the core: who gets them, how many are stored, counted as lost, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core_model import Core, tool
from toolbus.bus.access.identity import OBSERVER, Globs, Identity, Principal, Scopes
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import notification_board
from toolbus.bus.streams.notification_board import MAX_STORED, BoardEntry, NotificationBoard
from toolbus.errors import InvalidRequest, LimitExceeded, NotPermitted


def board(rules: dict[str, Any] | None = None) -> NotificationBoard:
    policy = Policy(permissions=AccessRules.read(rules or {}))
    return NotificationBoard(CatalogView(Registry(), policy), lambda: 1_000.0)


def reading(on: NotificationBoard, principal: Principal = OBSERVER) -> list[BoardEntry]:
    got: list[BoardEntry] = []
    on.read(principal, got.append, lambda: None)
    return got


def say(on: NotificationBoard, text: str = "hi", user: str = "", data: str = "", now: float = 0.0) -> int:
    on.take_rate("p", now)
    return on.publish("p", user, text, data)


def test_readers_get_what_is_published_from_then_on_in_order() -> None:
    bus = board()
    assert say(bus, "early") == 0
    got = reading(bus)
    assert say(bus, "one", "ann", '{"a": 1}') == 1
    say(bus, "two")
    assert [(each.source, each.user_id, each.text, each.data_json) for each in got] == [
        ("p", "ann", "one", '{"a": 1}'),
        ("p", "", "two", ""),
    ]
    assert [each.text for each in bus.since(1, OBSERVER)] == ["early", "one", "two"]
    assert [each.text for each in bus.since(got[0].number, OBSERVER)] == ["two"]
    assert list(bus.since(0, OBSERVER)) == []


def test_an_identity_gets_what_is_for_its_users() -> None:
    core = Core()
    core.plugin("p", tool("ring"))
    bus = NotificationBoard(core.dispatcher.view)
    scopes = Scopes(call=Globs(["*"]), users=Globs(["ann"]))
    got = reading(bus, Principal(identity=Identity("laptop", scopes)))
    for user in ("ann", "bob", ""):
        say(bus, f"to {user}", user)
    assert [each.text for each in got] == ["to ann", "to "]


def test_only_the_newest_are_kept_and_the_others_are_counted() -> None:
    bus = board()
    say(bus, "first")
    first = bus.newest
    for number in range(MAX_STORED + 9):
        say(bus, "more", now=float(number))
    assert len(list(bus.since(first, OBSERVER))) == MAX_STORED
    assert bus.lost_after(first) == 9
    assert bus.lost_after(bus.newest) == bus.lost_after(0) == 0


def test_large_ones_are_kept_only_as_far_as_they_fit() -> None:
    bus = board()
    for number in range(40):
        say(bus, "x" * 16_000, data=f'"{"y" * 200_000}"', now=float(number))
    assert sum(each.size for each in bus.since(1, OBSERVER)) <= notification_board.MAX_STORED_BYTES


@pytest.mark.parametrize(
    ("text", "user", "data", "rule"),
    [
        ("", "", "", "text is empty"),
        ("x" * 16_385, "", "", "text has 16385 bytes, the limit is 16384"),
        ("\ud800", "", "", "UTF-8"),
        ("hi", "u" * 257, "", "at most 256 characters"),
        ("hi", "", "{", "data is not JSON"),
        ("hi", "", f'"{"x" * 262_144}"', "data has 262146 bytes, the limit is 262144"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_and_nobody_gets_it(text: str, user: str, data: str, rule: str) -> None:
    bus = board()
    got = reading(bus)
    with pytest.raises(InvalidRequest, match=rule):
        say(bus, text, user, data)
    assert got == []


def test_a_source_that_notifies_too_often_is_refused_until_it_waits() -> None:
    bus = board()
    for _ in range(40):
        say(bus)
    with pytest.raises(LimitExceeded, match=r"notifications_per_second = 20"):
        say(bus)
    assert bus.publish("another", "", "hi", "") == 0
    say(bus, now=1.0)


def test_a_source_cannot_reach_users_to_whom_it_is_not_open() -> None:
    bus = board({"sources": {"p": ["ann"]}})
    say(bus, user="ann")
    with pytest.raises(NotPermitted, match="not open to user 'bob'"):
        say(bus, user="bob")


def test_closing_tells_those_who_still_read() -> None:
    bus = board()
    closed: list[str] = []
    bus.read(OBSERVER, lambda each: None, lambda: closed.append("first"))
    end = bus.read(OBSERVER, lambda each: None, lambda: closed.append("second"))
    end()
    bus.close()
    assert closed == ["first"]


def test_a_source_that_says_much_takes_the_place_of_its_own_and_not_of_what_others_said() -> None:
    bus = board()
    assert bus.publish("modest", "", "keep me", "") == 0
    first = bus.newest
    for number in range(60):
        say(bus, "x" * 16_000, data=f'"{"y" * 200_000}"', now=float(number))
    kept = list(bus.since(1, OBSERVER))
    assert [each.text for each in kept if each.source == "modest"] == ["keep me"]
    assert bus.lost_after(first) == 60 - (len(kept) - 1)
    assert bus.lost_after(kept[-2].number) == 0
