from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support.core_model import Core, offered, tool
from toolbus.bus.access.identity import OBSERVER
from toolbus.bus.calls.refusals import explain_change
from toolbus.bus.catalog.entry import read_tool
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.errors import Code, InvalidRequest, InvalidTool, UnknownRole
from toolbus.protocol.tool import Annotations, Limits, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


def ask(core: Core, *, page_bytes: int = catalog_messages.PAGE_BYTES, **request: Any) -> wire.ListResponse:
    view, principal = core.dispatcher.view, core.peer("host").principal
    return catalog_messages.list_tools(wire.ListRequest(**request), view, principal, page_bytes=page_bytes)


def listed(core: Core, **request: Any) -> list[str]:
    return [item.tool.name for item in ask(core, **request).tools]


# -- listing ---------------------------------------------------------------------------------------------------------


def test_a_listing_shows_the_tool_its_source_and_the_state_of_its_sessions() -> None:
    core = Core(roles=("r1", "r2"))
    declared = Tool(
        "t", "says", role="r2", timeout_seconds=3.0, annotations=Annotations(read_only=True), metadata_json='{"a":1}'
    )
    core.plugin("plugin", declared)
    (line,) = ask(core).tools
    assert Tool.from_wire(line.tool, Limits()) == declared
    assert (line.source, list(line.roles), line.schema_hash) == ("plugin", ["r2"], declared.schema_hash)
    assert (line.session_state, line.sessions, line.in_flight, line.stuck) == (wire.SESSION_STATE_LIVE, 1, 0, 0)


def test_a_listing_counts_calls_in_flight_and_stuck_ones_separately() -> None:
    core = Core()
    host, first, second = core.peer("host"), core.plugin("p", tool("t")), core.plugin("p", tool("t"))
    for _ in range(3):
        core.call(host, "t")
    first.hand_over()
    second.hand_over()
    core.cancel(host, next(iter(host.in_flight)))
    (line,) = ask(core).tools
    assert (line.sessions, line.in_flight, line.stuck) == (2, 2, 1)


def test_a_listing_shows_the_best_state_of_its_sessions() -> None:
    core = Core()
    first, second = core.plugin("p", tool("t")), core.plugin("p", tool("t"))
    first.session_state = wire.SESSION_STATE_SUSPECT
    assert ask(core).tools[0].session_state == wire.SESSION_STATE_LIVE
    second.session_state = wire.SESSION_STATE_DRAINING
    assert ask(core).tools[0].session_state == wire.SESSION_STATE_SUSPECT


def test_offline_tools_are_listed_on_request_only_with_the_reason() -> None:
    core = Core()
    core.lose(core.plugin("p", tool("t")), "its stream ended")
    assert listed(core) == []
    (line,) = ask(core, include_offline=True).tools
    assert (line.session_state, line.last_error, line.sessions) == (wire.SESSION_STATE_OFFLINE, "its stream ended", 0)


def test_conditions_add_up() -> None:
    core = Core(roles=("r1", "r2"))
    core.plugin("one", tool("a"), tool("b", role="r1"))
    core.plugin("two", tool("c"))
    assert listed(core) == ["a", "b", "c"]
    assert listed(core, role="r2") == ["a", "c"]
    assert listed(core, source="one") == ["a", "b"]
    assert listed(core, names=["b", "c", "x"]) == ["b", "c"]
    assert listed(core, names=["a"], source="two") == []
    with pytest.raises(UnknownRole, match="nobody"):
        listed(core, role="nobody")


def test_a_caller_that_has_the_revision_gets_nothing_but_the_revision() -> None:
    core = Core()
    core.plugin("p", tool("t"))
    revision = ask(core).revision
    same = ask(core, if_revision=revision)
    assert (list(same.tools), same.revision) == ([], revision)
    assert len(ask(core, if_revision=revision - 1).tools) == 1


def test_a_long_list_comes_in_pages_that_a_default_client_can_receive() -> None:
    core = Core()
    core.plugin("p", *(tool(f"t{number}", "x" * 16_000) for number in range(500)))
    names: list[str] = []
    pages, token = 0, ""
    while pages == 0 or token:
        response = ask(core, page_token=token)
        assert response.ByteSize() < 4 * 1024 * 1024
        names += [item.tool.name for item in response.tools]
        pages, token = pages + 1, response.next_page_token
    assert names == [f"t{number}" for number in range(500)]
    assert pages == 3


