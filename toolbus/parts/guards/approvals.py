"""Has people allow calls before they run: an operator, or the caller's own user.

An approval is for exactly one call: of that caller, user, tool, declaration and arguments. It is used once and expires,
and none outlives the bus. A call waits for it half of its time at most; whoever makes the same call again after an
operator has allowed it runs it at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolbus.bus.calls.call import Call, InputExchange
from toolbus.bus.calls.call_records import redacted
from toolbus.bus.catalog.schema import load_arguments
from toolbus.common.text import clean_line, parse_json, quote, shorten
from toolbus.errors import CallError, Code, InvalidRequest, Stage
from toolbus.parts.guards.settings import EITHER, OPERATOR, USER, ApprovalRule, fits
from toolbus.protocol.questions import ELICITATION, FORM
from toolbus.v1 import tool_pb2 as pb

WAITS, DENIED = "needs_approval", "approval_denied"  # `CallError.reason`
WAIT_SHARE = 0.5  # of what is left of a call's time: the rest is the tool's
MAX_WAITING = 1_000  # calls that wait for an operator, in all
MAX_WAITING_PER_CALLER = 100
MAX_ARGUMENTS = 2_000  # characters of arguments that people see
MAX_REASON = 500  # characters of an operator's reason
STATE = "approval."  # begins the `request_state` of a question of the bus
ANSWER = "approval"  # the key of its question


class Subject(NamedTuple):
    """What an approval is for."""

    caller: str
    user_id: str
    source: str
    tool: str
    schema: str
    arguments: str  # their hash
    state: str  # what the call continues with; "" for one that begins

    @classmethod
    def of(cls, call: Call) -> Subject:
        """Returns the subject of a call."""
        entry, text = call.entry, str(call.arguments_json or "{}")
        try:
            text = json.dumps(load_arguments(text), sort_keys=True)
        except ValueError:
            pass  # compared as it is written
        user_id = call.context.user_id if call.context is not None else ""
        hashed = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        schema = call.declaration.tool.schema_hash
        state = call.exchange.state if call.exchange is not None else ""
        return cls(call.caller.principal.account, user_id, entry.source, entry.name, schema, hashed, state)


@dataclass(slots=True)
class Request:
    """A call that waits for an operator.

    Attributes:
        id: for people, 8 hexadecimal digits.
        arguments: as people see them: shortened, without what is named like a secret.
        asked: seconds since the epoch.
        expires: by the monotonic clock.
        waiting: how many calls wait for it now; 0 where the caller has to make the call again.
        denied: why an operator denied it; None where nobody has.
    """

    id: str
    subject: Subject
    role: str
    arguments: str
    asked: float
    expires: float
    waiting: int = 0
    denied: str | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)

    def described(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        names = ("caller", "user_id", "source", "tool")
        times = {"asked": round(self.asked, 3), "expires_in": round(max(self.expires - time.monotonic(), 0.0), 1)}
        facts = {name: getattr(self.subject, name) for name in names}
        facts |= {"role": self.role, "arguments": self.arguments, "waiting": self.waiting}
        return {"id": self.id, **facts, **times}


class Approvals:
    """The calls of one bus that wait for approvals, and the approvals that were given and not used.

    Attributes:
        counts: calls that asked a user or an operator, and what was decided.
    """

    def __init__(self, rules: tuple[ApprovalRule, ...]) -> None:
        self.rules = rules
        self._requests: dict[Subject, Request] = {}
        self._granted: dict[Subject, tuple[float, str]] = {}  # until when, and who has allowed it
        self._asked: dict[str, tuple[Subject, float]] = {}  # the questions to users, by their request_state
        self._approved: dict[str, tuple[Subject, float]] = {}  # calls that run, by the bus's id, with their deadline
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Approvals waiting={len(self._requests)} granted={len(self._granted)}>"

    def rule_of(self, *names: Any, destructive: bool) -> ApprovalRule | None:
        """Returns the first rule for a tool; None where its calls need no approval."""
        return next((each for each in self.rules if (each.destructive and destructive) or fits(each, *names)), None)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def decide(self, call: Call, rule: ApprovalRule) -> CallError | pb.ToolResult | str:
        """Waits until a call may run.

        Returns:
            Who has allowed it; or the error, or the question, with which it ends.
        """
        exchange = call.exchange
        if exchange is not None and exchange.state.startswith(STATE):
            return self._answered(call, exchange)
        subject = Subject.of(call)
        if (who := self._take(subject, call)) is not None:
            return who
        asks_user = rule.ask in (USER, EITHER) and exchange is not None and FORM in exchange.accepts
        if asks_user and not subject.state:
            return self._question(call, subject, rule)
        if rule.ask == USER:
            why = f"and your program cannot ask: accept {FORM}"
            if asks_user:
                why = "and these answers are to questions of a call that was not allowed: make it again without them"
            text = f"{_calls(call)} need the approval of your user, {why}; it was not run"
            return CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, reason=WAITS)
        return await self._wait(call, subject, rule)

    def ended(self, call: Call, result: pb.ToolResult) -> None:
        """Takes the result of a call that was allowed: where the tool asks, its answer needs no further approval."""
        subject, _ = self._approved.pop(call.id, (None, 0.0))
        if subject is not None and result.input_requests_json:
            again = subject._replace(state=result.request_state)
            self._granted[again] = time.monotonic() + self._longest, "the approval of its first part"

    def close(self) -> None:
        for each in (self._requests, self._granted, self._asked, self._approved):
            each.clear()

    @property
    def _longest(self) -> float:
        return max((rule.expire_seconds for rule in self.rules), default=0.0)

    def _take(self, subject: Subject, call: Call) -> str | None:
        """Uses an approval that was given; returns who has given it."""
        until, who = self._granted.pop(subject, (0.0, ""))
        return self._runs(subject, call, who) if until > time.monotonic() else None

    def _runs(self, subject: Subject, call: Call, who: str) -> str:
        now = time.monotonic()
        if len(self._approved) >= MAX_WAITING:  # of those that ended without a result nothing is heard
            self._approved = {id: each for id, each in self._approved.items() if each[1] > now}
        self._approved[call.id] = subject._replace(state=""), call.deadline
        return who

    # -- users -------------------------------------------------------------------------------------------------------

    def _question(self, call: Call, subject: Subject, rule: ApprovalRule) -> pb.ToolResult:
        now = time.monotonic()
        self._asked = {state: each for state, each in self._asked.items() if each[1] > now}
        while len(self._asked) >= MAX_WAITING:
            del self._asked[next(iter(self._asked))]  # the oldest
        state = f"{STATE}{secrets.token_urlsafe(24)}"
        self._asked[state] = subject, now + rule.expire_seconds
        self.counts["asked_user"] += 1
        message = f"Allow {call.entry.name} to run? {_for_people(call)}".strip()
        form = {"type": "object", "properties": {}}
        question = {"method": ELICITATION, "params": {"message": message, "requestedSchema": form}}
        return pb.ToolResult(input_requests_json=json.dumps({ANSWER: question}), request_state=state)

    def _answered(self, call: Call, exchange: InputExchange) -> CallError | str:
        subject, until = self._asked.pop(exchange.state, (None, 0.0))
        call.exchange = InputExchange(exchange.accepts)  # the tool has not asked
        if subject != Subject.of(call) or until < time.monotonic():
            text = (
                f"the answer does not allow this call of {quote(call.entry.name)}: it was given for another one, was "
                "used already, or has expired; make the call again without it"
            )
            return CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, retry_safe=True, reason=WAITS)
        try:
            answer = parse_json(exchange.responses_json or "{}")[ANSWER]["action"]
        except (ValueError, LookupError, TypeError, RecursionError):
            answer = "cancel"
        self.counts["allowed" if answer == "accept" else "denied"] += 1
        if answer == "accept" and subject is not None:
            return self._runs(subject, call, "the user")
        text = f"the user did not allow this call of {quote(call.entry.name)}; it was not run"
        return CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, reason=DENIED)

    # -- operators ---------------------------------------------------------------------------------------------------

    async def _wait(self, call: Call, subject: Subject, rule: ApprovalRule) -> CallError | str:
        left = call.deadline - time.monotonic()
        until = time.monotonic() + (rule.expire_seconds if math.isinf(left) else left * WAIT_SHARE)
        while True:
            if (who := self._take(subject, call)) is not None:
                return who
            request = self._request(call, subject, rule)
            if isinstance(request, CallError):
                return request
            request.waiting += 1
            try:
                async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                    await request.decided.wait()
            except TimeoutError:
                text = (
                    f"{_calls(call)} need the approval of an operator, who has not decided yet: make the same call "
                    f"again after `toolbus approvals allow {request.id}`; it was not run"
                )
                return CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, retry_safe=True, reason=WAITS)
            finally:
                request.waiting -= 1
            if request.denied is not None:
                text = f"an operator denied this call of {quote(call.entry.name)}: {request.denied}; it was not run"
                return CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, reason=DENIED)

    def _request(self, call: Call, subject: Subject, rule: ApprovalRule) -> Request | CallError:
        """Returns the request of a call, an equal one where it waits already."""
        self._drop_expired()
        request = self._requests.get(subject)
        if request is not None:
            return request
        of_caller = sum(each.caller == subject.caller for each in self._requests)
        if len(self._requests) >= MAX_WAITING or of_caller >= MAX_WAITING_PER_CALLER:
            text = f"{_calls(call)} need an approval, and {len(self._requests)} calls wait for one already; try later"
            return CallError(Code.OVERLOADED, text, Stage.NOT_DISPATCHED, retry_safe=True, reason=WAITS)
        self.counts["asked_operator"] += 1
        role = call.role or call.entry.table.role or ""
        shown = redacted(str(call.arguments_json or "{}"), MAX_ARGUMENTS)
        expires = time.monotonic() + rule.expire_seconds
        request = Request(secrets.token_hex(4), subject, role, shown, time.time(), expires)
        self._requests[subject] = request
        return request

    def waiting(self) -> list[Request]:
        """Returns the calls that wait for an operator, the oldest first."""
        self._drop_expired()
        return list(self._requests.values())

    def find(self, id: str) -> Request:
        """Returns the call that waits under an id.

        Raises:
            InvalidRequest: none does.
        """
        request = next((each for each in self.waiting() if each.id == id), None)
        if request is None:
            raise InvalidRequest(
                f"no call {quote(id)} waits for an approval: it was decided, or has expired; "
                "`toolbus approvals` lists those that wait"
            )
        return request

    def settle(self, request: Request, who: str, denied: str | None) -> None:
        """Allows a call once, or denies it.

        Args:
            denied: the reason; None allows it.
        """
        self._requests.pop(request.subject, None)
        self.counts["allowed" if denied is None else "denied"] += 1
        if denied is None:
            self._granted[request.subject] = request.expires, who
        else:
            request.denied = shorten(clean_line(denied), MAX_REASON) or "no reason was given"
        request.decided.set()

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for subject, request in list(self._requests.items()):
            if request.expires <= now and not request.waiting:
                del self._requests[subject]
                self.counts["expired"] += 1
        self._granted = {subject: each for subject, each in self._granted.items() if each[0] > now}


def may_ask(rule: ApprovalRule) -> str:
    """Returns who is asked, for people."""
    return {OPERATOR: "an operator", USER: "the caller's user", EITHER: "the caller's user or an operator"}[rule.ask]


def _calls(call: Call) -> str:
    return f"calls of {quote(call.entry.name)}"


def _for_people(call: Call) -> str:
    """Returns the arguments as names and values, since a tripwire reads JSON in texts."""
    try:
        arguments = parse_json(redacted(str(call.arguments_json or "{}"), MAX_ARGUMENTS))
    except (ValueError, RecursionError):
        return ""
    if not isinstance(arguments, dict):
        return ""
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    return "; ".join(f"{name} = {shorten(clean_line(value), 200)}" for name, value in given.items())
