"""Drives the core of a bus by streams of an input, and counts what was called, answered and sent to a plugin.

Two of the streams are bystanders that no input can touch, with a call in flight between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from lab.fuzz.core import CoreOnAClock, StreamDouble
from lab.fuzz.target import hold
from toolbus.bus.calls.call import Call
from toolbus.parts.tasks.delivery import TaskCaller
from toolbus.parts.tripwire.tripwire import Tripwire
from toolbus.protocol.session import FRAME_ITEMS, Pool, State
from toolbus.protocol.tool import KIB, Limits, Result, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# Small, so that an input of a few hundred bytes reaches each of them.
LIMITS = Limits(
    calls_in_flight=8,
    calls_in_flight_most=16,
    arguments_bytes=4 * KIB,
    result_bytes=4 * KIB,
    held_bytes=32 * KIB,
    held_bytes_per_source=8 * KIB,
    waiting_bytes=64 * KIB,
    schema_bytes=2 * KIB,
    tools=12,
    tools_per_role=16,
    sessions=12,
    call_depth=3,
)
BOUND = "a secret that no input has"  # the bystanders' token: no input can attach as them
# Seconds between two judgements of silence: after a longer gap a bus takes its own clock to have stood still.
TICK = 2.0
MAX_SECONDS = 200.0  # that an input may let pass: the bystanders' call takes up to 300


class Stream(StreamDouble):
    """A stream that counts what goes in and what comes out."""

    def __init__(self, core: CoreOnAClock) -> None:
        super().__init__(core)
        self.in_flight: Counter[str] = Counter()  # calls that reached the dispatcher, by the caller's id
        self.answered: Counter[str] = Counter()  # their results, as written
        self.handed: set[str] = set()  # calls that were written to it, by the bus's id
        self.must_end = False  # whether its outbox was flooded

    def _flood(self) -> None:
        self.must_end = True  # ended after the frame, as the server does it

    def read_raw(self, raw: bytes) -> None:
        """Takes in the bytes of a message as the gRPC server does: what is not a message ends the stream."""
        try:
            frame = wire.InvokeRequest.FromString(raw)
        except DecodeError:
            self.end("a message is not an InvokeRequest", "INVALID_ARGUMENT")
            return
        self.send(**{field.name: value for field, value in frame.ListFields()})

    def settle(self) -> None:
        """Does what the server's shell does after each message: ends a stream that is flooded or has drained."""
        if self.must_end:
            self.end("the peer reads too slowly", "RESOURCE_EXHAUSTED")
        elif self.peer.state is State.LEAVING and self.peer.idle:
            self.end("it left", "OK")

    def write(self) -> None:
        """Writes what waits, and compares every message with the calls made and handed over before."""
        for frame in self.written():
            items = len(frame.calls) + len(frame.results) + len(frame.progress) + len(frame.cancels)
            hold(items <= FRAME_ITEMS, f"a message has {items} items")
            for call in frame.calls:
                hold(call.call_id not in self.handed, f"call {call.call_id} was handed over twice")
                self.handed.add(call.call_id)
            for sign in frame.progress:
                open_calls = self.in_flight[sign.call_id] - self.answered[sign.call_id]
                hold(open_calls > 0, f"progress for {sign.call_id!r}, which is not in flight")
            for result in frame.results:
                self.answered[result.call_id] += 1
                hold(
                    self.answered[result.call_id] <= self.in_flight[result.call_id],
                    f"call {result.call_id!r} was answered more often than called",
                )
            for cancel in frame.cancels:
                hold(cancel.call_id in self.handed, f"a cancel for {cancel.call_id!r}, which was never handed over")
        self.settle()

    @property
    def reads_all(self) -> bool:
        """Whether its peer reads everything that was sent to it: it is connected, or disconnected in order."""
        return self.status is None or self.status[0] == "OK"


class BackgroundCalls:
    """Adopts calls that go on in the background, as long as it has room."""

    def __init__(self, core: CoreOnAClock, room: int) -> None:
        self._core = core
        self._room = room
        self.callers: list[TaskCaller] = []  # of the calls that it adopted
        core.dispatcher.seams.background = self

    def adopt(self, call: Call, now: float, cancel: object, calls: object) -> tuple[TaskCaller, str, Result] | None:
        if sum(len(caller.in_flight) for caller in self.callers) >= self._room:
            return None
        self.callers.append(TaskCaller(call.caller.principal, call.caller.budget, lambda call_id, result: None))
        task_id = f"task{len(self.callers)}"
        return self.callers[-1], task_id, Result(call.call_id, f'{{"task_id":"{task_id}"}}')

    def cancel(self) -> None:
        for caller in self.callers:
            cancels = [pb.ToolCancel(call_id=call_id) for call_id in caller.in_flight]
            self._core.dispatcher.endings.cancels(caller, cancels, self._core.now)


