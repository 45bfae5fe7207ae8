"""Sends messages from a bus through a peer's connection: its session, the calls it makes and those it answers.

An input is a play of up to 80 steps: what the bus sends, raw or made of ids that collide, and what a program does
meanwhile. The connection is a real one on a loop that no thread runs; only its channel is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from lab.fuzz.choices import Choices, block_of
from lab.fuzz.target import Target, conversations, hold, no_faults
from toolbus.errors import ProtocolError
from toolbus.functions.call_context import CallOptions
from toolbus.protocol.session import FRAME_ITEMS
from toolbus.protocol.tool import Result, Tool
from toolbus.sdk.attempt import ANSWERED, Attempt, AttemptEnd, Delegate, IncomingCall
from toolbus.sdk.connection import Connection
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.outgoing_calls import OutgoingCall, PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

STEPS = 80
IDS = ("a", "b", "c", "", "x" * 200)
OUTPUTS = ("1", "", "no json", '"' + "z" * 70_000 + '"')
SECONDS = (0.01, 0.2, 2.0, 31.0, 302.0)


class NoTransport:
    """Stands for an attempt's transport: it reaches nothing, and ends when it is told to."""

    reached = False

    def wake(self) -> None:
        """Does nothing: `Model.write` takes what waits."""

    half_close = cancel = wake


class Line(Attempt):
    """An attempt without a transport; what waits is read by `Model.write`."""

    def _open_transport(self) -> Any:
        return NoTransport()


class PluginDouble(Delegate):
    """The delegate of a plugin that answers when the input says so."""

    def __init__(self) -> None:
        self.taken: list[tuple[PeerSession, str]] = []  # calls of the bus, in order

    def tools(self) -> Sequence[pb.Tool]:
        return [Tool("echo").to_wire()]

    def take(
        self, connection: Connection, session: PeerSession, calls: Mapping[str, pb.ToolCall]
    ) -> Mapping[str, IncomingCall]:
        self.taken += [(session, call_id) for call_id in calls]
        return dict.fromkeys(calls, ANSWERED)

    def event(self, event: wire.Event) -> None:
        """Ignores an event."""

    def subscriptions(self) -> Sequence[Any]:
        return ()


