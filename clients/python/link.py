"""Holds the state of one stream, and of each call that is sent on it.

No state of a stream may reach the next one, on which its call ids are unknown.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable

from call import Call, failure
from outbox import RESULT_BYTES, SENDABLE_BYTES, Outbox

from toolbus.v1 import tool_bus_service_pb2 as messages
from toolbus.v1 import tool_pb2 as pb

LEAVE_SECONDS = 2.0  # for the bus to end the stream after our drain, and again after our half-close
TICK_SECONDS, LATE_SECONDS = 0.5, 0.5  # between two looks at the clock; later by more means a standstill
# The limits of a bus that does not state them.
CALLS_IN_FLIGHT = 256
ARGUMENTS_BYTES = 1024 * 1024
HEARTBEAT_SECONDS = 10.0
DEFAULT_SECONDS, MAX_SECONDS = 30.0, 300.0  # the time of a call without a timeout; the longest of any call
SLACK_SECONDS = 1.0  # that the bus's answer may be late

OnProgress = Callable[[pb.ToolProgress], None]


class Ask:
    """A call of this peer until it has its result.

    Attributes:
        message: what is sent; its id is that of the newest attempt.
        parent: the stream of the call that this one is part of; None for a call of its own.
        on_progress: takes each progress; None drops it.
        timeout, background_after: the caller's, in seconds; 0 for none.
        started: when it was made, by the clock of the loop.
        deadline: until when it waits for a stream, for room, and between attempts.
        last_moment: when it ends even if the bus has not answered.
        outcome: the result of the newest attempt.
        sent_on: the stream on which it is; None while it waits.
        accepted: whether progress has shown that a plugin works on it.
        refusal: the newest of the bus; None before the first.
        timer: for its deadline, then for its last moment; None before the first attempt.
    """

    def __init__(self, message: pb.ToolCall, parent: Link | None, on_progress: OnProgress | None) -> None:
        loop = asyncio.get_running_loop()
        self.message = message
        self.parent = parent
        self.on_progress = on_progress
        self.timeout, self.background_after = message.timeout_seconds, message.background_after_seconds
        self.started = loop.time()
        named = self.background_after or self.timeout
        self.deadline = self.started + (named or DEFAULT_SECONDS)
        self.last_moment = self.started + min(named or MAX_SECONDS, MAX_SECONDS) + SLACK_SECONDS
        self.outcome: asyncio.Future[pb.ToolResult] = loop.create_future()
        self.sent_on: Link | None = None
        self.accepted = False
        self.refusal: pb.ToolResult | None = None
        self.timer: asyncio.TimerHandle | None = None

    def finish(self, result: pb.ToolResult) -> None:
        """Ends the attempt, unless it has ended or its caller has cancelled it."""
        if not self.outcome.done():
            self.outcome.set_result(result)

    def fail(self, code: pb.ErrorCode.ValueType, stage: pb.CallStage.ValueType, message: str) -> None:
        """Ends the attempt in an error of this side."""
        self.finish(failure(code, stage, message))


class Link:
    """One stream, from its attach to its end.

    Args:
        give_up: cancels the stream, with a reason.
        max_in_flight: as in the attach; 0 means the bus's default.
    """

    def __init__(self, give_up: Callable[[str], None], max_in_flight: int) -> None:
        self.outbox = Outbox()
        self.running: dict[str, Call] = {}  # calls that we answer, by the bus's id
        self.pending: dict[str, Ask] = {}  # calls of our own that the bus has not answered, by our id
        self.waiting: dict[Ask, None] = {}  # nested calls that wait for room, oldest first
        self.standstill = Standstill(self.outbox)
        self.attached: messages.Attached | None = None  # the bus's first answer; None before it
        self.attached_at = 0.0  # the time of that answer
        self.heard_at = asyncio.get_running_loop().time()  # the start of the stream, or the bus's last message
        self.declared = 0  # the version of the tools in the newest attach
        self.drain_sent = False
        self.drain_received = False
        self.leaving = False  # whether either was: then only nested calls are made
        self.calls_in_flight = max_in_flight or CALLS_IN_FLIGHT
        self.arguments_bytes = ARGUMENTS_BYTES
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        self._give_up = give_up
        self._leaving: asyncio.TimerHandle | None = None  # half-closes, then cancels; None while calls are left
        self._ids = itertools.count(1)

    def open(self, attached: messages.Attached) -> None:
        """Takes the bus's first answer, and with it the limits."""
        self.attached, self.attached_at = attached, asyncio.get_running_loop().time()
        limits = attached.limits
        self.calls_in_flight = limits.calls_in_flight or self.calls_in_flight
        self.arguments_bytes = limits.arguments_bytes or ARGUMENTS_BYTES
        self.outbox.limit(limits.result_bytes or RESULT_BYTES, limits.message_bytes or SENDABLE_BYTES)
        self.heartbeat_seconds = attached.heartbeat_seconds or HEARTBEAT_SECONDS
        self.standstill.echoes = attached.echoes

    def next_id(self) -> str:
        """Returns an id that no call on this stream has had."""
        return f"c{next(self._ids)}"

    def seconds(self) -> float:
        """Returns how long the session has been live; below 0 if it never was."""
        return -1.0 if self.attached is None else asyncio.get_running_loop().time() - self.attached_at

    def drain(self, reason: str) -> None:
        """Sends the bus a drain, once: this peer disconnects."""
        if not self.drain_sent:
            self.drain_sent = self.leaving = True
            self.outbox.put("drain", messages.Drain(reason=reason))
            self.when_idle()

    def when_idle(self) -> None:
        """Takes the next step towards the end of the stream; called after each message and each end of a call.

        After our own drain the bus ends the stream: it may have sent a call before it read the drain.
        """
        if not self.leaving:
            return
        if self._leaving is not None and self._busy():
            self._leaving.cancel()
            self._leaving = None
        if self._busy():
            return
        if self.drain_received:
            self.outbox.close()
        elif self._leaving is None:
            self._later(self._half_close)

    def _busy(self) -> bool:
        return bool(self.running or self.pending or self.waiting or self.standstill.held)

    def _half_close(self) -> None:
        self.outbox.close()
        self._later(lambda: self._give_up("the bus does not end the stream"))

    def _later(self, step: Callable[[], None]) -> None:
        self._leaving = asyncio.get_running_loop().call_later(LEAVE_SECONDS, step)

    def end(self) -> None:
        """Closes the outbox, which then drops further items, after the end of the stream."""
        self.outbox.close()
        if self._leaving is not None:
            self._leaving.cancel()


