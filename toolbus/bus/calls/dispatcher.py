"""Takes calls from callers and results from handlers: the short way of a call that is admitted, sent and answered.

Every way in uses the same methods: streams, local functions and the gateway hand in a list of calls, a handler of any
kind hands back a list of results. Nothing here awaits or owns a timer: the caller of a method passes the time, and the
dispatcher asks through ``arm`` for a sweep of the deadlines when the next one passes.

Rare steps have files of their own: the rules before a call is sent (call_admission.py), ends before the result
(call_endings.py), and records (call_observer.py). They share the calls in flight (`CallsInFlight`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from toolbus.bus.access.quota import Quota, Quotas
from toolbus.bus.calls.call import ArgumentBudget, Call, Caller, InputExchange, MakeCalls, Seams, SecretCheck
from toolbus.bus.calls.call_admission import CallAdmission, CallArguments, copy_context
from toolbus.bus.calls.call_endings import CallEndings, CallsInFlight
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.call_observer import CallObserver
from toolbus.bus.calls.call_records import MAX_TEXT, CallRecords, More, origin_of
from toolbus.bus.calls.refusals import (
    Refused,
    bad_call_id,
    bounded_hint,
    clamped_timeout,
    declared_as,
    identity_full,
    must_fit,
    no_room,
    over_budget,
    too_fast,
    window_full,
)
from toolbus.bus.catalog.argument_repair import original_of
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import BUS_SOURCE, RUN_SOURCES, Declaration, Entry, Handler
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.catalog.schema import ArgumentChecker, load_output
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.errors import CallError, Code, Stage
from toolbus.protocol.limits import DEFAULT_TIMINGS
from toolbus.protocol.questions import (
    INPUT_REQUIRED,
    NEEDS_INPUT,
    QuestionFault,
    explain_needs,
    explain_unaccepted,
    read_answers,
    read_questions,
    unaccepted,
    words,
)
from toolbus.protocol.tool import MAX_CALL_ID, MAX_TIMEOUT_SECONDS, Limits, Result, Tool
from toolbus.v1 import tool_pb2 as pb

# Refusals are recorded, and reported to the watchers of denials and limits. refusals.py builds the errors.

log = logging.getLogger("toolbus.calls")


class RefusedCalls:
    """The calls of one bus that are not sent."""

    def __init__(self, observer: CallObserver, seams: Seams) -> None:
        self._observer = observer
        self._seams = seams

    def refuse(self, caller: Caller, call: pb.ToolCall, refused: Refused, now: float) -> None:
        """Answers a call that is not sent, and records it, shortened: refused names may be of any length."""
        result = refused.result
        result.call_id = call.call_id
        caller.deliver_result(call.call_id, result)
        if refused.error.code == Code.PERMISSION_DENIED:
            self._seams.on_denied(caller.principal, call.name[:MAX_TEXT], refused.error.message)
        self._observer.call_refused(caller, call, refused, now)

    def within_quota(
        self, caller: Caller, quota: Quota, calls: Iterable[pb.ToolCall], now: float
    ) -> Sequence[pb.ToolCall]:
        """Returns the calls that an identity may make now; answers the others."""
        calls = list(calls)
        free = quota.free
        if free is not None and len(calls) > free:
            self._refuse_rest(caller, calls, free, identity_full(caller, quota), now)
        passed, wait = quota.take(len(calls), now)
        if passed < len(calls):
            self._refuse_rest(caller, calls, passed, too_fast(caller, quota, wait), now)
        return calls

    def _refuse_rest(self, caller: Caller, calls: list[pb.ToolCall], first: int, refused: Refused, now: float) -> None:
        self._observer.identity_limited(caller.principal.identity, len(calls) - first)
        self._seams.on_limited(caller.principal, len(calls) - first, refused.error.message)
        for call in calls[first:]:
            self.refuse(caller, call, refused, now)
        del calls[first:]

    def fault(self, caller: Caller, call_id: str, name: str, fault: BaseException, now: float) -> None:
        """Answers a call that met a fault of the bus; panics of the validator do not derive from Exception."""
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise fault
        fields = call_fields(call_id, name, "", caller.principal)
        log.error("a fault of the bus in a call", exc_info=fault, extra=fields)
        error = CallError(Code.INTERNAL, "a fault of the bus; its log has the details", stage=Stage.NOT_DISPATCHED)
        caller.deliver_result(call_id, Result(call_id, is_error=True, error=error).to_wire())
        self._observer.call_failed(caller, call_id, name, error, now)


# Ends calls whose deadline has passed, and makes tasks of those that have reached their soft deadline.
#
# One sweep over all calls in flight runs when the nearest deadline passes, instead of a timer for each call.

SWEEP_PAUSE = 0.005  # a sweep looks at every call in flight, so many short limits share one


class Deadlines:
    """The deadlines of the calls in flight.

    Args:
        calls: makes calls again, for tasks that got answers.
    """

    def __init__(self, in_flight: CallsInFlight, endings: CallEndings, calls: MakeCalls, seams: Seams) -> None:
        self._in_flight = in_flight
        self._endings = endings
        self._calls = calls
        self._seams = seams

    def sweep(self, now: float) -> None:
        """Ends calls whose deadline has passed, and arms the next sweep."""
        everything, nearest = self._in_flight, math.inf
        for call in list(everything.ended_early):
            if call.freed_at > now:
                nearest = min(nearest, call.freed_at)
            elif call.handler.pending.pop(call.id, None) is call:
                everything.free(call)
        everything.retried = {call: stage for call, stage in everything.retried.items() if call.active}
        for call, soft_deadline in list(everything.soft_deadlines.items()):
            if soft_deadline > now:
                nearest = min(nearest, soft_deadline)
            elif everything.soft_deadlines.pop(call, None) is not None and now < call.deadline:
                self.to_background(call, now)
        for caller in list(everything.callers):
            for call in list(caller.in_flight.values()):
                idle = call.declaration.tool.idle_timeout_seconds
                if call.deadline <= now:
                    self._exceeded(call, "timeout_seconds", call.timeout, now)
                elif idle and call.idle_deadline <= now:
                    self._exceeded(call, "idle_timeout_seconds", idle, now)
                else:
                    nearest = min(nearest, call.deadline, call.idle_deadline if idle else math.inf)
            if not caller.in_flight:
                del everything.callers[caller]
        everything.armed_at = math.inf
        nearest = min([nearest, *(call.freed_at for call in everything.ended_early)])
        if nearest < math.inf:
            everything.arm(max(nearest, now + SWEEP_PAUSE))

    def to_background(self, call: Call, now: float) -> None:
        """Answers a call at its soft deadline, and lets it go on as a task of the background."""
        adopted = None
        try:
            if (background := self._seams.background) is not None:
                adopted = background.adopt(call, now, self._endings.cancels, self._calls)
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
        self._in_flight.callers[call.caller] = None
        caller.deliver_result(call_id, envelope.to_wire())

    def _exceeded(self, call: Call, limit: str, value: float, now: float) -> None:
        waited = now - call.started
        what = "no progress of" if limit == "idle_timeout_seconds" else "no result from"
        message = f"{what} tool {call.entry.name!r} within {value:g} s (waited {waited:.1f} s; limit {limit})"
        self._endings.abandon(call, Code.DEADLINE_EXCEEDED, message, now, reason=limit, limit=(limit, value))


# Most calls have none of these. The bus stores no question: a call with answers is a call of its own.
def read_exchange(call: pb.ToolCall, limits: Limits) -> InputExchange:
    """Reads and checks the exchange of a call whose caller accepts questions.

    Raises:
        Refused: it breaks a rule or a limit.
    """
    answers, state = call.input_responses_json, call.request_state
    size = len(answers.encode())
    if size > limits.arguments_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"input_responses_json has {size} bytes, more than {limits.arguments_bytes}: answer with less",
            limit=("arguments_bytes", limits.arguments_bytes),
        )
    if answers:
        try:
            read_answers(answers)
        except ValueError as problem:
            raise Refused(Code.INVALID_ARGUMENTS, str(problem)) from None
    size = len(state.encode())
    if size > limits.request_state_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"request_state has {size} bytes, more than the limit request_state_bytes = {limits.request_state_bytes}: "
            "send back what came with the questions, unchanged",
            limit=("request_state_bytes", limits.request_state_bytes),
        )
    return InputExchange(words(call.accepts), answers, state)


def check_needs(tool: Tool, name: str, exchange: InputExchange | None) -> None:
    """Checks whether the caller accepts all that a tool is declared to need.

    Raises:
        Refused: it does not.
    """
    missing = unaccepted(tool.needs, exchange.accepts if exchange is not None else ())
    if missing:
        raise Refused(Code.INVALID_ARGUMENTS, explain_needs(name, missing), reason=NEEDS_INPUT)


def why_not_asked(name: str, result: pb.ToolResult, exchange: InputExchange | None, limits: Limits) -> CallError | None:
    """Returns the error that a caller gets instead of a tool's questions; None where it accepts them."""
    try:
        questions = read_questions(result.input_requests_json, limits)
        size = len(result.request_state.encode())
        if size > limits.request_state_bytes:
            raise QuestionFault(
                f"its request_state has {size} bytes, more than the limit "
                f"request_state_bytes = {limits.request_state_bytes}: keep less for the next run",
                ("request_state_bytes", limits.request_state_bytes),
            )
    except QuestionFault as fault:
        code = Code.TOOL if fault.limit is None else Code.RESULT_TOO_LARGE
        reason = "invalid_questions" if fault.limit is None else ""
        text = f"tool {name!r} asked for input in a way that breaks a rule: {fault}"
        return CallError(code, text, Stage.ACCEPTED, limit=fault.limit, reason=reason)
    accepts = exchange.accepts if exchange is not None else ()
    missing = unaccepted((question.needs for question in questions), accepts)
    if missing or exchange is None:
        text = explain_unaccepted(name, questions, missing)
        return CallError(Code.TOOL, text, Stage.ACCEPTED, reason=NEEDS_INPUT)
    return None