class Model:
    """One connection, its clock, and counts of calls, deliveries and answers."""

    def __init__(self) -> None:
        self.later = 0.0  # how far our clock is ahead
        self.delegate = PluginDouble()
        self.connection = Connection(
            ConnectionSettings("one", address="127.0.0.1:1", instance="i"), self.delegate, self.delegate.take
        )
        self.loop: Any = self.connection.loop
        self.loop.time = lambda: time.monotonic() + self.later  # type: ignore[method-assign]  # one that can be moved
        self.outgoing: dict[OutgoingCall, int] = {}  # our calls, with how many results each has
        self.cancelled: dict[OutgoingCall, int] = {}  # those taken back, with how many results they had by then
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.line = Line(self.connection.settings, self.loop)
        self.sent: set[str] = set()  # ids of our calls on this stream
        self.given: Counter[str] = Counter()  # results that we wrote on this stream
        self.connection._attempt = self.line
        self.connection._handshake.attach(self.line)

    def turn(self, seconds: float = 0.0) -> None:
        """Lets time pass and the loop do what is due then."""
        self.later += seconds
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def feed(self, raw: bytes) -> None:
        """Takes in the bytes of a message, as `Attempt.run` does; what is not a message ends the stream."""
        try:
            frame = wire.InvokeResponse.FromString(raw)
            for field, value in self.line.session.receive(frame, self.loop.time()):
                self.connection._handlers[field](self.line, value)
        except (DecodeError, ProtocolError):
            self.lose()

    def lose(self) -> None:
        """Ends the attempt and begins another, as `Reconnect.run` does."""
        self.write()
        code = "OK" if self.line.drain_reason else "UNAVAILABLE"
        self.line.all_read = bool(self.line.drain_reason) and self.line.drain_reason != "replaced"
        self.connection._lose(self.line)
        self.connection._reconnect.lost(AttemptEnd(code, "it broke", 1.0))
        self.begin_attempt()

    def call(self, choose: Choices) -> None:
        session, parent_call_id = choose.pick([(None, ""), (None, ""), *self.delegate.taken])
        options = CallOptions(choose.pick((None, 1.0, 30.0)), parent_call_id=parent_call_id)
        arguments_json = choose.pick(("{}", "no json", "x" * 5000))
        out = OutgoingCall("echo", arguments_json, self.deliver, options=options, parent_session=session)
        out.wants_progress = choose.flag()
        out.soft_deadline += self.later  # made by the other clock
        out.guard_deadline += self.later
        out.started_at += self.later
        self.outgoing[out] = 0
        self.connection.begin(out)

    def deliver(self, out: OutgoingCall, what: Any) -> None:
        hold(not self.outgoing[out], f"something came for {out.name} after its result: {what!r:.200}")
        hold(out not in self.cancelled, "something came for a call that was taken back")
        if isinstance(what, Result):
            self.outgoing[out] += 1

    def cancel(self, choose: Choices) -> None:
        if self.outgoing:
            out = choose.pick(list(self.outgoing))
            self.connection.cancel(out)
            self.turn()
            self.cancelled[out] = self.outgoing[out]

    def answer(self, choose: Choices) -> None:
        in_flight = list(self.line.session.in_flight)
        call_id = choose.pick([*in_flight, "b"])
        self.connection.answer(self.line.session, Result(call_id, choose.pick(OUTPUTS), is_error=choose.flag()))

    def write(self) -> None:
        """Takes every message that waits, and compares it with the counts."""
        self.turn()
        taken = Counter(call_id for session, call_id in self.delegate.taken if session is self.line.session)
        while (frame := self.line.session.outbox.take()) is not None:
            frame = wire.InvokeRequest.FromString(frame.SerializeToString())
            items = len(frame.calls) + len(frame.results) + len(frame.progress) + len(frame.cancels)
            hold(items <= FRAME_ITEMS, f"a message has {items} items")
            for call in frame.calls:
                hold(call.call_id not in self.sent, f"id {call.call_id} was used twice on a stream")
                self.sent.add(call.call_id)
            for cancel in frame.cancels:
                hold(cancel.call_id in self.sent, f"a cancel for {cancel.call_id!r}, which was never sent")
            for result in frame.results:
                self.given[result.call_id] += 1
                hold(self.given[result.call_id] <= taken[result.call_id], f"{result.call_id!r} was answered too often")

    def end(self) -> None:
        """Answers pending calls, closes, and checks for one result a call."""
        self.turn()
        session = self.line.session
        for call_id in list(session.in_flight):
            self.connection.answer(session, Result(call_id))
        self.write()
        hold(not session.in_flight, f"calls are still in flight: {list(session.in_flight)}")
        taken = Counter(call_id for of, call_id in self.delegate.taken if of is session)
        hold(self.given == taken, f"the bus called {taken}, answered were {self.given}")
        self.connection._lose(self.line)
        self.connection.calls.close("closed")
        self.turn()
        hold(not self.connection.calls.unfinished, "callers still wait after the end")
        for out, results in self.outgoing.items():
            wanted = self.cancelled.get(out, 1)
            hold(results == wanted, f"{out!r} has {results} results, not {wanted}")

    def close(self) -> None:
        self.loop.close()


def _attached(model: Model, choose: Choices) -> None:
    calls, arguments, message = choose.pick(((0, 0, 0), (2, 100, 0), (256, 1 << 20, 1 << 24), (1, 1, 5000)))
    limits = wire.Limits(calls_in_flight=calls, arguments_bytes=arguments, message_bytes=message)
    refused = [wire.RefusedTool(name="echo", error=choose.pick(("", "no")))] if choose.flag() else []
    frame = wire.InvokeResponse(attached=wire.Attached(session_id="s", limits=limits, refused=refused))
    model.feed(frame.SerializeToString())


