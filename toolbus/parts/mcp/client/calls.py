"""Runs the tools of a mounted MCP server: each call of the bus is one `tools/call`, and each answer a result.

The registry has one handler for a mount, across all restarts of the server's process. A call while no server runs waits
for one, up to its deadline. A call that was sent when the server died ends at once, with its stage; its caller decides
about a retry.

A legacy server asks in the middle of a call and waits; a task may ask too. Inside the bus a call ends with its
questions and is made again with the answers. Between the two, the server's side of the call is parked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call import Call, Trace
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import Slots, Trust
from toolbus.bus.catalog.schema import ArgumentChecker, load_output
from toolbus.common.text import clean_line, dump_json, shorten
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.client.connection import FEATURE_METHODS, LEGACY_ACCEPTS, Incoming, McpConnection
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.transport import Busy, Lost, NeedsLogin
from toolbus.parts.mcp.messages import content
from toolbus.parts.mcp.messages.eras import SAMPLING_TOOLS, gives_tools
from toolbus.parts.mcp.messages.headers import param_headers
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.protocol.input_requests import need_of
from toolbus.protocol.questions import ACCEPTED_BY, ELICITATION, SAMPLING
from toolbus.protocol.tool import CallError, Progress, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")

MAX_ATTEMPTS = 3  # of a call that did not reach its server
CONFIRM_SECONDS = 1.0  # a cancelled call holds its slot so long: servers do not confirm that it has ended
BUSY_SECONDS = 0.1  # the retry hint while a server does not read its input
RESEND_SECONDS = 0.25  # the pause before a call that did not reach its HTTP server is sent again
MAX_QUESTIONS = 8  # unanswered questions of one call
ENDED_SECONDS = 0.02  # between two looks at whether all calls have ended


@dataclass(slots=True, eq=False)
class SentCall:
    """The server's side of one call; it outlives the call of the bus while it is parked.

    Attributes:
        call: the call of the bus; None while parked.
        request: the id of the call at the server.
        accepts: the questions that its caller answers.
        question_count: how many questions the server has asked about it.
        questions: unanswered questions of the server, by key.
        outcome: the server's answer that came while the call was parked; None before.
        task: the server's task that runs the call; None without one.
    """

    call: Call | None
    request: str
    accepts: Collection[str]
    attempts: int = 1
    question_count: int = 0
    questions: dict[str, Incoming] = field(default_factory=dict)
    outcome: tuple[msgspec.Raw | None, Exception | None] | None = None
    task: RemoteTask | None = None


class HandlerOwner(Protocol):
    """The mount of a handler."""

    def wake(self) -> None:
        """Starts the server, since a call waits for it."""

    def relist(self, *kinds: str) -> None:
        """Reads lists of the server again, since it no longer has a tool."""

    def output_broken(self, tool: str, why: str) -> None:
        """Notes that a result broke the output schema of its own tool."""

    def use_older_era(self) -> bool:
        """Tells whether the server will be restarted in the older era, since it could not ask in this one."""

    def take_login(self, call: Call, error: NeedsLogin) -> bool:
        """Takes over a call whose user has to log in first; False if the call ends with the error."""


class MountHandler:
    """The handler of one mount in the registry, or of one user's server behind it.

    Args:
        owner: starts the server, and is told what its answers show.
        front: the handler in the registry, which has the names of the tools; None: this one.

    Attributes:
        advice: how its operator can leave arguments to the server, for refusals.
        names: the server's name of each tool, by our name.
        param_names: the arguments that go into HTTP headers, by our name of the tool; most tools have none.
        output_checkers: of the results, by our name of the tool.
        used_at: when it last sent or ended a call.
    """

    trust = Trust.MOUNT
    kind = "mount"
    instance = ""
    shares = False
    awaits_roles = True
    remote = True
    persisted = False
    speaks_mcp = True
    max_item_bytes = 1 << 62

    def __init__(
        self, entry: MountEntry, dispatcher: Dispatcher, owner: HandlerOwner, front: MountHandler | None = None
    ) -> None:
        self.source = entry.name
        how = 'set "check_arguments": false below "toolbus" of the mount'
        self.advice = f"if the server takes them, {how} {entry.name}"
        self.max_in_flight = entry.max_in_flight
        self._front = front or self
        self.pending: dict[str, Any] = {} if front is None else front.pending
        self.slots = Slots()
        self.stuck = 0
        self.takes_calls = True
        self.session_state: int = wire.SESSION_STATE_LIVE
        self.names: Mapping[str, str] = {}
        self.param_names: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
        self.output_checkers: Mapping[str, ArgumentChecker] = {}
        self.used_at = time.monotonic()
        self._quota = Quota(entry.rate or None)
        self._dispatcher = dispatcher
        self._owner = owner
        self._is_held = False  # whether calls wait for a change of the era
        self._connection: McpConnection | None = None  # None while no server is ready
        self._queue: dict[str, tuple[Call, int]] = {}  # calls that wait for a server, by id, with the next attempt
        self._sent: dict[str, SentCall] = {}  # by the id of the call of the bus
        self._parked = ParkedCalls(self._give_up)

    def __repr__(self) -> str:
        state = "ready" if self._connection is not None else "waiting"
        return f"<MountHandler {self.source} {state} sent={len(self._sent)} queued={len(self._queue)}>"

    @property
    def is_idle(self) -> bool:
        """Whether the server has no call, running or parked."""
        return not self.load and not len(self._parked)

    @property
    def load(self) -> int:
        """How many calls run at the server, or wait for it."""
        return len(self._sent) + len(self._queue)

    def has(self, call: Call) -> bool:
        """Tells whether a call runs at the server, or waits for it."""
        return call.id in self._sent or call.id in self._queue

    # -- start and end of the server ----------------------------------------------------------------------------------

    def attach(self, connection: McpConnection) -> None:
        """Sends calls over this connection, first those that wait."""
        self._connection = connection
        self.release()

    def release(self) -> None:
        """Sends the calls that wait, and later ones at once."""
        self._is_held = False
        queue, self._queue = self._queue, {}
        for call, attempt in queue.values():
            self._send(call, attempt)

    async def ended(self, seconds: float) -> bool:
        """Waits until the server runs no call; False if it still does after some seconds."""
        deadline = time.monotonic() + seconds
        while self._sent or len(self._parked):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(ENDED_SECONDS)
        return True

    def detach(self) -> None:
        """Queues calls until the next server. `McpConnection.closed` has ended those that were sent."""
        self._connection = None
        self._parked.clear()

    def fail_waiting(self, why: str) -> None:
        """Ends the calls that wait for a server, since it will not start."""
        queue, self._queue = self._queue, {}
        for call, _ in queue.values():
            self.refuse(call, why)

    def ask_waiting(self, error: NeedsLogin) -> None:
        """Has the owner take over the calls that wait for a server, since their user has to log in."""
        queue, self._queue = self._queue, {}
        for call, _ in queue.values():
            if not self._owner.take_login(call, error):
                self.refuse(call, str(error))

    # -- calls (`Handler`) --------------------------------------------------------------------------------------------

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Sends calls, or queues them until a server is ready."""
        self.used_at = now
        passed, wait = self._quota.take(len(calls), now)
        for call in calls[:passed]:
            self.pass_on(call, now)
        for call in calls[passed:]:
            text = f"mount {self.source!r} runs at most {self._quota.rate:g} calls a second (rate): retry later"
            self.refuse(call, text, Code.OVERLOADED, wait)

    def pass_on(self, call: Call, now: float) -> None:
        """Sends a call, or queues it until a server is ready."""
        self.used_at = now
        self._send(call, 1)

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels a call at the server. Servers do not confirm it, so its slot is free after `CONFIRM_SECONDS`."""
        if self._queue.pop(call.id, None) is not None:
            return True
        sent = self._sent.pop(call.id, None)
        if sent is not None:
            self._cancel_at_server(sent, reason)
        asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm, call)
        return False

    def stage(self, call: Call) -> Stage:
        """Returns the stage of a call: once it is written, the server may have read it."""
        return Stage.NOT_DISPATCHED if call.id in self._queue else Stage.DISPATCHED

    def _send(self, call: Call, attempt: int) -> None:
        connection = self._connection
        if connection is None or self._is_held:
            self._queue[call.id] = (call, attempt)
            self._owner.wake()
            return
        exchange = call.exchange
        if exchange is not None and ParkedCalls.is_state(exchange.state):
            self._resume(call, exchange.state, exchange.responses_json)
            return
        ours = call.entry.bare_name
        theirs = self._front.names.get(ours, ours)
        sent = SentCall(call, call.id, exchange.accepts if exchange is not None else (), attempt)
        self._sent[call.id] = sent
        if call.trace is not None:
            call.trace.sent = time.monotonic()
        try:
            connection.send(
                "tools/call",
                write_params(call, theirs),
                functools.partial(self._answered, sent),
                request=call.id,
                name=theirs,
                accepts=sent.accepts,
                on_progress=functools.partial(self._progressed, sent),
                headers=self._headers(ours, call.arguments_json),
                more_meta=write_trace(call.trace) if call.trace is not None else b"",
            )
        except Busy as error:
            del self._sent[call.id]
            self.refuse(call, str(error), Code.OVERLOADED, BUSY_SECONDS)
        except Lost:  # `McpConnection.closed` follows
            del self._sent[call.id]
            self._queue[call.id] = (call, attempt)

    def _send_again(self, call: Call) -> None:
        if call.id in self._queue and self._connection is not None:
            self._send(*self._queue.pop(call.id))

    def _headers(self, ours: str, arguments: str) -> Mapping[str, str] | None:
        names = self._front.param_names.get(ours)
        return param_headers(names, json.loads(arguments or "{}")) if names else None

    def _confirm(self, call: Call) -> None:
        if call.id in self.pending:
            self._dispatcher.results(self._front, [pb.ToolResult(call_id=call.id, is_error=True)], time.monotonic())

    def _cancel_at_server(self, sent: SentCall, reason: str) -> None:
        connection = self._connection
        if connection is None:
            return
        for incoming in sent.questions.values():
            connection.refuse(incoming, McpCode.INTERNAL, f"the call was cancelled: {reason}")
        sent.questions.clear()
        if sent.task is not None:
            sent.task.cancel()
        else:
            connection.cancel(sent.request, reason)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answered(self, sent: SentCall, raw: msgspec.Raw | None, error: Exception | None) -> None:
        """Takes the answer to a call, or the error in its place."""
        call = sent.call
        if call is None:  # parked: the caller gets the outcome when it resumes the call
            sent.outcome = (raw, error)
            return
        if raw is not None:
            self._take_result(sent, call, raw)
            return
        self._sent.pop(call.id, None)
        if isinstance(error, Lost):
            self._lost(call, sent.attempts, error)
        elif isinstance(error, RpcError):
            if self._repeats_older(sent, call, error.message):
                return
            if is_stale(error):
                self._owner.relist("tools")
            self.end(call, read_error(self.source, call, error))
        else:
            self.end(call, unreadable(call, error or ValueError("it is empty")))

    def _take_result(self, sent: SentCall, call: Call, raw: msgspec.Raw) -> None:
        try:
            answer = msgspec.json.decode(raw, type=dict[str, Any])
            if answer.get("resultType") == "task" and self._connection is not None:
                sent.task = RemoteTask(self._connection, answer, functools.partial(self._task_moved, sent))
                return
            if answer.get("isError") is True and self._repeats_older(sent, call, text_of(answer)):
                self._sent.pop(call.id, None)
                return
            result = read_answer(self._fitting(call, answer), self._dispatcher.largest_result(call))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as fault:
            result = unreadable(call, fault)
        self._sent.pop(call.id, None)
        self.end(call, result)

    def _fitting(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns an answer, without its structured content if that breaks the tool's own output schema."""
        name = call.entry.bare_name
        checker = self._front.output_checkers.get(name)
        if checker is None or answer.get("resultType") == "input_required" or answer.get("isError") is True:
            return answer
        if answer.get("structuredContent") is None:
            why = "has no structuredContent"
        else:
            try:
                output = load_output(dump_json(answer["structuredContent"]))
                why = "" if checker.is_valid(output) else checker.explain(output)
            except ValueError as fault:
                why = str(fault)
        if not why:
            return answer
        broken = f"a result of {name} breaks its own output schema ({shorten(why, 300)})"
        self._owner.output_broken(name, f"{broken}: it is passed on as text, and the schema is no longer offered")
        return without_structure(answer)

    def _repeats_older(self, sent: SentCall, call: Call, text: str) -> bool:
        """Queues a call again that ended because its tool could not ask: it is sent in the older era.

        As with every question of the modern era, the call ends where the tool asks, and the tool starts anew.
        """
        peer = self._connection.peer if self._connection is not None else None
        if peer is None or not peer.modern or not sent.accepts or sent.attempts >= MAX_ATTEMPTS:
            return False
        if NO_BACK_CHANNEL.search(text) is None or not self._owner.use_older_era():
            return False
        self._is_held = True
        self._queue[call.id] = (call, sent.attempts + 1)
        return True

    def _lost(self, call: Call, attempts: int, error: Lost) -> None:
        """Ends a call whose server has disconnected, or sends it again if it did not arrive."""
        if self.pending.get(call.id) is not call:
            return
        if error.stage is Stage.NOT_DISPATCHED:
            if attempts < MAX_ATTEMPTS and not isinstance(error, NeedsLogin):
                self._queue[call.id] = (call, attempts + 1)
                self._owner.wake()
                if self._connection is not None:  # over HTTP, a connection outlives the server's process
                    asyncio.get_running_loop().call_later(RESEND_SECONDS, self._send_again, call)
            elif not isinstance(error, NeedsLogin) or not self._owner.take_login(call, error):
                self.refuse(call, str(error))
            return
        del self.pending[call.id]
        if error.stage is Stage.ACCEPTED:
            call.accepted = True
        self._front.takes_calls = False  # so that the dispatcher does not send the call here again
        try:
            why = str(error) if str(error).startswith("server ") else f"server {self.source!r} {error}"
            self._dispatcher.endings.handler_ended([call], why, time.monotonic())
        finally:
            self._front.takes_calls = True

    def refuse(self, call: Call, text: str, code: Code = Code.UNAVAILABLE, wait: float = 0.0, reason: str = "") -> None:
        """Ends a call that was not sent, and may be made again, after some seconds if it names them."""
        self.end(call, failure(code, text, Stage.NOT_DISPATCHED, retry_safe=True, reason=reason, wait=wait))

    def end(self, call: Call, result: pb.ToolResult) -> None:
        """Ends a call with a result."""
        result.call_id = call.id
        self.used_at = now = time.monotonic()
        self._dispatcher.results(self._front, [result], now)

    # -- progress and log ---------------------------------------------------------------------------------------------

    def _progressed(self, sent: SentCall, params: Mapping[str, Any]) -> None:
        self._report(sent, progress_of(params))

    def _report(self, sent: SentCall, progress: Progress) -> None:
        """Reports progress to the caller, unless the call is parked."""
        if sent.call is not None:
            message = pb.ToolProgress(call_id=sent.call.id, progress=progress.progress, message=progress.message)
            message.total = progress.total
            self._dispatcher.progress(self._front, [message], time.monotonic())

    def log_message(self, text: str, stream: str = "") -> None:
        """Sends a log message of the server to the caller whose call it belongs to, if that is known."""
        sent = self._sent.get(stream) or self._of_request(stream)
        if sent is None and len(self._sent) == 1:
            sent = next(iter(self._sent.values()))
        if sent is not None:
            self._report(sent, Progress(message=text))

    # -- questions ----------------------------------------------------------------------------------------------------

    def take_request(self, incoming: Incoming, connection: McpConnection) -> None:
        """Takes a request of the server: a call ends with its question if the caller can answer.

        Any other request is refused at once, also while the server starts: it may wait for the answer.
        """
        asks = incoming.method == ELICITATION or incoming.method in ACCEPTED_BY
        needs = need_of({"method": incoming.method, "params": incoming.params}) if asks else ""
        if incoming.method == SAMPLING and gives_tools(incoming.params):
            needs = SAMPLING_TOOLS
        sent = self._call_of(incoming) if needs else None
        code, why = McpCode.INVALID_REQUEST, ""
        if not needs:
            code, why = McpCode.METHOD_NOT_FOUND, f"the bus does not know {incoming.method!r}"
        elif sent is None and needs not in LEGACY_ACCEPTS:
            code, why = McpCode.METHOD_NOT_FOUND, f"the bus does not declare {needs}, and no call runs that accepts it"
        elif sent is None:
            why = f"{incoming.method} outside of a call, or while calls of several users run: no user can be asked"
        elif needs not in sent.accepts:
            why = f"the caller of this tool cannot be asked: it does not accept {needs}"
        elif len(sent.questions) >= MAX_QUESTIONS or (sent.call is not None and self._parked.is_full):
            code, why = McpCode.INTERNAL, "too many questions of this server wait for answers: ask later"
        if sent is None or why:
            connection.refuse(incoming, code, why)
        else:
            sent.question_count += 1
            sent.questions[f"question-{sent.question_count}"] = incoming
            if sent.call is not None:  # else the caller gets it after its answers to the earlier questions
                self._park(sent, sent.call)

    def _call_of(self, incoming: Incoming) -> SentCall | None:
        """Returns the call that a question belongs to, parked or not; None if that is not certain."""
        if incoming.stream:
            return self._sent.get(incoming.stream) or self._of_request(incoming.stream)
        parked = [(each.owner, each.sent) for each in self._parked]
        owned = [*parked, *((_owner(each.call), each) for each in self._sent.values() if each.call is not None)]
        users = {owner[1:] for owner, _ in owned}
        has_others = self._connection is not None and self._connection.has_pending(FEATURE_METHODS)
        return owned[-1][1] if len(users) == 1 and not has_others else None

    def _of_request(self, request: str) -> SentCall | None:
        """Returns the call that has this id at the server; after a resume it differs from the id of the bus's call."""
        parked = (each.sent for each in self._parked)
        return next((each for each in (*self._sent.values(), *parked) if each.request == request), None)

    def _park(self, sent: SentCall, call: Call, task_questions: Mapping[str, Any] | None = None) -> None:
        """Ends a call with the questions of its server, and stores the server's side until the answers arrive."""
        own = {key: {"method": each.method, "params": each.params} for key, each in sent.questions.items()}
        questions = task_questions or own
        self._sent.pop(call.id, None)
        sent.call = None
        state = self._parked.park(sent, _owner(call))
        self.end(call, pb.ToolResult(input_requests_json=dump_json(questions), request_state=state))

    def _resume(self, call: Call, state: str, responses_json: str) -> None:
        """Resumes a parked call with the answers of its caller."""
        sent = self._parked.take(state, _owner(call))
        connection = self._connection
        if sent is None or connection is None:
            why = "it has expired, or the server was restarted; call again without answers"
            text = f"these answers belong to no waiting call: {why}"
            self.end(call, failure(Code.INVALID_ARGUMENTS, text, Stage.NOT_DISPATCHED))
            return
        answers = json.loads(responses_json or "{}")
        sent.call = call
        sent.accepts = call.exchange.accepts if call.exchange is not None else ()
        self._sent[call.id] = sent
        if sent.outcome is not None:
            self._answered(sent, *sent.outcome)
            return
        if sent.task is not None:
            sent.task.answer(answers)
            return
        for key in list(sent.questions):
            if isinstance(answers.get(key), dict):
                connection.respond(sent.questions.pop(key), answers[key])
        if sent.questions:  # some answers are missing, or the server has asked more
            self._park(sent, call)

    def _give_up(self, sent: SentCall) -> None:
        self._cancel_at_server(sent, "its caller did not answer in time")

    def _task_moved(self, sent: SentCall, state: Mapping[str, Any], error: Exception | None) -> None:
        """Takes a new state of the server's task: a result, questions, or progress."""
        call = sent.call
        if error is not None or "result" in state:
            raw = None if error is not None else msgspec.Raw(msgspec.json.encode(state["result"]))
            sent.task = None
            self._answered(sent, raw, error)
        elif call is not None and state.get("status") == "input_required":
            self._park(sent, call, state.get("inputRequests") or {})
        elif state.get("statusMessage"):
            self._report(sent, Progress(message=str(state["statusMessage"])))