# Reviews results that are not plain: large ones, failures, questions, content, and those that may not hold secrets.
#
# An error replaces a result that the caller may not get. The short way for plain results is in `Dispatcher.results`.

LARGE = 65_536  # characters of an output whose size is asked for without a copy
NO_OUTPUT = 4  # characters of null: only what is no longer can be a result with questions
OUTPUT_SCHEMA = "output_schema"  # `CallError.reason` where an output breaks the tool's own schema


def review(call: Call, result: pb.ToolResult, limits: Limits, tripwire: SecretCheck | None) -> int:
    """Changes a result to one that the caller may get.

    Args:
        tripwire: blocks secrets; None where the tool's source is trusted.

    Returns:
        Its code: 0 for a success, `INPUT_REQUIRED` for questions.
    """
    error = _too_large(call, result, limits)
    if error is None and tripwire is not None:
        blocked = tripwire.check_result(call.entry.name, result)
        error = CallError(Code.SECRET_BLOCKED, blocked, stage=Stage.ACCEPTED) if blocked is not None else None
    if error is not None:
        return _replace(result, error)
    name = call.entry.name
    if result.is_error or result.HasField("error"):
        _complete(name, result)
        return result.error.code
    if result.input_requests_json and len(result.output_json) <= NO_OUTPUT:
        error = why_not_asked(name, result, call.exchange, limits)
        result.output_json = ""
        return INPUT_REQUIRED if error is None else _replace(result, error)
    result.input_requests_json = result.request_state = ""  # what has an output has no questions
    checker = call.declaration.output_checker
    error = _why_invalid(name, result.output_json, checker) if checker is not None else None
    return 0 if error is None else _replace(result, error)


