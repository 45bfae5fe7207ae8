"""Serves one Invoke stream: what follows each of its messages, and what is written to it.

Session, presence and dispatcher decide; nothing here ever waits. A carrier, of gRPC or of the lane, brings the messages
and takes those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from toolbus.bus.access.budgets import MANY_TOOLS
from toolbus.bus.calls.call import Call
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import Refused, bad_call_id
from toolbus.bus.catalog.entry import Trust
from toolbus.bus.streams.peer import Peer, no_rpc
from toolbus.bus.streams.presence import Presence
from toolbus.common.stall import StallWatch
from toolbus.errors import Code, ToolBusError, grpc_status
from toolbus.protocol.session import Outbox, State
from toolbus.protocol.tool import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# A bus that was stopped finds in its sockets calls that their callers may have given up meanwhile. Their cancels, or
# the ends of their streams, come behind them and before the echo of a heartbeat that the bus sends now. So a caller
# still waits for each call that is not cancelled when the echo comes. The same goes for calls that waited here for the
# turn of their peer: what it sent meanwhile is behind them.

LATE_SECONDS = 1.0  # that a message waits before its calls may be old
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

    __slots__ = ("_budget", "_bytes", "_calls", "_dispatcher", "_heartbeat", "_peer", "_since", "_watch", "holding")

    def __init__(self, peer: Peer, dispatcher: Dispatcher, watch: StallWatch, budget: HeldBudget) -> None:
        self._peer = peer
        self._budget = budget
        self._dispatcher = dispatcher
        self._watch = watch
        self._calls: dict[str, pb.ToolCall] = {}  # by call_id, oldest first
        self._bytes = 0
        self._heartbeat = 0  # the heartbeat whose echo ends the hold; 0: none was sent yet
        self._since = 0.0  # the moment of the watch's clock since when they may wait
        self.holding = False

    def __repr__(self) -> str:
        return f"<HeldCalls {len(self._calls)}{' holding' if self.holding else ''}>"

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, now: float, since: float) -> None:
        """Holds calls from now on; only the echo of a heartbeat that is sent now or later ends that.

        Args:
            since: the moment of the watch's clock since when what is read now may wait.
        """
        self._since = min(since, self._since) if self.holding else since
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
        calls, age = self._calls, self._age
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

    @property
    def _age(self) -> float:
        return self._watch.clock() - self._since

    def _outlived(self) -> Refused:
        return Refused(
            Code.UNAVAILABLE,
            f"the bus read the call up to {self._age:.1f} s after it was sent and cannot tell whether the caller "
            "still waits: send the call again",
            retry_safe=True,
        )


def _has_time(call: pb.ToolCall, age: float, longest: float) -> bool:
    """Tells whether the limits that a call states may still hold at an age; invalid limits are left to others."""
    soft = call.background_after_seconds
    limits = (soft, call.timeout_seconds) if soft > 0.0 else (min(call.timeout_seconds, longest),)
    return all(limit > age for limit in limits if limit > 0.0)


# A message costs the bus as much as many items. Results that are passed on one by one make their caller send its next
# calls one by one, the plugin gets them so, and messages never grow again. So while small messages of results come in a
# row, the outbox of a caller that waits for many calls is held, for a millisecond at most. All others get their results
# at once, and whatever else is put into a held outbox goes out at once, too.

HOLD_SECONDS = 0.001  # that a result waits at most
FEW = 4  # results of a small message
MANY = 8  # calls that a caller still waits for; below, nothing is held
ROW = 3  # small messages that make a row
ROW_SECONDS = 0.01  # without a small message that end a row


class HeldOutboxes:
    """The outboxes of one bus that are held.

    Args:
        later: calls a function after so many seconds.
    """

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        self._later = later
        self._held: list[Outbox[wire.InvokeResponse]] = []  # some may have been released; empty: no timer runs

    def __repr__(self) -> str:
        return f"<HeldOutboxes {len(self._held)}>"

    def hold(self, outbox: Outbox[wire.InvokeResponse]) -> None:
        """Holds an outbox until the timer ends, which began with the first that is held."""
        outbox.held = True
        if not self._held:
            self._later(HOLD_SECONDS, self._release)
        self._held.append(outbox)

    def _release(self) -> None:
        held, self._held = self._held, []
        for outbox in held:
            outbox.release()


class JoinedResults:
    """The results of one peer on their way to the dispatcher."""

    __slots__ = ("_dispatcher", "_outboxes", "_peer", "_row", "_row_ends")

    def __init__(self, peer: Peer, dispatcher: Dispatcher, outboxes: HeldOutboxes) -> None:
        self._peer = peer
        self._dispatcher = dispatcher
        self._outboxes = outboxes
        self._row = 0  # small messages that have come in a row
        self._row_ends = 0.0  # when the row is over

    def __repr__(self) -> str:
        return f"<JoinedResults row={self._row}>"

    def take(self, results: Sequence[pb.ToolResult], now: float) -> None:
        """Takes the results of a message; those of a small one in a row may wait for the next."""
        if len(results) > FEW:
            self._row = 0
        else:
            self._row = self._row + 1 if now < self._row_ends else 1
            self._row_ends = now + ROW_SECONDS
            if self._row >= ROW and len(self._peer.pending) > len(results):  # a lone call pays nothing
                self._join(results, now)
                return
        self._dispatcher.results(self._peer, results, now)

    def _join(self, results: Sequence[pb.ToolResult], now: float) -> None:
        pending = self._peer.pending
        callers: list[Peer] = []
        for result in results:
            call: Call | None = pending.get(result.call_id)
            caller = call.caller if call is not None else None
            if isinstance(caller, Peer) and caller not in callers and (caller.outbox.held or not caller.outbox):
                caller.outbox.held = False  # else these results would release it
                callers.append(caller)
        self._dispatcher.results(self._peer, results, now)
        for caller in callers:
            if pending and len(caller.in_flight) >= MANY and caller.outbox:
                self._outboxes.hold(caller.outbox)
            else:
                caller.outbox.wake()


log = logging.getLogger("toolbus.grpc")

_COUNTED = frozenset({"calls", "results"})  # the fields whose items the traffic counts


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts that the streams of one server share."""

    presence: Presence
    dispatcher: Dispatcher
    check: Callable[[wire.Attach], None]  # raises where the address does not allow it
    stalls: StallWatch
    held_budget: HeldBudget
    held_outboxes: HeldOutboxes


