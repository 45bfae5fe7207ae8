"""Tests what sessions hear and change of the catalog, calls over real peers, and draining."""

from __future__ import annotations

import pytest

from tests.support.core_model import IDEMPOTENT, Core, answer, call, codes, names, offered, outputs, tool
from toolbus.errors import Code, InvalidRequest, InvalidTool, LimitExceeded, NotPermitted, SessionGone
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

CATALOG = [wire.SUBSCRIPTION_CATALOG]


# -- watchers --------------------------------------------------------------------------------------------------------


def test_a_watcher_gets_the_whole_list_first_then_one_event_for_everything_since() -> None:
    core = Core()
    plugin = core.attached("plugin", tool("a"), tool("b"))
    watcher, deaf = core.attached("watcher", subscribe=CATALOG), core.attached("deaf")
    (event,) = watcher.read("events")
    assert (event.catalog.full, [item.tool.name for item in event.catalog.added]) == (True, ["a", "b"])
    for number in range(20):
        plugin.attach("plugin", tool("b", str(number)), tool(f"c{number}"))
    core.presence.watchers.notify()
    (event,) = watcher.read("events")
    change = event.catalog
    assert not change.full
    assert [item.tool.name for item in change.added] == ["c19"]
    assert [item.tool.name for item in change.changed] == ["b"]
    assert [ref.name for ref in change.removed] == ["a"]
    assert change.revision == core.registry.revision
    core.presence.watchers.notify()
    assert watcher.read("events") == deaf.read("events") == []


def test_a_watcher_of_an_empty_catalog_gets_an_empty_list() -> None:
    core = Core()
    (event,) = core.attached("watcher", subscribe=CATALOG).read("events")
    assert (event.catalog.full, list(event.catalog.added)) == (True, [])


def test_one_more_watcher_does_not_disturb_the_others() -> None:
    core = Core()
    first = core.attached("first", subscribe=CATALOG)
    first.written()
    core.attached("plugin", tool("t"))
    core.attached("second", subscribe=CATALOG)
    assert first.read("events") == []
    core.presence.watchers.notify()
    assert len(first.read("events")) == 1


def test_a_watcher_that_reads_slowly_gets_all_changes_at_once_later() -> None:
    core = Core()
    watcher = core.attached("watcher", subscribe=CATALOG)
    watcher.written()
    for number in range(100):
        core.registry.register(core.peer("p"), offered(tool(f"t{number}", "x" * 16_000)))
        core.presence.watchers.notify()
    waiting = watcher.peer.outbox.waiting_bytes
    assert waiting < 600 * 1024
    watcher.written()
    core.presence.watchers.notify()
    names = [item.tool.name for event in watcher.read("events") for item in event.catalog.added]
    assert names[-1] == "t99"
    assert len(names) > 50


def test_a_watcher_that_does_not_read_costs_no_more_than_one_that_does_however_many_changes_come() -> None:
    core = Core()
    watcher = core.attached("watcher", subscribe=CATALOG)
    watcher.written()
    for number in range(2_000):
        core.registry.register(core.peer("p"), offered(tool(f"t{number}")))
        core.presence.watchers.notify()
    events = watcher.read("events")
    assert len(events) < 100  # then it gets all that came, at once
    core.presence.watchers.notify()
    (last,) = watcher.read("events")
    assert len(events) + len(last.catalog.added) == 2_000


# -- the catalog, by unary requests --------------------------------------------------------------------------------


def test_tools_are_added_to_a_live_session_by_its_id() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"))
    request = wire.RegisterRequest(session_id=stream.peer.session_id, tools=[pb.Tool(name="b"), pb.Tool(name="a")])
    response = core.presence.register(request)
    assert (list(response.registered), list(response.affected_roles), response.ok) == (["b", "a"], ["default"], True)
    assert names(core) == ["a", "b"]


def test_a_session_may_register_what_it_has_again_up_to_the_limit_and_not_one_more() -> None:
    core = Core(limits=Limits(tools=2))
    stream = core.attached("plugin", tool("a"), tool("b"))
    core.presence.register(wire.RegisterRequest(session_id=stream.peer.session_id, tools=[pb.Tool(name="a")]))
    more = wire.RegisterRequest(session_id=stream.peer.session_id, tools=[pb.Tool(name="c")], all_or_none=True)
    with pytest.raises(LimitExceeded, match="tools"):
        core.presence.register(more)
    assert names(core) == ["a", "b"]