def _replace(result: pb.ToolResult, error: CallError) -> int:
    """Makes a result a failure, with nothing of what the tool returned. Returns its code."""
    result.Clear()
    result.is_error = True
    result.output_json = "null"
    result.error.CopyFrom(error.to_wire())
    return error.code


def _too_large(call: Call, result: pb.ToolResult, limits: Limits) -> CallError | None:
    largest = min(limits.result_bytes, call.caller.max_item_bytes)
    small = len(result.output_json) < LARGE and result.ByteSize() <= largest  # which writes all of it to count it
    if small or (size := _payload_bytes(result)) <= largest:
        return None
    name = "result_bytes" if size > limits.result_bytes else "max_message_bytes"
    largest = limits.result_bytes if name == "result_bytes" else largest
    text = f"tool {call.entry.name!r} returned {size} bytes, more than {largest}: ask for less"
    return CallError(Code.RESULT_TOO_LARGE, text, stage=Stage.ACCEPTED, limit=(name, largest))


def _payload_bytes(result: pb.ToolResult) -> int:
    """Returns the size of a result: all parts from the tool in UTF-8, without the frame around them."""
    error = result.error.ByteSize() if result.HasField("error") else 0
    texts = (result.output_json, result.input_requests_json, result.request_state)
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    return size + sum(block.ByteSize() for block in result.content) + error