def _owner(call: Call | None) -> tuple[str, ...]:
    """Returns the owner of a call, who may resume it: the tool, the caller's account and the user."""
    if call is None:
        return ()
    user = call.context.user_id if call.context is not None else ""
    return (call.entry.name, call.caller.principal.account, user)


# -- calls that wait for answers ---------------------------------------------------------------------------------------

MAX_PARKED = 100  # of one mount
PARKED_SECONDS = 300.0  # people answer slowly
_PREFIX = "mount-"


@dataclass(slots=True)
class Parked:
    """One parked call.

    Attributes:
        sent: the server's side of the call.
        owner: who may resume it: the tool, the caller's account and the user.
    """

    sent: SentCall
    owner: tuple[str, ...]
    timer: asyncio.TimerHandle


class ParkedCalls:
    """The parked calls of one mount.

    Args:
        on_expired: called with a call that was not resumed in time.
    """

    def __init__(self, on_expired: Callable[[SentCall], None]) -> None:
        self._on_expired = on_expired
        self._parked: dict[str, Parked] = {}  # by the state that the caller got

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked.values())

    def __repr__(self) -> str:
        return f"<ParkedCalls {len(self)}>"

    @property
    def is_full(self) -> bool:
        """Whether the limit of parked calls is reached."""
        return len(self._parked) >= MAX_PARKED

    def park(self, sent: SentCall, owner: tuple[str, ...]) -> str:
        """Parks a call. Returns the state that names it, which cannot be guessed."""
        state = _PREFIX + secrets.token_urlsafe(24)
        timer = asyncio.get_running_loop().call_later(PARKED_SECONDS, self._expire, state)
        self._parked[state] = Parked(sent, owner, timer)
        return state

    @staticmethod
    def is_state(text: str) -> bool:
        """Tells whether a state has the form of a parked call's; other states are the server's own."""
        return text.startswith(_PREFIX)

    def take(self, state: str, owner: tuple[str, ...]) -> SentCall | None:
        """Removes and returns a parked call; None if its owner has no call of that state."""
        parked = self._parked.get(state)
        if parked is None or parked.owner != owner:
            return None
        del self._parked[state]
        parked.timer.cancel()
        return parked.sent

    def clear(self) -> None:
        """Forgets all parked calls, since the server has disconnected."""
        for parked in self._parked.values():
            parked.timer.cancel()
        self._parked.clear()

    def _expire(self, state: str) -> None:
        parked = self._parked.pop(state, None)
        if parked is not None:
            self._on_expired(parked.sent)