def test_registering_all_or_none_needs_a_live_session_with_permission_and_good_tools() -> None:
    core = Core(denied=frozenset({"quiet"}))
    plugin, quiet, leaving = core.attached("plugin"), core.attached("quiet"), core.attached("leaving")
    leaving.send(drain=wire.Drain())
    quiet.written()
    tools = [pb.Tool(name="t")]
    with pytest.raises(SessionGone, match="Attach again"):
        core.presence.register(wire.RegisterRequest(session_id="0" * 32, tools=tools))
    with pytest.raises(InvalidRequest, match="draining"):
        core.presence.register(wire.RegisterRequest(session_id=leaving.peer.session_id, tools=tools))
    with pytest.raises(InvalidRequest, match="source 'plugin'"):
        core.presence.register(wire.RegisterRequest(session_id=plugin.peer.session_id, source="x", tools=tools))
    whole = wire.RegisterRequest(session_id=quiet.peer.session_id, tools=tools, all_or_none=True)
    with pytest.raises(NotPermitted, match="tools"):
        core.presence.register(whole)
    bad = [pb.Tool(name="t", callback_url="http://127.0.0.1/"), pb.Tool(name="a b"), pb.Tool(name="good")]
    with pytest.raises(InvalidTool, match=r"callback_url.*'a b'"):
        core.presence.register(wire.RegisterRequest(session_id=plugin.peer.session_id, tools=bad, all_or_none=True))
    assert [event.permission_denied.operation for event in quiet.read("events")] == ["register"]
    assert names(core) == []


def test_the_owner_is_notified_when_another_source_withdraws_or_overwrites_its_tool() -> None:
    core = Core(roles=("r1", "r2"))
    owner, other = core.attached("owner", tool("a"), tool("b"), tool("c"), tool("d")), core.attached("other")
    owner.written()
    presence, session_id = core.presence, owner.peer.session_id
    assert presence.unregister(wire.UnregisterRequest(session_id=session_id, name="a")).removed
    assert owner.read("events") == []
    assert presence.unregister(wire.UnregisterRequest(name="b", role="r1")).removed
    assert not presence.unregister(wire.UnregisterRequest(session_id=other.peer.session_id, name="c")).removed
    presence.register(wire.RegisterRequest(session_id=other.peer.session_id, tools=[pb.Tool(name="c")]))
    assert presence.clear(wire.ClearRequest(source="owner")).removed == 3
    notices = []
    for event in owner.read("events"):
        detail = event.tool_overwritten if event.HasField("tool_overwritten") else event.tool_removed
        notices.append((event.WhichOneof("kind"), detail.name, list(detail.roles)))
    assert notices == [
        ("tool_removed", "b", ["r1"]),
        ("tool_overwritten", "c", ["r1", "r2"]),
        ("tool_removed", "b", ["r2"]),
        ("tool_removed", "d", ["r1", "r2"]),
    ]


def test_withdrawing_needs_a_name_and_a_source_that_is_not_the_bus_s_own() -> None:
    core = Core()
    with pytest.raises(InvalidRequest, match="name is empty"):
        core.presence.unregister(wire.UnregisterRequest())
    with pytest.raises(InvalidRequest, match="source is empty"):
        core.presence.clear(wire.ClearRequest())
    with pytest.raises(NotPermitted):
        core.presence.clear(wire.ClearRequest(source="toolbus"))
    with pytest.raises(SessionGone):
        core.presence.unregister(wire.UnregisterRequest(session_id="x", name="t"))


def test_a_session_that_offers_a_tool_may_not_set_the_context_any_more() -> None:
    core = Core()
    plugin = core.plugin("plugin", tool("t"))
    stream = core.attached("host")
    call(stream, "t", "before", context=pb.CallContext(user_id="ann"))
    core.presence.register(wire.RegisterRequest(session_id=stream.peer.session_id, tools=[pb.Tool(name="own")]))
    call(stream, "t", "after", context=pb.CallContext(user_id="bob"))
    before, after = plugin.hand_over()
    assert before.context is not None
    assert (before.context.user_id, after.context) == ("ann", None)


# -- calls over real peers -------------------------------------------------------------------------------------------


def test_two_streams_that_use_the_same_call_ids_get_their_own_results() -> None:
    core = Core()
    plugin = core.attached("plugin", tool("t", annotations=IDEMPOTENT))
    hosts = [core.attached("a"), core.attached("b")]
    for host in hosts:
        call(host, "t", "same")
    sent = plugin.read("calls")
    assert len({each.call_id for each in sent}) == 2
    assert all(0 < each.timeout_seconds <= 30 for each in sent)
    for number, each in enumerate(sent):
        answer(plugin, each.call_id, str(number))
    assert [(r.call_id, r.output_json) for host in hosts for r in host.read("results")] == [
        ("same", "0"),
        ("same", "1"),
    ]


