"""Access levels: a user below a tool's level learns nothing of it, by calls, listings and watches alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core_model import Core, PeerDouble, offered, tool
from tests.support.examples import examples
from toolbus.bus.catalog.policy import AccessRules
from toolbus.errors import Code, InvalidTool
from toolbus.protocol.tool import MAX_LEVEL, Limits, Tool, level_of
from toolbus.v1 import tool_pb2 as pb

ROLES = ("r1", "r2")


def stating(level: object = None, user: str = "") -> pb.CallContext:
    return pb.CallContext(user_id=user, attributes={} if level is None else {"level": str(level)})


def three() -> tuple[Core, PeerDouble]:
    core = Core(grace_seconds=0.0)
    core.plugin("p", tool("open"), tool("staff", min_level=50), tool("sysop", min_level=90))
    return core, core.peer("host")


def names(core: Core, level: int, **more: object) -> list[str]:
    return [each.tool.name for each in core.dispatcher.view.listings(None, "", level, **more)]  # type: ignore[arg-type]


def code_of(core: Core, caller: PeerDouble, name: str, **more: object) -> Code | None:
    """Returns how a call is refused; None where it reaches a plugin."""
    call_id = core.call(caller, name, **more)  # type: ignore[arg-type]
    if call_id in caller.in_flight:
        core.cancel(caller, call_id)
        return None
    (result,) = caller.results.pop(call_id)
    assert result.error is not None
    return result.error.code


@pytest.mark.parametrize(
    ("level", "may"),
    [
        (None, ["open"]),
        (0, ["open"]),
        (49, ["open"]),
        (50, ["open", "staff"]),
        (90, ["open", "staff", "sysop"]),
        ("9" * 18, ["open", "staff", "sysop"]),
        ("9" * 19, ["open"]),
        ("-90", ["open"]),
        ("90.0", ["open"]),
        ("٩٠", ["open"]),
        ("sysop", ["open"]),
    ],
)
def test_a_level_reaches_the_tools_that_need_no_more(level: object, may: list[str]) -> None:
    core, host = three()
    context = stating(level)
    assert names(core, level_of(context.attributes)) == may
    codes = {name: code_of(core, host, name, context=context) for name in ("open", "staff", "sysop")}
    assert [name for name, code in codes.items() if code is None] == may
    assert {code for code in codes.values() if code is not None} <= {Code.NOT_FOUND}


@pytest.mark.parametrize("state", ["live", "offline", "settling"])
def test_a_hidden_tool_is_refused_with_the_text_for_one_that_does_not_exist(state: str) -> None:
    core = Core(grace_seconds=5.0)
    core.plugin("q", tool("open"))
    plugin = core.plugin("p", tool("hidden", min_level=1))
    if state == "offline":
        core.lose(plugin, "it crashed")
    if state == "settling":
        core.dispatcher.admission.settled_at = core.now + 1.0
    host = core.peer("host")
    hidden, unknown = core.refusal(host, "hidden"), core.refusal(host, "nobody")
    assert hidden.message.replace("hidden", "nobody") == unknown.message
    assert (hidden.code, hidden.stage, hidden.retry_safe) == (unknown.code, unknown.stage, unknown.retry_safe)
    assert "hidden" not in unknown.message


def test_a_refusal_of_a_hidden_tool_shows_neither_its_schema_nor_its_rules() -> None:
    core = Core()
    schema = '{"type":"object","required":["x"],"properties":{"x":{"type":"integer"}}}'
    core.plugin("p", Tool("hidden", parameters_json=schema, min_level=5))
    core.dispatcher.view.permit(AccessRules.read({"tools": {"hidden": ["ann"]}}))
    host = core.peer("host")
    for arguments in ("{", "{}", '{"x":1}'):
        assert core.refusal(host, "hidden", arguments, schema_hash="old").code is Code.NOT_FOUND
    assert core.refusal(host, "hidden", context=stating(5)).code is Code.PERMISSION_DENIED
    assert code_of(core, host, "hidden", arguments='{"x":1}', context=stating(5, "ann")) is None


def test_only_hosts_set_a_level_and_nested_calls_keep_it() -> None:
    core, host = three()
    plugin = core.plugin("q", tool("m"))
    assert code_of(core, plugin, "sysop", context=stating(90)) is Code.NOT_FOUND
    for level, code in ((90, None), (10, Code.NOT_FOUND)):
        root = core.call(host, "m", context=stating(level))
        parent = list(plugin.pending)[-1]
        assert code_of(core, plugin, "sysop", parent_call_id=parent, context=stating(99 - level)) is code
        core.cancel(host, root)


def test_a_tool_that_one_role_hides_is_called_in_another_role_that_does_not() -> None:
    core = Core(roles=ROLES)
    hidden, open_to_all = core.plugin("a", tool("t", role="r1", min_level=9)), core.plugin("b", tool("t", role="r2"))
    host = core.peer("host")
    core.call(host, "t", context=stating(0))
    assert (len(hidden.pending), len(open_to_all.pending)) == (0, 1)
    core.call(host, "t", context=stating(9))
    assert (len(hidden.pending), len(open_to_all.pending)) == (1, 1)
    assert code_of(core, host, "t", role="r1", context=stating(0)) is Code.NOT_FOUND


def test_a_caller_that_may_omit_the_user_still_needs_the_level() -> None:
    core, host = three()
    host.principal = replace(host.principal, may_omit_user=True)
    assert code_of(core, host, "sysop") is Code.NOT_FOUND
    assert names(core, 0, principal=host.principal) == ["open"]


def test_a_missing_tool_is_refused_with_the_names_that_the_level_shows() -> None:
    core, host = three()
    assert core.refusal(host, "x", context=stating(0)).message.endswith("there are: open")
    assert core.refusal(host, "x", context=stating(50)).message.endswith("there are: open, staff")


def test_a_watcher_is_notified_of_open_tools_only() -> None:
    core, _ = three()
    view = core.dispatcher.view
    assert [each.tool.name for each in view.since(-1).added] == ["open"]
    revision = view.revision
    plugin = core.plugin("q", tool("secret", min_level=1))
    changes = view.since(revision)
    assert (changes.added, changes.changed, changes.removed) == ((), (), ())
    core.registry.register(plugin, offered(tool("secret")))
    shown = view.since(revision)
    assert [each.tool.name for each in (*shown.added, *shown.changed)] == ["secret"]
    revision = view.revision
    core.registry.register(plugin, offered(tool("secret", min_level=1)))
    assert view.since(revision).removed == (("secret", "q"),)
    revision = view.revision
    core.registry.clear("q")
    changes = view.since(revision)
    assert (changes.added, changes.changed, changes.removed) == ((), (), ())


@pytest.mark.parametrize("level", [-1, 2**32, True, 1.5, "9"])
def test_an_invalid_level_is_named_in_the_error(level: object) -> None:
    with pytest.raises(InvalidTool, match=r"min_level is .* from 0 \(everybody\) to 4294967295"):
        Tool("t", min_level=level)  # type: ignore[arg-type]


def test_a_level_crosses_the_wire_and_is_not_part_of_the_schema_hash() -> None:
    tool = Tool("t", min_level=MAX_LEVEL)
    assert Tool.from_wire(tool.to_wire(), Limits()) == tool
    assert tool.schema_hash == Tool("t").schema_hash


@settings(max_examples=examples(15))
@given(
    offers=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["", *ROLES]), st.integers(0, 3)),
        max_size=8,
    ),
    levels=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_what_is_listed_can_be_called_and_what_can_be_called_is_listed_at_every_level(
    offers: list[tuple[str, str, str, int]], levels: list[int]
) -> None:
    core = Core(roles=ROLES)
    plugins = {source: core.plugin(source) for source in "ab"}
    for source, name, role, level in offers:
        core.registry.register(plugins[source], offered(tool(name, role=role, min_level=level)))
    host = core.peer("host")
    for level in levels:
        for looked in (None, *ROLES):
            listed = {each.tool.name for each in core.dispatcher.view.listings(looked, "", level)}
            called = {
                name for name in "xyz" if code_of(core, host, name, role=looked or "", context=stating(level)) is None
            }
            assert listed == called


def test_of_different_levels_of_sessions_the_highest_applies() -> None:
    core = Core()
    strict, lax = core.plugin("p", tool("t", min_level=50), instance="1"), core.plugin("p", tool("t"), instance="2")
    host = core.peer("host")
    assert code_of(core, host, "t", context=stating(49)) is Code.NOT_FOUND
    assert names(core, 49) == []
    core.registry.withdraw(lax)
    assert code_of(core, host, "t", context=stating(49)) is Code.NOT_FOUND, "only the strict one is left"
    core.registry.register(strict, offered(tool("t")))
    assert code_of(core, host, "t", context=stating(0)) is None


def test_the_notices_of_a_source_are_hidden_with_its_tools() -> None:
    core = Core()
    core.attached("open", tool("a"), notices=["n1"])
    core.attached("none", notices=["n2"])
    core.attached("staff", tool("b", min_level=50), notices=["ban_user is protected by nothing"])
    view = core.dispatcher.view
    levels = {
        level: [source for source, _ in core.presence.notices() if not view.hides_source(source, level)]
        for level in (0, 50)
    }
    assert levels == {0: ["open", "none"], 50: ["open", "none", "staff"]}