# -- tasks of servers --------------------------------------------------------------------------------------------------

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 30.0
POLL_SECONDS = 0.5  # if the server sends no interval
MAX_FAILURES = 5  # consecutive polls that the server does not read
ENDS = ("completed", "failed", "cancelled")

OnChange = Callable[[Mapping[str, Any], Exception | None], None]  # the task's state, or the error that ended it


class RemoteTask:
    """One task of a server, from its creation to its end.

    Args:
        created: the answer that created it.
        on_change: called with each new state, and once at the end.
    """

    def __init__(self, connection: McpConnection, created: Mapping[str, Any], on_change: OnChange) -> None:
        self.id = str(created.get("taskId") or "")
        self._connection = connection
        self._on_change = on_change
        self._state: Mapping[str, Any] = created
        self._polling = asyncio.create_task(self._poll(), name=f"task {self.id}")

    def __repr__(self) -> str:
        return f"<RemoteTask {self.id} {self._state.get('status')}>"

    def cancel(self) -> None:
        """Cancels the task at the server, and stops following it."""
        self._polling.cancel()
        self._polling = asyncio.create_task(self._quietly("tasks/cancel", {}))

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Answers the questions of the task, and follows it again."""
        self._polling.cancel()
        self._polling = asyncio.create_task(self._answer_and_poll(answers))

    async def _answer_and_poll(self, answers: Mapping[str, Any]) -> None:
        await self._quietly("tasks/update", {"inputResponses": dict(answers)})
        self._state = {**self._state, "status": "working"}
        await self._poll()

    async def _poll(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(self._interval())
            try:
                state = await self._connection.request("tasks/get", {"taskId": self.id}, name=self.id)
            except (RpcError, Lost) as error:
                self._on_change({}, error)
                return
            except Busy as error:
                failures += 1
                if failures == MAX_FAILURES:
                    self._on_change({}, Lost(str(error)))
                    return
                continue
            failures = 0
            before, self._state = self._state, state
            status = state.get("status")
            if status in ENDS:
                self._on_change(state, None if "result" in state else _why(state))
                return
            if status == "input_required" or state.get("statusMessage") != before.get("statusMessage"):
                self._on_change(state, None)
            if status == "input_required":
                return

    def _interval(self) -> float:
        milliseconds = self._state.get("pollIntervalMs")
        seconds = number_of(milliseconds) / 1000
        if not seconds and milliseconds != 0:  # 0 is an interval: the shortest
            return POLL_SECONDS
        return min(max(seconds, MIN_POLL_SECONDS), MAX_POLL_SECONDS)

    async def _quietly(self, method: str, params: Mapping[str, Any]) -> None:
        fields = {"taskId": self.id, **params}
        with contextlib.suppress(RpcError, Lost, Busy, TimeoutError):  # the next poll shows the effect
            await self._connection.request(method, fields, name=self.id, timeout=MAX_POLL_SECONDS)


def _why(state: Mapping[str, Any]) -> RpcError:
    """Returns the error of a task that has no result."""
    error = state.get("error")
    if isinstance(error, Mapping) and isinstance(error.get("code"), int):
        return RpcError(error["code"], str(error.get("message") or "the task failed"), error.get("data"))
    message = shorten(clean_line(str(state.get("statusMessage") or f"the task ended as {state.get('status')}")), 300)
    return RpcError(-32603, message)


# -- messages ----------------------------------------------------------------------------------------------------------

MAX_MESSAGE = 4000  # characters of a server's error message
_UNKNOWN_TOOL = re.compile(r"unknown tool|tool .{0,200}not found|no such tool", re.IGNORECASE | re.DOTALL)

# How servers of both eras say that they can only ask in the older one: the official SDKs, FastMCP.
NO_BACK_CHANNEL = re.compile(
    r"no back-?channel|server-initiated requests? (?:is|are) (?:unavailable|not (?:supported|available))|"
    r"(?:elicit|sampling|roots).{0,80}(?:stateless|2026-07-28)",
    re.IGNORECASE,
)


def write_params(call: Call, name: str) -> bytes:
    """Returns the params of a call as one line.

    Args:
        name: the server's name of the tool.
    """
    exchange = call.exchange
    more = ""
    if exchange is not None and exchange.responses_json:
        state = f',"requestState":{dump_json(exchange.state)}' if exchange.state else ""
        more = f',"inputResponses":{exchange.responses_json}{state}'
    params = f'{{"name":{dump_json(name)},"arguments":{call.arguments_json or "{}"}{more}}}'
    if "\n" in params or "\r" in params:  # only between values: inside strings JSON escapes them
        params = params.replace("\n", " ").replace("\r", " ")
    return params.encode()


def write_trace(trace: Trace) -> bytes:
    """Returns the trace of a call as fields of `_meta` (SEP-414)."""
    fields = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    return dump_json({name: value for name, value in fields.items() if value}).encode()


def read_answer(answer: Mapping[str, Any], max_bytes: int) -> pb.ToolResult:
    """Returns an answer to `tools/call` as a result: complete, or with questions.

    Raises:
        ValueError, TypeError, RecursionError: it breaks the protocol.
    """
    if answer.get("resultType") != "input_required":
        return content.read_result(answer, max_bytes).to_wire()
    return pb.ToolResult(
        input_requests_json=dump_json(answer.get("inputRequests") or {}),
        request_state=str(answer.get("requestState") or ""),
    )


def text_of(answer: Mapping[str, Any]) -> str:
    """Returns the texts of an answer, joined."""
    blocks = answer.get("content")
    texts = [each.get("text") for each in blocks if isinstance(each, Mapping)] if isinstance(blocks, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def without_structure(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer whose structured content is a text, unless it has a text already."""
    blocks = answer.get("content")
    blocks = list(blocks) if isinstance(blocks, list) else []
    structured = answer.get("structuredContent")
    if structured is not None and not text_of(answer):
        blocks.append({"type": "text", "text": dump_json(structured)})
    return {**answer, "content": blocks, "structuredContent": None}


