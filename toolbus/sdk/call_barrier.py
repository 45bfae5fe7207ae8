"""Holds the calls that arrive after a stall of this process, until the bus has echoed a heartbeat.

A process that was stopped finds calls in its socket that the bus has ended meanwhile; their cancels, or the end of the
stream, come behind them. The bus echoes a heartbeat behind everything that it has sent before. So the callers of all
calls that are not cancelled when the echo comes still wait for them. The same is true of calls that wait in a queue of
this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from toolbus.errors import Code, Stage
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.sdk.peer_delegate import IncomingCall
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.attempt import Attempt

Take = Callable[[PeerSession, Mapping[str, pb.ToolCall]], Mapping[str, IncomingCall]]
Answer = Callable[[PeerSession, Result], None]


class Postponed(Protocol):
    """A call that waits in a queue of this process."""

    session: PeerSession

    def resume(self) -> None:
        """Begins it, unless it was cancelled."""


class CallBarrier:
    """The barrier of one connection. Everything runs on the connection's loop.

    Args:
        handlers: the connection's handler of each field of a message; the barrier replaces that of calls while it
            holds them.
        take: begins to answer calls, given by their ids.
        answer: answers a call that never begins.

    Attributes:
        is_holding: whether calls are held now; other threads may read it.
    """

    def __init__(self, handlers: dict[str, Callable[[Attempt, Any], None]], take: Take, answer: Answer) -> None:
        self._handlers = handlers
        self._on_calls = handlers["calls"]  # the handler while no call is held
        self._take = take
        self._answer = answer
        self._session: PeerSession | None = None  # the stream whose calls are held; None while none are
        self._heartbeat = 0  # the heartbeat whose echo releases them
        self._held: list[Postponed] = []  # oldest first
        self.is_holding = False

    def __repr__(self) -> str:
        return f"<CallBarrier {f'holding {len(self._held)}' if self.is_holding else 'open'}>"

    def hold(self, session: PeerSession) -> None:
        """Holds the calls of a stream from now on, until the bus echoes a heartbeat that is sent now."""
        self._session, self._heartbeat, self.is_holding = session, session.send_own_heartbeat(), True
        self._handlers["calls"] = self._hold_calls

    def _hold_calls(self, attempt: Attempt, calls: Iterable[pb.ToolCall]) -> None:
        session = attempt.session
        for call in calls:
            if call.call_id not in session.in_flight:
                held = _HeldCall(session, call, self._take, self._answer)
                session.in_flight[call.call_id] = held
                self._held.append(held)

    def postpone(self, job: Postponed) -> None:
        """Holds a call that was about to begin; begins it if no call is held any more."""
        if self.is_holding and job.session is self._session:
            self._held.append(job)
        else:
            job.resume()

    def echo(self, heartbeat: wire.Heartbeat) -> None:
        """Begins the held calls if this is the echo of the heartbeat that was sent for them."""
        if self.is_holding and heartbeat.sequence >= self._heartbeat:
            held = self._held
            self.release()
            for each in held:
                each.resume()

    def release(self) -> None:
        """Holds no more calls and forgets those that it has: their stream has ended, or `echo` begins them."""
        self._held, self._session, self.is_holding = [], None, False
        self._handlers["calls"] = self._on_calls


class _HeldCall:
    """A call that has arrived and not begun."""

    __slots__ = ("_answer", "_call", "_cancelled", "_take", "session")

    def __init__(self, session: PeerSession, call: pb.ToolCall, take: Take, answer: Answer) -> None:
        self.session = session
        self._call = call
        self._take = take
        self._answer = answer
        self._cancelled = False

    def cancel(self, reason: str) -> None:
        """Ends the call, which never ran."""
        if not self._cancelled:
            self._cancelled = True
            text = f"the call of {self._call.name} was cancelled before it began: {reason}"
            error = CallError(Code.CANCELLED, text, Stage.NOT_DISPATCHED)
            self._answer(self.session, Result(self._call.call_id, is_error=True, error=error))

    def resume(self) -> None:
        """Begins the call, unless it was cancelled."""
        if not self._cancelled:
            self.session.in_flight.update(self._take(self.session, {self._call.call_id: self._call}))
