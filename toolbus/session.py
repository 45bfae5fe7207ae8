"""One stream as a state machine. The same class serves both ends of the wire.

It owns what belongs to one stream: its state, what waits to be written, which calls each side owes the other, and
whether the peer is alive. It knows no sockets, no clock and no catalog: whoever drives it passes frames and the
time in and does what comes back. This file does not know which side it is on beyond the two tables below, so the
same rules bind both.

The states::

    OPENING ──attach/attached──▶ LIVE ──drain received──▶ LEAVING ──nothing owed──▶ CLOSED
       └───────────────────────────┴── end of stream, error, silence ──▲────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from toolbus.errors import ProtocolError
from toolbus.tool import KIB, MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# A frame carries at most this much. Slices of 128 run 1.35 times as fast as whole frames of 512, which bounce in
# lockstep between processes (design.md 4).
FRAME_ITEMS = 128
FRAME_BYTES = 1 * MIB
MAX_ITEMS = 4096  # of one kind in a frame that arrives: a frame of 2 MB can hold a million empty calls
DEFAULT_MESSAGE_BYTES = 4 * MIB  # what a gRPC client receives unless told otherwise
ITEM_OVERHEAD_BYTES = 4 * KIB  # room kept in a frame for everything about an item but its JSON

# Heartbeats (design.md 4): an exchange costs the bus about 300 µs, so an idle session is asked less often.
BUSY_INTERVAL = 2.0
IDLE_INTERVAL = 10.0
MISSED_SUSPECT = 3
MISSED_GONE = 10


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


# The order in which the arms of a frame are read: a chunk before the result that ends its call.
READING_ORDER = ("attach", "attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain")
_RANK = {arm: rank for rank, arm in enumerate(READING_ORDER)}

_ALL_FROM_PEER = frozenset({"attach", "calls", "progress", "results", "cancels", "heartbeat", "drain"})
_ALL_FROM_BUS = frozenset({"attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain"})

# (side, state) → arms that may arrive. What arrives in CLOSED is ignored: it was on its way.
_MAY_ARRIVE: dict[tuple[Side, State], frozenset[str]] = {
    (Side.BUS, State.OPENING): _ALL_FROM_PEER,  # attach must be among them, checked below
    (Side.BUS, State.LIVE): _ALL_FROM_PEER,
    (Side.BUS, State.LEAVING): _ALL_FROM_PEER - {"attach"},  # but one that crossed our goodbye, see `receive`
    (Side.BUS, State.CLOSED): frozenset(),
    (Side.PEER, State.OPENING): _ALL_FROM_BUS,
    (Side.PEER, State.LIVE): _ALL_FROM_BUS,
    (Side.PEER, State.LEAVING): _ALL_FROM_BUS,
    (Side.PEER, State.CLOSED): frozenset(),
}
_LISTS = frozenset({"calls", "progress", "results", "cancels"})
_OPENING_ARM = {Side.BUS: "attach", Side.PEER: "attached"}

Frame = TypeVar("Frame", wire.InvokeRequest, wire.InvokeResponse)


class Pool:
    """What waits in all outboxes of a bus together.

    Args:
        max_bytes: above it, the outbox that holds the most is flooded, whichever grows: a slow reader pays, no other.
    """

    __slots__ = ("bytes", "max_bytes", "outboxes")

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.max_bytes = max_bytes
        self.outboxes: dict[Outbox[Any], int] = {}  # those in which sealed frames wait, with the bytes of these

    def count(self, outbox: Outbox[Any], waiting: int, more: int) -> None:
        """Notes that an outbox has ``waiting`` bytes now, ``more`` than before."""
        self.bytes += more
        if waiting:
            self.outboxes[outbox] = waiting
        else:
            self.outboxes.pop(outbox, None)
        if more > 0 and self.bytes > self.max_bytes:
            max(self.outboxes, key=self.outboxes.__getitem__).flooded()


class Outbox(Generic[Frame]):
    """What waits to be written, already in frames.

    Items are built straight into the open frame, so nothing that came in is kept alive by what goes out. A frame is
    numbered when it is opened and *handed over* when it is taken: a call in frame n has reached the writer's write
    once ``taken >= n``.

    An item takes as much of a frame's bytes as it has, and at least the share of one in ``FRAME_ITEMS``; so one
    number, ``space``, bounds both. The hot path of calls and results goes round ``room``: it takes ``least`` from
    ``space`` and builds with ``add_call`` and ``add_result``, whose lookups would cost more than the item.
    """

    __slots__ = (
        "_frames",
        "_new_frame",
        "_sealed_bytes",
        "add_call",
        "add_result",
        "flooded",
        "frame_bytes",
        "least",
        "max_bytes",
        "opened",
        "pool",
        "space",
        "taken",
        "wake",
    )

    def __init__(self, new_frame: Callable[[], Frame]) -> None:
        self._new_frame: Callable[[], Frame] = new_frame
        self._frames: deque[tuple[Frame, int]] = deque()  # (frame, its bytes once sealed); the last may be open
        self._sealed_bytes = 0  # bytes in all frames but the open one
        self.space = -1  # what the open frame still takes; negative: the next item opens another
        self.frame_bytes = FRAME_BYTES  # lowered where the peer takes only smaller messages
        self.least = FRAME_BYTES // FRAME_ITEMS  # what the smallest item takes
        self.opened = 0  # number of the newest frame
        self.taken = 0  # number of the newest frame handed to the writer
        self.add_call: Callable[[], pb.ToolCall] = _no_frame  # the open frame's
        self.add_result: Callable[[], pb.ToolResult] = _no_frame  # the open frame's
        self.max_bytes = 64 * MIB  # what may wait for a peer that reads slowly
        self.pool = Pool(256 * MIB)  # shared with the other outboxes of a bus
        self.wake: Callable[[], None] = _nobody_waits  # tells the writer that the first frame was opened
        self.flooded: Callable[[], None] = _nobody_waits  # tells that more waits than may

    def __repr__(self) -> str:
        return f"<Outbox frames={len(self._frames)} bytes={self.waiting_bytes} taken={self.taken}>"

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def waiting_bytes(self) -> int:
        """Bytes in all frames not yet taken."""
        return self._sealed_bytes + (self._frames[-1][0].ByteSize() if self._frames else 0)

    def take_only(self, largest: int) -> None:
        """Keeps frames below what the peer can receive.

        Those who put items count characters, which take up to four bytes each.
        """
        self.frame_bytes = min(FRAME_BYTES, largest // 4)
        self.least = self.frame_bytes // FRAME_ITEMS

    def room(self, size: int) -> Frame:
        """Returns the frame to which the caller now adds one item of about ``size`` bytes."""
        needed = max(size, self.least)
        if needed > self.space:
            self.open()
        self.space -= needed
        return self._frames[-1][0]

    def seal(self) -> None:
        """Closes the open frame: what comes next is read after everything that is in it."""
        self.space = -1

    def open(self) -> None:
        """Opens another frame; the one before is complete."""
        if self._frames:
            last, _ = self._frames[-1]
            size = last.ByteSize()
            self._frames[-1] = (last, size)
            self._count(size)
        frame = self._new_frame()
        self._frames.append((frame, 0))
        self.space = self.frame_bytes
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
        """Takes a call out of a frame that still waits. Returns whether it was there."""
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

    def discard(self) -> None:
        """Forgets everything that waits: nobody will read it."""
        self._frames.clear()
        self._count(-self._sealed_bytes)
        self.space = -1
        self.taken = self.opened


class Pulse(Enum):
    """What the silence of a peer means."""

    FINE = "fine"
    PROBE = "probe"
    SUSPECT = "suspect"
    GONE = "gone"


class Session(Generic[Frame]):
    """One stream, from its first message to its end.

    Attributes:
        outbox: what waits to be written; the one writer takes from it.
        owed: calls that the peer owes us, by the id they have on this stream. The values belong to the driver.
        asked: calls that the peer asked of us, by the id the peer gave them. The values belong to the driver.
    """

    __slots__ = (
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
        "state",
        "suspect",
        "takes_calls",
    )

    def __init__(self, side: Side, new_frame: Callable[[], Frame], now: float) -> None:
        self._side = side
        self.state = State.OPENING
        self.outbox: Outbox[Frame] = Outbox(new_frame)
        self.pending: dict[str, Any] = {}
        self.in_flight: dict[str, Any] = {}
        self.max_in_flight = 0  # how many calls the peer takes; set when attached
        self.max_item_bytes = DEFAULT_MESSAGE_BYTES - ITEM_OVERHEAD_BYTES  # the largest item that the peer can receive
        self.last_heard = now  # when the last frame came
        self.last_probe = now  # when the last heartbeat was sent
        self.missed = 0  # heartbeats in a row without any frame since
        self._taken_before = 0  # frames that had been written when the pulse was last judged
        self._last_sent = now  # when the pulse last saw that one had been
        self._probes = 0  # heartbeats sent in all; their sequence number
        self.suspect = False  # whether so many were missed that the peer gets no new calls
        self.half_closed = False  # whether the peer has ended its direction and can no longer echo
        self.drain_sent = False  # whether we have said goodbye
        self.takes_calls = False  # whether a new call may be sent to the peer; an attribute, for the hot path asks it
        self._may_arrive = _MAY_ARRIVE[side, State.OPENING]  # arms

    def __repr__(self) -> str:
        return (
            f"<Session {self._side.value} {self.state.value}{' suspect' if self.suspect else ''}"
            f" pending={len(self.pending)} in_flight={len(self.in_flight)} {self.outbox!r}>"
        )

    @property
    def idle(self) -> bool:
        """Whether neither side owes the other anything and nothing waits to be written."""
        return not self.pending and not self.in_flight and not self.outbox

    def receive(self, frame: wire.InvokeRequest | wire.InvokeResponse, now: float) -> list[tuple[str, Any]]:
        """Takes in a frame: the peer is alive, and these arms are to be handled, in this order.

        Raises:
            ProtocolError: where an arm may not come in this state; the stream must end.
        """
        self.last_heard = now
        self.missed = 0
        if self.suspect:
            self.suspect = False
            self._judge()
        arms = [(descriptor.name, value) for descriptor, value in frame.ListFields()]
        if len(arms) > 1:
            arms.sort(key=_rank)
        if self.state is State.OPENING:
            opening = _OPENING_ARM[self._side]
            if not arms or arms[0][0] != opening:
                first = arms[0][0] if arms else "empty"
                raise ProtocolError(
                    f"the first message on the stream is {first!r}, it must hold {opening!r}: "
                    "see docs/protocol.md, 'Opening a stream'"
                )
        may_arrive = self._may_arrive
        for arm, value in arms:
            if arm not in may_arrive:
                if self.state is State.CLOSED:
                    return []
                raise ProtocolError(f"{arm!r} may not come while the stream is {self.state.value}")
            if arm in _LISTS and len(value) > MAX_ITEMS:
                raise ProtocolError(f"a message holds {len(value)} {arm}, at most {MAX_ITEMS} are read: split it")
        return arms

    def open(self, max_in_flight: int, max_message_bytes: int) -> None:
        """Enters LIVE with what the peer said about itself."""
        self.state = State.LIVE
        self.max_in_flight = max_in_flight
        most = max_message_bytes or DEFAULT_MESSAGE_BYTES
        self.max_item_bytes = max(most - ITEM_OVERHEAD_BYTES, most // 2)
        self.outbox.take_only(self.max_item_bytes)
        self._judge()

    def leave(self) -> None:
        """The peer said goodbye: it takes no new calls and finishes those it has."""
        if self.state is State.LIVE:
            self.state = State.LEAVING
            self._judge()

    def close_half(self) -> None:
        """The peer ended its direction: it can neither answer nor echo any more."""
        self.half_closed = True
        self.leave()
        self._judge()

    def _judge(self) -> None:
        """Works out what follows from the state, once for many frames."""
        self.takes_calls = self.state is State.LIVE and not self.suspect and not self.half_closed
        self._may_arrive = _MAY_ARRIVE[self._side, self.state]
        if self.drain_sent and self.state is State.LEAVING:
            self._may_arrive |= {"attach"}  # it was on its way when we said goodbye

    def send_drain(self, reason: str, grace_seconds: float = 0.0) -> None:
        """Says goodbye, once."""
        if not self.drain_sent and self.state is not State.CLOSED:
            self.drain_sent = True
            self._judge()
            self.outbox.room(len(reason) + 16).drain.MergeFrom(wire.Drain(reason=reason, grace_seconds=grace_seconds))
            self.outbox.seal()

    def echo(self, heartbeat: wire.Heartbeat) -> None:
        """Answers a heartbeat of the bus."""
        self.outbox.room(16).heartbeat.CopyFrom(heartbeat)

    def pulse(self, now: float) -> Pulse:
        """Judges the peer's silence and sends a heartbeat where one is due (bus side only).

        A frame in the interval, a half-closed direction or a stream that has not opened yet need none. Once one
        heartbeat has gone unanswered the next follow at the busy interval. A peer that only sends gets one at the
        idle interval, so that it can tell a silent bus from a dead one.
        """
        if self.half_closed or self.state in (State.OPENING, State.CLOSED):
            return Pulse.FINE
        if self.outbox.taken != self._taken_before:
            self._taken_before, self._last_sent = self.outbox.taken, now
        waiting = self.last_probe > self.last_heard
        interval = BUSY_INTERVAL if self.pending or waiting else IDLE_INTERVAL
        due = max(self.last_heard, self.last_probe) + interval
        if now < due and now < self._last_sent + IDLE_INTERVAL:
            return Pulse.FINE
        if waiting and now >= due:
            self.missed += 1
            if self.missed >= MISSED_GONE:
                return Pulse.GONE
        self._probes += 1
        self._last_sent = now
        self.last_probe = due if 0 <= now - due < interval / 2 else now  # late ticks do not add up
        self.outbox.room(16).heartbeat.CopyFrom(wire.Heartbeat(sequence=self._probes))
        if self.missed >= MISSED_SUSPECT and not self.suspect:
            self.suspect = True
            self._judge()
            return Pulse.SUSPECT
        return Pulse.PROBE

    def restart_pulse(self, now: float) -> None:
        """Starts counting anew: our own clock stood still (a suspended machine, a debugger)."""
        self.last_heard = self.last_probe = self._last_sent = now
        self.missed = 0

    def end(self) -> tuple[list[Any], list[Any]]:
        """Ends the stream.

        Returns:
            What the peer owed, and what the peer asked for; both tables are empty afterwards. A second call returns
            two empty lists.
        """
        self.state = State.CLOSED
        self._judge()
        pending, in_flight = list(self.pending.values()), list(self.in_flight.values())
        self.pending.clear()
        self.in_flight.clear()
        return pending, in_flight


def _rank(arm: tuple[str, Any]) -> int:
    return _RANK[arm[0]]


def _no_frame() -> Any:
    raise RuntimeError("the outbox has no open frame: take space first")


def _nobody_waits() -> None:
    """Stands in until a writer has told the outbox how to wake it."""