@pytest.mark.parametrize("rules", [{}, {"roles": {"r1": ["ann"]}}])
def test_pages_end_where_roles_got_the_same_tool_at_different_times(rules: dict[str, dict[str, list[str]]]) -> None:
    core = Core(roles=("r1", "r2"))
    core.dispatcher.view.permit(AccessRules.read(rules))
    for name, role in (("x", "r2"), ("y", "r1"), ("y", "r2"), ("x", "r1"), ("z", "r1"), ("u", "r2"), ("z", "r2")):
        core.plugin("p", tool(name, role=role))
    whole = [listing.tool.name for listing in core.dispatcher.view.listings()]
    assert sorted(whole) == ["u", "x", "y", "z"]
    names, token = [], ""
    for _ in whole:
        response = ask(core, page_bytes=1, page_token=token)
        names += [item.tool.name for item in response.tools]
        token = response.next_page_token
    assert (names, token) == (whole, "")


@pytest.mark.parametrize("token", ["x", "-1", "1 ", "٣", "9" * 50])
def test_an_invalid_page_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token"):
        ask(Core(), page_token=token)


# -- who may -------------------------------------------------------------------------------------------------------


def test_what_is_listed_can_be_called_and_what_can_be_called_is_listed() -> None:
    core = Core()
    core.plugin("p", tool("t"))
    core.registry.register(core.peer("toolbus", shares=False), offered(tool("drain")), qualified=True)
    operator, guest = core.peer("operator"), core.peer("guest")
    guest.principal = replace(guest.principal, is_admin=False)
    for caller, may in ((operator, True), (guest, False)):
        request = wire.ListRequest(source="toolbus")
        lines = catalog_messages.list_tools(request, core.dispatcher.view, caller.principal).tools
        core.call(caller, "toolbus:drain", call_id="1")
        assert (len(lines) == 1) is may
        assert ("1" in caller.in_flight) is may
    (result,) = guest.results["1"]
    assert result.error is not None
    assert result.error.code is Code.PERMISSION_DENIED
    assert "'guest'" in result.error.message


def test_the_tools_of_the_bus_are_listed_only_when_asked_for() -> None:
    core = Core()
    core.registry.register(core.peer("toolbus", shares=False), offered(tool("drain")), qualified=True)
    assert listed(core) == []
    assert listed(core, names=["toolbus:drain"]) == []
    assert listed(core, source="toolbus") == ["toolbus:drain"]


def test_a_denied_source_may_not_offer_tools() -> None:
    policy = Policy(frozenset({"quiet"}))
    assert (policy.may_offer("quiet"), policy.may_offer("loud")) == (False, True)


# -- reading -------------------------------------------------------------------------------------------------------


def test_every_fault_of_a_tool_is_named() -> None:
    with pytest.raises(InvalidTool) as caught:
        read_tool(pb.Tool(name="a/b", description="x" * 20_000), Limits())
    assert all(part in str(caught.value) for part in ("'a/b'", "description_bytes"))


def test_what_was_read_is_copied_out_of_its_frame() -> None:
    message = pb.Tool(name="t", description="before")
    item = read_tool(message, Limits())
    message.description = "after"
    assert item.tool.description == "before"


def test_a_schema_is_compiled_even_if_its_tool_asks_for_no_validation() -> None:
    with pytest.raises(InvalidTool, match="'t'"):
        read_tool(pb.Tool(name="t", parameters_json='{"type":"strin"}', validate=False), Limits())


# -- changes -------------------------------------------------------------------------------------------------------


def test_many_changes_become_events_that_share_frames_with_calls() -> None:
    registry = Registry()
    core = Core()
    handler = core.peer("p")
    registry.register(handler, offered(*(tool(f"t{number}", "x" * 16_000) for number in range(100))))
    events = list(catalog_messages.changes(registry.since(-1)))
    assert len(events) > 2
    assert all(event.ByteSize() < 600 * 1024 for event in events)
    assert [event.catalog.full for event in events] == [True, *[False] * (len(events) - 1)]
    assert {event.catalog.revision for event in events} == {registry.revision}
    assert [item.tool.name for event in events for item in event.catalog.added] == [f"t{n}" for n in range(100)]


