from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.core_model import IDEMPOTENT, Core, StreamDouble, answer, call, error_of, names, outputs, tool
from toolbus.errors import Code, Stage
from toolbus.protocol.session import Pulse, Session
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

CATALOG = [wire.SUBSCRIPTION_CATALOG]


# -- opening ---------------------------------------------------------------------------------------------------------


def test_an_attach_is_answered_with_the_identity_and_limits_of_the_bus() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"), tool("b"), max_in_flight=3)
    (attached,) = stream.read("attached")
    assert re.fullmatch(r"[0-9a-f]{32}", attached.session_id)
    assert (attached.bus_id, attached.boot_id, attached.protocol_version) == ("bus", "boot", 1)
    assert (list(attached.registered), list(attached.refused)) == (["a", "b"], [])
    assert attached.limits.calls_in_flight == 3
    assert attached.limits.result_bytes == core.limits.result_bytes
    assert attached.revision == core.registry.revision
    assert attached.heartbeat_seconds > 0


@pytest.mark.parametrize(("requested", "granted"), [(0, 256), (1, 1), (4_096, 4_096), (100_000, 4_096)])
def test_a_session_takes_as_many_calls_as_it_asks_for_within_the_limit(requested: int, granted: int) -> None:
    core = Core()
    stream = core.attached("plugin", max_in_flight=requested)
    assert stream.peer.max_in_flight == stream.read("attached")[0].limits.calls_in_flight == granted


@pytest.mark.parametrize(
    ("attach", "status", "says"),
    [
        ({"protocol_version": 2}, "FAILED_PRECONDITION", "version 1 of the toolbus protocol.*version 2"),
        ({"protocol_version": 0}, "FAILED_PRECONDITION", "Update the peer's SDK"),
        ({"source": ""}, "INVALID_ARGUMENT", "source ''"),
        ({"source": "a b"}, "INVALID_ARGUMENT", "source 'a b'.*choose another"),
        ({"source": "x" * 129}, "INVALID_ARGUMENT", "1,128"),
        ({"source": "toolbus"}, "PERMISSION_DENIED", "belongs to the bus itself"),
        ({"instance": "x" * 129}, "INVALID_ARGUMENT", r"\(129 characters\) breaks the rule \[!-~\]\{0,128\}: use"),
        ({"instance": "a b"}, "INVALID_ARGUMENT", "instance 'a b'.*without blanks"),
        ({"instance": "x\n12:00:00 info toolbus"}, "INVALID_ARGUMENT", r"instance 'x\\n12:00:00 info"),
        ({"instance": "x\n"}, "INVALID_ARGUMENT", r"instance 'x\\n'"),
        ({"instance": "\x1b]0;owned\x07"}, "INVALID_ARGUMENT", r"instance '\\x1b\]0;owned"),
        ({"instance": "\x7f"}, "INVALID_ARGUMENT", r"instance '\\x7f'"),
        ({"instance": "é"}, "INVALID_ARGUMENT", "instance 'é'"),
    ],
)
def test_an_attach_that_breaks_a_rule_ends_the_stream_with_an_error(
    attach: dict[str, Any], status: str, says: str
) -> None:
    core = Core()
    stream = core.stream()
    stream.attach(**{"source": "plugin", **attach})
    assert stream.status is not None
    assert stream.status[0] == status
    assert re.search(says, stream.status[1])
    assert (stream.ended, core.presence.sessions, stream.written()) == (True, {}, [])


def test_one_bad_tool_refuses_an_attach_that_is_all_or_none_and_every_fault_is_named() -> None:
    core = Core()
    stream = core.stream()
    bad = [
        pb.Tool(name="good"),
        pb.Tool(name="a b"),
        pb.Tool(name="c", parameters_json="{"),
        pb.Tool(name="d", parameters_json='{"type":"strin"}'),
        pb.Tool(name="e", timeout_seconds=301),
    ]
    stream.send(attach=wire.Attach(protocol_version=1, source="plugin", tools=bad, all_or_none=True))
    assert stream.status is not None
    status, text = stream.status
    assert status == "INVALID_ARGUMENT"
    assert all(f"'{name}'" in text for name in ("a b", "c", "d", "e"))
    assert "'good'" not in text
    assert (names(core), core.presence.sessions) == ([], {})


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (pb.Tool(name="t", callback_url="http://127.0.0.1:1/"), "callback_url"),
        (pb.Tool(name="t", role="nobody"), "nobody"),
    ],
)
def test_a_tool_that_no_session_may_offer_refuses_an_attach_that_is_all_or_none(declared: pb.Tool, says: str) -> None:
    core = Core()
    stream = core.stream()
    stream.send(attach=wire.Attach(protocol_version=1, source="plugin", tools=[declared], all_or_none=True))
    assert stream.status is not None
    assert says in stream.status[1]
    assert core.presence.sessions == {}


