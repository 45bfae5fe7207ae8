"""Runs one stream as a state machine; the same class serves both ends of the wire.

It owns the state of one stream: the messages that wait to be written, the pending calls, the calls in flight, and the
heartbeat. It knows no sockets, no clock and no catalog: the driver passes in frames and the time, and acts on the
returned values. Only the two tables below depend on the side, so the same rules bind both.

The states::

    OPENING ──attach/attached──▶ LIVE ──drain received──▶ LEAVING ──no call left──▶ CLOSED
       └───────────────────────────┴── end of stream, error, timeout ──▲────────────┘
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sized
from enum import Enum
from typing import Any, Generic, TypeVar

from toolbus.errors import ProtocolError
from toolbus.protocol.limits import DEFAULT_TIMINGS, Timings
from toolbus.protocol.tool import KIB, MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# A frame carries at most this much. Frames of 128 items are 1.35 times as fast as frames of 512, with which the two
# processes work by turns instead of at the same time.
FRAME_ITEMS = 128
FRAME_BYTES = 1 * MIB
MAX_ITEMS = 4096  # of one kind in a frame that arrives: a frame of 2 MB can hold a million empty calls
DEFAULT_MESSAGE_BYTES = 4 * MIB  # what a gRPC client receives unless it is configured otherwise
ITEM_OVERHEAD_BYTES = 4 * KIB  # reserved in a frame for everything about an item but its JSON


class State(Enum):
    """Where a stream is in its life."""

    OPENING = "opening"
    LIVE = "live"
    LEAVING = "leaving"
    CLOSED = "closed"


class Side(Enum):
    """Which end of the stream this is."""

    BUS = "bus"
    PEER = "peer"


# The order in which the fields of a frame are read: a chunk before the result that ends its call.
READING_ORDER = ("attach", "attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain")
_RANK = {field: rank for rank, field in enumerate(READING_ORDER)}

_ALL_FROM_PEER = frozenset({"attach", "calls", "progress", "results", "cancels", "heartbeat", "drain"})
_ALL_FROM_BUS = frozenset({"attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain"})

# (side, state) → fields that may arrive. Fields that arrive in CLOSED are ignored: they were on their way.
_MAY_ARRIVE: dict[tuple[Side, State], frozenset[str]] = {
    (Side.BUS, State.OPENING): _ALL_FROM_PEER,  # attach must be among them, checked below
    (Side.BUS, State.LIVE): _ALL_FROM_PEER,
    (Side.BUS, State.LEAVING): _ALL_FROM_PEER - {"attach"},  # except for one that crossed our drain, see `_update`
    (Side.BUS, State.CLOSED): frozenset(),
    (Side.PEER, State.OPENING): _ALL_FROM_BUS,
    (Side.PEER, State.LIVE): _ALL_FROM_BUS,
    (Side.PEER, State.LEAVING): _ALL_FROM_BUS,
    (Side.PEER, State.CLOSED): frozenset(),
}
_LISTS = frozenset({"calls", "progress", "results", "cancels"})
_OPENING_FIELD = {Side.BUS: "attach", Side.PEER: "attached"}

Frame = TypeVar("Frame", wire.InvokeRequest, wire.InvokeResponse)


class Pool:
    """Counts the bytes that wait in all outboxes of a bus together.

    Args:
        max_bytes: above it the fullest outbox is flooded, whichever grows: only a slow reader is disconnected.
    """

    __slots__ = ("bytes", "max_bytes", "outboxes")

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.max_bytes = max_bytes
        self.outboxes: dict[Outbox[Any], int] = {}  # those in which sealed frames wait, with the bytes of these

    def count(self, outbox: Outbox[Any], waiting: int, more: int) -> None:
        """Counts an outbox that has ``waiting`` bytes now, ``more`` than before."""
        self.bytes += more
        if waiting:
            self.outboxes[outbox] = waiting
        else:
            self.outboxes.pop(outbox, None)
        if more > 0 and self.bytes > self.max_bytes:
            max(self.outboxes, key=self.outboxes.__getitem__).flooded()


class Outbox(Generic[Frame]):
    """Holds the items that wait to be written, already in frames.

    Items are built directly in the open frame, so outgoing frames keep no incoming frame alive. A frame gets its number
    when it is opened and goes to the writer when it is taken: a call in frame n has reached the writer's write once
    ``taken >= n``.

    An item takes as much of a frame's bytes as it has, and at least the share of one in ``frame_items``; so one
    number, ``space``, bounds both. The hot path of calls and results does without ``room``: it takes ``least`` from
    ``space`` and builds with ``add_call`` and ``add_result``, whose lookups would cost more than the item.
    """

    def __init__(self, new_frame: Callable[[], Frame]) -> None:
        self._new_frame: Callable[[], Frame] = new_frame
        self._frames: deque[tuple[Frame, int]] = deque()  # (frame, its bytes once sealed); the last may be open
        self._sealed_bytes = 0  # bytes in all frames but the open one
        self.space = -1  # what the open frame still takes; negative: the next item opens another
        self.frame_items = FRAME_ITEMS
        self.frame_bytes = FRAME_BYTES  # lowered where the peer takes only smaller messages
        self._most = self._capacity = FRAME_BYTES  # of the largest frame, and of the newest
        self.least = FRAME_BYTES // FRAME_ITEMS  # what the smallest item takes
        self.opened = 0  # number of the newest frame
        self.taken = 0  # number of the newest frame handed to the writer
        self.calls: tuple[Sized, Sized] = (), ()  # pending and in flight
        self.held = False  # whether the writer waits, so that more goes into the open frame
        self.add_call: Callable[[], pb.ToolCall] = _no_frame  # the open frame's
        self.add_result: Callable[[], pb.ToolResult] = _no_frame  # the open frame's
        self.max_bytes = 64 * MIB  # what may wait for a peer that reads slowly
        self.pool = Pool(256 * MIB)  # shared with the other outboxes of a bus
        self.wake: Callable[[], None] = _ignore  # tells the writer that the first frame was opened
        self.full: Callable[[], None] = _ignore  # tells it that all frames are complete: it may take them at once
        self.flooded: Callable[[], None] = _ignore  # reports that more waits than the limit

    def __repr__(self) -> str:
        return f"<Outbox frames={len(self._frames)} bytes={self.waiting_bytes} taken={self.taken}>"

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def backlog(self) -> int:
        """About how many bytes wait, in constant time: the open frame counts with what its items have taken of it."""
        return self._sealed_bytes + (self._capacity - max(self.space, 0) if self._frames else 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes in all frames not yet taken; looks at all that is in the open one."""
        return self._sealed_bytes + (self._frames[-1][0].ByteSize() if self._frames else 0)

    def write_early(self, items: int, full: Callable[[], None]) -> None:
        """Makes frames of fewer items and bytes, and lets the writer take each before the next is opened.

        Where many calls are pending or in flight, a frame takes up to a quarter of them: that is early enough.
        """
        self.frame_items, self.full = items, full
        self.frame_bytes = FRAME_BYTES * items // FRAME_ITEMS

    def limit_frames(self, largest: int) -> None:
        """Limits frames to the size that the peer can receive.

        Callers count the characters of an item, which take up to four bytes each.
        """
        self._most = min(self._most, largest // 4)
        self.frame_bytes = min(self.frame_bytes, self._most)
        self.least = self.frame_bytes // self.frame_items

    def room(self, size: int) -> Frame:
        """Returns the frame to which the caller now adds one item of about ``size`` bytes."""
        needed = max(size, self.least)
        if needed > self.space:
            self.open()
        self.space -= needed
        if self.held:
            self.release()
        return self._frames[-1][0]

    def release(self) -> None:
        """Lets the writer take the waiting frames, if it was held."""
        if self.held:
            self.held = False
            self.wake()

    def seal(self) -> None:
        """Closes the open frame: later items are read after everything in it."""
        self.space = -1

    def open(self) -> None:
        """Opens another frame; the one before is complete."""
        pending, in_flight = self.calls
        share = (len(pending) + len(in_flight)) // 4 * self.least
        self._capacity = min(max(self.frame_bytes, share), self._most)
        if self._frames:
            self.full()
        if self._frames:
            last, _ = self._frames[-1]
            size = last.ByteSize()
            self._frames[-1] = (last, size)
            self._count(size)
        frame = self._new_frame()
        self._frames.append((frame, 0))
        self.space = self._capacity
        self.add_call, self.add_result = frame.calls.add, frame.results.add
        self.opened += 1
        if len(self._frames) == 1:
            self.wake()
        elif self._sealed_bytes > self.max_bytes:
            self.flooded()

    def _count(self, more: int) -> None:
        self._sealed_bytes += more
        self.pool.count(self, self._sealed_bytes, more)

    def take(self) -> Frame | None:
        """Hands the oldest frame to the writer, or None."""
        if not self._frames:
            return None
        frame, size = self._frames.popleft()
        if self._frames:
            self._count(-size)
        else:
            self.space = -1
        self.taken += 1
        return frame

    def recall(self, number: int, call_id: str) -> bool:
        """Removes a call from a frame that still waits. Returns whether it was there."""
        place = number - self.taken - 1
        if not 0 <= place < len(self._frames):
            return False
        frame, size = self._frames[place]
        for index, call in enumerate(frame.calls):
            if call.call_id == call_id:
                del frame.calls[index]
                if place < len(self._frames) - 1:
                    self._frames[place] = (frame, frame.ByteSize())
                    self._count(frame.ByteSize() - size)
                return True
        return False

    def disconnect(self) -> None:
        """Drops all waiting frames, and the writer."""
        self.discard()
        self.wake = self.full = self.flooded = _ignore

    def discard(self) -> None:
        """Drops all waiting frames, since the peer will not read them."""
        self._frames.clear()
        self._count(-self._sealed_bytes)
        self.space = -1
        self.taken = self.opened


class Pulse(Enum):
    """The verdict of a heartbeat check on a peer."""

    FINE = "fine"
    PROBE = "probe"
    SUSPECT = "suspect"
    HUNG = "hung"
    GONE = "gone"


class Session(Generic[Frame]):
    """One stream, from its first message to its end.

    Attributes:
        outbox: the frames that wait to be written; the one writer takes from it.
        pending: calls that we wait for, by their id on this stream. The values belong to the driver.
        in_flight: calls that we run for the peer, by the peer's id. The values belong to the driver.
        timings: of the bus; they say how long the intervals between heartbeats are.
    """

    __slots__ = (
        "_busy_since",
        "_last_check",
        "_last_sent",
        "_may_arrive",
        "_probes",
        "_side",
        "_taken_before",
        "drain_sent",
        "half_closed",
        "in_flight",
        "last_heard",
        "last_probe",
        "max_in_flight",
        "max_item_bytes",
        "missed",
        "outbox",
        "pending",
        "quiet_until",
        "state",
        "suspect",
        "takes_calls",
        "timings",
    )

    def __init__(
        self, side: Side, new_frame: Callable[[], Frame], now: float, timings: Timings = DEFAULT_TIMINGS
    ) -> None:
        self._side = side
        self.timings = timings
        self.state = State.OPENING
        self.outbox: Outbox[Frame] = Outbox(new_frame)
        self.pending: dict[str, Any] = {}
        self.in_flight: dict[str, Any] = {}
        self.outbox.calls = self.pending, self.in_flight
        self.max_in_flight = 0  # how many calls the peer takes; set when attached
        self.max_item_bytes = DEFAULT_MESSAGE_BYTES - ITEM_OVERHEAD_BYTES  # the largest item that the peer can receive
        self.last_heard = now  # when the last frame arrived
        self.last_probe = now  # when the last heartbeat was sent
        self.missed = 0  # heartbeats in a row without any frame since
        self.quiet_until = -math.inf  # before then a session without calls needs no `pulse`
        self._taken_before = 0  # frames that had been written at the last check of the heartbeat
        self._last_check = now  # when the heartbeat was checked last
        self._last_sent = now  # since when at least nothing has been written: the check before the one that saw a frame
        self._busy_since: float | None = None  # when a check first saw the pending calls; None while there were none
        self._probes = 0  # heartbeats sent in all; their sequence number
        self.suspect = False  # whether so many were missed that the peer gets no new calls
        self.half_closed = False  # whether the peer has ended its direction and can no longer echo
        self.drain_sent = False  # whether we have sent a drain
        self.takes_calls = False  # whether a new call may be sent to the peer; not a property: the hot path reads it
        self._may_arrive = _MAY_ARRIVE[side, State.OPENING]  # fields

    def __repr__(self) -> str:
        return (
            f"<Session {self._side.value} {self.state.value}{' suspect' if self.suspect else ''}"
            f" pending={len(self.pending)} in_flight={len(self.in_flight)} {self.outbox!r}>"
        )

    @property
    def idle(self) -> bool:
        """Whether no call is pending or in flight and nothing waits to be written."""
        return not self.pending and not self.in_flight and not self.outbox

    def receive(self, frame: wire.InvokeRequest | wire.InvokeResponse, now: float) -> list[tuple[str, Any]]:
        """Receives a frame, which shows that the peer is alive; returns its fields in the order to handle them.

        Raises:
            ProtocolError: a field may not arrive in this state; the stream must end.
        """
        self.last_heard = now
        self.missed = 0
        if self.suspect:
            self.suspect = False
            self._update()
        fields = [(descriptor.name, value) for descriptor, value in frame.ListFields()]
        if len(fields) > 1:
            fields.sort(key=_rank)
        if self.state is State.OPENING:
            opening = _OPENING_FIELD[self._side]
            if not fields or fields[0][0] != opening:
                first = fields[0][0] if fields else "empty"
                raise ProtocolError(
                    f"the first message on the stream is {first!r}, it must hold {opening!r}: "
                    "see docs/protocol.md, 'Opening a stream'"
                )
        may_arrive = self._may_arrive
        for field, value in fields:
            if field not in may_arrive:
                if self.state is State.CLOSED:
                    return []
                raise ProtocolError(f"{field!r} may not arrive while the stream is {self.state.value}")
            if field in _LISTS and len(value) > MAX_ITEMS:
                raise ProtocolError(f"a message holds {len(value)} {field}, at most {MAX_ITEMS} are read: split it")
        return fields

    def open(self, max_in_flight: int, max_message_bytes: int) -> None:
        """Enters LIVE with the limits that the peer has stated."""
        self.state = State.LIVE
        self.max_in_flight = max_in_flight
        limit = max_message_bytes or DEFAULT_MESSAGE_BYTES
        self.max_item_bytes = max(limit - ITEM_OVERHEAD_BYTES, limit // 2)
        self.outbox.limit_frames(self.max_item_bytes)
        self._update()

    def leave(self) -> None:
        """Enters LEAVING: the peer has sent a drain, takes no new calls and finishes those in flight."""
        if self.state is State.LIVE:
            self.state = State.LEAVING
            self._update()

    def close_half(self) -> None:
        """Notes that the peer has half-closed: it can neither answer nor echo any more."""
        self.half_closed = True
        self.leave()
        self._update()

    def _update(self) -> None:
        """Derives the attributes that the hot path reads from the state, once for many frames."""
        self.takes_calls = self.state is State.LIVE and not self.suspect and not self.half_closed
        self._may_arrive = _MAY_ARRIVE[self._side, self.state]
        if self.drain_sent and self.state is State.LEAVING:
            self._may_arrive |= {"attach"}  # it was on its way when we sent the drain

    def send_drain(self, reason: str, grace_seconds: float = 0.0) -> None:
        """Sends a drain, once."""
        if not self.drain_sent and self.state is not State.CLOSED:
            self.drain_sent = True
            self._update()
            self.outbox.room(len(reason) + 16).drain.MergeFrom(wire.Drain(reason=reason, grace_seconds=grace_seconds))
            self.outbox.seal()

    def send_own_heartbeat(self) -> int:
        """Sends a heartbeat of the peer's own (peer side only); returns its sequence number."""
        self._probes += 1
        self.send_alone(wire.Heartbeat(sequence=self._probes, from_peer=True))
        return self._probes

    def send_alone(self, heartbeat: wire.Heartbeat) -> None:
        """Sends a heartbeat, or the echo of one, behind everything before, in a frame of its own: a frame holds one."""
        self.outbox.seal()
        self.outbox.room(16).heartbeat.CopyFrom(heartbeat)
        self.outbox.seal()

    def pulse(self, now: float) -> Pulse:
        """Checks whether the peer is alive, and sends a heartbeat if one is due (bus side only).

        None is due after a frame in the interval, after a half-close or before the stream is open. After a heartbeat
        without answer the next ones follow at the busy interval. A peer that only sends gets one at the idle interval,
        whatever else delays its heartbeats, so that it can tell a quiet bus from a dead one.

        Returns:
            HUNG once, when the calls of the peer are to end; a peer that is not suspect yet becomes so with it.
        """
        if self.half_closed or self.state in (State.OPENING, State.CLOSED):
            return Pulse.FINE
        if self.outbox.taken != self._taken_before:
            self._taken_before, self._last_sent = self.outbox.taken, self._last_check
        self._last_check = now
        if not self.pending:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        waiting = self.last_probe > self.last_heard
        timings = self.timings
        idle = timings.idle_heartbeat_seconds
        interval = timings.busy_heartbeat_seconds if self.pending or waiting else idle
        # A peer that was idle has as long as one that was busy.
        begun = self._busy_since if self._busy_since is not None and not waiting else -math.inf
        due = max(self.last_heard, self.last_probe, begun) + interval
        if now < due and now < max(self._last_sent + idle, begun + interval):
            if not self.pending and not waiting:
                self.quiet_until = min(due, self._last_sent + idle)
            return Pulse.FINE
        if waiting and now >= due:
            self.missed += 1
            if self.missed >= timings.missed_heartbeats_gone:
                return Pulse.GONE
        self.send_heartbeat(now)
        self.last_probe = due if 0 <= now - due < interval / 2 else now  # so that late ticks do not add up
        suspect = self.missed >= max(1, timings.missed_heartbeats // 2)
        pulse = Pulse.SUSPECT if suspect and not self.suspect else Pulse.PROBE
        if suspect and not self.suspect:
            self.suspect = True
            self._update()
        return Pulse.HUNG if waiting and self.missed == timings.missed_heartbeats else pulse

    def send_heartbeat(self, now: float) -> int:
        """Sends a heartbeat; returns its sequence number."""
        self._probes += 1
        self.last_probe = self._last_sent = now
        self.quiet_until = -math.inf
        self.outbox.room(16).heartbeat.CopyFrom(wire.Heartbeat(sequence=self._probes))
        return self._probes

    def delay_pulse(self, seconds: float) -> None:
        """Moves every moment by which the peer is judged, because this process was late itself."""
        self.last_heard += seconds
        self.last_probe += seconds
        if self._busy_since is not None:
            self._busy_since += seconds

    def restart_pulse(self, now: float) -> None:
        """Starts counting anew, because this process stood still itself (a suspended machine, a debugger)."""
        self.last_heard = self.last_probe = now
        self.missed = 0

    def end(self) -> tuple[list[Any], list[Any]]:
        """Ends the stream.

        Returns:
            The values of `pending` and of `in_flight`; both tables are empty afterwards. A second call returns two
            empty lists.
        """
        self.state = State.CLOSED
        self._update()
        pending, in_flight = list(self.pending.values()), list(self.in_flight.values())
        self.pending.clear()
        self.in_flight.clear()
        return pending, in_flight


def _rank(field: tuple[str, Any]) -> int:
    return _RANK[field[0]]


def _no_frame() -> Any:
    raise RuntimeError("the outbox has no open frame: call room() or open() first")


def _ignore() -> None:
    """Does nothing: the default until a driver connects a writer."""