class BusModel:
    """One bus, the streams of an input and two bystanders."""

    def __init__(self) -> None:
        self.core = CoreOnAClock(
            ("default", "other"), limits=LIMITS, denied=frozenset({"silent"}), untrusted=["guarded"]
        )
        self.core.dispatcher.seams.tripwire = Tripwire()
        self.background = BackgroundCalls(self.core, room=2)
        self.pool = Pool(256 * KIB)
        self.streams: list[Stream] = []
        self.began = self.core.now
        self._dispatch = self.core.dispatcher.calls
        self.core.dispatcher.calls = self._count_and_dispatch  # type: ignore[method-assign]  # the one way in
        self.host, self.plugin = self.stream(), self.stream()
        self.plugin.attach("bystander", Tool("steady"), token=BOUND)
        self.host.attach("bystander.host", token=BOUND)
        self.host.send(calls=[pb.ToolCall(call_id="mine", name="steady", timeout_seconds=300.0)])
        for bystander in (self.host, self.plugin):
            bystander.write()

    def _count_and_dispatch(self, caller: Any, calls: Iterable[pb.ToolCall], now: float) -> None:
        calls = list(calls)
        for stream in self.streams:
            if stream.peer is caller:
                stream.in_flight.update(call.call_id for call in calls)
        self._dispatch(caller, calls, now)

    def stream(self) -> Stream:
        stream = Stream(self.core)
        stream.peer.outbox.pool = self.pool
        self.streams.append(stream)
        return stream

    def pass_time(self, seconds: float) -> None:
        """Moves the clock as the bus's timers see it; the bystanders answer their heartbeats."""
        if self.core.now + seconds > self.began + MAX_SECONDS:
            return
        until = self.core.now + seconds
        while (left := until - self.core.now) > 0:
            self.core.advance(min(left, TICK))
            for bystander in (self.host, self.plugin):
                bystander.send(heartbeat=wire.Heartbeat(sequence=1))
            self.core.presence.tick(self.core.now)
        self.core.presence.watchers.notify()

    def check(self) -> None:
        """Compares all counts; called after every step."""
        for stream in self.streams:
            stream.settle()
        peers: list[Any] = [*(stream.peer for stream in self.streams)]
        calls = [call for peer in peers for call in peer.pending.values()]
        active = {id(call) for call in calls if call.active}
        dispatcher = self.core.dispatcher
        hold(
            active == {id(call) for peer in [*peers, *self.background.callers] for call in peer.in_flight.values()},
            "pending calls and calls in flight differ",
        )
        hold(
            dispatcher.in_flight.held == sum(call.size for call in calls), "held bytes are not those of the calls held"
        )
        hold(dispatcher.in_flight.active == len(active), "the count of calls in flight is wrong")
        hold(dispatcher.in_flight.stuck == len(calls) - len(active), "the count of stuck calls is wrong")
        for peer in peers:
            hold(
                peer.stuck == sum(not call.active for call in peer.pending.values()),
                f"{peer.source} counts its stuck calls wrong",
            )
            slots = Counter(call.caller.budget for call in peer.pending.values())
            hold(peer.slots.held == slots, f"{peer.source} counts the slots of its callers wrong")
            hold(len(peer.pending) <= max(peer.max_in_flight, 0), f"{peer.source} has more pending calls than it takes")
        refused = self.core.presence.review.refused
        hold(len(refused) == sum(len(refused.of(peer)) for peer in peers), "the count of refused tools is wrong")
        hold(all(peer.state is State.LIVE for peer in refused.peers), "a session that has ended has refused tools")
        waiting = sum(stream.peer.outbox._sealed_bytes for stream in self.streams)
        hold(self.pool.bytes == waiting, "the pool's bytes are not those that wait")

    def end(self) -> None:
        """Checks the bystanders and every call, ends all streams, and asks for a bus that holds nothing."""
        hold(self.host.status is None and self.plugin.status is None, "a bystander's stream was ended")
        hold(len(self.plugin.peer.pending) >= 1 and self.host.in_flight["mine"] == 1, "the bystanders' call has ended")
        (handed,) = [call.id for call in self.host.peer.in_flight.values()]
        self.plugin.send(results=[pb.ToolResult(call_id=handed, output_json="42")])
        self.host.send(heartbeat=wire.Heartbeat(sequence=2))
        for stream in self.streams:
            stream.write()
            if stream.reads_all:
                still = Counter(stream.peer.in_flight.keys())
                hold(
                    stream.answered + still == stream.in_flight,
                    f"called {stream.in_flight}, answered {stream.answered}",
                )
        hold(self.host.answered["mine"] == 1, "the bystanders' call was not answered")
        for stream in self.streams:
            stream.end()
        core = self.core
        self.background.cancel()
        core.presence.tick(core.now)
        core.advance(100.0)
        core.presence.tick(core.now)
        self.check()
        hold(
            core.held == 0 and not core.dispatcher.in_flight.active,
            f"{core.held} bytes are held after all sessions are lost",
        )
        hold(not self.pool.bytes and not self.pool.outboxes, f"{self.pool.bytes} bytes wait for no stream")
        hold(not core.presence.sessions and not core.presence.by_source, "a session is left")
        hold(not core.registry.listings(include_offline=True), "a tool outlived its grace period")
        hold(not core.presence.review.refused, "a refused tool outlived its session")
        for stream in self.streams:
            hold(not stream.peer.budget.held, f"{stream.peer.source} has bytes on its budget after the end")
