"""A call's life: find, may, check, send, time, cancel, end in exactly one result.

The steps stand in one order for every way in (design.md 6): stream, local function and gateway hand the same methods
a list of calls, a handler of any kind hands back a list of results. Nothing here awaits or owns a timer: whoever
drives it passes the time in, and is told through ``arm`` when the next deadline passes.

The file is long because those steps share one state; what they say when they refuse stands in refusals.py.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from toolbus.bus.calls.call import Background, Budget, Call, Caller
from toolbus.bus.calls.call_records import MAX_TEXT, READER, CallRecords, content_of, origin_of
from toolbus.bus.calls.refusals import (
    RETRY_SECONDS,
    Refused,
    bad_call_id,
    bounded_hint,
    clamped_timeout,
    declared_as,
    invalid,
    must_fit,
    no_room,
    overloaded,
    some,
    window_full,
)
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Declaration, Entry
from toolbus.bus.catalog.handler import BUS_SOURCE, Handler
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.catalog.schema import load_arguments
from toolbus.errors import Code, Stage, UnknownRole
from toolbus.tool import MAX_CALL_ID, MAX_TIMEOUT_SECONDS, TASK_SECONDS, CallError, Limits, Result, level_of
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.calls")

STUCK_SECONDS = 60.0  # how long a call that ended early may keep its slot unconfirmed
SWEEP_PAUSE = 0.005  # a sweep looks at every call in flight, so many short limits share one


class Dispatcher:
    """Calls in flight, and the steps of their lives.

    Args:
        arm: called with the time of the next deadline whenever it comes nearer; ``sweep`` is to be called then.
        first_id: where the ids towards handlers begin; dispatchers that share handlers must not share ids.
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
        first_id: int = 1,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._limits = limits
        self._arm = arm
        self._armed_at = math.inf  # when the next sweep is due
        self._budgets: WeakValueDictionary[str, Budget] = WeakValueDictionary()  # by the caller's source
        self._held = 0  # bytes of arguments held in all
        self._last_id = first_id - 1  # the last id that a call got towards its handler
        self._callers: dict[Caller, None] = {}  # those that have had calls since the last sweep
        self._stuck: set[Call] = set()
        self._patient: dict[Call, float] = {}  # calls that become tasks, and when
        self._moved: dict[Call, Stage] = {}  # calls that a handler lost and another has, and how far the first had got
        self.tripwire = tripwire  # looks for secrets in results of guarded sources; None: nobody does
        self.background = background  # who keeps tasks; None: nobody, callers wait to the end
        self.view = CatalogView(registry, policy)  # what callers may see, by the same policy
        self.records = records
        self.settled_at = settled_at  # until then an unknown name may still come back (a restarted bus)
        self.draining = False  # whether only nested calls are taken

    def __repr__(self) -> str:
        state = " draining" if self.draining else ""
        return f"<Dispatcher active={self.active} stuck={self.stuck} held={self._held}{state}>"

    @property
    def active(self) -> int:
        """Calls whose caller waits."""
        return sum(len(caller.in_flight) for caller in self._callers)

    @property
    def stuck(self) -> int:
        """Calls that have ended for their caller and hold a slot until their handler confirms."""
        return len(self._stuck)

    @property
    def held_bytes(self) -> int:
        """Bytes of arguments held for all calls."""
        return self._held

    # -- the four hot ways in ------------------------------------------------------------------------------------
    # `calls` and `results` are flat on purpose: a function call a call would cost a twentieth of the budget
    # (design.md 7). What is rare stands in functions of its own, and items go on in batches.

    def calls(self, caller: Caller, calls: Iterable[pb.ToolCall], now: float) -> None:
        """Takes what a caller asks for. Each call that cannot be sent is answered here and now."""
        asked, budget, allowed = caller.in_flight, caller.budget, caller.allowed
        limits, first, nearest = self._limits, self._registry.first, self._armed_at
        if caller.allowed_at != self._registry.revision:
            allowed.clear()
            caller.allowed_at = self._registry.revision
        batch: list[Call] = []  # accepted, for the same handler, not yet sent
        to: Handler | None = None  # whom the batch is for
        # Put into words once for many calls: a flood that is turned away would else cost more than the calls taken.
        full: Refused | None = None  # the caller is
        crowded: Declaration | None = None  # the last tool without room, and
        no: Refused | None = None  # what is said of it
        for call in calls:
            call_id, name = call.call_id, call.name
            try:
                if not call_id or call_id in asked or len(call_id) > MAX_CALL_ID:
                    raise bad_call_id(call_id)
                parent_id = call.parent_call_id
                parent = self._parent(caller, parent_id) if parent_id else None
                if self.draining and parent is None:
                    raise Refused(Code.UNAVAILABLE, "the bus is draining and takes no new calls", retry_safe=True)

                role = call.role
                entry = first.get(name)
                if role or entry is None or entry.current is None:
                    entry = self._find(caller, call, parent, now)
                if entry not in allowed:
                    entry = self._allowed(caller, entry, call, parent, now)
                declaration: Declaration = entry.current  # type: ignore[assignment]  # one that is offline was refused
                wanted = call.schema_hash
                if wanted and wanted != declaration.tool.schema_hash:
                    declaration = declared_as(entry, wanted)

                text = call.arguments_json
                size = len(text)
                checker = declaration.checker
                if checker is None or size * 4 > limits.arguments_bytes:
                    text = self._checked(text, declaration)
                else:
                    try:
                        arguments = checker.load(text)
                    except ValueError as problem:
                        raise Refused(Code.INVALID_ARGUMENTS, str(problem)) from None
                    if type(arguments) is dict and not declaration.strips.isdisjoint(arguments):
                        text = self._checked(text, declaration)  # reads anew what it writes anew: exactly
                    elif type(arguments) is not dict or not checker.is_valid(arguments):
                        raise invalid(text, arguments, checker)
                context = parent.context if parent is not None else None
                if parent is None and call.HasField("context") and caller.may_set_context:
                    context = _copied(call.context, limits)
                    size += context.ByteSize()
                if len(asked) >= caller.max_in_flight:
                    full = full or window_full(caller.source, caller.max_in_flight)
                    self._turn_away(caller, call, full, now)
                    continue
                if self._held + size > limits.held_bytes or budget.held + size > limits.held_bytes_per_source:
                    raise self._over_budget(caller, size)
                handler = declaration.pick()
                if handler is None:
                    if no is None or crowded is not declaration:
                        crowded, no = declaration, no_room(entry, declaration)
                    self._turn_away(caller, call, no, now)
                    continue
                if size * 4 > handler.max_item_bytes or context is not None:
                    must_fit(text, context, name, handler.max_item_bytes)

                record = Call()
                timeout = call.timeout_seconds or declaration.timeout
                if not 0.0 < timeout <= MAX_TIMEOUT_SECONDS:
                    timeout = clamped_timeout(timeout, caller.longest_timeout)
                patience = call.background_after_seconds
                if patience:
                    timeout, patience = self._patience(caller, call, declaration, parent)
                record.timeout = timeout
                record.deadline = deadline = now + timeout
                record.context, record.parent, record.children, record.depth = context, None, None, 1
                if parent is not None:
                    record.nest(parent)
                if declaration.tool.idle_timeout_seconds:
                    record.idle_deadline = now + declaration.tool.idle_timeout_seconds
                    deadline = min(deadline, record.idle_deadline)
                if deadline < nearest:
                    nearest = deadline
                record.caller, record.call_id, record.handler = caller, call_id, handler
                record.entry, record.declaration = entry, declaration
                record.arguments_json, record.size = text, size
                record.started, record.accepted, record.active = now, False, True
                if patience:
                    self._patient[record] = now + patience
                    nearest = min(nearest, now + patience)
                self._last_id = number = self._last_id + 1
                record.id = handler_id = str(number)
                asked[call_id] = handler.pending[handler_id] = record
                self._held += size
                budget.held += size
                if handler is not to:
                    if to is not None:
                        to.send(batch, now)
                    batch, to = [], handler
                batch.append(record)
            except Refused as refused:
                self._turn_away(caller, call, refused, now)
            except BaseException as fault:
                self._fault(caller, call_id, name, fault, now)
        if to is not None:
            to.send(batch, now)
            self._callers[caller] = None
        if nearest < self._armed_at:
            self._rearm(nearest)

    def results(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> None:
        """Takes what a handler answers."""
        pending, keep, patient = handler.pending, self.records.keep, self._patient
        careful = self.records.contents or handler.source == BUS_SOURCE  # what `_record` has to look at
        guarded = self.tripwire is not None and self._policy.is_untrusted(handler.source)
        batch: list[tuple[str, str]] = []  # plain results for the same caller, not yet delivered
        to: Caller | None = None  # whom the batch is for
        most = succeeded = 0
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
                handler.stuck -= 1
                self._stuck.discard(call)
                self.records.late += 1
                continue
            call.active = False
            if call.children:
                self._end_children(call, now)
            if patient:
                patient.pop(call, None)
            del caller.in_flight[call_id]
            if caller is not to:
                if batch and to is not None:
                    to.deliver(batch)
                batch, to = [], caller
                most = min(self._limits.result_bytes, caller.max_item_bytes) // 4
            output = result.output_json
            if guarded or result.is_error or result.content or len(output) > most or result.HasField("error"):
                code = self._deliver_special(call, result, guarded)
                self._record(call, code, now, "" if code == Code.SECRET_BLOCKED else output)
                continue
            batch.append((call_id, output))
            if careful:
                self._record(call, 0, now, output)
                continue
            origin, context = None, call.context
            if context is not None:
                origin, size = origin_of(context), len(call.arguments_json)
            name, source, started = entry.name, entry.source, call.started
            keep((call_id, name, source, caller.source, started, now, 0, size, len(output), origin, None))
            succeeded += 1
        if batch and to is not None:
            to.deliver(batch)
        self.records.outcomes[0] += succeeded

    def progress(self, handler: Handler, progress: Iterable[pb.ToolProgress], now: float) -> None:
        """Takes signs of life; each resets the idle timeout."""
        guarded = self.tripwire is not None and self._policy.is_untrusted(handler.source)
        for sign in progress:
            call = handler.pending.get(sign.call_id)
            if guarded:  # a piece of an output cannot be judged; the result carries the whole
                sign.output_chunk = ""
                del sign.content[:]
                if (
                    call is not None
                    and self.tripwire is not None
                    and self.tripwire.check(call.entry.name, sign.message)
                ):
                    sign.message = ""
            if call is None or not call.active:
                self.records.unexpected += call is None
                continue
            call.accepted = True
            largest = min(self._limits.result_bytes, call.caller.max_item_bytes)
            if sign.ByteSize() > largest:  # as with a result: a larger frame would end every call of the caller
                message = f"tool {call.entry.name!r} sent progress of {sign.ByteSize()} bytes, more than {largest}"
                limit = ("result_bytes", largest)
                self._abandon(call, Code.RESULT_TOO_LARGE, f"{message}: ask for less", "result_bytes", now, limit)
                continue
            idle = call.declaration.tool.idle_timeout_seconds
            if idle:
                call.idle_deadline = now + idle
            call.caller.progress(call.call_id, sign)

    def cancels(self, caller: Caller, cancels: Iterable[pb.ToolCancel], now: float) -> None:
        """Takes calls back for their caller; one that has ended already is no error."""
        for cancel in cancels:
            call = caller.in_flight.get(cancel.call_id)
            if call is not None:
                reason = cancel.reason[:200] or "cancelled"
                self._abandon(call, Code.CANCELLED, f"the caller took the call back: {reason}", reason, now)

    def budget(self, source: str) -> Budget:
        """Returns the budget that the callers of a source share."""
        return self._budgets.setdefault(source, Budget())

    # -- a call's beginning --------------------------------------------------------------------------------------

    def _find(self, caller: Caller, call: pb.ToolCall, parent: Call | None, now: float) -> Entry:
        """Returns who offers a name now.

        Raises:
            Refused: nobody does.
        """
        name, role = call.name, call.role
        try:
            entry = self._registry.find(name, role)
        except UnknownRole as unknown:
            raise Refused(Code.NOT_FOUND, f"{unknown} (configured: {some(self._registry.roles)})") from None
        if entry is None or entry.current is None:
            raise self._missing(caller, call, parent, entry, now)
        return entry

    def _parent(self, caller: Caller, parent_id: str) -> Call:
        parent: Call | None = caller.pending.get(parent_id)
        if parent is None or not parent.active:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"parent_call_id {parent_id[:80]!r} is no call that this session owes: "
                "use the id of the call being answered, while it is being answered",
            )
        if parent.depth >= self._limits.call_depth:
            depth = self._limits.call_depth
            raise Refused(
                Code.PERMISSION_DENIED,
                f"tools called tools {depth} deep; the chain ends here: let a tool answer without calling another",
                limit=("call_depth", depth),
            )
        return parent

    def _missing(
        self, caller: Caller, call: pb.ToolCall, parent: Call | None, entry: Entry | None, now: float
    ) -> Refused:
        name, role, (user_id, level) = call.name, call.role, _user_of(caller, call, parent)
        if entry is not None and not self._policy.hides(entry, level):
            denied = self._policy.denial(caller.principal, entry, user_id, level)
            if denied is not None:  # else it would be waited for in vain
                return Refused(Code.PERMISSION_DENIED, denied)
            why = f" ({entry.last_error})" if entry.last_error else ""
            return Refused(
                Code.UNAVAILABLE, f"tool {name!r} is offline{why}: its plugin may come back", retry_safe=True
            )
        withdrawn = self._policy.withdrawn_from(name)
        if withdrawn is not None:
            return Refused(
                Code.PERMISSION_DENIED,
                f"tool {name!r} is withdrawn: source {withdrawn!r} may not offer tools any more; an operator lets it "
                f"with `toolbus grant {withdrawn}`",
            )
        if now < self.settled_at:
            return Refused(
                Code.UNAVAILABLE,
                f"tool {name[:80]!r} is not here yet: the bus has just started and plugins are coming back",
                retry_safe=True,
                retry_after_seconds=RETRY_SECONDS,
            )
        seen = self.view.listings(role or None, user_id, level, principal=caller.principal)
        there = some(listing.tool.name for listing in seen)
        where = f" in role {role!r}" if role else ""
        return Refused(Code.NOT_FOUND, f"there is no tool {name[:80]!r}{where}; there are: {there}")

    def _allowed(self, caller: Caller, entry: Entry, call: pb.ToolCall, parent: Call | None, now: float) -> Entry:
        """Returns the entry that a caller may call: the one found, or another role's where none was asked for.

        Raises:
            Refused: it may call none.
        """
        user_id, level = _user_of(caller, call, parent)
        denied = self._policy.denial(caller.principal, entry, user_id, level)
        if denied is None:
            if not self._policy.depends_on_user(entry):
                caller.allowed.add(entry)
            return entry
        for other in () if call.role else self._registry.find_all(call.name):
            if self._policy.denial(caller.principal, other, user_id, level) is None:
                return other
        if self._policy.hides(entry, level):
            raise self._missing(caller, call, parent, None, now)
        raise Refused(Code.PERMISSION_DENIED, denied)

    def _patience(
        self, caller: Caller, call: pb.ToolCall, declaration: Declaration, parent: Call | None
    ) -> tuple[float, float]:
        """Returns how long a call may run, and how long its caller waits before it becomes a task; 0: to the end.

        Raises:
            Refused: either is no length of time.
        """
        patience, asked = call.background_after_seconds, call.timeout_seconds
        if not patience > 0.0 or not asked >= 0.0:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"background_after_seconds is {patience:g} and timeout_seconds {asked:g}: the first must be more than "
                "0 or left out, the second not below 0",
            )
        if self.background is None or parent is not None or declaration.tool.no_background:
            return min(asked or declaration.timeout, caller.longest_timeout), 0.0
        return min(asked or TASK_SECONDS, TASK_SECONDS), min(patience, MAX_TIMEOUT_SECONDS)

    def _checked(self, text: str, declaration: Declaration) -> str:
        """Does what the flat path leaves out: large arguments, unchecked tools, keys that are taken out."""
        limit = self._limits.arguments_bytes
        if len(text) * 4 > limit and len(text.encode()) > limit:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"the arguments have more than {limit} bytes: send less, or a reference to the data",
                limit=("arguments_bytes", limit),
            )
        checker = declaration.checker
        # A key may be spelled with escapes; what cannot be read cannot be searched for keys either.
        if checker is None and not (declaration.strips and ("ser" in text or "\\" in text)):
            return text
        try:
            arguments = load_arguments(text)
        except ValueError as problem:
            raise Refused(Code.INVALID_ARGUMENTS, str(problem)) from None
        if type(arguments) is dict and not declaration.strips.isdisjoint(arguments):
            arguments, text = _stripped(arguments, declaration.strips)
        if checker is not None and (type(arguments) is not dict or not checker.is_valid(arguments)):
            raise invalid(text, arguments, checker)
        return text

    def _fault(self, caller: Caller, call_id: str, name: str, fault: BaseException, now: float) -> None:
        """Answers a call that met a fault of ours. The validator's panics are no Exceptions, and end nothing else."""
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise fault
        log.error("a fault of the bus in call %s of %s", call_id, name[:80], exc_info=fault)
        error = CallError(Code.INTERNAL, "a fault of the bus; its log has the details", stage=Stage.NOT_DISPATCHED)
        caller.deliver_result(call_id, Result(call_id, is_error=True, error=error).to_wire())
        self.records.add(call_id[:MAX_TEXT], name[:MAX_TEXT], "", caller.source, now, now, error.code)

    def _over_budget(self, caller: Caller, size: int) -> Refused:
        limits = self._limits
        if self._held + size > limits.held_bytes:
            return overloaded("the bus holds all the arguments it can", ("held_bytes", limits.held_bytes))
        return overloaded(
            f"the bus holds all the arguments it can for {caller.source!r}",
            ("held_bytes_per_source", limits.held_bytes_per_source),
        )

    # -- a call's end --------------------------------------------------------------------------------------------

    def _deliver_special(self, call: Call, result: pb.ToolResult, guarded: bool) -> int:
        """Delivers a result that is large, failed, has content, or may not hold secrets. Returns its code."""
        caller = call.caller
        largest = min(self._limits.result_bytes, caller.max_item_bytes)
        if result.ByteSize() > largest:
            name = "result_bytes" if largest == self._limits.result_bytes else "max_message_bytes"
            error = CallError(
                Code.RESULT_TOO_LARGE,
                f"tool {call.entry.name!r} answered {result.ByteSize()} bytes, more than {largest}: ask for less",
                stage=Stage.ACCEPTED,
                limit=(name, largest),
            )
            self._fail(call, error)
            return error.code
        said = self.tripwire.check_result(call.entry.name, result) if guarded and self.tripwire is not None else None
        if said is not None:
            self._fail(call, CallError(Code.SECRET_BLOCKED, said, stage=Stage.ACCEPTED))
            return Code.SECRET_BLOCKED
        if result.is_error or result.HasField("error"):
            result.is_error = True
            error_of = result.error
            if not error_of.code:
                error_of.code = Code.TOOL.value  # type: ignore[assignment]  # protoc's enum types are ints
            if not error_of.stage:
                error_of.stage = Stage.ACCEPTED.value  # type: ignore[assignment]
            error_of.retry_after_seconds = bounded_hint(error_of.retry_after_seconds)
            if not error_of.message and not result.output_json.strip("nul "):
                error_of.message = f"tool {call.entry.name!r} failed and gave no reason"
        caller.deliver_result(call.call_id, result)
        return result.error.code if result.is_error else 0

    def _abandon(
        self,
        call: Call,
        code: Code,
        message: str,
        reason: str,
        now: float,
        limit: tuple[str, float] | None = None,
        tell: bool = True,
    ) -> None:
        """Ends a call for its caller while its handler still has it."""
        if not call.active:
            return
        stage = self._stage(call)
        call.caller.in_flight.pop(call.call_id, None)
        self._patient.pop(call, None)
        if call.handler.cancel(call, reason):
            call.handler.pending.pop(call.id, None)
            self._let_go(call)
            call.active = False
        else:
            call.active = False
            call.handler.stuck += 1
            self._stuck.add(call)
            call.freed_at = now + STUCK_SECONDS
            self._rearm(call.freed_at)
        if call.children:
            self._end_children(call, now)
        safe = stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable
        if tell:
            self._fail(call, CallError(code, message, stage=stage, retry_safe=safe, limit=limit))
        self._record(call, code, now)

    def _end_children(self, call: Call, now: float) -> None:
        children, call.children = call.children, None  # each takes itself off the list
        for child in children or ():
            self._abandon(child, Code.CANCELLED, "the call that made this one has ended", "parent ended", now)

    def _fail(self, call: Call, error: CallError) -> None:
        call.caller.deliver_result(call.call_id, Result(call.call_id, is_error=True, error=error).to_wire())

    def _record(self, call: Call, code: int, now: float, output: str = "") -> None:
        """Notes how a call ended, with everything that the flat path leaves out."""
        entry = call.entry
        if entry.name == READER:
            return
        self.records.add(
            *(call.call_id, entry.name, entry.source, call.caller.source, call.started, now, code),
            (len(call.arguments_json), len(output)),  # without the context, which counts towards what is held
            origin_of(call.context) if call.context is not None else None,
            content_of(call.arguments_json, output) if self.records.contents else None,
        )

    def _turn_away(self, caller: Caller, call: pb.ToolCall, refused: Refused, now: float) -> None:
        """Answers a call that was not sent, and notes it. Cut: what is refused may be of any length, and is kept."""
        text, result, code = call.arguments_json, refused.result, refused.error.code
        result.call_id = call.call_id
        caller.deliver_result(call.call_id, result)
        self.records.add(
            *(call.call_id[:MAX_TEXT], call.name[:MAX_TEXT], "", caller.source, now, now, code),
            (len(text), 0),
            origin_of(call.context) if caller.may_set_context and call.HasField("context") else None,
            content_of(text, "") if self.records.contents else None,
        )

    def _stage(self, call: Call) -> Stage:
        if call.accepted:
            return Stage.ACCEPTED
        stage: Stage = max(call.handler.stage(call), self._moved.get(call, Stage.NOT_DISPATCHED))
        return stage

    def _let_go(self, call: Call) -> None:
        """Nobody runs the call any more, and its handler has taken it off its table: frees what was held for it."""
        self._held -= call.size
        call.caller.budget.held -= call.size
        if call.parent is not None:
            call.leave_parent()
        if not call.active:
            call.handler.stuck -= 1
            self._stuck.discard(call)

    # -- what happens to others ----------------------------------------------------------------------------------

    def handler_ended(self, pending: Iterable[Call], why: str, now: float) -> None:
        """A handler is gone. Its calls move to another one where that is safe, else they end here.

        Args:
            owed: what it owed; the handler's own table is empty already.
        """
        for call in pending:
            if not call.active:
                if call in self._stuck:  # else it ended just now, with its parent, before it was sent
                    self._let_go(call)
                continue
            stage = self._stage(call)
            safe = stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable
            same = call.entry.declarations.get(call.declaration.tool.schema_hash)
            other = same.pick() if safe and same is not None and now < call.deadline else None
            if other is not None and call.size * 4 <= other.max_item_bytes:
                self._end_children(call, now)  # they belong to the run that was lost
                if stage is not Stage.NOT_DISPATCHED:
                    self._moved[call] = stage
                call.handler = other
                call.accepted = False
                other.pending[call.id] = call
                other.send([call], now)
                continue
            self._let_go(call)
            call.active = False
            call.caller.in_flight.pop(call.call_id, None)
            self._patient.pop(call, None)
            if call.children:
                self._end_children(call, now)
            message = f"tool {call.entry.name!r} was lost: {why}"
            if not safe:
                message += "; it may have run, so it was not tried again"
            self._fail(call, CallError(Code.UNAVAILABLE, message, stage=stage, retry_safe=safe))
            self._record(call, Code.UNAVAILABLE, now)

    def caller_ended(self, asked: Iterable[Call], now: float) -> None:
        """A caller is gone: what it asked for is cancelled to the plugins, and nobody is told."""
        for call in asked:
            self._abandon(call, Code.CANCELLED, "the caller went away", "caller gone", now, tell=False)
            self._callers.pop(call.caller, None)

    def take_back(self, call: Call, why: str, now: float) -> None:
        """Ends a call of a caller that is told to leave, and can still be told so."""
        self._abandon(call, Code.CANCELLED, f"the caller's session ended: {why}", "caller gone", now)

    def stop(self, now: float) -> None:
        """Takes no more calls, and ends those that programs and functions of this process still have."""
        self.draining = True
        for caller in list(self._callers):
            for call in list(caller.in_flight.values()):
                self._abandon(call, Code.UNAVAILABLE, "the bus stopped", "the bus stopped", now)

    def sweep(self, now: float) -> None:
        """Ends what is past its time, and says when to come again."""
        nearest = math.inf
        for call in list(self._stuck):
            if call.freed_at > now:
                nearest = min(nearest, call.freed_at)
            elif call.handler.pending.pop(call.id, None) is call:
                self._let_go(call)
        self._moved = {call: stage for call, stage in self._moved.items() if call.active}
        for call, patience_ends in list(self._patient.items()):
            if patience_ends > now:
                nearest = min(nearest, patience_ends)
            elif self._patient.pop(call, None) is not None and now < call.deadline:
                self._to_background(call, now)
        for caller in list(self._callers):
            for call in list(caller.in_flight.values()):
                idle = call.declaration.tool.idle_timeout_seconds
                if call.deadline <= now:
                    self._out_of_time(call, "timeout_seconds", call.timeout, now)
                elif idle and call.idle_deadline <= now:
                    self._out_of_time(call, "idle_timeout_seconds", idle, now)
                else:
                    nearest = min(nearest, call.deadline, call.idle_deadline if idle else math.inf)
            if not caller.in_flight:
                del self._callers[caller]
        self._armed_at = math.inf
        nearest = min([nearest, *(call.freed_at for call in self._stuck)])
        if nearest < math.inf:
            self._rearm(max(nearest, now + SWEEP_PAUSE))

    def _to_background(self, call: Call, now: float) -> None:
        """Gives a call's caller a result now, and lets the call go on for whoever keeps it."""
        adopted = None
        try:
            if self.background is not None:
                adopted = self.background.adopt(call, now, self.cancels)
        except Exception:  # it runs in the middle of a sweep, which times every other call too
            log.exception("a fault of the bus: call %s of %s became no task", call.call_id, call.entry.name)
        if adopted is None:  # the caller waits on, as long as any may
            call.timeout = min(call.timeout, call.caller.longest_timeout)
            call.deadline = min(call.deadline, call.started + call.timeout)
            return
        before, call_id = call.caller, call.call_id
        del before.in_flight[call_id]
        before.budget.held -= call.size
        call.caller, call.call_id, envelope = adopted
        call.caller.budget.held += call.size
        call.caller.in_flight[call.call_id] = call
        self._callers[call.caller] = None
        before.deliver_result(call_id, envelope.to_wire())

    def _out_of_time(self, call: Call, limit: str, value: float, now: float) -> None:
        waited = now - call.started
        what = "no sign of life from" if limit == "idle_timeout_seconds" else "no result from"
        message = f"{what} tool {call.entry.name!r} within {value:g} s (waited {waited:.1f} s; limit {limit})"
        self._abandon(call, Code.DEADLINE_EXCEEDED, message, limit, now, limit=(limit, value))

    def _rearm(self, when: float) -> None:
        if when < self._armed_at:
            self._armed_at = when
            self._arm(when)


def _user_of(caller: Caller, call: pb.ToolCall, parent: Call | None) -> tuple[str, int]:
    """Returns for whom a call is made and their level: a nested one for whom its parent is, and only hosts may say."""
    if parent is not None:
        context = parent.context
    else:
        context = call.context if caller.may_set_context and call.HasField("context") else None
    return ("", 0) if context is None else (context.user_id, level_of(context.attributes))


def _copied(context: pb.CallContext, limits: Limits) -> pb.CallContext:
    """Copies a context out of its frame, which would else stay in memory as long as the call."""
    if context.ByteSize() > limits.arguments_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"the context has {context.ByteSize()} bytes, more than {limits.arguments_bytes}: send fewer messages",
            limit=("arguments_bytes", limits.arguments_bytes),
        )
    copy = pb.CallContext()
    copy.CopyFrom(context)
    return copy


def _stripped(arguments: dict[str, Any], keys: frozenset[str]) -> tuple[dict[str, Any], str]:
    kept = {key: value for key, value in arguments.items() if key not in keys}
    return kept, json.dumps(kept, separators=(",", ":"))  # ASCII: a lone surrogate is legal JSON, but not UTF-8
