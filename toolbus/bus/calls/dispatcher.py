"""Takes calls from callers and results from handlers: the short way of a call that is admitted, sent and answered.

Every way in uses the same methods: streams, local functions and the gateway hand in a list of calls, a handler of any
kind hands back a list of results. Nothing here awaits or owns a timer: the caller of a method passes the time, and the
dispatcher asks through ``arm`` for a sweep of the deadlines when the next one passes.

Rare steps have files of their own: the rules before a call is sent (call_admission.py, call_arguments.py), answers to
calls that are not sent (refused_calls.py), ends before the result (call_endings.py, deadlines.py), results that are not
plain (result_review.py), and records (call_observer.py). They share the calls in flight
(calls_in_flight.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from toolbus.bus.access.quota import Quotas
from toolbus.bus.calls.call import ArgumentBudget, Background, Call, Caller
from toolbus.bus.calls.call_admission import CallAdmission, copy_context
from toolbus.bus.calls.call_arguments import CallArguments
from toolbus.bus.calls.call_endings import CallEndings
from toolbus.bus.calls.call_observer import CallObserver
from toolbus.bus.calls.call_record import More, origin_of
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.calls_in_flight import CallsInFlight
from toolbus.bus.calls.deadlines import Deadlines
from toolbus.bus.calls.input_exchange import check_needs, read_exchange
from toolbus.bus.calls.refusals import (
    Refused,
    bad_call_id,
    clamped_timeout,
    declared_as,
    must_fit,
    no_room,
    over_budget,
    window_full,
)
from toolbus.bus.calls.refused_calls import RefusedCalls
from toolbus.bus.calls.result_review import NO_OUTPUT, review
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Declaration, Entry
from toolbus.bus.catalog.handler import BUS_SOURCE, RUN_SOURCES, Handler
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.errors import CallError, Code
from toolbus.limits import DEFAULT_TIMINGS
from toolbus.tool import MAX_CALL_ID, MAX_TIMEOUT_SECONDS, Limits
from toolbus.v1 import tool_pb2 as pb

CAREFUL = (BUS_SOURCE, RUN_SOURCES)  # how the names of sources begin of which not every call is recorded


class Dispatcher:
    """Dispatches all calls of one bus, and owns the parts for the rest of their lives.

    Args:
        arm: called with the time of the next deadline whenever it comes nearer; `Deadlines.sweep` is to be called then.
        background: see `Deadlines`.
        stuck_seconds: as in `Timings`.
        first_id: where the ids towards handlers begin. A bus draws it, so that an id from before its restart names no
            call of now: a nested call that a peer sends again would run as the user of another call. Dispatchers that
            share handlers must not share ids.
        repairs: whether arguments that break their schema are repaired before they are refused.
        metrics: counts the calls of each tool; None: they are not counted.

    Attributes:
        tripwire: blocks secrets in results of untrusted sources; None: nothing is blocked.
        view: what callers may see, by the same policy.
        observer: records how calls end.
        draining: whether only nested calls are accepted, for a graceful shutdown.
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
        stuck_seconds: float = DEFAULT_TIMINGS.stuck_seconds,
        first_id: int = 1,
        repairs: bool = True,
        metrics: CallMetrics | None = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._limits = limits
        self._budgets: WeakValueDictionary[str, ArgumentBudget] = WeakValueDictionary()  # by the caller's source
        self._last_id = first_id - 1  # the last id that a call got towards its handler
        self.quotas = Quotas()
        self.tripwire = tripwire
        self.view = CatalogView(registry, policy)
        self.records = records
        self.observer = CallObserver(registry, records, metrics)
        self.slow_calls = self.observer.slow_calls
        self.traces = self.observer.traces
        self.draining = False
        self.in_flight = CallsInFlight(arm)
        self.admission = CallAdmission(registry, policy, self.view, limits)
        self._arguments = CallArguments(limits, repairs=repairs)
        self.refused = RefusedCalls(self.observer)
        self.endings = CallEndings(self.in_flight, self.observer, stuck_seconds=stuck_seconds)
        self.deadlines = Deadlines(self.in_flight, self.endings, self.calls, background)

    def __repr__(self) -> str:
        return f"<Dispatcher {self.in_flight!r}{' draining' if self.draining else ''}>"

    def budget(self, source: str) -> ArgumentBudget:
        """Returns the budget that the callers of a source share."""
        return self._budgets.setdefault(source, ArgumentBudget())

    def stop(self, now: float) -> None:
        """Accepts no more calls, and ends those of programs and functions of this process."""
        self.draining = True
        self.endings.end_all(now)

    # -- the hot path ----------------------------------------------------------------------------------------------
    # `calls` and `results` are flat on purpose: one more function call per call would take a twentieth of the time.
    # Rare steps are functions of their own, and items are passed on in batches.

    def calls(self, caller: Caller, calls: Sequence[pb.ToolCall], now: float) -> None:
        """Takes the calls of a caller: admits and sends each, or answers at once with an error."""
        total, in_flight, budget, allowed = self.in_flight, caller.in_flight, caller.budget, caller.allowed
        limits, first, nearest, window = self._limits, self._registry.first, total.armed_at, caller.max_in_flight
        max_arguments, max_held, max_of_source = limits.arguments_bytes, limits.held_bytes, limits.held_bytes_per_source
        if caller.quota is not None:
            calls = self.refused.within_quota(caller, caller.quota, calls, now)
        traces = self.traces
        if self._last_id + len(calls) >= traces.draw_at:
            _drawn = traces.draw(calls, self._last_id)  # held, so that they are not read from the message twice
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
                parent = self.admission.find_parent(caller, parent_id) if parent_id else None
                if self.draining and parent is None:
                    raise Refused(Code.UNAVAILABLE, "the bus is draining and takes no new calls", retry_safe=True)

                role = call.role
                entry = first.get(name)
                if role or entry is None or entry.current is None:
                    entry = self.admission.find(caller, call, parent, now)
                if entry not in allowed:
                    entry = self.admission.authorize(caller, entry, call, parent, now)
                declaration: Declaration = entry.current  # type: ignore[assignment]  # an offline one was refused
                schema_hash = call.schema_hash
                if schema_hash and schema_hash != declaration.tool.schema_hash:
                    declaration = declared_as(entry, schema_hash)

                text = call.arguments_json
                size = len(text)
                checker = declaration.checker
                if checker is None or size * 4 > max_arguments:
                    text = self._arguments.validate(caller, call, parent, declaration)
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
                        text = self._arguments.validate(caller, call, parent, declaration)
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
                    self.refused.refuse(caller, call, caller_full, now)
                    continue
                if total.held + size > max_held or budget.held + size > max_of_source:
                    raise over_budget(caller, total.held + size, limits)
                if tool_full is not None and declaration is full_tool:  # no call ends while these are taken
                    self.refused.refuse(caller, call, tool_full, now)
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
                    self.refused.refuse(caller, call, tool_full, now)
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
                    timeout, background_after = self.admission.soft_deadline(
                        caller, call, declaration, parent, has_tasks=self.deadlines.background is not None
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
                if (traceparent := call.traceparent) or parent is not None or context is not None:
                    record.trace = traces.begin(traceparent, call, parent, context, now)
                if deadline < nearest:
                    nearest = deadline
                record.caller, record.call_id, record.handler = caller, call_id, handler
                record.entry, record.declaration, record.exchange = entry, declaration, exchange
                record.arguments_json, record.size = text, size
                record.started, record.accepted, record.active = now, False, True
                if background_after:
                    total.soft_deadlines[record] = now + background_after
                    nearest = min(nearest, now + background_after)
                    if declaration.tool.always_background:
                        at_once.append(record)
                self._last_id = number = self._last_id + 1
                record.id = handler_id = str(number)
                in_flight[call_id] = handler.pending[handler_id] = record
                total.held += size
                budget.held += size
                batch.append(record)
                share -= 1
            except Refused as refused:
                self.refused.refuse(caller, call, refused, now)
            except BaseException as fault:
                self.refused.fault(caller, call_id, name, fault, now)
        if to is not None and batch:
            to.slots.take(budget, len(batch))
            to.send(batch, now)
        for record in at_once:
            if total.soft_deadlines.pop(record, None) is not None:  # else a handler of this process has ended it
                self.deadlines.to_background(record, now)
        if in_flight:
            total.callers[caller] = None
        if (identity := caller.principal.identity).name:
            self.observer.identity_called(identity, self._last_id - sent_before)
        if nearest < total.armed_at:
            total.arm(nearest)

    def results(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> None:
        """Takes the results of a handler, and delivers each to its caller."""
        total, pending, keep = self.in_flight, handler.pending, self.records.keep
        soft_deadlines, tripwire = total.soft_deadlines, None if self.tripwire is None else self._tripwire_for(handler)
        careful = self.records.contents or handler.source.startswith(CAREFUL)  # whether the observer records each
        slow = now - self.slow_calls.seconds  # a call that began before took long
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
            total.held -= size
            caller.budget.held -= size
            if call.parent is not None:
                call.leave_parent()
            if not call.active:
                handler.slots.release(caller.budget, 1)
                handler.stuck -= 1
                total.ended_early.discard(call)
                self.records.late += 1
                continue
            call.active = False
            if call.children:
                self.endings.end_children(call, now)
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
                (tripwire is not None or result.is_error or result.content or len(output) > most or "error" in result)
                or (len(output) <= NO_OUTPUT and result.input_requests_json)
                or (checks_outputs and call.declaration.output_checker is not None)
            ):
                handler.slots.release(caller.budget, 1)
                code = review(call, result, self._limits, tripwire)
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
            parent, trace = call.parent, call.trace
            more: More | str | None = trace.trace_id if trace is not None else None
            if parent is not None:
                more = More(parent=parent.id, trace_id=trace.trace_id if trace is not None else "")
            name, source, started = entry.name, entry.source, call.started
            if started < slow:
                self.slow_calls.note(call, 0, now)
            row = (call_id, name, source, caller.source, started, now, 0, size, len(output), origin, call.id, more)
            keep(row)
            if trace is not None and trace.recorded:
                observer.span_ended(trace, call, row)
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
        tripwire = self._tripwire_for(handler)
        for message in progress:
            call = handler.pending.get(message.call_id)
            if call is None or not call.active:
                self.records.unexpected += call is None
                continue
            if tripwire is not None:
                tripwire.clear_progress(call.entry.name, message)
            if call.trace is not None and not call.accepted:
                call.trace.first_sign = now
            call.accepted = True
            largest = min(self._limits.result_bytes, call.caller.max_item_bytes)
            if message.ByteSize() > largest:  # as with a result: a larger frame would end every call of the caller
                name, size = call.entry.name, message.ByteSize()
                text = f"tool {name!r} sent progress of {size} bytes, more than {largest}: ask for less"
                limit = ("result_bytes", largest)
                self.endings.abandon(call, Code.RESULT_TOO_LARGE, text, now, reason="result_bytes", limit=limit)
                continue
            idle = call.declaration.tool.idle_timeout_seconds
            if idle:
                call.idle_deadline = now + idle
            call.caller.progress(call.call_id, message)

    def _tripwire_for(self, handler: Handler) -> Tripwire | None:
        """Returns what checks the results of a handler; None where its source is trusted."""
        return self.tripwire if self._policy.is_untrusted(handler.source) else None