class Carrier(Protocol):
    """Carries one stream. It passes on what it reads, and writes what `InvokeStream.next_frame` returns."""

    def wake(self) -> None:
        """Notes that a frame waits or that the stream has ended; it then calls `next_frame` soon, not at once."""


class InvokeStream:
    """One Invoke stream, from its opening to its end.

    Attributes:
        ended: status and text with which it ended; None before.
    """

    def __init__(self, shared: SharedParts, peer: Peer, carrier: Carrier) -> None:
        presence, dispatcher = shared.presence, shared.dispatcher
        self.ended: tuple[str, str] | None = None
        self._presence = presence
        self._seams = dispatcher.seams
        self._peer = peer
        self._held = HeldCalls(peer, dispatcher, shared.stalls, shared.held_budget)
        self._stalls = shared.stalls
        self._check = shared.check
        self._wake = carrier.wake
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.call_later(peer.timings.attach_seconds, self._never_attached)
        peer.close = self._close
        peer.outbox.wake = self._wake
        peer.outbox.flooded = self._flooded
        self._handle: dict[str, Callable[[Any, float], None]] = {
            "attach": self._attach,
            "calls": lambda calls, now: dispatcher.calls(peer, calls, now),
            "progress": lambda progress, now: dispatcher.progress(peer, progress, now),
            "results": JoinedResults(peer, dispatcher, shared.held_outboxes).take,
            "cancels": lambda cancels, now: dispatcher.endings.cancels(peer, cancels, now),
            "heartbeat": self._heartbeat,
            "drain": lambda drain, now: presence.drain_received(peer),
        }
        self._plain = {field: self._handle[field] for field in ("calls", "cancels", "heartbeat")}

    def _attach(self, attach: wire.Attach, now: float) -> None:
        self._check(attach)
        self._presence.attach(self._peer, attach, now)

    def _heartbeat(self, heartbeat: wire.Heartbeat, now: float) -> None:
        if heartbeat.from_peer:  # any other is an echo: like every frame it shows that the peer is alive
            self._peer.send_alone(heartbeat)

    def hold(self, since: float) -> bool:
        """Holds calls that may have been sent at a moment of the stall watch or later; returns whether any can come."""
        if self._peer.state is State.CLOSED or self._peer.half_closed:
            return False
        now = time.monotonic()
        if self._stalls.suspended:  # the tick judges a stall that the monotonic clock has counted
            self._peer.restart_pulse(now)
        self._held.begin(now, since)
        self._handle.update(calls=self._held.calls, cancels=self._held.cancels, heartbeat=self._held_heartbeat)
        return True

    def settle(self) -> None:
        """Stops holding where nothing came since the stall."""
        self._held.settle(time.monotonic())
        self._resume()

    def _held_heartbeat(self, heartbeat: wire.Heartbeat, now: float) -> None:
        if heartbeat.from_peer:
            self._peer.send_alone(heartbeat)
        else:
            self._held.echo(heartbeat, now)
            self._resume()

    def _resume(self) -> None:
        if not self._held.holding:
            self._handle.update(self._plain)

    def waits(self, frame: wire.InvokeRequest) -> bool:
        """Tells whether a message is one for `take`: of any peer but an own program, or with many tools."""
        return self._peer.trust is not Trust.OWN or (frame.HasField("attach") and len(frame.attach.tools) > MANY_TOOLS)

    async def take(self, frame: wire.InvokeRequest) -> None:
        """Handles a message within the budgets of its peer; an own program only lets others have their turns."""
        principal = self._peer.principal
        if frame.HasField("attach"):
            self._opening.cancel()
            principal = principal.of_source(frame.attach.source)
        sender = None if self._peer.trust is Trust.OWN else principal
        came = self._stalls.clock()

        def receive(frame: wire.InvokeRequest) -> None:
            if frame.calls and not self._held.holding and self._stalls.clock() - came > LATE_SECONDS:
                self.hold(came)
            self.receive(frame)

        self._peer.unread = True
        try:
            await self._seams.budgets.take(sender, self._peer.pending, frame, receive, self._may_attach)
        except Exception as error:
            self._fail(error)
        finally:
            self._peer.unread = False

    def _may_attach(self, frame: wire.InvokeRequest) -> bool:
        if self._peer.state is State.OPENING:
            with suppress(ToolBusError):
                self._check(frame.attach)
                self._presence.handshake.check(self._peer, frame.attach)
                return True
        return self._peer.state is State.LIVE

    def receive(self, frame: wire.InvokeRequest) -> None:
        """Handles a message of the peer; what breaks a rule ends the stream."""
        peer, traffic, handle = self._peer, self._presence.traffic, self._handle
        self._note_stall()
        now = time.monotonic()
        suspect = peer.suspect
        traffic.frames_in += 1
        try:
            for field, value in peer.receive(frame, now):
                if field in _COUNTED:
                    traffic.items_in += len(value)
                handle[field](value, now)
            if suspect:
                self._presence.recovered(peer)
            if peer.state is State.LEAVING:
                self._leave_if_done()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ToolBusError):
            log.error("a fault of the bus ended the session of %s", self._peer.source or "a new peer", exc_info=error)
        self.end(*grpc_status(error))

    def undecodable(self, error: DecodeError) -> None:
        """Ends the stream, because something is not a message."""
        self.end("INVALID_ARGUMENT", f"a message cannot be decoded as InvokeRequest: {error}")

    def half_close(self) -> None:
        """Handles that the peer has ended its direction in good order."""
        peer, now = self._peer, time.monotonic()
        self._note_stall()
        if peer.state is State.OPENING:
            self.end("INVALID_ARGUMENT", "the stream ended before its first message: send attach first")
        elif peer.state is not State.CLOSED:
            if self._held:  # the peer cannot echo
                self._held.release(now)
            self._presence.half_closed(peer, now)
            self._leave_if_done()

    def disconnected(self) -> None:
        """Ends the stream, because its connection broke."""
        self.end("UNAVAILABLE", "its connection broke")

    def next_frame(self) -> wire.InvokeResponse | None:
        """Returns the next message to write; None if none waits, and after the last one of a stream that has ended."""
        peer, outbox = self._peer, self._peer.outbox
        frame = None if outbox.held else outbox.take()
        if frame is None:
            if peer.state is State.LEAVING:
                self._leave_if_done()
            return None
        if peer.traced:
            peer.note_sent(time.monotonic())
        traffic = self._presence.traffic
        traffic.frames_out += 1
        traffic.items_out += len(frame.calls) + len(frame.results)
        return frame

    def next_complete(self) -> wire.InvokeResponse | None:
        """Returns the next message while the outbox has only complete ones (`Outbox.full`)."""
        return self.next_frame() if self._peer.outbox else None

    def write_early(self, items: int, full: Callable[[], None]) -> None:
        """Has messages of so many items, which the carrier takes by `next_complete` when it calls ``full``."""
        self._peer.outbox.write_early(items, full)

    def drop(self) -> None:
        """Drops what still waits, and cycles that only a garbage collection would free; for the carrier's end."""
        self._opening.cancel()
        self._held.drop()
        self._handle, self._plain = {}, {}
        self._peer.outbox.disconnect()
        self._peer.close = no_rpc

    def _note_stall(self) -> None:
        if self._stalls.clock() > self._stalls.due:
            self._stalls.notice()

    def _never_attached(self) -> None:
        if self._peer.state is State.OPENING:
            seconds = self._peer.timings.attach_seconds
            self.end("UNAVAILABLE", f"no attach arrived within {seconds:g} s: send it as the first message")

    def _leave_if_done(self) -> None:
        if self._peer.idle and not self._held:
            self.end("OK", "its stream ended" if self._peer.half_closed else "it left")

    def _flooded(self) -> None:
        outbox = self._peer.outbox
        if outbox.waiting_bytes > outbox.max_bytes:
            limit, why = "waiting_bytes", f"more than {outbox.max_bytes} bytes wait for it"
        else:
            limit, why = "held_bytes", f"more than {outbox.pool.max_bytes} bytes wait for all peers, most for it"
        text = f"the peer reads too slowly: {why} (limit {limit})"
        # Later: the dispatcher is in the middle of a frame.
        self._loop.call_soon(self.end, "RESOURCE_EXHAUSTED", text)

    def end(self, status: str, text: str) -> None:
        """Ends the stream with a status, by its name, and a text."""
        self._presence.end(self._peer, text, time.monotonic(), status=status)

    def _close(self, status: str, text: str) -> None:
        if self.ended is None:
            self.ended = status, text
        self._peer.outbox.held = False
        self._wake()
