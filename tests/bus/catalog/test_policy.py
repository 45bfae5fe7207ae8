"""Tests who may call what: the rules, how they are read, and that listings and calls answer alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core_model import Core, PeerDouble, offered, tool
from tests.support.examples import examples
from toolbus.bus.access.identity import Principal
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.policy import KINDS, MAX_RULES, MAX_USER, AccessRules
from toolbus.errors import Code, InvalidRequest
from toolbus.v1 import tool_pb2 as pb

ROLES = ("r1", "r2")
SOURCES = ("a", "b", "c")
NAMES = ("x", "y")


def reached(core: Core, caller: PeerDouble, name: str, user: str = "", **more: Any) -> Entry | str:
    """Asks for one call; returns whose handler it reached, or the sentence that denies it."""
    call_id = core.call(caller, name, context=pb.CallContext(user_id=user), **more)
    call = caller.in_flight.get(call_id)
    if call is not None:
        core.cancel(caller, call_id)
        entry: Entry = call.entry
        return entry
    error = caller.results[call_id][0].error
    assert error is not None
    assert error.code is Code.PERMISSION_DENIED, error
    return error.message


def denied(core: Core, caller: PeerDouble, name: str, user: str = "", **more: Any) -> str | None:
    """Asks for one call; returns the sentence that denies it, or None where it reached a handler."""
    outcome = reached(core, caller, name, user, **more)
    return outcome if isinstance(outcome, str) else None


def permitting(*tools: str, **tables: dict[str, list[str]]) -> tuple[Core, PeerDouble]:
    """Returns a core whose source `p` offers tools, with rules, and a host."""
    core = Core()
    core.plugin("p", *(tool(name) for name in tools or ("t",)))
    core.dispatcher.view.permit(AccessRules.read(tables))
    return core, core.peer("host")


# -- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "may"),
    [
        (None, {"", "ann", "bob"}),
        (["*"], {"", "ann", "bob"}),
        (["ann"], {"ann"}),
        (["ann", "bob"], {"ann", "bob"}),
        (["bob", "*"], {"", "ann", "bob"}),
        (["ANN", "an", "ann "], set()),
        ([], set()),
    ],
)
@pytest.mark.parametrize(("kind", "name"), [("tools", "t"), ("roles", "default"), ("sources", "p")])
def test_a_rule_grants_the_users_it_names_and_a_tool_without_a_rule_is_open(
    kind: str, name: str, users: list[str] | None, may: set[str]
) -> None:
    core, host = permitting(**({} if users is None else {kind: {name: users}}))
    assert {user for user in ("", "ann", "bob") if denied(core, host, "t", user) is None} == may


def test_a_call_has_to_pass_all_rules_of_a_tool() -> None:
    core, host = permitting(tools={"t": ["ann", "bob"]}, roles={"default": ["bob", "eve"]}, sources={"p": ["*"]})
    assert [user for user in ("ann", "bob", "eve") if denied(core, host, "t", user) is None] == ["bob"]


@pytest.mark.parametrize(("may_omit_user", "users"), [(True, ["ann"]), (True, []), (False, ["ann"]), (False, [])])
def test_a_call_without_a_user_passes_a_rule_only_if_its_caller_may_omit_the_user(
    may_omit_user: bool, users: list[str]
) -> None:
    core, host = permitting(tools={"t": users})
    host.principal = replace(host.principal, may_omit_user=may_omit_user)
    assert (denied(core, host, "t", "") is None) is may_omit_user
    assert denied(core, host, "t", "eve") is not None


def test_a_rule_for_a_bare_name_also_holds_for_the_qualified_one_and_not_the_other_way_round() -> None:
    core = Core()
    core.plugin("far", tool("t"), qualified=True)
    core.plugin("near", tool("u"))
    host = core.peer("host")
    core.dispatcher.view.permit(AccessRules.read({"tools": {"t": ["ann"], "near:u": []}}))
    assert denied(core, host, "far:t", "bob") is not None
    assert denied(core, host, "t", "bob") is not None
    assert denied(core, host, "far:t", "ann") is None
    assert denied(core, host, "u", "bob") is None
    core.dispatcher.view.permit(AccessRules.read({"tools": {"t": ["ann"], "far:t": ["bob"]}}))
    assert [denied(core, host, "far:t", user) is None for user in ("ann", "bob")] == [False, False]


def test_a_denial_names_the_user_the_tool_the_rule_and_who_can_change_it() -> None:
    core, host = permitting(sources={"p": ["ann"]})
    message = denied(core, host, "t", "bob")
    assert message == "user 'bob' may not call 't': source 'p' is open to certain users only, an operator adds them"
    closed, anybody = permitting(tools={"t": []})
    message = denied(closed, anybody, "t", "bob")
    assert message == "user 'bob' may not call 't': tool 't' is open to no user, an operator adds them"
    message = denied(core, host, "t")
    assert message is not None
    assert message.startswith("a call that names no user (context.user_id) may not call 't'")
    assert len(denied(core, host, "t", "x" * 5_000) or "") < 300


def test_a_call_that_is_denied_in_one_role_runs_in_another_role_that_grants_it() -> None:
    core = Core(roles=ROLES)
    first, second = core.plugin("a", tool("t", role="r1")), core.plugin("b", tool("t", role="r2"))
    core.dispatcher.view.permit(AccessRules.read({"roles": {"r1": ["ann"]}}))
    host = core.peer("host")
    for user, takes in (("ann", first), ("bob", second)):
        core.call(host, "t", context=pb.CallContext(user_id=user))
        assert len(takes.pending) == 1
    assert denied(core, host, "t", "bob", role="r1") is not None


def test_a_caller_that_may_not_set_the_context_cannot_name_its_user() -> None:
    core, _ = permitting(tools={"t": ["ann"]})
    plugin = core.plugin("other", tool("o"))
    assert denied(core, plugin, "t", "ann") is not None


def test_a_nested_call_is_for_the_user_of_its_root_whatever_its_own_context_names() -> None:
    core, host = permitting("t", "open", tools={"t": ["ann"]})
    middle = core.plugin("middle", tool("m"))
    for user, claimed in (("ann", "bob"), ("bob", "ann"), ("", "ann")):
        root = core.call(host, "m", context=pb.CallContext(user_id=user))
        parent = list(middle.pending)[-1]
        assert (denied(core, middle, "t", claimed, parent_call_id=parent) is None) is (user == "ann")
        error = core.refusal(middle, "nobody", parent_call_id=parent)
        assert error.message.endswith("there are: " + ("t, open, m" if user == "ann" else "open, m"))
        core.cancel(host, root)


def test_a_missing_tool_is_refused_with_the_names_that_the_caller_may_call() -> None:
    core, host = permitting("t", "open", tools={"t": ["ann"]})
    plugin = core.plugin("other", tool("o"))
    ann = pb.CallContext(user_id="ann")
    assert core.refusal(host, "x", context=ann).message.endswith("there are: t, open, o")
    assert core.refusal(host, "x").message.endswith("there are: open, o")
    assert core.refusal(plugin, "x", context=ann).message.endswith("there are: open, o")


def test_an_offline_tool_that_a_user_may_not_call_is_denied_and_not_worth_a_retry() -> None:
    core = Core()
    core.lose(core.plugin("p", tool("t")), "it crashed")
    core.dispatcher.view.permit(AccessRules.read({"tools": {"t": ["ann"]}}))
    host = core.peer("host")
    error = core.refusal(host, "t")
    assert (error.code, error.retry_safe, "it crashed" in error.message) == (Code.PERMISSION_DENIED, False, False)
    assert core.refusal(host, "t", context=pb.CallContext(user_id="ann")).code is Code.UNAVAILABLE


# -- listed is callable ----------------------------------------------------------------------------------------------

USERS = st.lists(st.sampled_from(["ann", "bob", "*", ""]), max_size=2, unique=True)
TOOL_NAMES = [*NAMES, *(f"{source}:{name}" for source in SOURCES for name in NAMES), "toolbus:drain"]


class Offer(NamedTuple):
    source: str
    name: str
    role: str


OFFERS = st.lists(
    st.builds(Offer, st.sampled_from(SOURCES), st.sampled_from(NAMES), st.sampled_from(["", *ROLES])), max_size=6
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.dictionaries(st.sampled_from(TOOL_NAMES), USERS, max_size=4),
        "roles": st.dictionaries(st.sampled_from(ROLES), USERS, max_size=2),
        "sources": st.dictionaries(st.sampled_from([*SOURCES, "toolbus"]), USERS, max_size=3),
    },
).map(AccessRules.read)


def assert_alike(core: Core, caller: PeerDouble, user: str, **more: Any) -> None:
    """Checks that what is listed can be called and what can be called is listed, in each role and in none."""
    view = core.dispatcher.view
    counts = user if caller.may_set_context or more else ""
    for role in (None, *ROLES):
        seen = {(line.tool.name, line.source) for line in view.listings(role, counts, principal=caller.principal)}
        there = [line for line in core.registry.listings(role) if line.source != "toolbus"]
        for name in {line.tool.name for line in there} | {line.entry.bare_name for line in there}:
            outcome = reached(core, caller, name, user, role=role, **more)
            if isinstance(outcome, str):
                assert name not in {known for known, _ in seen}
            else:  # a bare name may stand for a qualified one, which is listed
                assert (outcome.name, outcome.source) in seen
    own = {line.tool.name for line in view.own(caller.principal)}
    assert (denied(core, caller, "toolbus:drain", user, **more) is None) is ("toolbus:drain" in own)


@settings(max_examples=examples(40))
@given(
    offers=OFFERS,
    qualified=st.sets(st.sampled_from(SOURCES)),
    rules=st.lists(TABLES, min_size=1, max_size=3),
    user=st.sampled_from(["", "ann", "bob", "eve"]),
    rights=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_what_is_listed_can_be_called_and_what_can_be_called_is_listed_under_any_rules(
    offers: list[Offer],
    qualified: set[str],
    rules: list[AccessRules],
    user: str,
    rights: tuple[bool, bool, bool],
) -> None:
    core = Core(roles=ROLES)
    core.registry.register(core.peer("toolbus", shares=False), offered(tool("drain")), qualified=True)
    plugins = {source: core.peer(source, trusted=False) for source in SOURCES}
    for source, name, role in offers:
        core.registry.register(plugins[source], offered(tool(name, role=role)), qualified=source in qualified)
    middle = core.plugin("middle", tool("m"))
    host = core.peer("host")
    host.may_set_context, is_admin, may_omit_user = rights
    host.principal = Principal("host", is_admin, may_omit_user)
    opener = core.peer("opener")
    core.call(opener, "m", context=pb.CallContext(user_id=user))
    parent = next(iter(middle.pending))
    middle.principal = replace(middle.principal, is_admin=False)
    for each in rules:
        core.dispatcher.view.permit(each)  # the same callers: what they were allowed before counts for nothing
        assert_alike(core, host, user)
        assert_alike(core, middle, user, parent_call_id=parent)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_rules_are_written_as_they_are_read() -> None:
    tables = {"tools": {"t": ["ann", "bob"]}, "roles": {}, "sources": {"p": []}}
    rules = AccessRules.read(tables)
    assert rules.as_tables() == tables
    assert AccessRules.read(rules.as_tables()) == rules
    assert not AccessRules.read({})
    assert rules


def test_a_rule_is_added_changed_and_removed_and_the_rules_before_stay_as_they_were() -> None:
    first = AccessRules().changed("tools", "t", ["ann"])
    second = first.changed("tools", "t", ("bob",)).changed("roles", "r", [])
    third = second.changed("tools", "t", None).changed("tools", "never there", None)
    assert first.as_tables() == {"tools": {"t": ["ann"]}, "roles": {}, "sources": {}}
    assert second.as_tables() == {"tools": {"t": ["bob"]}, "roles": {"r": []}, "sources": {}}
    assert third.as_tables() == {"tools": {}, "roles": {"r": []}, "sources": {}}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (None, ("permissions are None", "give tables tools, roles, sources")),
        ([], ("permissions are []", "give tables")),
        ({"tool": {}}, ("no table 'tool'", "use one of tools, roles, sources")),
        ({"tool": 5}, ("no table 'tool'", "use one of tools, roles, sources")),
        ({7: {}}, ("no table '7'", "use one of tools")),
        ({"tools": ["t"]}, ("permissions.tools is ['t']", "give a table")),
        ({"tools": {"": []}}, ("permissions.tools has a rule for ''", "use the name of a tool, role or source")),
        ({"tools": {7: []}}, ("a rule for 7", "use the name of a tool, role or source")),
        ({"tools": {"\ud800": []}}, ("a rule for '\\ud800'", "use the name of a tool, role or source")),
        ({"tools": {"t": "ann"}}, ("permissions.tools.t is 'ann'", "give a list of user ids", "['*'] for everyone")),
        ({"tools": {"t": None}}, ("permissions.tools.t is None", "give a list")),
        ({"tools": {"t": {"ann": True}}}, ("permissions.tools.t is {'ann': True}", "give a list")),
        ({"roles": {"r": [7]}}, ("permissions.roles.r names 7", "a text of at most 256 characters")),
        ({"roles": {"r": ["x" * 257]}}, ("permissions.roles.r names 'xxx", "at most 256 characters")),
        ({"roles": {"r": ["\udfff"]}}, ("permissions.roles.r names '\\udfff'",)),
        (
            {"sources": {str(number): [] for number in range(MAX_RULES + 1)}},
            ("permissions.sources has more than 10000 rules", "write rules for roles or sources"),
        ),
    ],
)
def test_an_invalid_rule_is_refused_with_value_rule_and_how_to_fix_it(tables: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AccessRules.read(tables)
    assert [part for part in says if part not in str(caught.value)] == []
    assert len(str(caught.value)) < 300


def test_one_rule_above_the_limit_is_refused() -> None:
    full = AccessRules.read({"tools": {str(number): [] for number in range(MAX_RULES)}})
    assert full.changed("tools", "7", ["ann"])
    with pytest.raises(InvalidRequest, match="more than 10000"):
        full.changed("tools", "x", [])
    with pytest.raises(InvalidRequest, match="no table 'users'"):
        full.changed("users", "x", [])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=MAX_USER + 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from([*KINDS, "users"]) | st.text(max_size=3)


@settings(max_examples=examples(50))
@given(ANYTHING | st.dictionaries(KEYS, ANYTHING | st.dictionaries(st.text(max_size=3), ANYTHING, max_size=3)))
def test_any_value_becomes_rules_that_can_be_stored_or_an_error_that_says_why(tables: Any) -> None:
    try:
        rules = AccessRules.read(tables)
    except InvalidRequest as refused:
        message = str(refused)
    else:
        assert AccessRules.read(rules.as_tables()) == rules
        message = "permissions " + json.dumps(rules.as_tables(), ensure_ascii=False)
    assert message.startswith("permissions")
    message.encode()