class Standstill:
    """Notices that this process stood still (it was stopped, or its machine was suspended), and then holds calls.

    The bus may have ended them meanwhile. It echoes a heartbeat behind everything that it has sent before, so the
    callers of calls that are not cancelled by then still wait.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.held: dict[str, pb.ToolCall] = {}  # by their ids
        self.echoes = False  # whether the bus echoes heartbeats of ours
        self.holding = False  # whether calls that arrive are held
        self._outbox = outbox
        self._sequence = 0  # of our newest heartbeat
        self._due = math.inf  # when `look` is called next, at the latest

    def look(self) -> bool:
        """Looks at the clock, at least every `TICK_SECONDS`; returns whether the process stood still since then."""
        now = boot_time()
        late = now > self._due
        self._due = now + TICK_SECONDS + LATE_SECONDS
        if late and self.echoes:
            self.holding = True
            self._sequence += 1
            self._outbox.put("heartbeat", messages.Heartbeat(sequence=self._sequence, from_peer=True))
        return late

    def echoed(self, sequence: int) -> list[pb.ToolCall]:
        """Takes the echo of a heartbeat of ours; returns the calls that may begin now."""
        if sequence != self._sequence:
            return []
        self.holding, held, self.held = False, self.held, {}
        return list(held.values())


def boot_time() -> float:
    """Returns a time in seconds that includes those in which the machine was suspended, if the system counts them."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux
    return time.monotonic() if clock is None else time.clock_gettime(clock)