def test_a_removal_names_tool_and_source() -> None:
    core = Core()
    plugin = core.plugin("p", tool("t"))
    revision = core.registry.revision
    core.registry.withdraw(plugin)
    (event,) = catalog_messages.changes(core.registry.since(revision))
    assert [(ref.name, ref.source) for ref in event.catalog.removed] == [("t", "p")]


# -- what changed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("{}", '{"properties":{"a":{}}}', ": new argument 'a'"),
        ('{"properties":{"a":{}}}', "{}", ": no argument 'a' any more"),
        ('{"properties":{"a":{"type":"string"}}}', '{"properties":{"a":{"type":"number"}}}', ": other rules for 'a'"),
        ('{"properties":{"a":{}}}', '{"properties":{"a":{}},"required":["a"]}', ": new required argument 'a'"),
        ("{}", '{"properties":{"a":{}},"required":["a"]}', ": new required argument 'a'"),
        ('{"properties":{"a":{}},"required":["a"]}', "{}", ": no argument 'a' any more"),
        ('{"properties":{"a":{}},"required":["a"]}', '{"properties":{"a":{}}}', ": no required argument 'a' any more"),
        ('{"minProperties":1}', '{"minProperties":2}', ": its parameters"),
        ('{"properties":[1],"required":"a"}', '{"properties":null}', ": its parameters"),
    ],
)
def test_a_change_of_the_schema_is_explained(before: str, after: str, says: str) -> None:
    assert explain_change(Tool("t", parameters_json=before), Tool("t", parameters_json=after)) == says


def test_a_change_of_the_description_is_explained_and_one_since_an_unknown_declaration_is_not() -> None:
    assert explain_change(tool("t", "old"), tool("t", "new")) == ": its description"
    assert explain_change(None, tool("t", "new")) == ""


@pytest.mark.parametrize("flag", ["council_eligible", "inline_available", "qualified"])
def test_keys_that_name_a_user_never_reach_an_extensions_tool_even_where_it_declares_them(flag: str) -> None:
    core = Core()
    schema = '{"type":"object","properties":{"userId":{},"a":{}}}'
    qualified = flag == "qualified"
    stream = core.attached(
        "p",
        tool(
            "t",
            parameters_json=schema,
            council_eligible=flag == "council_eligible",
            inline_available=flag == "inline_available",
        ),
        qualified=qualified,
    )
    host = core.peer("host")
    core.call(host, "p:t" if qualified else "t", '{"userId":"eve","a":{"userId":1},"__user_id":2}')
    (call,) = stream.read("calls")
    assert call.arguments_json == '{"a":{"userId":1}}'


def test_an_extension_receives_the_call_id_of_its_caller_and_other_plugins_do_not() -> None:
    core = Core()
    extension, plugin = core.attached("e", tool("t"), qualified=True), core.attached("p", tool("u"))
    host = core.peer("host")
    core.call(host, "e:t", call_id="mine-1", request_id="claimed")
    core.call(host, "u", call_id="mine-2", request_id="claimed")
    assert [each.request_id for each in (*extension.read("calls"), *plugin.read("calls"))] == ["mine-1", ""]


def test_a_list_of_names_costs_the_same_among_many_tools_as_among_few() -> None:
    def seconds(count: int) -> float:
        core = Core()
        core.plugin("p", *(tool(f"t{number}") for number in range(count)))
        request = wire.ListRequest(names=["t7", "nobody", "t3", "t7"])
        best = math.inf
        for _ in range(30):
            before = time.perf_counter()
            response = catalog_messages.list_tools(request, core.dispatcher.view, OBSERVER)
            best = min(best, time.perf_counter() - before)
        assert [each.tool.name for each in response.tools] == ["t3", "t7"]
        return best

    assert seconds(5_000) < 5 * seconds(10)  # by looking at each it was a hundred times as much