def _complete(name: str, result: pb.ToolResult) -> None:
    """Fills in what the plugin left out of a failure; a failure has no questions."""
    result.is_error = True
    result.input_requests_json = result.request_state = ""
    error = result.error
    if not error.code:
        error.code = Code.TOOL.value  # type: ignore[assignment]  # protoc's enum types are ints
    if not error.stage:
        error.stage = Stage.ACCEPTED.value  # type: ignore[assignment]
    error.retry_after_seconds = bounded_hint(error.retry_after_seconds)
    if not math.isfinite(error.limit.value):  # JSON has no such number: records with it could not be shown
        error.limit.value = 0.0
    if not error.message and not result.output_json.strip('nul "'):
        error.message = f"tool {name!r} failed and gave no reason"


def _why_invalid(name: str, output_json: str, checker: ArgumentChecker) -> CallError | None:
    """Returns the error of an output that breaks the tool's own schema."""
    try:
        output = load_output(output_json)
        fault = "" if checker.is_valid(output) else checker.explain(output)
    except ValueError as problem:
        fault = str(problem)
    if not fault:
        return None
    text = (
        f"tool {name!r} ran and returned what its own output schema does not allow: {fault}. The result is withheld: "
        "its author corrects the tool or the schema"
    )
    return CallError(Code.TOOL, text, Stage.ACCEPTED, reason=OUTPUT_SCHEMA)


CAREFUL = (BUS_SOURCE, RUN_SOURCES)  # how the names of sources begin of which not every call is recorded