def is_stale(error: RpcError) -> bool:
    """Tells whether an error means that the server does not have the tool."""
    codes = (McpCode.INVALID_PARAMS, McpCode.METHOD_NOT_FOUND)
    return error.code in codes and _UNKNOWN_TOOL.search(error.message) is not None


def read_error(source: str, call: Call, error: RpcError) -> pb.ToolResult:
    """Returns the result of a call that a server answered with a JSON-RPC error."""
    message = shorten(clean_line(error.message), MAX_MESSAGE) or f"the server answered with error {error.code}"
    if is_stale(error):
        text = f"server {source!r} no longer has tool {call.entry.bare_name!r} ({message}): list again"
        return failure(Code.CATALOG_STALE, text, Stage.ACCEPTED, retry_safe=True)
    result = failure(Code.TOOL, message, Stage.ACCEPTED, reason=f"jsonrpc:{error.code}")
    if error.data is not None:
        result.output_json = dump_json(error.data)
    return result


def unreadable(call: Call, fault: Exception) -> pb.ToolResult:
    """Returns the result of a call whose answer breaks the protocol."""
    shown = shorten(clean_line(str(fault)), 300)
    text = f"tool {call.entry.name!r} gave a result that cannot be read: {shown}"
    return failure(Code.TOOL, text, Stage.ACCEPTED)


def failure(
    code: Code, text: str, stage: Stage, *, retry_safe: bool = False, reason: str = "", wait: float = 0.0
) -> pb.ToolResult:
    """Returns the result of a call that failed.

    Args:
        wait: seconds after which a retry makes sense.
    """
    error = CallError(code, text, stage, retry_safe, retry_after_seconds=wait, reason=reason)
    return Result(is_error=True, error=error).to_wire()


def progress_of(params: Mapping[str, Any]) -> Progress:
    """Returns what a notification of progress says."""
    number, total = number_of(params.get("progress")), number_of(params.get("total"))
    return Progress(number, total, str(params.get("message") or ""))


def number_of(value: object) -> float:
    """Returns a number that a server sent; 0 for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        return float(value)
    except OverflowError:
        return 0.0
