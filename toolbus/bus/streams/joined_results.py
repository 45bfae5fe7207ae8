"""Lets results wait for each other where a peer answers many calls in small messages.

A message costs the bus as much as many items. Results that are passed on one by one make their caller send its next
calls one by one, the plugin gets them so, and messages never grow again. So while small messages of results come in a
row, the outbox of a caller that waits for many calls is held, for a millisecond at most. All others get their results
at once, and whatever else is put into a held outbox goes out at once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.streams.peer import Peer
from toolbus.session import Outbox
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

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