class Dispatcher:
    """Dispatches all calls of one bus, and owns the parts for the rest of their lives.

    Args:
        arm: called with the time of the next deadline whenever it comes nearer; `Deadlines.sweep` is to be called then.
        stuck_seconds: as in `Timings`.
        first_id: where the ids towards handlers begin. A bus draws it, so that an id from before its restart names no
            call of now: a nested call that a peer sends again would run as the user of another call. Dispatchers that
            share handlers must not share ids.
        repairs: whether arguments that break their schema are repaired before they are refused.
        metrics: counts the calls of each tool; None: they are not counted.

    Attributes:
        seams: what rooms put around calls.
        view: what callers may see, by the same policy.
        observer: records how calls end.
        draining: whether only nested calls are accepted, for a graceful shutdown.
        arguments: validates the arguments of calls.
    """

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        records: CallRecords,
        limits: Limits,
        *,
        arm: Callable[[float], None],
        seams: Seams | None = None,
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
        self.seams = seams = seams or Seams()
        self.view = CatalogView(registry, policy)
        self.records = records
        self.observer = CallObserver(registry, records, metrics)
        self.slow_calls = self.observer.slow_calls
        self.traces = self.observer.traces
        self.draining = False
        self.in_flight = CallsInFlight(arm)
        self.admission = CallAdmission(registry, policy, self.view, limits, seams)
        self.arguments = CallArguments(limits, seams, repairs=repairs)
        self.refused = RefusedCalls(self.observer, seams)
        self.endings = CallEndings(self.in_flight, self.observer, stuck_seconds=stuck_seconds)
        self.deadlines = Deadlines(self.in_flight, self.endings, self.calls, seams)

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
                    text = self.arguments.validate(caller, call, parent, declaration)
                else:
                    try:
                        arguments = checker.load(text)
                    except ValueError:
                        arguments = None
                    plain = type(arguments) is dict and declaration.strips.isdisjoint(arguments)
                    if not plain or not checker.passes(arguments):
                        filled = self.arguments.filled(declaration, checker, text, arguments) if plain else None
                        # Parses again, and exactly, since it may write the text again.
                        text = filled or self.arguments.validate(caller, call, parent, declaration)
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
                        self._send(to, budget, batch, now)
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
                        caller, call, declaration, parent, has_tasks=self.seams.background is not None
                    )
                record.timeout = timeout
                record.deadline = deadline = now + timeout
                record.context, record.parent, record.children, record.depth = context, None, None, 1
                record.role = role
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
            self._send(to, budget, batch, now)
        for record in at_once:
            if total.soft_deadlines.pop(record, None) is not None:  # else a handler of this process has ended it
                self.deadlines.to_background(record, now)
        if in_flight:
            total.callers[caller] = None
        if (identity := caller.principal.identity).name:
            self.observer.identity_called(identity, self._last_id - sent_before)
        if nearest < total.armed_at:
            total.arm(nearest)

    def _send(self, handler: Handler, budget: ArgumentBudget, batch: list[Call], now: float) -> None:
        """Sends the calls of one caller for a handler to it, but those that an interceptor takes over."""
        handler.slots.take(budget, len(batch))
        for each in self.seams.interceptors:
            batch = each.before(batch, now)
        if batch:
            handler.send(batch, now)

    def results(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> None:
        """Takes the results of a handler, and delivers each to its caller."""
        for each in reversed(self.seams.interceptors):
            results = each.after(handler, results, now)
        total, pending, keep = self.in_flight, handler.pending, self.records.keep
        soft_deadlines, tripwire = total.soft_deadlines, self._tripwire_for(handler)
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
            if careful:
                self.observer.call_ended(call, 0, now, output)
                continue
            origin, context, arguments_json = None, call.context, call.arguments_json
            parent, trace = call.parent, call.trace
            more: More | str | None = trace.trace_id if trace is not None else None
            if parent is not None or type(arguments_json) is not str:  # repaired ones say so in their record
                more = observer.more(call)
                arguments_json = original_of(arguments_json)
                size = len(arguments_json)
            if context is not None:
                origin, size = origin_of(context), len(arguments_json)
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
            for each in reversed(self.seams.interceptors):
                each.progress(call, message)
            if call.trace is not None and not call.accepted:
                call.trace.first_sign = now
            call.accepted = True
            largest = self.largest_result(call)
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

    def largest_result(self, call: Call) -> int:
        """Returns how many bytes of a result its caller may get."""
        return min(self._limits.result_bytes, call.caller.max_item_bytes)

    def _tripwire_for(self, handler: Handler) -> SecretCheck | None:
        """Returns what checks the results of a handler; None where its source is trusted."""
        tripwire = self.seams.tripwire
        return tripwire if tripwire is not None and self._policy.is_untrusted(handler.source) else None
