"""The deadlines of a host's calls, on a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.functions.call_context import CallOptions
from toolbus.protocol.session import Side
from toolbus.protocol.tool import CallError, Progress, Result
from toolbus.sdk.outgoing_calls import OutgoingCall, OutgoingCalls, PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


class Clock:
    """A loop's clock and its newest timer."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # calls take their own time
        self.due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, moment: float, function: Callable[[], None]) -> Any:
        self.due = (moment, function)
        return self

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> Any:
        return self.call_at(self.now + seconds, partial(function, *arguments))

    def cancel(self) -> None:
        self.due = None

    def fire(self, late: float = 0.0) -> None:
        """Runs the timer, so many seconds late."""
        assert self.due is not None
        self.now, function = self.due[0] + late, self.due[1]
        self.due = None
        function()


class Caller:
    """A host with one call that the bus has.

    Args:
        room: how many calls the bus takes of it at once.
    """

    def __init__(self, room: int = 256) -> None:
        self.clock = Clock()
        self.calls = OutgoingCalls(self.clock, "127.0.0.1:1", "p")  # type: ignore[arg-type]
        self.session = PeerSession(Side.PEER, wire.InvokeRequest, self.clock.now)
        self.session.open(room, 0)
        self.calls.opened(self.session, 1 << 20)
        self.results: list[Result] = []
        self.calls.begin(OutgoingCall("t", "{}", self._deliver, options=CallOptions(timeout=1.0)))
        (self.call_id,) = self.session.pending

    def _deliver(self, out: OutgoingCall, result: Result | Progress) -> None:
        assert isinstance(result, Result)
        self.results.append(result)


def test_a_host_that_stood_still_reads_the_answers_before_it_calls_the_bus_dead() -> None:
    caller = Caller()
    caller.clock.fire(late=30.0)
    assert caller.results == []
    caller.calls.results(caller.session, [pb.ToolResult(call_id=caller.call_id, output_json="1")])
    assert [result.output_json for result in caller.results] == ["1"]


def test_a_bus_that_gives_no_answer_after_that_either_ends_the_call() -> None:
    caller = Caller()
    caller.clock.fire(late=30.0)
    caller.clock.fire()
    assert caller.results[0].error is not None
    assert (caller.results[0].error.code, caller.results[0].error.stage) == (Code.DEADLINE_EXCEEDED, Stage.UNKNOWN)


def test_a_host_that_was_awake_ends_the_call_at_its_guard_deadline() -> None:
    caller = Caller()
    caller.clock.fire(late=0.1)
    assert len(caller.results) == 1


def test_a_call_whose_options_cannot_be_sent_ends_in_an_error_and_those_behind_it_are_sent() -> None:
    caller = Caller()
    broken = OutgoingCall("broken", "{}", caller._deliver, options=CallOptions(role="\ud800"))
    sound = OutgoingCall("sound", "{}", caller._deliver, options=CallOptions(role="r"))
    caller.calls.begin_many([broken, sound])
    (result,) = caller.results
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED)
    assert "options" in result.error.message
    frame = caller.session.outbox.take()
    assert frame is not None
    assert [call.name for call in frame.calls] == ["t", "sound"]
    assert caller.session.pending.keys() == {caller.call_id, sound.call_id}


def test_a_call_that_waited_for_room_until_its_time_was_over_is_not_sent() -> None:
    caller = Caller(room=1)
    caller.calls.begin(OutgoingCall("late", "{}", caller._deliver, options=CallOptions(timeout=1.0)))
    caller.clock.now += 1.1  # the timer that ends it comes late
    caller.calls.results(caller.session, [pb.ToolResult(call_id=caller.call_id, output_json="1")])
    error = caller.results[1].error
    assert error is not None
    assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
    assert error.limit == ("calls_in_flight", 1.0)
    assert not caller.session.pending


def test_a_retry_that_comes_after_its_time_is_not_sent_and_ends_in_the_refusal() -> None:
    caller = Caller()
    refusal = CallError(Code.OVERLOADED, "the tool is full", Stage.NOT_DISPATCHED, retry_safe=True)
    caller.calls.results(caller.session, [Result(caller.call_id, is_error=True, error=refusal).to_wire()])
    assert not caller.results, "it pauses"
    caller.clock.fire(late=2.0)
    (result,) = caller.results
    assert result.error is not None
    assert (result.error.code, result.error.message) == (Code.OVERLOADED, "the tool is full")
    assert (result.error.stage, result.error.retry_safe) == (Stage.NOT_DISPATCHED, True)
    assert not caller.session.pending
