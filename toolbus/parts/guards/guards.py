"""Asks guards about calls before they are sent and about results before they are delivered.

A guarded call is moved to `Held`, a handler that runs nothing, while its guards look at it: so a deadline, a cancel and
a task treat it like any call, and it takes no slot of its tool meanwhile. The guards are called through the dispatcher,
as calls nested in the one that they judge.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from toolbus.bus.calls.call import Call, Interceptor
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import Refused
from toolbus.bus.catalog.argument_repair import noted
from toolbus.bus.catalog.entry import Entry, Handler, Slots, Trust, is_operators
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller
from toolbus.common.text import clean_line, quote, shorten
from toolbus.errors import CallError, Code, Stage, UnknownRole
from toolbus.parts.guards.approvals import Approvals
from toolbus.parts.guards.settings import AFTER, ALLOW, BEFORE, ApprovalRule, GuardRule
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.guards")

SOURCE = "toolbus.guards"  # the caller of guards, in records
REASON = "guard"  # `CallError.reason` of what a guard refused or did not decide
MAX_REASON = 500  # characters of a guard's reason
SHARE = 0.9  # of what is left of a call's time: so the guard's failure is reported, not the call's deadline
VERDICTS = ("allow", "refuse", "replace")


class ToolRules(NamedTuple):
    """The rules for a tool: of guards before its calls and after them, and of the approval that they need."""

    before: tuple[GuardRule, ...] = ()
    after: tuple[GuardRule, ...] = ()
    approval: ApprovalRule | None = None


_NO_RULES = ToolRules()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guard decided; `failure` says why it decided nothing."""

    kind: str
    reason: str = ""
    value: Any = None  # the new arguments, or the new output
    failure: str = ""


