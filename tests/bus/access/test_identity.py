"""Tests identities and scopes: what matches, what a refusal says, how a table is read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.bus.access.identity import LOCAL, VERBS, Globs, Identity, Scopes, read_identities
from toolbus.common.reader import Reader
from toolbus.errors import NotPermitted, SetupError


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*", "", True),
        ("weather*", "weather", True),
        ("weather*", "get_weather", False),
        ("*:get_*", "home:get_weather", True),
        ("get_?", "get_a", True),
        ("get_?", "get_ab", False),
        ("a.b", "axb", False),
        ("[a]", "a", False),
        ("A", "a", False),
    ],
)
def test_a_glob_matches_whole_names(pattern: str, name: str, fits: bool) -> None:
    assert Globs([pattern]).match(name) is fits


def test_no_pattern_matches_nothing_and_each_of_several_matches() -> None:
    assert not Globs().match("")
    assert Globs(["a", "b*"]).match("bc")
    assert not Globs(["a", "b*"]).match("ca")


def test_never_wins_over_call_and_a_tool_is_named_bare_listed_or_with_its_source() -> None:
    scopes = Scopes(call=Globs(["home:*", "clock"]), never=Globs(["danger*"]))
    assert scopes.reaches("get_weather", "get_weather", "home", None)
    assert scopes.reaches("clock", "clock", "other", None)
    assert scopes.reaches("home:get", "get", "home", "any")
    assert not scopes.reaches("get_weather", "get_weather", "office", None)
    assert not scopes.reaches("home:danger_zone", "danger_zone", "home", None)


def test_a_tool_of_another_role_does_not_exist_for_the_identity() -> None:
    scopes = Scopes(call=Globs(["*"]), roles=Globs(["cat"]))
    assert scopes.reaches("purr", "purr", "home", "cat")
    assert not scopes.reaches("bark", "bark", "home", "dog")


def test_the_local_identity_may_do_everything() -> None:
    LOCAL.check_attach("any")
    LOCAL.check_offers(["any"])
    LOCAL.check_claims("any", 1 << 30)
    for verb in VERBS:
        LOCAL.check_verb(verb, "anything")


def test_each_refusal_names_the_identity_the_value_and_the_scope() -> None:
    identity = Identity("chat", Scopes(attach=Globs(["chat"]), users=Globs(["team-*"]), level=5), key="k1")
    with pytest.raises(NotPermitted, match=r"identity 'chat' \(key k1\) may not attach as source 'home'.*scope attach"):
        identity.check_attach("home")
    with pytest.raises(NotPermitted, match=r"may not offer 'a', 'b': it may offer nothing.*scope offer"):
        identity.check_offers(["a", "b"])
    with pytest.raises(NotPermitted, match=r"may not act for user 'bob': it may act for team-\*.*scope users"):
        identity.check_claims("bob", 0)
    with pytest.raises(NotPermitted, match="may not state level 6: 5 is the highest"):
        identity.check_claims("team-a", 6)
    with pytest.raises(NotPermitted, match=r"may not use toolbus:drain: that needs 'drain' in its scope administer"):
        identity.check_verb("drain", "toolbus:drain")


def test_a_call_without_a_user_needs_no_scope_for_users() -> None:
    Identity("chat", Scopes()).check_claims("", 0)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"call": [1]}, r"chat.call\[0\] is 1, it must be text"),
        ({"call": [""]}, r"chat.call\[0\] is '', a pattern has 1 to 256 characters"),
        ({"administer": ["drian"]}, r"chat.administer\[0\] is 'drian', it must be one of drain"),
        ({"level": -1}, "chat.level is -1, it must be a whole number"),
        ({"rate": 0}, "chat.rate is 0, it must be a number"),
        ({"cal": []}, "unknown key chat.cal .did you mean call"),
        ("all", "chat is 'all'"),
    ],
)
def test_a_broken_table_is_refused_with_its_place(table: object, error: str) -> None:
    with pytest.raises(SetupError, match=error):
        read_identities(Reader({"chat": table}))


def test_a_name_that_breaks_the_rule_is_refused() -> None:
    with pytest.raises(SetupError, match="'a b' breaks the rule"):
        read_identities(Reader({"a b": {}}))


@given(
    st.builds(
        Scopes,
        *(st.lists(st.text("ab*?:", min_size=1, max_size=5), max_size=3).map(Globs) for _ in range(6)),
        level=st.integers(0, 100),
        administer=st.frozensets(st.sampled_from(VERBS)),
        rate=st.none() | st.floats(0.001, 1e9),
        in_flight=st.none() | st.integers(0, 1000),
        sessions=st.none() | st.integers(0, 1000),
    )
)
def test_scopes_are_the_same_after_they_were_written_and_read(scopes: Scopes) -> None:
    table = scopes.as_table()
    assert Scopes.read(Reader(table)).as_table() == table
