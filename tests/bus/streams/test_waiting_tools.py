"""Tools of sessions for a role that does not exist: they wait for it, are offered when it comes, and wait again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.core_model import Core, StreamDouble, call, codes, names, tool
from toolbus.bus.access.identity import Globs, Identity, Principal, Scopes
from toolbus.bus.streams import catalog_messages
from toolbus.errors import Code, UnknownRole
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire

ROLE = "小八"


def add_role(core: Core, role: str = ROLE) -> None:
    core.registry.add_role(role)
    core.presence.catalog_changed()


def remove_role(core: Core, role: str = ROLE) -> None:
    core.registry.remove_role(role)
    core.presence.catalog_changed()


def reviewed(stream: StreamDouble) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Returns what the events said: tools that are offered now, and that wait now."""
    reviews = [event.tools_reviewed for event in stream.read("events") if event.HasField("tools_reviewed")]
    return [(list(each.registered), [(one.name, one.role) for one in each.waiting]) for each in reviews]


def listed(core: Core, **request: Any) -> list[tuple[str, str, list[str]]]:
    response = catalog_messages.list_tools(wire.ListRequest(**request), core.dispatcher.view, Principal("host"))
    return [
        (each.tool.name, wire.SessionState.Name(each.session_state).removeprefix("SESSION_STATE_"), list(each.roles))
        for each in response.tools
    ]


def test_a_tool_for_a_role_that_does_not_exist_waits_and_the_others_are_offered() -> None:
    core = Core()
    stream = core.attached("plugin", tool("t", role=ROLE), tool("u"))
    (attached,) = stream.read("attached")
    assert [(each.name, each.role) for each in attached.waiting] == [("t", ROLE)]
    assert (list(attached.registered), list(attached.refused)) == (["u"], [])
    assert (names(core), core.registry.roles) == (["u"], ("default",))
    assert listed(core) == [("u", "LIVE", ["default"])]
    everything = [("t", "WAITING", [ROLE]), ("u", "LIVE", ["default"])]
    assert listed(core, include_offline=True) == everything
    assert listed(core, include_offline=True, role=ROLE) == everything[:1]
    with pytest.raises(UnknownRole):
        listed(core, role=ROLE)
    host = core.attached("host")
    call(host, "t")
    call(host, "t", "2", role=ROLE)
    assert codes(host) == {"1": Code.NOT_FOUND, "2": Code.NOT_FOUND}


def test_the_tool_is_offered_when_the_role_comes_and_waits_again_when_it_goes_and_the_session_is_told() -> None:
    core = Core()
    stream = core.attached("plugin", tool("t", role=ROLE), tool("u"))
    stream.read("attached")
    for _ in range(2):
        add_role(core)
        assert reviewed(stream) == [(["t"], [])]
        assert listed(core, role=ROLE) == [("t", "LIVE", [ROLE]), ("u", "LIVE", [ROLE])]
        remove_role(core)
        assert reviewed(stream) == [([], [("t", ROLE)])]
        assert listed(core, include_offline=True)[0] == ("t", "WAITING", [ROLE])
    stream.send(drain=wire.Drain())
    add_role(core)
    assert (reviewed(stream), names(core)) == ([], [])


def test_a_later_attach_and_a_register_wait_too_and_an_unregister_ends_it() -> None:
    core = Core()
    stream = core.attached("plugin", tool("t", role=ROLE))
    session_id = stream.read("attached")[0].session_id
    stream.attach("plugin", tool("v", role=ROLE))
    assert [each.name for each in stream.read("attached")[0].waiting] == ["v"]
    request = wire.RegisterRequest(session_id=session_id, tools=[tool("w", role=ROLE).to_wire(), tool("x").to_wire()])
    response = core.presence.register(request)
    assert ([each.name for each in response.waiting], list(response.registered), response.ok) == (["w"], ["x"], True)
    outcome = core.presence.unregister(wire.UnregisterRequest(session_id=session_id, name="v", role=ROLE))
    assert outcome.removed
    add_role(core)
    assert reviewed(stream) == [(["w"], [])]
    with pytest.raises(UnknownRole):  # an operator names a role that exists
        core.presence.unregister(wire.UnregisterRequest(name="w", role="nobody"))


def test_a_session_that_comes_back_within_the_grace_period_finds_its_place_in_the_role_that_came_meanwhile() -> None:
    core = Core()
    core.attached("other", tool("before", role=ROLE))
    stream = core.attached("plugin", tool("t", role=ROLE), instance="i")
    core.attached("other2", tool("after", role=ROLE))
    stream.end()
    add_role(core)
    assert listed(core, role=ROLE, include_offline=True) == [
        (name, state, [ROLE]) for name, state in (("before", "LIVE"), ("t", "OFFLINE"), ("after", "LIVE"))
    ]
    core.attached("plugin", tool("t", role=ROLE), instance="i")
    assert [name for name, _, _ in listed(core, role=ROLE)] == ["before", "t", "after"]