def test_a_cancelled_call_that_is_still_in_the_outbox_never_reaches_the_plugin() -> None:
    core = Core()
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    plugin.written()
    call(host, "t", "keep")
    call(host, "t", "drop")
    host.send(cancels=[pb.ToolCancel(call_id="drop")])
    frames = plugin.written()
    assert [len(frame.calls) for frame in frames] == [1]
    assert [len(frame.cancels) for frame in frames] == [0]
    assert codes(host) == {"drop": Code.CANCELLED}


def test_a_result_that_a_host_cannot_receive_does_not_reach_it() -> None:
    core = Core()
    plugin, host = core.attached("plugin", tool("t")), core.attached("host", max_message_bytes=64 * 1024)
    call(host, "t")
    answer(plugin, plugin.read("calls")[0].call_id, '"' + "x" * 100_000 + '"')
    frames = host.written()
    assert all(frame.ByteSize() <= 64 * 1024 for frame in frames)
    (result,) = [result for frame in frames for result in frame.results]
    assert Code(result.error.code) is Code.RESULT_TOO_LARGE
    assert result.error.limit.name == "max_message_bytes"


# -- draining --------------------------------------------------------------------------------------------------------


def test_a_draining_bus_notifies_every_session_accepts_no_new_one_and_ends_idle_ones() -> None:
    core = Core()
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    call(host, "t")
    (running,) = plugin.read("calls")
    core.presence.drain(30.0)
    core.presence.drain(30.0)
    (drain,) = host.read("drain")
    assert (drain.reason, drain.grace_seconds) == ("shutdown", 30.0)
    assert plugin.read("drain") == []  # the call that runs may need its tools
    late = core.stream()
    late.attach("late")
    assert late.status is not None
    assert (late.status[0], "draining" in late.status[1]) == ("UNAVAILABLE", True)
    core.presence.end_idle(core.now)
    assert plugin.status is host.status is None
    answer(plugin, running.call_id)
    assert [result.output_json for result in host.read("results")] == ["1"]
    core.presence.drain(20.0)
    (drain,) = plugin.read("drain")
    assert (drain.reason, drain.grace_seconds) == ("shutdown", 20.0)
    core.presence.end_idle(core.now)
    assert [stream.status[0] for stream in (plugin, host) if stream.status] == ["OK", "OK"]


def test_an_attach_that_crossed_the_drain_of_its_source_is_refused_and_the_calls_go_on() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.attached("plugin", tool("t"))
    core.call(host, "t")
    (running,) = plugin.read("calls")
    core.presence.drain_source("plugin", 5.0, core.now)
    plugin.attach("plugin", tool("t"), tool("new"))
    (attached,) = plugin.read("attached")
    ((name, error),) = [(refused.name, refused.error) for refused in attached.refused]
    assert (name, attached.refused_total) == ("", 0), "the attach itself is refused"
    assert "sent this session a drain" in error
    assert names(core, include_offline=True) == []
    answer(plugin, running.call_id)
    assert outputs(host) == ["1"]


def test_the_tools_of_the_bus_itself_can_be_neither_unregistered_nor_cleared() -> None:
    core = Core()
    core.plugin("toolbus", tool("drain"), qualified=True)
    with pytest.raises(NotPermitted, match="own tools"):
        core.presence.unregister(wire.UnregisterRequest(name="toolbus:drain"))
    with pytest.raises(NotPermitted, match="own tools"):
        core.presence.clear(wire.ClearRequest(source="toolbus"))
    assert core.registry.find("toolbus:drain") is not None


def test_draining_a_source_withdraws_its_tools_and_lets_its_calls_end() -> None:
    core = Core()
    host = core.peer("host")
    sessions = [core.attached("plugin", tool("t")), core.attached("plugin", tool("t"))]
    core.attached("other", tool("o"))
    core.call(host, "t")
    assert core.presence.drain_source("plugin", 5.0, core.now) == 2
    assert names(core, include_offline=True) == ["o"]
    (running,) = [item for stream in sessions for item in stream.read("calls")]
    owner = next(stream for stream in sessions if stream.peer.pending)
    answer(owner, running.call_id)
    assert host.results["c1"][0].output_json == "1"
    assert core.presence.drain_source("nobody", 5.0, core.now) == 0


def test_a_session_that_does_not_leave_within_the_grace_of_a_drain_is_ended_with_its_calls() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.attached("plugin", tool("t"))
    core.call(host, "t")
    core.presence.drain_source("plugin", 5.0, core.now)
    core.presence.tick(core.now + 4.9)
    assert not host.results
    core.presence.tick(core.now + 5.1)
    error = host.results["c1"][0].error
    assert error is not None
    assert error.code is Code.UNAVAILABLE
    assert plugin.status is not None
    assert plugin.status[0] == "UNAVAILABLE"
