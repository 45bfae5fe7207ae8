"""Holds the calls of one peer that may be older than the end of a stall, until the peer has answered a heartbeat.

A bus that was stopped finds in its sockets calls that their callers may have given up meanwhile. Their cancels, or the
ends of their streams, come behind them and before the echo of a heartbeat that the bus sends now. So a caller still
waits for each call that is not cancelled when the echo comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import Refused, bad_call_id
from toolbus.bus.streams.peer import Peer
from toolbus.errors import Code
from toolbus.session import State
from toolbus.stall import StallWatch
from toolbus.tool import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

HELD_BYTES = 4 * MIB  # of one peer; what comes beyond it is refused, and may be sent again


class HeldBudget:
    """How many more bytes of calls a bus holds, for all peers together."""

    __slots__ = ("left",)

    def __init__(self, held_bytes: int) -> None:
        self.left = held_bytes


class HeldCalls:
    """The held calls of one peer. Its methods stand in for those of the dispatcher while `holding`.

    Attributes:
        holding: whether calls of the peer are held now.
    """

    __slots__ = ("_budget", "_bytes", "_calls", "_dispatcher", "_heartbeat", "_peer", "_watch", "holding")

    def __init__(self, peer: Peer, dispatcher: Dispatcher, watch: StallWatch, budget: HeldBudget) -> None:
        self._peer = peer
        self._budget = budget
        self._dispatcher = dispatcher
        self._watch = watch
        self._calls: dict[str, pb.ToolCall] = {}  # by call_id, oldest first
        self._bytes = 0
        self._heartbeat = 0  # the heartbeat whose echo ends the hold; 0: none was sent yet
        self.holding = False

    def __repr__(self) -> str:
        return f"<HeldCalls {len(self._calls)}{' holding' if self.holding else ''}>"

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, now: float) -> None:
        """Holds calls from now on; only the echo of a heartbeat that is sent now or later ends that."""
        self.holding = True
        self._heartbeat = 0
        if (self._calls or self._watch.suspended) and self._peer.state in (State.LIVE, State.LEAVING):
            self._heartbeat = self._peer.send_heartbeat(now)

    def settle(self, now: float) -> None:
        """Ends the hold where nothing came: all that had arrived when the stall ended has been read by now."""
        if not self._heartbeat and not self._calls:
            self.release(now)

    def calls(self, calls: Iterable[pb.ToolCall], now: float) -> None:
        """Holds calls; refuses those beyond the bounds."""
        if not self._heartbeat:
            self._heartbeat = self._peer.send_heartbeat(now)
        for call in calls:
            size = call.ByteSize()
            if call.call_id in self._calls:
                self._dispatcher.refused.refuse(self._peer, call, bad_call_id(call.call_id), now)
            elif len(self._calls) >= self._peer.max_in_flight or size > min(
                HELD_BYTES - self._bytes, self._budget.left
            ):
                self._dispatcher.refused.refuse(self._peer, call, self._outlived(), now)
            else:
                self._calls[call.call_id] = call
                self._count(size)

    def cancels(self, cancels: Iterable[pb.ToolCancel], now: float) -> None:
        """Ends held calls that their caller cancels; any other goes to the dispatcher."""
        for cancel in cancels:
            call = self._calls.pop(cancel.call_id, None)
            if call is None:
                self._dispatcher.endings.cancels(self._peer, [cancel], now)
                continue
            self._count(-call.ByteSize())
            reason = cancel.reason[:200] or "cancelled"
            self._dispatcher.refused.refuse(
                self._peer, call, Refused(Code.CANCELLED, f"the caller cancelled the call: {reason}"), now
            )

    def echo(self, heartbeat: wire.Heartbeat, now: float) -> None:
        """Ends the hold at the echo of the heartbeat that was sent for it, or of a newer one."""
        if self._heartbeat and heartbeat.sequence >= self._heartbeat:
            self.release(now)

    def release(self, now: float) -> None:
        """Hands the held calls to the dispatcher, and ends the hold.

        A call whose time may be over is refused: its caller sends it again, if it still waits. The others have all of
        their time from now on: how much of it has passed is not known, and a caller that waits no longer cancels.
        """
        calls, age = self._calls, self._watch.age
        self.drop()
        in_time = []
        for call in calls.values():
            if _has_time(call, age, self._peer.longest_timeout):
                in_time.append(call)
            else:
                self._dispatcher.refused.refuse(self._peer, call, self._outlived(), now)
        if in_time:
            self._dispatcher.calls(self._peer, in_time, now)

    def drop(self) -> None:
        """Drops the held calls and ends the hold."""
        self._count(-self._bytes)
        self._calls, self._heartbeat, self.holding = {}, 0, False

    def _count(self, size: int) -> None:
        self._bytes += size
        self._budget.left -= size

    def _outlived(self) -> Refused:
        return Refused(
            Code.UNAVAILABLE,
            f"the bus stood still for up to {self._watch.age:.1f} s and cannot tell whether the caller still waits: "
            "send the call again",
            retry_safe=True,
        )


def _has_time(call: pb.ToolCall, age: float, longest: float) -> bool:
    """Tells whether the limits that a call states may still hold at an age; invalid limits are left to others."""
    soft = call.background_after_seconds
    limits = (soft, call.timeout_seconds) if soft > 0.0 else (min(call.timeout_seconds, longest),)
    return all(limit > age for limit in limits if limit > 0.0)