def test_what_is_cleared_or_replaced_meanwhile_does_not_return_with_the_role() -> None:
    core = Core()
    streams = {
        source: core.attached(source, tool(name, role=ROLE))
        for source, name in (("cleared", "a"), ("replaced", "b"), ("stays", "c"))
    }
    core.presence.clear(wire.ClearRequest(source="cleared"))
    core.attached("new", tool("b"))
    [event] = [event for event in streams["replaced"].read("events") if event.HasField("tool_overwritten")]
    assert (event.tool_overwritten.name, list(event.tool_overwritten.roles)) == ("b", [ROLE])
    core.attached("late", tool("c"))
    core.attached("stays", tool("c", role=ROLE))
    add_role(core)
    owners = [(each.tool.name, each.source) for each in core.registry.listings(ROLE)]
    assert owners == [("b", "new"), ("c", "stays")]


def test_the_roles_that_tools_wait_for_are_limited_and_the_others_are_refused_until_there_is_room() -> None:
    core = Core(limits=Limits(unconfigured_roles=2))
    stream = core.attached("plugin", *(tool("t", role=f"r{number}") for number in range(4)))
    (attached,) = stream.read("attached")
    assert [each.role for each in attached.waiting] == ["r0", "r1"]
    assert [each.role for each in attached.refused] == ["r2", "r3"]
    assert all("unconfigured_roles" in each.error for each in attached.refused)
    assert len(core.registry.waiting()) == 2
    add_role(core, "r0")
    core.presence.tick(core.now)
    # An event tells all standings of the names in it: offered ones come without a role.
    assert reviewed(stream) == [(["t"], [("t", "r1")]), ([], [("t", "r1"), ("t", "r2")])]


def test_waiting_tools_count_against_the_limit_of_a_session_and_all_together_against_that_of_a_role() -> None:
    core = Core(limits=Limits(tools=3))
    stream = core.attached("plugin", tool("t", role="r1"), tool("t", role="r2"), tool("t"), tool("u", role="r1"))
    (attached,) = stream.read("attached")
    assert ([each.role for each in attached.waiting], list(attached.registered)) == (["r1", "r2"], ["t"])
    assert [(each.name, "one too many for its session" in each.error) for each in attached.refused] == [("u", True)]
    core = Core()
    core.registry.tables.tools_per_role = 2
    stream = core.attached("plugin", *(tool(f"t{number}", role=f"r{number}") for number in range(3)))
    (attached,) = stream.read("attached")
    assert ([each.name for each in attached.waiting], [each.name for each in attached.refused]) == (
        ["t0", "t1"],
        ["t2"],
    )


@pytest.mark.parametrize("role", [" a", "x" * 129, "a\n"])
def test_what_is_not_the_name_of_a_role_is_refused(role: str) -> None:
    core = Core()
    stream = core.attached("plugin", Tool("t", role=role))
    (attached,) = stream.read("attached")
    assert (list(attached.waiting), [each.name for each in attached.refused]) == ([], ["t"])


def test_with_all_or_none_nothing_waits() -> None:
    core = Core()
    stream = core.stream()
    stream.attach("plugin", tool("t", role=ROLE), tool("u"), all_or_none=True)
    assert stream.status is not None
    assert (stream.status[0], stream.status[1]) == ("NOT_FOUND", f"unknown role: {ROLE}")


def test_a_key_cannot_wait_for_a_role_outside_its_scope_nor_go_on_waiting_when_the_scope_loses_it() -> None:
    core = Core()
    every = Globs(["*"])
    scopes = Scopes(attach=every, offer=every, roles=Globs(["mine", ROLE]))
    stream = core.stream()
    stream.peer.principal = replace(stream.peer.principal, identity=Identity("ann", scopes))
    stream.attach("plugin", tool("t", role=ROLE), tool("u", role="theirs"))
    (attached,) = stream.read("attached")
    assert [each.name for each in attached.waiting] == ["t"]
    [refused] = attached.refused
    assert (refused.name, "may not offer tools for role 'theirs'" in refused.error) == ("u", True)
    narrower = Identity("ann", replace(scopes, roles=Globs(["mine"])))
    core.presence.refresh_identities(lambda identity: narrower, core.now)
    assert core.registry.waiting() == []
    add_role(core)
    assert [each for each in core.registry.listings(ROLE) if each.source == "plugin"] == []


def test_a_role_is_adopted_by_a_tool_that_is_good_and_allowed_and_by_no_other() -> None:
    adopted: list[tuple[str, str]] = []

    def adopt(role: str, principal: Principal) -> bool:
        adopted.append((role, principal.source))
        core.registry.add_role(role)
        return True

    core = Core(denied=frozenset({"silenced"}), adopt=adopt)
    core.attached("silenced", tool("t", role="r1"))
    core.attached("plugin", tool("bad name", role="r2"), tool("t", role=ROLE), tool("u", role=ROLE))
    assert adopted == [(ROLE, "plugin")]
    assert [name for name, _, _ in listed(core, role=ROLE)] == ["t", "u"]
