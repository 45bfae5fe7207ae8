"""Runs the life of every call: admit, send, time out, retry, cancel, and end in exactly one result.

Every way in uses the same methods: streams, local functions and the gateway hand in a list of calls, a handler of any
kind hands back a list of results. Nothing here awaits or owns a timer: the caller of a method passes the time, and the
dispatcher asks through ``arm`` to be called again when the next deadline passes.

The file is long because these steps share one state and the hot path must stay flat. The rules before a call is sent
stand in call_admission.py, the errors of refused calls in refusals.py, and what is written down in call_observer.py.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from toolbus.bus.access.identity import Identity
from toolbus.bus.access.principal import Principal
from toolbus.bus.access.quota import Quota, Quotas
from toolbus.bus.calls.call import Background, Budget, Call, Caller
from toolbus.bus.calls.call_admission import CallAdmission, copy_context
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.call_observer import CallObserver
from toolbus.bus.calls.call_records import MAX_TEXT, CallRecords, only_reads, origin_of
from toolbus.bus.calls.input_exchange import check_needs, read_exchange
from toolbus.bus.calls.refusals import (
    Refused,
    bad_call_id,
    clamped_timeout,
    declared_as,
    identity_full,
    must_fit,
    no_room,
    overloaded,
    too_fast,
    window_full,
)
from toolbus.bus.calls.result_review import NO_OUTPUT, review
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Declaration, Entry
from toolbus.bus.catalog.handler import BUS_SOURCE, RUN_SOURCES, Handler
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.errors import Code, Stage
from toolbus.limits import DEFAULT_TIMINGS
from toolbus.tool import MAX_CALL_ID, MAX_TIMEOUT_SECONDS, CallError, Limits, Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.calls")

OnDenied = Callable[[Principal, str, str], object]
OnLimited = Callable[[Principal, int, str], object]

CAREFUL = (BUS_SOURCE, RUN_SOURCES)  # how sources begin of which not every call is recorded
SWEEP_PAUSE = 0.005  # a sweep looks at every call in flight, so many short limits share one


class Dispatcher:
    """All calls in flight on one bus.

    Args:
        arm: called with the time of the next deadline whenever it comes nearer; ``sweep`` is to be called then.
        stuck_seconds: as in `Timings`.
        first_id: where the ids towards handlers begin. A bus draws it, so that an id from before its restart names no
            call of now: a nested call that a peer sends again would run as the user of another call. Dispatchers that
            share handlers must not share ids.
        repairs: whether arguments that break their schema are repaired before they are refused.
        metrics: counts the calls of each tool; None: nobody does.
    """

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        records: CallRecords,
        limits: Limits,
        *,
        arm: Callable[[float], None],
        tripwire: Tripwire | None = None,
        background: Background | None = None,
        settled_at: float = 0.0,
        stuck_seconds: float = DEFAULT_TIMINGS.stuck_seconds,
        first_id: int = 1,
        repairs: bool = True,
        metrics: CallMetrics | None = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._limits = limits
        self._arm = arm
        self._armed_at = math.inf  # when the next sweep of deadlines is due
        self._budgets: WeakValueDictionary[str, Budget] = WeakValueDictionary()  # by the caller's source
        self.quotas = Quotas()
        self._held = 0  # bytes of arguments held in all
        self._last_id = first_id - 1  # the last id that a call got towards its handler
        self._callers: dict[Caller, None] = {}  # those that have had calls since the last sweep
        self._stuck: set[Call] = set()
        self._stuck_seconds = stuck_seconds
        self.soft_deadlines: dict[Call, float] = {}  # when a call becomes a task
        self.retried: dict[Call, Stage] = {}  # calls retried on another handler → how far the first one had got
        self.tripwire = tripwire  # blocks secrets in results of untrusted sources; None: nothing is blocked
        self.background = background  # takes calls over at their soft deadline; None: callers wait to the end
        self.view = CatalogView(registry, policy)  # what callers may see, by the same policy
        self._admission = CallAdmission(registry, policy, self.view, limits, repairs=repairs)
        self.records = records
        self.observer = CallObserver(registry, records, metrics)  # writes down how calls end
        self.slow_calls = self.observer.slow_calls
        self.traces = self.observer.traces
        self.settled_at = settled_at
        self._on_denied: OnDenied | None = None  # see watch_refusals
        self._on_limited: OnLimited | None = None
        self.draining = False  # graceful shutdown: whether only nested calls are accepted

    def __repr__(self) -> str:
        state = " draining" if self.draining else ""
        return f"<Dispatcher active={self.active} stuck={self.stuck} held={self._held}{state}>"

    @property
    def active(self) -> int:
        """How many calls have a caller that waits."""
        return sum(len(caller.in_flight) for caller in self._callers)

    @property
    def stuck(self) -> int:
        """How many calls have ended for their caller and keep a slot until their handler confirms."""
        return len(self._stuck)

    @property
    def settled_at(self) -> float:
        """Until when an unknown tool counts as one whose plugin may still reconnect to a restarted bus."""
        return self._admission.settled_at

    @settled_at.setter
    def settled_at(self, when: float) -> None:
        self._admission.settled_at = when

    @property
    def held_bytes(self) -> int:
        """Bytes of arguments held for all calls."""
        return self._held

    def watch_refusals(self, on_denied: OnDenied, on_limited: OnLimited) -> None:
        """Says from now on who may not call what and why, and whose quota has refused how many calls."""
        self._on_denied, self._on_limited = on_denied, on_limited

    def follow_identities(self, current: Callable[[Identity], Identity]) -> None:
        """Asks from now on for the identity of now of a caller whose call goes on as a task: `Doorman.current`."""
        self._admission.current = current

    def oldest(self, limit: int) -> list[Call]:
        """Returns the calls whose callers wait longest, the oldest first, without those that read records.

        Looks at each caller and at about ``limit`` calls: a caller's are in the order in which they began, but for
        those that became tasks.
        """
        of_callers = (
            (call for call in caller.in_flight.values() if not only_reads(call.entry)) for caller in self._callers
        )
        return list(itertools.islice(heapq.merge(*of_callers, key=lambda call: call.started), limit))

    def count_by_source(self, limit: int) -> tuple[Counter[str], Counter[str]]:
        """Counts calls in flight, and those that are stuck, by the source of their tools; of about ``limit`` calls."""
        in_flight = (call for caller in self._callers for call in caller.in_flight.values())
        counted = Counter(call.entry.source for call in itertools.islice(in_flight, limit))
        return counted, Counter(call.entry.source for call in itertools.islice(self._stuck, limit))

    def stage(self, call: Call) -> Stage:
        """Returns how far a call has got."""
        return self._stage(call)

    def decide(self, principal: Principal, call: pb.ToolCall, now: float) -> Entry:
        """Returns the entry that a host's call would reach, without making it; raises `Refused` as the call would."""
        return self._admission.decide(principal, call, now)

    # -- the hot path ----------------------------------------------------------------------------------------------
    # `calls` and `results` are flat on purpose: one more function call per call would take a twentieth of the time.
    # What is rare stands in functions of its own, and items are passed on in batches.

    def calls(self, caller: Caller, calls: Sequence[pb.ToolCall], now: float) -> None:
        """Takes the calls of a caller: admits and sends each, or answers at once with an error."""
        in_flight, budget, allowed = caller.in_flight, caller.budget, caller.allowed
        limits, first, nearest, window = self._limits, self._registry.first, self._armed_at, caller.max_in_flight
        max_arguments, max_held, max_of_source = limits.arguments_bytes, limits.held_bytes, limits.held_bytes_per_source
        if caller.quota is not None:
            calls = self._within_quota(caller, caller.quota, calls, now)
        traces = self.traces
        if self._last_id + len(calls) >= traces.draw_at:
            traces.draw(calls, self._last_id)
        if caller.allowed_at != self._registry.revision:
            allowed.clear()
            caller.allowed_at = self._registry.revision
        batch: list[Call] = []  # accepted, for the same handler, not yet sent
        to: Handler | None = None  # the handler of the batch
        share = 0  # how many more of its slots the caller may take
        # Backpressure: built once for many calls, or a flood of refused calls would cost more than the accepted ones.
        caller_full: Refused | None = None
        full_tool: Declaration | None = None  # the last tool without room
        tool_full: Refused | None = None  # the refusal of its calls
        sent_before = self._last_id
        at_once: list[Call] = []  # those that become tasks as soon as they are sent
        for call in calls:
            call_id, name = call.call_id, call.name
            try:
                if not call_id or call_id in in_flight or len(call_id) > MAX_CALL_ID:
                    raise bad_call_id(call_id)
                parent_id = call.parent_call_id
                parent = self._admission.find_parent(caller, parent_id) if parent_id else None
                if self.draining and parent is None:
                    raise Refused(Code.UNAVAILABLE, "the bus is draining and takes no new calls", retry_safe=True)

                role = call.role
                entry = first.get(name)
                if role or entry is None or entry.current is None:
                    entry = self._admission.find(caller, call, parent, now)
                if entry not in allowed:
                    entry = self._admission.authorize(caller, entry, call, parent, now)
                declaration: Declaration = entry.current  # type: ignore[assignment]  # an offline one was refused
                schema_hash = call.schema_hash
                if schema_hash and schema_hash != declaration.tool.schema_hash:
                    declaration = declared_as(entry, schema_hash)

                text = call.arguments_json
                size = len(text)
                checker = declaration.checker
                if checker is None or size * 4 > max_arguments:
                    text = self._admission.validate(caller, call, parent, declaration)
                else:
                    try:
                        arguments = checker.load(text)
                    except ValueError:
                        arguments = None
                    if (
                        type(arguments) is not dict
                        or not declaration.strips.isdisjoint(arguments)
                        or not checker.passes(arguments)
                    ):
                        # Parses again, and exactly, since it may write the text again.
                        text = self._admission.validate(caller, call, parent, declaration)
                        size = len(text)
                context = exchange = None
                if parent is not None:
                    context = parent.context
                elif "context" in call and caller.may_set_context:  # half the time of `HasField`
                    context = copy_context(call.context, limits)
                    size += context.ByteSize()
                    if call.accepts:
                        exchange = read_exchange(call, limits)
                        size += exchange.size
                if len(in_flight) >= window:
                    caller_full = caller_full or window_full(caller.source, window)
                    self.refuse(caller, call, caller_full, now)
                    continue
                if self._held + size > max_held or budget.held + size > max_of_source:
                    raise self._over_budget(caller, size)
                if tool_full is not None and declaration is full_tool:  # no call ends while these are taken
                    self.refuse(caller, call, tool_full, now)
                    continue
                handler = declaration.pick()
                if handler is not to or not share:  # once for a run of calls of the same handler
                    if to is not None and batch:
                        to.slots.take(budget, len(batch))
                        to.send(batch, now)
                        batch = []
                    if handler is not None:
                        share = handler.slots.offer(budget, handler.max_in_flight - len(handler.pending), now)
                    if handler is None or not share:
                        handler, share = declaration.pick_for(budget, now), 1
                    to = handler
                if handler is None:
                    full_tool, tool_full = declaration, no_room(entry, declaration, caller)
                    self.refuse(caller, call, tool_full, now)
                    continue
                if size * 4 > handler.max_item_bytes or context is not None:
                    more = exchange.size if exchange is not None else 0
                    must_fit(text, context, more, name, handler.max_item_bytes)

                record = Call()
                timeout = call.timeout_seconds or declaration.timeout
                if not 0.0 < timeout <= MAX_TIMEOUT_SECONDS:
                    timeout = clamped_timeout(timeout, caller.longest_timeout)
                background_after = call.background_after_seconds  # the soft deadline, from now
                if background_after:
                    timeout, background_after = self._admission.soft_deadline(
                        caller, call, declaration, parent, has_tasks=self.background is not None
                    )
                record.timeout = timeout
                record.deadline = deadline = now + timeout
                record.context, record.parent, record.children, record.depth = context, None, None, 1
                if parent is not None:
                    record.nest(parent)
                if declaration.is_special:
                    check_needs(declaration.tool, name, exchange)
                    if declaration.tool.idle_timeout_seconds:
                        record.idle_deadline = now + declaration.tool.idle_timeout_seconds
                        deadline = min(deadline, record.idle_deadline)
                record.trace = None
                if call.traceparent or parent is not None or context is not None:
                    record.trace = traces.begin(call, parent, context, now)
                if deadline < nearest:
                    nearest = deadline
                record.caller, record.call_id, record.handler = caller, call_id, handler
                record.entry, record.declaration, record.exchange = entry, declaration, exchange
                record.arguments_json, record.size = text, size
                record.started, record.accepted, record.active = now, False, True
                if background_after:
                    self.soft_deadlines[record] = now + background_after
                    nearest = min(nearest, now + background_after)
                    if declaration.tool.always_background:
                        at_once.append(record)
                self._last_id = number = self._last_id + 1
                record.id = handler_id = str(number)
                in_flight[call_id] = handler.pending[handler_id] = record
                self._held += size
                budget.held += size
                batch.append(record)
                share -= 1
            except Refused as refused:
                self.refuse(caller, call, refused, now)
            except BaseException as fault:
                self._fault(caller, call_id, name, fault, now)
        if to is not None and batch:
            to.slots.take(budget, len(batch))
            to.send(batch, now)
        for record in at_once:
            if self.soft_deadlines.pop(record, None) is not None:  # else a handler of this process has ended it
                self._to_background(record, now)
        if in_flight:
            self._callers[caller] = None
        if (identity := caller.principal.identity).name:
            self.observer.identity_called(identity, self._last_id - sent_before)
        if nearest < self._armed_at:
            self._rearm(nearest)

    def results(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> None:
        """Takes the results of a handler, and delivers each to its caller."""
        pending, keep, soft_deadlines = handler.pending, self.records.keep, self.soft_deadlines
        careful = self.records.contents or handler.source.startswith(CAREFUL)  # whether the observer writes each down
        slow = now - self.slow_calls.seconds  # a call that began before took long
        untrusted = self.tripwire is not None and self._policy.is_untrusted(handler.source)
        batch: list[tuple[str, str]] = []  # plain results for the same caller, not yet delivered
        to: Caller | None = None  # the caller of the batch
        checks_outputs, most, succeeded = self._registry.checks_outputs, 0, 0
        run: Entry | None = None  # the tool of the results before; its calls are counted together
        first = 0.0  # when the first of these calls began
        starts: list[float] | None = None  # when each of them did; None for one call
        observer = self.observer
        counted = observer.counts
        for result in results:
            call: Call | None = pending.pop(result.call_id, None)
            if call is None:
                self.records.unexpected += 1
                continue
            caller, size, call_id, entry = call.caller, call.size, call.call_id, call.entry
            self._held -= size
            caller.budget.held -= size
            if call.parent is not None:
                call.leave_parent()
            if not call.active:
                handler.slots.release(caller.budget, 1)
                handler.stuck -= 1
                self._stuck.discard(call)
                self.records.late += 1
                continue
            call.active = False
            if call.children:
                self._end_children(call, now)
            if soft_deadlines:
                soft_deadlines.pop(call, None)
            del caller.in_flight[call_id]
            if caller is not to:
                if batch and to is not None:
                    handler.slots.release(to.budget, len(batch))
                    to.deliver(batch)
                batch, to = [], caller
                most = min(self._limits.result_bytes, caller.max_item_bytes) // 4
            output = result.output_json
            if (
                (untrusted or result.is_error or result.content or len(output) > most or "error" in result)
                or (len(output) <= NO_OUTPUT and result.input_requests_json)
                or (checks_outputs and call.declaration.output_checker is not None)
            ):
                handler.slots.release(caller.budget, 1)
                code = review(call, result, self._limits, self.tripwire if untrusted else None)
                caller.deliver_result(call_id, result)
                error = CallError.from_wire(result.error) if result.is_error else None
                self.observer.call_ended(call, code, now, "" if code == Code.SECRET_BLOCKED else output, error)
                continue
            batch.append((call_id, output))
            if careful or type(call.arguments_json) is not str:  # repaired ones say so in their record
                self.observer.call_ended(call, 0, now, output)
                continue
            origin, context = None, call.context
            if context is not None:
                origin, size = origin_of(context), len(call.arguments_json)
            more = observer.more(call, now) if call.parent is not None or call.trace is not None else None
            name, source, started = entry.name, entry.source, call.started
            if started < slow:
                self.slow_calls.note(call, 0, now)
            keep((call_id, name, source, caller.source, started, now, 0, size, len(output), origin, call.id, more))
            succeeded += 1
            if counted:
                if entry is not run:
                    if run is not None:
                        observer.count_run(run, first, starts, now)
                    run, first, starts = entry, started, None
                elif starts is None:
                    starts = [first, started]
                else:
                    starts.append(started)
        if batch and to is not None:
            handler.slots.release(to.budget, len(batch))
            to.deliver(batch)
        self.records.outcomes[0] += succeeded
        if run is not None:
            if starts is None and run.counts is not None:
                run.counts.add_one(first, now)
            else:
                observer.count_run(run, first, starts, now)

    def progress(self, handler: Handler, progress: Iterable[pb.ToolProgress], now: float) -> None:
        """Takes progress of running calls; each message resets the idle timeout."""
        untrusted = self.tripwire is not None and self._policy.is_untrusted(handler.source)
        for message in progress:
            call = handler.pending.get(message.call_id)
            if untrusted:  # a part of an output cannot be judged; the result carries all of it
                message.output_chunk = ""
                del message.content[:]
                if (
                    call is not None
                    and self.tripwire is not None
                    and self.tripwire.check(call.entry.name, message.message)
                ):
                    message.message = ""
            if call is None or not call.active:
                self.records.unexpected += call is None
                continue
            if call.trace is not None and not call.accepted:
                call.trace.first_sign = now
            call.accepted = True
            largest = min(self._limits.result_bytes, call.caller.max_item_bytes)
            if message.ByteSize() > largest:  # as with a result: a larger frame would end every call of the caller
                text = f"tool {call.entry.name!r} sent progress of {message.ByteSize()} bytes, more than {largest}"
                limit = ("result_bytes", largest)
                self._abandon(call, Code.RESULT_TOO_LARGE, f"{text}: ask for less", "result_bytes", now, limit)
                continue
            idle = call.declaration.tool.idle_timeout_seconds
            if idle:
                call.idle_deadline = now + idle
            call.caller.progress(call.call_id, message)

    def cancels(self, caller: Caller, cancels: Iterable[pb.ToolCancel], now: float) -> None:
        """Cancels calls for their caller; a call that has ended already is ignored."""
        for cancel in cancels:
            call = caller.in_flight.get(cancel.call_id)
            if call is not None:
                reason = cancel.reason[:200] or "cancelled"
                self._abandon(call, Code.CANCELLED, f"the caller cancelled the call: {reason}", reason, now)

    def budget(self, source: str) -> Budget:
        """Returns the budget that the callers of a source share."""
        return self._budgets.setdefault(source, Budget())

    # -- a call that is refused -----------------------------------------------------------------------------------

    def refuse(self, caller: Caller, call: pb.ToolCall, refused: Refused, now: float) -> None:
        """Answers a call that is not sent, and records it, shortened: what is refused may be of any length."""
        result = refused.result
        result.call_id = call.call_id
        caller.deliver_result(call.call_id, result)
        if refused.error.code == Code.PERMISSION_DENIED and self._on_denied is not None:
            self._on_denied(caller.principal, call.name[:MAX_TEXT], refused.error.message)
        self.observer.call_refused(caller, call, refused, now)

    def _within_quota(
        self, caller: Caller, quota: Quota, calls: Iterable[pb.ToolCall], now: float
    ) -> Sequence[pb.ToolCall]:
        """Returns the calls that an identity may make now; answers the others."""
        calls = list(calls)
        free = quota.free
        if free is not None and len(calls) > free:
            refused = identity_full(caller, quota)
            self._refuse_rest(caller, calls, free, refused, now)
        passed, wait = quota.take(len(calls), now)
        if passed < len(calls):
            refused = too_fast(caller, quota, wait)
            self._refuse_rest(caller, calls, passed, refused, now)
        return calls

    def _refuse_rest(self, caller: Caller, calls: list[pb.ToolCall], first: int, refused: Refused, now: float) -> None:
        self.observer.identity_limited(caller.principal.identity, len(calls) - first)
        if self._on_limited is not None:
            self._on_limited(caller.principal, len(calls) - first, refused.error.message)
        for call in calls[first:]:
            self.refuse(caller, call, refused, now)
        del calls[first:]

    def _fault(self, caller: Caller, call_id: str, name: str, fault: BaseException, now: float) -> None:
        """Answers a call that met a fault of the bus; panics of the validator do not derive from Exception."""
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise fault
        log.error(
            "a fault of the bus in a call", exc_info=fault, extra=call_fields(call_id, name, "", caller.principal)
        )
        error = CallError(Code.INTERNAL, "a fault of the bus; its log has the details", stage=Stage.NOT_DISPATCHED)
        caller.deliver_result(call_id, Result(call_id, is_error=True, error=error).to_wire())
        self.observer.call_failed(caller, call_id, name, error, now)

    def _over_budget(self, caller: Caller, size: int) -> Refused:
        limits = self._limits
        if self._held + size > limits.held_bytes:
            return overloaded("the bus holds as many bytes of arguments as it may", ("held_bytes", limits.held_bytes))
        return overloaded(
            f"the bus holds as many bytes of arguments as it may for {caller.source!r}",
            ("held_bytes_per_source", limits.held_bytes_per_source),
        )

    # -- a call's end --------------------------------------------------------------------------------------------

    def _abandon(
        self,
        call: Call,
        code: Code,
        message: str,
        reason: str,
        now: float,
        limit: tuple[str, float] | None = None,
        answer: bool = True,
    ) -> None:
        """Ends a call for its caller, by deadline or cancel, while its handler still runs it."""
        if not call.active:
            return
        stage = self._stage(call)
        call.caller.in_flight.pop(call.call_id, None)
        self.soft_deadlines.pop(call, None)
        if call.handler.cancel(call, reason):
            call.handler.pending.pop(call.id, None)
            self._let_go(call)
            call.active = False
        else:
            call.active = False
            call.handler.stuck += 1
            self._stuck.add(call)
            call.freed_at = now + self._stuck_seconds
            self._rearm(call.freed_at)
        if call.children:
            self._end_children(call, now)
        safe = stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable
        error = CallError(code, message, stage=stage, retry_safe=safe, limit=limit)
        if answer:
            self._fail(call, error)
        self.observer.call_ended(call, code, now, error=error)

    def _end_children(self, call: Call, now: float) -> None:
        children, call.children = call.children, None  # each removes itself from the list
        for child in children or ():
            self._abandon(child, Code.CANCELLED, "the call that made this one has ended", "parent ended", now)

    def _fail(self, call: Call, error: CallError) -> None:
        call.caller.deliver_result(call.call_id, Result(call.call_id, is_error=True, error=error).to_wire())

    def _stage(self, call: Call) -> Stage:
        if call.accepted:
            return Stage.ACCEPTED
        stage: Stage = max(call.handler.stage(call), self.retried.get(call, Stage.NOT_DISPATCHED))
        return stage

    def _let_go(self, call: Call) -> None:
        """Frees what was held for a call that no handler runs any more; it has left its handler's table."""
        call.handler.slots.release(call.caller.budget, 1)
        self._held -= call.size
        call.caller.budget.held -= call.size
        if call.parent is not None:
            call.leave_parent()
        if not call.active:
            call.handler.stuck -= 1
            self._stuck.discard(call)

    # -- lost handlers and callers: retry and cancel -----------------------------------------------------------------

    def handler_ended(self, pending: Iterable[Call], why: str, now: float) -> None:
        """A handler disconnected: its calls are retried on another handler where that is safe, otherwise they end.

        Args:
            pending: its calls; the handler's own table is empty already.
        """
        for call in pending:
            if not call.active:
                if call in self._stuck:  # otherwise it ended just now, with its parent, before it was sent
                    self._let_go(call)
                continue
            stage = self._stage(call)
            safe = stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable
            other = self._other_handler(call, now) if safe else None
            if other is not None:
                self._move(call, other, stage, now)
                continue
            self._let_go(call)
            call.active = False
            call.caller.in_flight.pop(call.call_id, None)
            self.soft_deadlines.pop(call, None)
            if call.children:
                self._end_children(call, now)
            error = CallError(Code.UNAVAILABLE, _lost(call, why, safe=safe), stage=stage, retry_safe=safe)
            self._fail(call, error)
            self.observer.call_ended(call, Code.UNAVAILABLE, now, error=error)

    def handler_hangs(self, handler: Handler, why: str, now: float) -> None:
        """A handler is connected and shows no life: its calls are retried elsewhere where that is safe, or end.

        Each is cancelled at the handler, which may go on later. One that ends keeps its slot until then.
        """
        for call in list(handler.pending.values()):
            if not call.active:
                continue
            stage = self._stage(call)
            safe = stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable
            other = self._other_handler(call, now) if safe else None
            if other is None:
                self._abandon(call, Code.UNAVAILABLE, _lost(call, why, safe=safe), "no heartbeat", now)
                continue
            del handler.pending[call.id]
            handler.cancel(call, "no heartbeat")
            self._move(call, other, stage, now)

    @staticmethod
    def _other_handler(call: Call, now: float) -> Handler | None:
        """Returns a handler that declares the tool of a call in the same way and has room for it now."""
        same = call.entry.declarations.get(call.declaration.tool.schema_hash)
        other = same.pick() if same is not None and now < call.deadline else None
        return other if other is not None and call.size * 4 <= other.max_item_bytes else None

    def _move(self, call: Call, other: Handler, stage: Stage, now: float) -> None:
        """Sends a call to another handler; it has left the table of the one before."""
        self._end_children(call, now)  # they belong to the run that was lost
        if stage is not Stage.NOT_DISPATCHED:
            self.retried[call] = stage
        call.handler.slots.release(call.caller.budget, 1)
        other.slots.take(call.caller.budget, 1)
        call.handler = other
        call.accepted = False
        other.pending[call.id] = call
        other.send([call], now)

    def caller_ended(self, calls: Iterable[Call], now: float) -> None:
        """A caller disconnected: its calls are cancelled at their handlers, without an answer."""
        for call in calls:
            self._abandon(call, Code.CANCELLED, "the caller disconnected", "caller gone", now, answer=False)
            self._callers.pop(call.caller, None)

    def take_back(self, call: Call, why: str, now: float) -> None:
        """Cancels a call of a caller whose session ends in good order: it still gets the result."""
        self._abandon(call, Code.CANCELLED, f"the caller's session ended: {why}", "caller gone", now)

    def stop(self, now: float) -> None:
        """Accepts no more calls, and ends those of programs and functions of this process."""
        self.draining = True
        for caller in list(self._callers):
            for call in list(caller.in_flight.values()):
                self._abandon(call, Code.UNAVAILABLE, "the bus stopped", "the bus stopped", now)

    # -- deadlines -------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Ends calls whose deadline has passed, and arms the next sweep."""
        nearest = math.inf
        for call in list(self._stuck):
            if call.freed_at > now:
                nearest = min(nearest, call.freed_at)
            elif call.handler.pending.pop(call.id, None) is call:
                self._let_go(call)
        self.retried = {call: stage for call, stage in self.retried.items() if call.active}
        for call, soft_deadline in list(self.soft_deadlines.items()):
            if soft_deadline > now:
                nearest = min(nearest, soft_deadline)
            elif self.soft_deadlines.pop(call, None) is not None and now < call.deadline:
                self._to_background(call, now)
        for caller in list(self._callers):
            for call in list(caller.in_flight.values()):
                idle = call.declaration.tool.idle_timeout_seconds
                if call.deadline <= now:
                    self._deadline_exceeded(call, "timeout_seconds", call.timeout, now)
                elif idle and call.idle_deadline <= now:
                    self._deadline_exceeded(call, "idle_timeout_seconds", idle, now)
                else:
                    nearest = min(nearest, call.deadline, call.idle_deadline if idle else math.inf)
            if not caller.in_flight:
                del self._callers[caller]
        self._armed_at = math.inf
        nearest = min([nearest, *(call.freed_at for call in self._stuck)])
        if nearest < math.inf:
            self._rearm(max(nearest, now + SWEEP_PAUSE))

    def _to_background(self, call: Call, now: float) -> None:
        """Answers a call at its soft deadline, and lets it go on as a task of the background."""
        adopted = None
        try:
            if self.background is not None:
                adopted = self.background.adopt(call, now, self.cancels, self.calls)
        except Exception:  # the sweep must go on: it times out every other call too
            names = call.call_id, call.entry.name, call.entry.source
            log.exception("a fault of the bus: a call became no task", extra=call_fields(*names, call.caller.principal))
        if adopted is None:  # the caller waits on, within the longest timeout
            call.timeout = min(call.timeout, call.caller.longest_timeout)
            call.deadline = min(call.deadline, call.started + call.timeout)
            return
        caller, call_id = call.caller, call.call_id
        del caller.in_flight[call_id]
        caller.budget.held -= call.size
        call.handler.slots.release(caller.budget, 1)
        call.caller, call.call_id, envelope = adopted
        call.caller.budget.held += call.size
        call.handler.slots.take(call.caller.budget, 1)
        call.caller.in_flight[call.call_id] = call
        self._callers[call.caller] = None
        caller.deliver_result(call_id, envelope.to_wire())

    def _deadline_exceeded(self, call: Call, limit: str, value: float, now: float) -> None:
        waited = now - call.started
        what = "no progress of" if limit == "idle_timeout_seconds" else "no result from"
        message = f"{what} tool {call.entry.name!r} within {value:g} s (waited {waited:.1f} s; limit {limit})"
        self._abandon(call, Code.DEADLINE_EXCEEDED, message, limit, now, limit=(limit, value))

    def _rearm(self, when: float) -> None:
        if when < self._armed_at:
            self._armed_at = when
            self._arm(when)


def _lost(call: Call, why: str, *, safe: bool) -> str:
    """Returns the text that the handler of a call was lost."""
    text = f"tool {call.entry.name!r} was lost: {why}"
    return text if safe else f"{text}; it may have run, so it was not tried again"
