"""Represents one attached peer on the bus's side: its session, its identity, and its parts as handler and caller.

The registry knows a peer as the handler of its tools, the dispatcher as the caller of its calls. Both parts only build
items into the outbox; the one writer of the stream sends them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from toolbus.bus.access.identity import LOCAL, Identity, Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call import TRACE_BYTES, ArgumentBudget, Call
from toolbus.bus.catalog.entry import Entry, Slots, Trust
from toolbus.errors import Stage
from toolbus.protocol.limits import DEFAULT_TIMINGS, Timings
from toolbus.protocol.session import Session, Side, State
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

CALL_OVERHEAD = 96  # bytes of a call or result in addition to its JSON, about


class Peer(Session[wire.InvokeResponse]):
    """A stream's session with the identity that its attach gave it."""

    kind = "peer"
    shares = True
    awaits_roles = True
    remote = True
    persisted = False
    longest_timeout = MAX_TIMEOUT_SECONDS

    def __init__(
        self, limits: Limits, now: float, timings: Timings = DEFAULT_TIMINGS, identity: Identity = LOCAL
    ) -> None:
        super().__init__(Side.BUS, wire.InvokeResponse, now, timings)
        self.outbox.max_bytes = limits.waiting_bytes
        self.address = ""  # of the other end, as gRPC names it; "" where the peer has no connection
        self.session_id = ""  # set when attached
        self.attached = now  # since when its stream is open, by the monotonic clock
        self.source = ""  # set when attached
        self.instance = ""  # set when attached; may stay empty
        self.notices: tuple[str, ...] = ()  # what an operator should know about the source
        self.budget = ArgumentBudget()  # its source's, once attached
        self.quota: Quota | None = None  # its identity's, once attached; None without limits
        self.qualified = False  # whether its tools are listed as source:name
        self.offers_tools = False  # whether it ever offered one: it may not set the context of calls then
        self.allowed: set[Entry] = set()  # what it may call, as of allowed_at
        self.allowed_at = 0  # the revision for which allowed holds
        self.untrusted = False  # see Policy.is_untrusted
        self.slots = Slots()  # how many of the calls that it runs each caller has
        self.principal = Principal(identity=identity)  # gets its source when attached
        self.stuck = 0  # calls that have ended for their caller but keep a slot until the plugin confirms
        self.traced: list[Call] = []  # whose spans wait for the moment in which they are written
        self.unread = False  # whether a message of it waits in the bus, which reads nothing behind it: no echo either
        self.leave_by = math.inf  # when a session that was sent a drain is ended at the latest
        self.close: Callable[[str, str], None] = no_rpc  # ends the RPC with a gRPC status name and a text

    def __repr__(self) -> str:
        return f"<Peer {self.source}/{self.instance} {super().__repr__()}>"

    @property
    def trust(self) -> Trust:
        """How far its source is trusted."""
        if self.untrusted:
            return Trust.SANDBOXED
        return Trust.OWN if self.principal.identity.scopes is None else Trust.KEY

    @property
    def may_set_context(self) -> bool:
        """Whether it may set the context of a call: hosts may, plugins and untrusted sources may not."""
        return not (self.offers_tools or self.untrusted)

    @property
    def log_level(self) -> int:
        """The level of log lines about its life: a program that only calls comes and goes with each command."""
        return logging.INFO if self.offers_tools else logging.DEBUG

    @property
    def session_state(self) -> int:
        """The state that listings show."""
        if self.suspect:
            return wire.SESSION_STATE_SUSPECT
        if self.state is State.LIVE:
            return wire.SESSION_STATE_LIVE
        return wire.SESSION_STATE_DRAINING if self.state is State.LEAVING else wire.SESSION_STATE_OFFLINE

    # -- as handler ------------------------------------------------------------------------------------------------

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Puts calls into the outbox."""
        outbox = self.outbox
        least, space, add = outbox.least, outbox.space, outbox.add_call
        for call in calls:
            size = call.size + CALL_OVERHEAD
            if call.context is not None:
                size += call.context.ByteSize()
            if call.trace is not None:
                size += TRACE_BYTES + len(call.trace.tracestate)
            if size < least:
                size = least
            if size > space:
                outbox.open()
                space, add = outbox.space, outbox.add_call
            space -= size
            call.frame = outbox.opened
            message = add()
            message.call_id = call.id
            message.name = call.entry.bare_name
            message.arguments_json = call.arguments_json or "{}"
            message.timeout_seconds = call.deadline - now
            role = call.declaration.tool.role or call.role
            if role:
                message.role = role
            if call.context is not None:
                message.context.CopyFrom(call.context)
                if call.exchange is not None:
                    call.exchange.fill(message)
            trace = call.trace
            if trace is not None:
                message.traceparent = trace.traceparent  # as `fill` does it
                if trace.tracestate:
                    message.tracestate = trace.tracestate
                if trace.recorded:
                    self.traced.append(call)
            if self.qualified:
                message.request_id = call.call_id
        outbox.space = space
        if outbox.held:
            outbox.release()

    def note_sent(self, now: float) -> None:
        """Notes the time for the traced calls whose frames the writer has taken."""
        traced, taken = self.traced, self.outbox.taken
        self.traced = []
        for call in traced:
            if call.frame > taken:
                self.traced.append(call)
            elif call.trace is not None:
                call.trace.sent = now

    def cancel(self, call: Call, reason: str) -> bool:
        """Takes a call out of the outbox, or asks the plugin to stop it. Returns whether it was never sent."""
        if call.frame > self.outbox.taken and self.outbox.recall(call.frame, call.id):
            return True
        self.outbox.room(CALL_OVERHEAD).cancels.add(call_id=call.id, reason=reason)
        return False

    def recall(self, calls: Sequence[Call]) -> None:
        """Takes calls out of the outbox that were not sent: the peer still reads, and they may run elsewhere now."""
        for call in calls:
            self.outbox.recall(call.frame, call.id)

    def stage(self, call: Call) -> Stage:
        """Returns how far a call has got: whether its frame was handed to the writer."""
        return Stage.DISPATCHED if call.frame <= self.outbox.taken else Stage.NOT_DISPATCHED

    # -- as caller -------------------------------------------------------------------------------------------------

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        """Puts plain results into the outbox."""
        outbox = self.outbox
        least, space, add = outbox.least, outbox.space, outbox.add_result
        for call_id, output_json in results:
            size = len(output_json) + CALL_OVERHEAD
            if size < least:
                size = least
            if size > space:
                outbox.open()
                space, add = outbox.space, outbox.add_result
            space -= size
            message = add()
            message.call_id = call_id
            message.output_json = output_json
        outbox.space = space
        if outbox.held:
            outbox.release()

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        """Puts any result into the outbox."""
        message = self.outbox.room(result.ByteSize() + CALL_OVERHEAD).results.add()
        message.CopyFrom(result)
        message.call_id = call_id

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        """Puts progress into the outbox."""
        message = self.outbox.room(progress.ByteSize() + CALL_OVERHEAD).progress.add()
        message.CopyFrom(progress)
        message.call_id = call_id

    def send_event(self, event: wire.Event) -> None:
        """Puts an event into the outbox."""
        if self.state in (State.LIVE, State.LEAVING):
            self.outbox.room(event.ByteSize()).events.add().CopyFrom(event)


def no_rpc(status: str, text: str) -> None:
    """Stands in until a shell has set how to end its RPC, and once that has ended."""