def test_more_sessions_than_the_bus_takes_are_refused_until_one_ends() -> None:
    core = Core(limits=Limits(sessions=1))
    first = core.attached("one")
    second = core.stream()
    second.attach("two")
    assert second.status is not None
    assert second.status[0] == "RESOURCE_EXHAUSTED"
    assert "sessions" in second.status[1]
    first.end()
    core.attached("two")


def test_a_source_bound_by_a_token_cannot_be_claimed_without_it() -> None:
    core = Core()
    first = core.attached("plugin", tool("t"), token="secret")
    for token in ("", "guess", "sécret"):
        stream = core.stream()
        stream.attach("plugin", token=token)
        assert stream.status is not None
        assert stream.status[0] == "PERMISSION_DENIED"
        assert "secret" not in stream.status[1]
    first.end()
    core.attached("plugin", token="secret")


def test_a_source_that_may_not_offer_tools_attaches_without_them_and_is_notified() -> None:
    core = Core(denied=frozenset({"quiet"}))
    core.plugin("plugin", tool("t"))
    stream = core.stream()
    stream.attach("quiet", tool("mine"), tool("too"))
    frames = stream.written()
    attached = frames[0].attached
    assert [refused.name for refused in attached.refused] == ["mine", "too"]
    assert "tools" in attached.refused[0].error
    denied = [event.permission_denied for frame in frames for event in frame.events]
    assert [(each.permission, each.operation) for each in denied] == [("tools", "attach")]
    assert names(core) == ["t"]
    call(stream, "t")
    assert stream.status is None
    assert len(stream.peer.in_flight) == 1


# -- a later attach --------------------------------------------------------------------------------------------------


def test_a_later_attach_replaces_the_declared_set_and_keeps_the_session() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"), tool("b"))
    (first,) = stream.read("attached")
    stream.attach("plugin", tool("b", "newer"), tool("c"))
    (second,) = stream.read("attached")
    assert second.session_id == first.session_id
    assert (list(second.registered), names(core)) == (["b", "c"], ["b", "c"])
    assert second.revision > first.revision


def test_a_later_attach_is_answered_in_order_with_the_calls() -> None:
    core = Core()
    host, stream = core.peer("host"), core.attached("plugin", tool("a"))
    core.call(host, "a")
    stream.attach("plugin", tool("b"))
    core.call(host, "b")
    frames = [sorted(field.name for field, _ in frame.ListFields()) for frame in stream.written()]
    assert frames == [["attached", "calls"], ["attached", "calls"]]


def test_a_bad_later_attach_that_is_all_or_none_is_refused_and_everything_stays_as_it_was() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"))
    stream.written()
    revision = core.registry.revision
    tools = [pb.Tool(name="b"), pb.Tool(name="bad name")]
    stream.send(attach=wire.Attach(protocol_version=1, source="plugin", tools=tools, all_or_none=True))
    (attached,) = stream.read("attached")
    assert (list(attached.registered), [refused.name for refused in attached.refused]) == (["a"], ["b", "bad name"])
    assert "'bad name'" in attached.refused[0].error
    assert (names(core), core.registry.revision, stream.status) == (["a"], revision, None)


def test_a_later_attach_of_another_instance_ends_the_stream() -> None:
    core = Core()
    stream = core.attached("plugin", instance="i")
    stream.attach("plugin", instance="j")
    assert stream.status is not None
    assert stream.status[0] == "INVALID_ARGUMENT"
    assert "needs a stream of its own" in stream.status[1]


# -- takeover --------------------------------------------------------------------------------------------------------


def test_an_instance_that_attaches_again_takes_over_from_its_older_session() -> None:
    core = Core()
    host = core.peer("host")
    older = core.attached("plugin", tool("a"), tool("t"), instance="i")
    core.attached("other", tool("z"))
    older.written()
    call_id = core.call(host, "t")
    older.written()
    newer = core.attached("plugin", tool("t"), instance="i")
    assert [drain.reason for drain in older.read("drain")] == ["replaced"]
    assert older.status is not None
    assert (older.status[0], older.ended) == ("OK", True)
    error = error_of(host, call_id)
    assert (error.code, error.retry_safe) == (Code.UNAVAILABLE, False)
    assert names(core, include_offline=True) == ["t", "z"]
    assert [*core.presence.sessions.values()][-1] is newer.peer
    assert core.presence.serving("plugin") is True


