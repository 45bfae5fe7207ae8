"""Calls that a bus reads after it stood still: held until their caller has answered, then run, ended or sent back."""

from __future__ import annotations

from tests.support.core_model import Core, StreamDouble, call, codes, tool
from toolbus.bus.streams.invoke_stream import HELD_BYTES, HeldBudget, HeldCalls
from toolbus.common.stall import StallWatch
from toolbus.errors import Code
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


class Thawed:
    """A bus that stood still for a while, a host whose calls it holds since, and a plugin."""

    def __init__(self, seconds: float = 5.0, suspended: float = 0.0) -> None:
        self.core = core = Core()
        self.asleep = 0.0
        self.watch = StallWatch(0.5, 0.5, lambda: core.now + self.asleep, lambda: core.now)
        self.watch.tick()
        self.plugin, self.host = core.attached("plugin", tool("t")), core.attached("host")
        self.budget = HeldBudget(1 << 30)
        self.held = HeldCalls(self.host.peer, core.dispatcher, self.watch, self.budget)
        core.now += seconds
        self.asleep = suspended
        self.watch.notice()
        self.held.begin(core.now, self.watch.since)

    def ask(self, *ids: str, **fields: object) -> None:
        self.held.calls([pb.ToolCall(call_id=id, name="t", **fields) for id in ids], self.core.now)  # type: ignore[arg-type]

    def heartbeat(self) -> wire.Heartbeat:
        (heartbeat,) = self.host.read("heartbeat")
        assert isinstance(heartbeat, wire.Heartbeat)
        return heartbeat

    def running(self) -> list[pb.ToolCall]:
        return list(self.plugin.read("calls"))


def _ids(calls: list[pb.ToolCall]) -> int:
    return len(calls)


def test_calls_run_once_their_caller_has_answered_a_heartbeat_of_now() -> None:
    thawed = Thawed()
    thawed.ask("1", "2")
    heartbeat = thawed.heartbeat()
    thawed.held.echo(wire.Heartbeat(sequence=heartbeat.sequence - 1), thawed.core.now)  # of before the stall
    assert (thawed.running(), thawed.held.holding) == ([], True)
    thawed.held.echo(heartbeat, thawed.core.now)
    assert (_ids(thawed.running()), thawed.held.holding) == (2, False)


def test_what_its_caller_cancels_before_the_echo_never_runs_and_has_its_result() -> None:
    thawed = Thawed()
    thawed.ask("1", "2")
    heartbeat = thawed.heartbeat()
    thawed.held.cancels([pb.ToolCancel(call_id="1", reason="timeout_seconds")], thawed.core.now)
    thawed.held.echo(heartbeat, thawed.core.now)
    assert _ids(thawed.running()) == 1
    assert codes(thawed.host) == {"1": Code.CANCELLED}


def test_a_cancel_of_a_call_from_before_the_stall_reaches_its_plugin() -> None:
    core = Core()
    host, plugin = core.attached("host"), core.attached("plugin", tool("t"))
    call(host, "t", "old")
    (running,) = plugin.read("calls")
    held = HeldCalls(host.peer, core.dispatcher, StallWatch(0.5, 0.5, lambda: core.now), HeldBudget(1 << 30))
    held.begin(core.now, core.now)
    held.cancels([pb.ToolCancel(call_id="old")], core.now)
    assert [cancel.call_id for cancel in plugin.read("cancels")] == [running.call_id]