class Held:
    """Holds the calls of one source that guards look at; a handler, but it runs nothing.

    Args:
        pending: the calls, shared by all sources.
        guards: who decides on them.
    """

    kind = "guard"
    instance = ""
    trust = Trust.OWN
    shares = False
    awaits_roles = False
    remote = False
    persisted = False
    takes_calls = True
    session_state = wire.SESSION_STATE_LIVE
    max_in_flight = max_item_bytes = 1 << 62

    def __init__(self, source: str, pending: dict[str, Any], guards: Guards) -> None:
        self.source = source
        self.pending = pending
        self.slots = Slots()
        self.stuck = 0
        self._guards = guards

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Runs nothing: nobody offers a tool by it."""

    def cancel(self, call: Call, reason: str) -> bool:
        """Ends the look at a call; it will not be confirmed."""
        self._guards.give_up(call)
        return True

    def stage(self, call: Call) -> Stage:
        """A held call was not sent yet, or its result is here."""
        return Stage.ACCEPTED if self._guards.has_result(call) else Stage.NOT_DISPATCHED


class _Everything(set[Entry]):
    """The tools that guards are: the operator has named them, so no rule about users or roles refuses them."""

    def __contains__(self, entry: object) -> bool:
        return True


class Guards(Interceptor):
    """The guards of one bus: an `Interceptor`.

    Attributes:
        verdicts: how often each guard decided what, by its name, ``before`` or ``after``, and the decision.
    """

    def __init__(
        self, rules: tuple[GuardRule, ...], approvals: Approvals, registry: Registry, dispatcher: Dispatcher
    ) -> None:
        self._rules = rules
        self._approvals = approvals
        self._registry = registry
        self._dispatcher = dispatcher
        self._held: dict[str, Any] = {}  # the calls that guards look at, by the bus's id
        self._handlers: dict[str, Held] = {}  # by source, while it has such calls
        self._looks: dict[str, asyncio.Task[None]] = {}  # by the bus's id of the call
        self._results: dict[str, pb.ToolResult] = {}  # of held calls that have one
        self._caller = LocalCaller(SOURCE, dispatcher, pending=self._held)
        self._caller.allowed = _Everything()
        self._known: dict[Entry, ToolRules] = {}  # cache: the rules of tools, as of `_known_at`
        self._known_at = -1
        self.verdicts: Counter[tuple[str, str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<Guards rules={len(self._rules)} held={len(self._held)}>"

    def rules_of(self, entry: Entry) -> ToolRules:
        if self._known_at != self._registry.revision:
            self._known.clear()
            self._known_at = self._registry.revision
        rules = self._known.get(entry)
        if rules is None:
            names = entry.name, entry.bare_name, entry.source, entry.table.role
            rules = _NO_RULES
            if not is_operators(entry.source):  # or a guard that hangs would lock operators out
                before, after = (tuple(rule for rule in self._rules if rule.sees(at, *names)) for at in (BEFORE, AFTER))
                destructive = entry.tool.annotations.destructive is True
                rules = ToolRules(before, after, self._approvals.rule_of(*names, destructive=destructive))
            self._known[entry] = rules
        return rules

    # -- the interceptor ---------------------------------------------------------------------------------------------

    def before(self, calls: list[Call], now: float) -> list[Call]:
        """Takes over the calls that guards are to see."""
        passed = []
        for call in calls:
            rules = self.rules_of(call.entry)
            if not (rules.before or rules.approval) or self._is_guards(call):
                passed.append(call)
                continue
            self._hold(call, self._look_before(call, rules))
        return passed

    def after(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> Iterable[pb.ToolResult]:
        """Takes over the results that guards are to see."""
        if isinstance(handler, Held):
            return results  # they have seen it
        passed = []
        for result in results:
            call: Call | None = handler.pending.get(result.call_id)
            rules = self.rules_of(call.entry).after if call is not None and call.active else ()
            if call is not None:
                self._approvals.ended(call, result)
            if call is None or not rules or self._is_guards(call):
                passed.append(result)
                continue
            copy = self._results[call.id] = pb.ToolResult()
            copy.CopyFrom(result)
            self._dispatcher.endings.end_children(call, now)
            self._hold(call, self._look_after(call, rules, copy))
        return passed

    def progress(self, call: Call, message: pb.ToolProgress) -> None:
        """Clears parts of an output that guards have not seen; how far the tool is may pass."""
        if self.rules_of(call.entry).after and not self._is_guards(call):
            message.message = message.output_chunk = ""
            del message.content[:]

    # -- the handler -------------------------------------------------------------------------------------------------

    def give_up(self, call: Call) -> None:
        """Ends the look at a call that ended otherwise."""
        self._results.pop(call.id, None)
        look = self._looks.pop(call.id, None)
        if look is not None:
            look.cancel()

    def has_result(self, call: Call) -> bool:
        """Tells whether a held call has run."""
        return call.id in self._results

    def close(self) -> None:
        """Ends every look; the bus has ended the calls."""
        for look in self._looks.values():
            look.cancel()
        self._looks.clear()
        self._results.clear()
        self._approvals.close()

    def _is_guards(self, call: Call) -> bool:
        """Tells whether a call is of a guard, or made by one: guards do not guard themselves."""
        each: Call | None = call
        while each is not None:
            if each.caller is self._caller:
                return True
            each = each.parent
        return False

    def _hold(self, call: Call, look: Coroutine[Any, Any, None]) -> None:
        source = call.entry.source
        held = self._handlers.get(source)
        if held is None:
            self._handlers = {name: each for name, each in self._handlers.items() if each.slots.held}
            held = self._handlers[source] = Held(source, self._held, self)
        self._dispatcher.in_flight.hand_over(call, held)
        call.idle_deadline = math.inf  # the tool does nothing meanwhile
        task = asyncio.get_running_loop().create_task(self._looked(call, look), name=f"guards of {call.entry.name}")
        self._looks[call.id] = task

    async def _looked(self, call: Call, look: Coroutine[Any, Any, None]) -> None:
        try:
            await look
        except Exception:
            log.exception("a fault of the bus while guards looked at a call of tool=%r", call.entry.name)
            if call.active:
                stage = call.handler.stage(call)
                text = "a fault of the bus while guards looked at the call; its log has the details"
                error = CallError(Code.INTERNAL, text, stage, reason=REASON)
                self._results.pop(call.id, None)
                self._dispatcher.endings.refuse(call, error, time.monotonic())
        finally:
            self._looks.pop(call.id, None)

    # -- looks -------------------------------------------------------------------------------------------------------

    async def _look_before(self, call: Call, rules: ToolRules) -> None:
        for rule in rules.before:
            verdict = await self._ask(rule, BEFORE, call, {})
            if verdict.kind == "replace" and not verdict.failure:
                try:
                    text = json.dumps(verdict.value, separators=(",", ":"))
                    self._dispatcher.arguments.replace(call, text, f"{rule.guard} replaced the arguments")
                except Refused as refused:
                    why = f"it replaced the arguments by some that are invalid: {refused}"
                    verdict = Verdict("refuse", failure=why)
            self._count(rule, BEFORE, verdict, call)
            if verdict.kind == "refuse":
                self._looks.pop(call.id, None)
                self._dispatcher.endings.refuse(call, _refusal(rule, verdict, call, ran=False), time.monotonic())
                return
        if rules.approval is not None:
            decided = await self._approvals.decide(call, rules.approval)
            if not isinstance(decided, str):
                self._looks.pop(call.id, None)
                if isinstance(decided, CallError):
                    self._dispatcher.endings.refuse(call, decided, time.monotonic())
                else:
                    decided.call_id = call.id
                    self._dispatcher.results(call.handler, [decided], time.monotonic())
                return
            call.arguments_json = noted(call.arguments_json, f"allowed by {decided}")
        self._looks.pop(call.id, None)
        now, idle = time.monotonic(), call.declaration.tool.idle_timeout_seconds
        if idle:
            call.idle_deadline = now + idle
            self._dispatcher.in_flight.arm(call.idle_deadline)
        self._dispatcher.endings.send_on(call, now)

    async def _look_after(self, call: Call, rules: Sequence[GuardRule], result: pb.ToolResult) -> None:
        for rule in rules:
            verdict = await self._ask(rule, AFTER, call, _described(result))
            self._count(rule, AFTER, verdict, call)
            if verdict.kind == "refuse":
                result.Clear()
                result.is_error = True
                result.error.CopyFrom(_refusal(rule, verdict, call, ran=True).to_wire())
                break
            if verdict.kind == "replace":
                _replace(result, verdict.value)
        del self._results[call.id]
        self._looks.pop(call.id, None)
        result.call_id = call.id
        self._dispatcher.results(call.handler, [result], time.monotonic())

    async def _ask(self, rule: GuardRule, when: str, call: Call, more: dict[str, str]) -> Verdict:
        """Calls a guard, within its budget."""
        if rule.guard in (call.entry.name, f"{call.entry.source}:{call.entry.bare_name}"):
            return Verdict("allow")  # a model calls the guard itself
        entry, context = call.entry, call.context
        facts = {
            "when": json.dumps(when),
            "tool": json.dumps(entry.name),
            "source": json.dumps(entry.source),
            "role": json.dumps(call.role or entry.table.role or ""),
            "user_id": json.dumps(context.user_id if context is not None else ""),
            "arguments": call.arguments_json or "{}",
            **more,
        }
        names = self._parameters(rule.guard)
        shown = {name: value for name, value in facts.items() if names is None or name in names}
        text = ",".join(f"{json.dumps(name)}:{value}" for name, value in shown.items())
        seconds = min(rule.budget_ms / 1000, max((call.deadline - time.monotonic()) * SHARE, 0.001))
        message = pb.ToolCall(
            call_id=f"{call.id}.{when}.{self._rules.index(rule)}",
            name=rule.guard,
            arguments_json=f"{{{text}}}",
            parent_call_id=call.id,
            timeout_seconds=seconds,
        )
        result = await self._caller.call(message)
        if result.error is not None:
            code, text = result.error.code, clean_line(result.error.message)
            if code in (Code.TOOL, Code.INVALID_ARGUMENTS):  # its message may repeat arguments, which records leave out
                text = "the records of its own calls say more"
            return _undecided(rule, f"{code.name}: {text}")
        output = result.output
        kind = output.get("verdict") if isinstance(output, dict) else None
        key = "arguments" if when == BEFORE else "output"
        if kind not in VERDICTS or (kind == "replace" and key not in output):
            wanted = (
                f'{{"verdict": "allow"}}, {{"verdict": "refuse", "reason": …}} or {{"verdict": "replace", "{key}": …}}'
            )
            return _undecided(rule, f"it must answer {wanted}")
        reason = shorten(clean_line(str(output.get("reason") or "it gave no reason")), MAX_REASON)
        return Verdict(kind, reason, output.get(key))

    def _parameters(self, guard: str) -> Collection[str] | None:
        """Returns the parameters that a guard declares, since it gets no others; None where it takes any."""
        try:
            entry = self._registry.find(guard)
        except UnknownRole:
            entry = None
        schema = entry.tool.parameters if entry is not None else {}
        return schema.get("properties")

    def _count(self, rule: GuardRule, when: str, verdict: Verdict, call: Call) -> None:
        word = f"failed, {verdict.kind}" if verdict.failure else verdict.kind
        self.verdicts[rule.guard, when, word.replace(", ", "_")] += 1
        if verdict.failure:
            log.warning("guard=%r tool=%r when=%s %s", rule.guard, call.entry.name, when, word)  # no values of calls
        if verdict.kind != "replace" or when == AFTER:
            call.arguments_json = noted(call.arguments_json, f"{rule.guard} {when}: {word}")


def _undecided(rule: GuardRule, why: str) -> Verdict:
    return Verdict("allow" if rule.on_failure == ALLOW else "refuse", failure=why)


def _refusal(rule: GuardRule, verdict: Verdict, call: Call, *, ran: bool) -> CallError:
    """Returns the error that the caller gets; a model reads its message."""
    name, guard = quote(call.entry.name), quote(rule.guard)
    what = "the tool has run, and its result is withheld" if ran else "the tool was not run"
    stage = Stage.ACCEPTED if ran else Stage.NOT_DISPATCHED
    if not verdict.failure:
        text = f"guard {guard} refused {name}: {verdict.reason}; {what}"
        return CallError(Code.PERMISSION_DENIED, text, stage, reason=REASON)
    safe = not ran or call.declaration.tool.repeatable
    text = f"guard {guard} of {name} did not decide: {verdict.failure}; {what}"
    return CallError(Code.UNAVAILABLE, text, stage, retry_safe=safe, reason=REASON)


def _described(result: pb.ToolResult) -> dict[str, str]:
    """Returns what a guard sees of a result: JSON texts by parameter."""
    error = None
    if result.is_error or result.HasField("error"):
        error = {"code": pb.ErrorCode.Name(result.error.code or pb.ERROR_CODE_TOOL), "message": result.error.message}
    blocks = [MessageToDict(block, preserving_proto_field_name=True) for block in result.content]
    return {
        "output": result.output_json or "null",
        "content": json.dumps(blocks),
        "error": json.dumps(error),
        "questions": result.input_requests_json or "null",
    }


def _replace(result: pb.ToolResult, output: Any) -> None:
    """Gives a result another output; a failure stays one, with that as its message."""
    text = json.dumps(output)
    if result.is_error or result.HasField("error"):
        result.error.message = output if isinstance(output, str) else text
        text = "null"
    result.output_json = text
    del result.content[:]
    result.input_requests_json = result.request_state = ""