def test_calls_that_the_replaced_session_has_not_seen_run_in_the_newer_one_and_only_there() -> None:
    core = Core()
    host = core.peer("host")
    older = core.attached("plugin", tool("t"), instance="i")
    older.written()
    core.call(host, "t")
    newer = core.attached("plugin", tool("t"), instance="i")
    assert older.read("calls") == []
    (moved,) = newer.read("calls")
    answer(newer, moved.call_id)
    assert [result.output_json for (result,) in host.results.values()] == ["1"]


def test_an_empty_instance_never_takes_over() -> None:
    core = Core()
    older = core.attached("plugin", tool("t"))
    core.attached("plugin", tool("t"))
    assert (older.status, len(core.presence.sessions)) == (None, 2)


def test_an_attach_that_is_refused_takes_over_from_no_session() -> None:
    core = Core()
    older = core.attached("plugin", tool("t"), instance="i")
    for bad in (pb.Tool(name="bad name"), pb.Tool(name="t", role="nobody")):
        stream = core.stream()
        attach = wire.Attach(protocol_version=1, source="plugin", instance="i", tools=[bad], all_or_none=True)
        stream.send(attach=attach)
        assert stream.status is not None
    assert (older.status, names(core)) == (None, ["t"])
    assert core.presence.session(older.peer.session_id) is older.peer


def test_a_draining_session_finishes_its_calls_beside_its_successor() -> None:
    core = Core()
    host = core.peer("host")
    older = core.attached("plugin", tool("t"), instance="i")
    core.call(host, "t")
    (running,) = older.read("calls")
    older.send(drain=wire.Drain(reason="deploy"))
    newer = core.attached("plugin", tool("t"), instance="i")
    answer(older, running.call_id)
    assert [result.output_json for (result,) in host.results.values()] == ["1"]
    older.end(status="OK")
    assert names(core) == ["t"]
    assert core.presence.session(newer.peer.session_id) is newer.peer
    again = core.attached("plugin", tool("t"), instance="i")
    assert newer.ended
    assert not again.ended


def test_more_than_five_takeovers_a_minute_are_refused_and_a_minute_later_accepted() -> None:
    core = Core()
    for _ in range(6):
        last = core.attached("plugin", tool("t"), instance="i")
        core.now += 1.0
    clone = core.stream()
    clone.attach("plugin", tool("t"), instance="i")
    assert clone.status is not None
    assert clone.status[0] == "ALREADY_EXISTS"
    assert (last.status, names(core)) == (None, ["t"])
    core.now += 60.0
    core.attached("plugin", tool("t"), instance="i")
    core.presence.tick(core.now + 61.0)
    assert repr(core.presence.handshake) == "<ServerHandshake takeovers=0>"


# -- heartbeats ------------------------------------------------------------------------------------------------------


def ticks(core: Core, seconds: float, *answering: StreamDouble) -> None:
    for _ in range(round(seconds / 0.5)):
        core.now += 0.5
        core.presence.tick(core.now)
        for stream in answering:
            for heartbeat in stream.read("heartbeat"):
                stream.send(heartbeat=heartbeat)


def test_a_hung_plugin_is_suspect_then_gone_and_an_answering_one_neither() -> None:
    core = Core()
    host = core.peer("host")
    hung, well = core.attached("hung", tool("t")), core.attached("well", tool("w"))
    watcher = core.attached("watcher", subscribe=CATALOG)
    watcher.written()
    call_id = core.call(host, "t", timeout_seconds=60)
    (running,) = hung.read("calls")
    core.presence.tick(core.now)
    ticks(core, 3.0, well, watcher)
    assert hung.peer.suspect
    assert core.refusal(host, "t").code is Code.UNAVAILABLE
    assert core.presence.serving("hung") is False
    core.presence.watchers.notify()
    (event,) = watcher.read("events")
    assert [item.session_state for item in event.catalog.changed] == [wire.SESSION_STATE_SUSPECT]
    assert call_id in host.in_flight
    ticks(core, 2.0, well, watcher)
    error = error_of(host, call_id)
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.DISPATCHED, False)
    assert "answered no heartbeat for 5 s; it may have run" in error.message
    assert [cancel.call_id for cancel in hung.read("cancels")] == [running.call_id]
    assert (hung.status, core.dispatcher.in_flight.stuck) == (None, 1)
    ticks(core, 16.0, well, watcher)
    assert hung.status is not None
    assert hung.status[0] == "UNAVAILABLE"
    assert "heartbeat" in hung.status[1]
    assert well.status is watcher.status is None


