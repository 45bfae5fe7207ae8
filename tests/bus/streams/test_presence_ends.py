from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.core_model import IDEMPOTENT, Core, StreamDouble, answer, call, codes, error_of, names, tool
from toolbus.bus.streams.server_handshake import LOST_SECONDS, MAX_LOST
from toolbus.errors import Code
from toolbus.v1 import tool_bus_service_pb2 as wire

# -- drain, half-close, broken -------------------------------------------------------------------------------------


def test_a_drain_withdraws_the_tools_at_once_and_lets_the_calls_end() -> None:
    core = Core()
    host = core.peer("host")
    stream = core.attached("plugin", tool("t"))
    core.call(host, "t")
    (running,) = stream.read("calls")
    stream.send(drain=wire.Drain(reason="bye"))
    assert names(core, include_offline=True) == []
    assert core.refusal(host, "t").code is Code.NOT_FOUND
    assert not stream.peer.idle
    answer(stream, running.call_id)
    assert host.results["c1"][0].output_json == "1"
    assert stream.peer.idle


def test_a_half_close_ends_pending_calls_at_once_and_lets_the_peers_own_calls_be_answered() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.plugin("other", tool("o"))
    stream = core.attached("plugin", tool("t"))
    call_id = core.call(host, "t")
    stream.written()
    call(stream, "o")
    stream.half_close()
    assert error_of(host, call_id).code is Code.UNAVAILABLE
    assert names(core) == ["o"]
    assert names(core, include_offline=True) == ["o", "t"]
    assert stream.status is None
    core.answer(plugin, "7")
    assert [result.output_json for result in stream.read("results")] == ["7"]
    assert stream.peer.idle


def test_a_half_closed_peer_does_not_get_calls_that_run_elsewhere_now() -> None:
    core = Core()
    host = core.peer("host")
    first = core.attached("plugin", tool("t"))
    first.written()
    core.call(host, "t")
    second = core.attached("plugin", tool("t"))
    first.half_close()
    assert len(second.read("calls")) == 1
    assert first.read("calls") == []


def test_the_nested_calls_of_a_half_closed_run_end_while_the_call_itself_runs_elsewhere() -> None:
    core = Core()
    host, other = core.peer("host"), core.plugin("other", tool("o"))
    declared = tool("t", annotations=IDEMPOTENT)
    first = core.attached("plugin", declared)
    core.call(host, "t")
    (running,) = first.read("calls")
    second = core.attached("plugin", declared)
    call(first, "o", parent_call_id=running.call_id)
    other.hand_over()
    first.half_close()
    assert [reason for _, reason in other.cancelled] == ["parent ended"]
    assert codes(first) == {"1": Code.CANCELLED}
    answer(second, second.read("calls")[0].call_id, "2")
    assert host.results["c1"][0].output_json == "2"


def test_a_stream_that_breaks_ends_its_calls_both_ways_and_its_tools_go_offline() -> None:
    core = Core(grace_seconds=5.0)
    host, other = core.peer("host"), core.plugin("other", tool("o"))
    stream = core.attached("plugin", tool("t"))
    call_id = core.call(host, "t")
    stream.written()
    call(stream, "o")
    other.hand_over()
    stream.end()
    assert error_of(host, call_id).code is Code.UNAVAILABLE
    assert [reason for _, reason in other.cancelled] == ["caller gone"]
    assert (names(core), names(core, include_offline=True)) == (["o"], ["o", "t"])
    assert core.presence.serving("plugin") is False
    core.now += 5.0
    core.presence.tick(core.now)
    assert names(core, include_offline=True) == ["o"]
    assert core.presence.serving("plugin") is None
    assert core.refusal(host, "t").code is Code.NOT_FOUND


def test_a_plugin_that_reconnects_within_its_grace_period_takes_its_place_again() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"))
    core.attached("other", tool("b"))
    stream.end()
    core.now += 4.0
    core.attached("plugin", tool("a"))
    core.now += 10.0
    core.presence.tick(core.now)
    assert names(core) == ["a", "b"]


def test_a_source_that_does_not_come_back_is_lost_for_an_hour_and_one_that_left_is_not() -> None:
    core = Core(grace_seconds=5.0)
    left = core.attached("left", tool("l"))
    left.send(drain=wire.Drain(reason="bye"))
    for source in ("gone", "back"):
        core.attached(source, tool(source)).end()
    left.end()
    assert list(core.presence.lost) == []
    core.now += 5.0
    core.presence.tick(core.now)
    assert sorted(core.presence.lost) == ["back", "gone"]
    core.attached("back")
    assert list(core.presence.lost) == ["gone"]
    core.now += LOST_SECONDS
    core.presence.tick(core.now)
    assert list(core.presence.lost) == []


def test_no_more_than_a_thousand_lost_sources_are_told_of() -> None:
    core = Core(grace_seconds=0.0)
    for number in range(MAX_LOST + 1):
        core.presence.start_grace(f"s{number}", core.now)
    core.presence.tick(core.now)
    assert len(list(core.presence.lost)) == MAX_LOST
    assert "s0" not in list(core.presence.lost)


def _opening(core: Core) -> StreamDouble:
    return core.stream()


def _live(core: Core) -> StreamDouble:
    return core.attached("plugin", tool("t"), instance="i")


def _leaving(core: Core) -> StreamDouble:
    stream = _live(core)
    stream.send(drain=wire.Drain())
    return stream


def _half_closed(core: Core) -> StreamDouble:
    stream = _live(core)
    stream.half_close()
    return stream


@pytest.mark.parametrize("state", [_opening, _live, _leaving, _half_closed])
@pytest.mark.parametrize("status", ["OK", "UNAVAILABLE"])
def test_ending_a_session_twice_ends_it_once_from_whatever_state(
    state: Callable[[Core], StreamDouble], status: str
) -> None:
    core = Core()
    host = core.peer("host")
    core.plugin("other", tool("o"))
    stream = state(core)
    if state is _live:
        core.call(host, "t")
        call(stream, "o")
    stream.end("first", status)
    revision = core.registry.revision
    stream.end("second")
    core.presence.drain_received(stream.peer)
    assert stream.status == (status, "first")
    assert (stream.closes, core.registry.revision) == (1, revision)
    assert (core.presence.sessions, core.presence.by_source, core.dispatcher.in_flight.active) == ({}, {}, 0)
    assert all(len(results) == 1 for results in host.results.values())


def test_nothing_is_written_to_a_session_that_broke() -> None:
    core = Core()
    stream = core.attached("plugin", tool("t"))
    core.call(core.peer("host"), "t")
    stream.end()
    assert stream.written() == []