def _bus_calls(model: Model, choose: Choices) -> None:
    calls = [pb.ToolCall(call_id=choose.pick(IDS), name="echo", timeout_seconds=choose.byte()) for _ in range(2)]
    model.feed(wire.InvokeResponse(calls=calls).SerializeToString())


def _bus_results(model: Model, choose: Choices) -> None:
    pending = [*model.line.session.pending, "a"]
    results = [pb.ToolResult(call_id=choose.pick(pending), output_json=choose.pick(OUTPUTS)) for _ in range(2)]
    if choose.flag():
        error = results[0].error
        error.code = choose.byte() % 20  # type: ignore[assignment]  # also numbers that no code has
        error.stage, error.retry_safe = choose.byte() % 7, choose.flag()  # type: ignore[assignment]
        error.retry_after_seconds = choose.pick((0.0, 0.1, 1e9, float("nan"), -1.0))
    model.feed(wire.InvokeResponse(results=results).SerializeToString())


def _bus_more(model: Model, choose: Choices) -> None:
    kinds = ("progress", "cancels", "heartbeat", "drain", "events")
    frame = wire.InvokeResponse()
    for kind in choose.some(kinds):
        match kind:
            case "progress":
                frame.progress.add(call_id=choose.pick([*model.line.session.pending, "a"]), message="m")
            case "cancels":
                frame.cancels.add(call_id=choose.pick([*model.line.session.in_flight, "a"]), reason="why")
            case "heartbeat":
                frame.heartbeat.sequence = choose.byte()
            case "drain":
                frame.drain.reason = choose.pick(("", "shutdown", "replaced"))
            case "events":
                frame.events.add().tool_removed.name = "echo"
    model.feed(frame.SerializeToString())


ACTS: tuple[Callable[[Model, Choices], None], ...] = (
    lambda model, choose: model.feed(choose.block()),
    _attached,
    lambda model, choose: model.call(choose),
    _bus_results,
    _bus_calls,
    lambda model, choose: model.answer(choose),
    lambda model, choose: model.write(),
    _bus_more,
    lambda model, choose: model.turn(choose.pick(SECONDS)),
    lambda model, choose: model.cancel(choose),
    lambda model, choose: model.lose(),
    lambda model, choose: model.connection.tools_changed(),
    lambda model, choose: model.call(choose),
)


def run(data: bytes) -> None:
    with no_faults():
        choose, model = Choices(data), Model()
        try:
            for _ in range(STEPS):
                if not choose:
                    break
                choose.pick(ACTS)(model, choose)
            model.end()
        finally:
            model.close()


def seeds() -> Iterator[bytes]:
    """The vectors' conversations, and plays that reach what those do not."""
    for messages in conversations("peer.jsonl", wire.InvokeResponse):
        yield (bytes([1, 2, 0]) + b"".join(b"\0" + block_of(each) for each in messages))[:4000] + bytes([6])
    opened, call, write = bytes([1, 2, 0]), bytes([2, 0, 0, 0, 0]), bytes([6])
    yield opened + call + write + bytes([3, 0, 0, 0, 0, 0])
    yield call + opened + write + bytes([3, 0, 0, 0, 0, 1, 7, 1, 1, 0]) + bytes([8, 1]) + write
    yield opened + bytes([4, 0, 1, 1, 1]) + bytes([5, 0, 0, 0]) + bytes([5, 0, 1, 1]) + write
    yield opened + bytes([4, 0, 1, 1, 1]) + bytes([2, 2, 0, 0, 0]) + write + bytes([9, 0]) + bytes([10])
    yield opened + call + write + bytes([10]) + opened + bytes([8, 4])
    yield opened + call + bytes([7, 1, 3, 1]) + bytes([4, 0, 1, 1, 1]) + bytes([11]) + write
    yield bytes([1, 1, 0]) + call * 4 + write + bytes([8, 3]) + bytes([8, 4])


TARGET = Target("responses", "a peer gives one result a call and one answer a run, whatever a bus sends", run, seeds)