def test_a_suspect_plugin_that_answers_again_gets_calls_again() -> None:
    core = Core()
    host = core.peer("host")
    stream = core.attached("plugin", tool("t"))
    core.call(host, "t", timeout_seconds=60)
    (running,) = stream.read("calls")
    ticks(core, 4.0)
    assert stream.peer.suspect
    answer(stream, running.call_id)
    assert core.presence.serving("plugin") is True
    core.call(host, "t")
    assert len(stream.read("calls")) == 1


def test_a_machine_that_stood_still_restarts_the_count_of_missed_heartbeats() -> None:
    core = Core()
    stream = core.attached("plugin", tool("t"))
    core.call(core.peer("host"), "t", timeout_seconds=300)
    ticks(core, 2.5)
    assert stream.peer.missed == 1
    core.now += 120.0
    core.presence.tick(core.now)
    assert (stream.peer.missed, stream.peer.suspect, stream.status) == (0, False, None)
    ticks(core, 2.5)
    assert not stream.peer.suspect


@pytest.mark.parametrize("pause", [0.9, 1.6])
def test_a_bus_that_is_late_all_the_time_is_not_silent_for_longer_than_it_says(pause: float) -> None:
    core = Core()
    stream = core.attached("plugin", tool("t"))
    stream.read("attached")
    heard = core.now
    for _ in range(40):
        core.now += pause  # 1.1 s late counts as having stood still
        stream.send(progress=[pb.ToolProgress(call_id="none")])
        core.presence.tick(core.now)
        if stream.read("heartbeat"):
            assert core.now - heard <= 10.0 + pause
            heard = core.now
    assert core.now - heard <= 10.0 + pause


def test_an_idle_session_is_looked_at_when_a_heartbeat_may_be_due_and_a_busy_one_at_each_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []
    pulse = Session.pulse

    def noting(session: Any, now: float) -> Pulse:
        looks.append(session.source)
        return pulse(session, now)

    monkeypatch.setattr(Session, "pulse", noting)
    core = Core()
    host, idle = core.peer("host"), core.attached("idle", tool("a"))
    busy = core.attached("busy", tool("b"))
    core.call(host, "b", timeout_seconds=300)
    beats = 0
    for _ in range(120):  # a minute
        core.now += 0.5
        core.presence.tick(core.now)
        for stream in (idle, busy):
            for heartbeat in stream.read("heartbeat"):
                beats += stream is idle
                stream.send(heartbeat=wire.Heartbeat(sequence=heartbeat.sequence))
    assert 5 <= beats <= 6
    assert looks.count("idle") <= 4 * beats
    assert looks.count("busy") == 120
    core.registry.find("a")
    core.call(host, "a", timeout_seconds=300)  # it is judged at once
    looks.clear()
    core.now += 0.5
    core.presence.tick(core.now)
    assert "idle" in looks


def test_a_bus_that_is_late_all_the_time_gives_its_peers_that_time() -> None:
    core = Core()
    host = core.peer("host")
    core.attached("plugin", tool("t"))
    call_id = core.call(host, "t", timeout_seconds=300)
    core.presence.tick(core.now)
    started = core.now
    while call_id in host.in_flight:
        core.now += 0.9  # each tick is 0.4 s late
        core.presence.tick(core.now)
    assert 9.0 <= round(core.now - started, 3) <= 9.9  # 5 s and 5.5 s, without what the bus was late


def test_a_call_of_a_hung_plugin_moves_where_that_is_safe_and_its_late_result_changes_nothing() -> None:
    core = Core()
    host = core.peer("host")
    safe = tool("t", annotations=IDEMPOTENT)
    hung = core.attached("plugin", safe, instance="one")
    call_id = core.call(host, "t", timeout_seconds=60)
    (first,) = hung.read("calls")
    well = core.attached("plugin", safe, instance="two")
    ticks(core, 5.0, well)
    ticks(core, 0.5)
    (second,) = well.read("calls")
    assert [cancel.call_id for cancel in hung.read("cancels")] == [first.call_id]
    answer(hung, first.call_id, "1")
    assert call_id in host.in_flight
    answer(well, second.call_id, "2")
    assert outputs(host) == ["2"]
    assert (core.dispatcher.in_flight.active, core.dispatcher.in_flight.stuck, core.dispatcher.in_flight.held) == (
        0,
        0,
        0,
    )


def test_a_half_closed_peer_that_waits_for_an_answer_is_never_gone() -> None:
    core = Core()
    core.plugin("plugin", tool("t"))
    stream = core.attached("host")
    call(stream, "t", timeout_seconds=300)
    stream.half_close()
    ticks(core, 120.0)
    assert stream.status is None