def test_a_call_whose_time_may_be_over_is_sent_back_and_any_other_has_all_of_its_time() -> None:
    thawed = Thawed(5.0)
    thawed.ask("over", timeout_seconds=5.0)
    thawed.ask("left", timeout_seconds=7.0)
    thawed.ask("none stated")
    thawed.ask("soft", timeout_seconds=100.0, background_after_seconds=4.0)
    thawed.ask("longest", timeout_seconds=1_000.0)
    thawed.ask("soft left", timeout_seconds=90.0, background_after_seconds=6.0)
    thawed.held.echo(thawed.heartbeat(), thawed.core.now)
    assert [round(each.timeout_seconds, 6) for each in thawed.running()] == [7.0, 30.0, 300.0, 90.0]
    refused = {result.call_id: result.error for result in thawed.host.read("results")}
    assert {id: (Code(error.code), error.retry_safe) for id, error in refused.items()} == {
        "over": (Code.UNAVAILABLE, True),
        "soft": (Code.UNAVAILABLE, True),
    }
    assert "the bus read the call up to 5.0 s after it was sent" in refused["over"].message


def test_what_is_held_is_bounded_and_the_rest_is_sent_back() -> None:
    thawed = Thawed()
    thawed.host.peer.max_in_flight = 2
    thawed.ask("1", "2", "3")
    assert codes(thawed.host) == {"3": Code.UNAVAILABLE}
    thawed.held.cancels([pb.ToolCancel(call_id="1"), pb.ToolCancel(call_id="2")], thawed.core.now)
    thawed.host.written()
    thawed.ask("4", arguments_json="x" * HELD_BYTES)
    assert codes(thawed.host) == {"4": Code.UNAVAILABLE}


def test_all_peers_share_a_bound_and_give_back_what_they_held() -> None:
    thawed = Thawed()
    whole = thawed.budget.left
    thawed.ask("1", "2")
    thawed.budget.left = 10
    thawed.ask("3", arguments_json='{"n": 12345678}')
    assert codes(thawed.host) == {"3": Code.UNAVAILABLE}
    thawed.budget.left = whole - sum(pb.ToolCall(call_id=id, name="t").ByteSize() for id in "12")
    thawed.held.cancels([pb.ToolCancel(call_id="1")], thawed.core.now)
    thawed.held.drop()
    assert thawed.budget.left == whole


def test_an_id_that_is_held_already_is_refused_and_the_first_call_stays() -> None:
    thawed = Thawed()
    thawed.ask("1", "1")
    assert codes(thawed.host) == {"1": Code.INVALID_ARGUMENTS}
    thawed.held.release(thawed.core.now)
    assert _ids(thawed.running()) == 1


def test_a_peer_that_sent_nothing_is_asked_nothing_and_free_again_when_the_stall_has_settled() -> None:
    thawed = Thawed()
    thawed.held.settle(thawed.core.now)
    assert (thawed.host.read("heartbeat"), thawed.held.holding) == ([], False)


def test_one_that_sent_something_stays_held_until_its_echo() -> None:
    thawed = Thawed()
    thawed.ask("1")
    thawed.held.settle(thawed.core.now)
    assert thawed.held.holding


def test_after_a_second_stall_the_echo_of_the_first_heartbeat_is_too_old() -> None:
    thawed = Thawed()
    thawed.ask("1")
    first = thawed.heartbeat()
    thawed.held.begin(thawed.core.now, thawed.watch.since)
    thawed.held.echo(first, thawed.core.now)
    assert thawed.held.holding
    thawed.held.echo(thawed.heartbeat(), thawed.core.now)
    assert not thawed.held.holding


def test_after_a_suspended_machine_every_peer_is_asked_at_once() -> None:
    """Its machine resends what it wrote meanwhile when it likes, so quiet for a second proves nothing."""
    thawed = Thawed(0.1, suspended=600.0)
    thawed.held.settle(thawed.core.now)
    assert thawed.held.holding
    thawed.held.echo(thawed.heartbeat(), thawed.core.now)
    assert not thawed.held.holding


def test_a_stream_without_an_attach_gets_no_heartbeat() -> None:
    core = Core()
    stream = StreamDouble(core)
    held = HeldCalls(stream.peer, core.dispatcher, StallWatch(0.5, 0.5, lambda: core.now), HeldBudget(1 << 30))
    held.begin(core.now, core.now)
    assert stream.written() == []
