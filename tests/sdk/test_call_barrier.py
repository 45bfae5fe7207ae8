"""Calls that a plugin reads after it stood still: held until the bus has echoed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.protocol.session import Side
from toolbus.protocol.tool import Result
from toolbus.sdk.connection import CallBarrier
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


class Queued:
    """A call that waits in a queue of the plugin."""

    def __init__(self, session: PeerSession, begun: list[str]) -> None:
        self.session = session
        self._begun = begun

    def resume(self) -> None:
        self._begun.append("queued")


class Plugin:
    """A connection's part of a plugin: what it began, answered, and asked the bus."""

    def __init__(self) -> None:
        self.session = PeerSession(Side.PEER, wire.InvokeRequest, 0.0)
        self.session.open(256, 0)
        self.begun: list[str] = []
        self.answers: list[Result] = []
        self.handlers: dict[str, Any] = {"calls": self._take_all}
        self.barrier = CallBarrier(self.handlers, self._take, lambda session, result: self.answers.append(result))

    def _take(self, session: PeerSession, calls: Mapping[str, pb.ToolCall]) -> Any:
        self.begun += calls
        return dict.fromkeys(calls, "running")

    def _take_all(self, attempt: Any, calls: Iterable[pb.ToolCall]) -> None:
        self._take(attempt.session, {call.call_id: call for call in calls})

    def read(self, *ids: str) -> None:
        self.handlers["calls"](SimpleNamespace(session=self.session), [pb.ToolCall(call_id=id, name="t") for id in ids])

    def asked(self) -> wire.Heartbeat:
        frame = self.session.outbox.take()
        assert frame is not None
        assert frame.heartbeat.from_peer
        return frame.heartbeat


def test_calls_begin_once_the_bus_has_echoed_and_at_once_from_then_on() -> None:
    plugin = Plugin()
    plugin.barrier.hold(plugin.session)
    plugin.read("1", "2")
    plugin.read("2")  # one that is held already
    assert plugin.begun == []
    assert list(plugin.session.in_flight) == ["1", "2"]
    plugin.barrier.echo(plugin.asked())
    assert (plugin.begun, plugin.barrier.is_holding) == (["1", "2"], False)
    assert plugin.session.in_flight["1"] == "running"
    plugin.read("3")
    assert plugin.begun == ["1", "2", "3"]


def test_a_call_that_the_bus_cancels_before_its_echo_never_begins_and_is_answered_once() -> None:
    plugin = Plugin()
    plugin.barrier.hold(plugin.session)
    plugin.read("1")
    for reason in ("timeout_seconds", "again"):
        plugin.session.in_flight["1"].cancel(reason)
    plugin.barrier.echo(plugin.asked())
    assert plugin.begun == []
    (answer,) = plugin.answers
    assert answer.error is not None
    assert (answer.call_id, answer.error.code, answer.error.stage) == ("1", Code.CANCELLED, Stage.NOT_DISPATCHED)
    assert "timeout_seconds" in answer.error.message


def test_what_is_held_when_the_stream_ends_never_begins() -> None:
    plugin = Plugin()
    plugin.barrier.hold(plugin.session)
    plugin.read("1")
    plugin.barrier.postpone(Queued(plugin.session, plugin.begun))
    plugin.barrier.release()
    plugin.barrier.echo(plugin.asked())
    assert (plugin.begun, plugin.barrier.is_holding) == ([], False)


def test_after_a_second_stall_the_first_echo_is_too_old() -> None:
    plugin = Plugin()
    plugin.barrier.hold(plugin.session)
    plugin.read("1")
    first = plugin.asked()
    plugin.barrier.hold(plugin.session)
    plugin.barrier.echo(first)
    assert plugin.begun == []
    plugin.barrier.echo(plugin.asked())
    assert plugin.begun == ["1"]


def test_a_call_in_a_queue_waits_with_the_others_and_goes_on_where_nothing_is_held() -> None:
    plugin = Plugin()
    plugin.barrier.postpone(Queued(plugin.session, plugin.begun))
    assert plugin.begun == ["queued"]
    plugin.barrier.hold(plugin.session)
    plugin.read("1")
    plugin.barrier.postpone(Queued(plugin.session, plugin.begun))
    assert plugin.begun == ["queued"]
    plugin.barrier.echo(plugin.asked())
    assert plugin.begun == ["queued", "1", "queued"]
