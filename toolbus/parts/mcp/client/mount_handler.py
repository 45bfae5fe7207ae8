"""Runs the tools of a mounted MCP server: each call of the bus is one `tools/call`, and each answer a result.

The registry has one handler for a mount, across all restarts of the server's process. A call while no server runs waits
for one, up to its deadline. A call that was sent when the server died ends at once, with its stage; its caller decides
about a retry.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call import Call
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import Slots
from toolbus.bus.catalog.schema import ArgumentChecker, load_output
from toolbus.common.text import dump_json, shorten
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.client.call_messages import (
    NO_BACK_CHANNEL,
    failure,
    is_stale,
    number_of,
    read_answer,
    read_error,
    text_of,
    unreadable,
    without_structure,
    write_params,
    write_trace,
)
from toolbus.parts.mcp.client.mcp_connection import FEATURE_METHODS, LEGACY_ACCEPTS, Incoming, McpConnection
from toolbus.parts.mcp.client.parked_calls import ParkedCalls
from toolbus.parts.mcp.client.remote_task import RemoteTask
from toolbus.parts.mcp.client.transport import Busy, Lost, NeedsLogin
from toolbus.parts.mcp.messages.headers import param_headers
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")

MAX_ATTEMPTS = 3  # of a call that did not reach its server
CONFIRM_SECONDS = 1.0  # a cancelled call holds its slot so long: servers do not confirm that it has ended
BUSY_SECONDS = 0.1  # the retry hint while a server does not read its input
RESEND_SECONDS = 0.25  # the pause before a call that did not reach its HTTP server is sent again
MAX_QUESTIONS = 8  # unanswered questions of one call
ENDED_SECONDS = 0.02  # between two looks at whether all calls have ended
ELICITATION = "elicitation/create"
QUESTIONS = {"sampling/createMessage": "sampling", "roots/list": "roots"}  # elicitation has two modes


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

    __slots__ = ("accepts", "attempts", "call", "outcome", "question_count", "questions", "request", "task")

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.request = call.id
        self.accepts: Collection[str] = call.exchange.accepts if call.exchange is not None else ()
        self.question_count = 0
        self.attempts = 1
        self.questions: dict[str, Incoming] = {}
        self.outcome: tuple[msgspec.Raw | None, Exception | None] | None = None
        self.task: RemoteTask | None = None


class MountHandler:
    """The handler of one mount in the registry.

    Args:
        wake: called when a call waits for a server.
        stale: called when the server no longer has a tool.
        output_broken: called with a tool whose result breaks its own output schema, and with a text that says how.
        use_older_era: called when the server could not ask; tells whether it will be restarted in the older era.
        rate: the most calls a second; 0: no limit.

    Attributes:
        names: the server's name of each tool, by our name.
        param_names: the arguments that go into HTTP headers, by our name of the tool; most tools have none.
        output_checkers: of the results, by our name of the tool.
        used_at: when it last sent or ended a call.
    """

    kind = "mount"
    instance = ""
    shares = False
    awaits_roles = True
    remote = True
    persisted = False
    speaks_mcp = True
    max_item_bytes = 1 << 62

    def __init__(
        self,
        source: str,
        max_in_flight: int,
        dispatcher: Dispatcher,
        *,
        wake: Callable[[], None],
        stale: Callable[[], None],
        output_broken: Callable[[str, str], None],
        use_older_era: Callable[[], bool],
        rate: float = 0.0,
    ) -> None:
        self.source = source
        self.max_in_flight = max_in_flight
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self.takes_calls = True
        self.session_state: int = wire.SESSION_STATE_LIVE
        self.names: Mapping[str, str] = {}
        self.param_names: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
        self.output_checkers: Mapping[str, ArgumentChecker] = {}
        self.used_at = time.monotonic()
        self._quota = Quota(rate or None)
        self._dispatcher = dispatcher
        self._wake = wake
        self._stale = stale
        self._output_broken = output_broken
        self._use_older_era = use_older_era
        self._is_held = False  # whether calls wait for a change of the era
        self._connection: McpConnection | None = None  # None while no server is ready
        self._queue: dict[str, tuple[Call, int]] = {}  # calls that wait for a server, by id, with the next attempt
        self._sent: dict[str, SentCall] = {}  # by the id of the call of the bus
        self._parked: ParkedCalls[SentCall] = ParkedCalls(self._give_up)

    def __repr__(self) -> str:
        state = "ready" if self._connection is not None else "waiting"
        return f"<MountHandler {self.source} {state} sent={len(self._sent)} queued={len(self._queue)}>"

    @property
    def is_idle(self) -> bool:
        """Whether the server has no call, running or parked."""
        return not self.pending and not len(self._parked)

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
            self._end(call, failure(Code.UNAVAILABLE, why, Stage.NOT_DISPATCHED, retry_safe=True))

    # -- calls (`Handler`) --------------------------------------------------------------------------------------------

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Sends calls, or queues them until a server is ready."""
        self.used_at = now
        passed, wait = self._quota.take(len(calls), now)
        for call in calls[:passed]:
            self._send(call, 1)
        for call in calls[passed:]:
            text = f"mount {self.source!r} runs at most {self._quota.rate:g} calls a second (rate): retry later"
            self._end(call, failure(Code.OVERLOADED, text, Stage.NOT_DISPATCHED, retry_safe=True, wait=wait))

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
            self._wake()
            return
        exchange = call.exchange
        if exchange is not None and ParkedCalls.is_state(exchange.state):
            self._resume(call, exchange.state, exchange.responses_json)
            return
        ours = call.entry.bare_name
        theirs = self.names.get(ours, ours)
        sent = SentCall(call)
        sent.attempts = attempt
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
                accepts=exchange.accepts if exchange is not None else (),
                on_progress=functools.partial(self._progressed, sent),
                headers=self._headers(ours, call.arguments_json),
                more_meta=write_trace(call.trace) if call.trace is not None else b"",
            )
        except Busy as error:
            del self._sent[call.id]
            self._end(
                call, failure(Code.OVERLOADED, str(error), Stage.NOT_DISPATCHED, retry_safe=True, wait=BUSY_SECONDS)
            )
        except Lost:  # `McpConnection.closed` follows
            del self._sent[call.id]
            self._queue[call.id] = (call, attempt)

    def _send_again(self, call: Call) -> None:
        if call.id in self._queue and self._connection is not None:
            self._send(*self._queue.pop(call.id))

    def _headers(self, ours: str, arguments: str) -> Mapping[str, str] | None:
        names = self.param_names.get(ours)
        return param_headers(names, json.loads(arguments or "{}")) if names else None

    def _confirm(self, call: Call) -> None:
        if call.id in self.pending:
            self._dispatcher.results(self, [pb.ToolResult(call_id=call.id, is_error=True)], time.monotonic())

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
                self._stale()
            self._end(call, read_error(self.source, call, error))
        else:
            self._end(call, unreadable(call, error or ValueError("it is empty")))

    def _take_result(self, sent: SentCall, call: Call, raw: msgspec.Raw) -> None:
        try:
            answer = msgspec.json.decode(raw, type=dict[str, Any])
            if answer.get("resultType") == "task" and self._connection is not None:
                sent.task = RemoteTask(self._connection, answer, functools.partial(self._task_moved, sent))
                return
            if answer.get("isError") is True and self._repeats_older(sent, call, text_of(answer)):
                self._sent.pop(call.id, None)
                return
            result = read_answer(self._fitting(call, answer))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as fault:
            result = unreadable(call, fault)
        self._sent.pop(call.id, None)
        self._end(call, result)

    def _fitting(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns an answer, without its structured content if that breaks the tool's own output schema."""
        name = call.entry.bare_name
        checker = self.output_checkers.get(name)
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
        self._output_broken(
            name,
            f"a result of {name} breaks its own output schema ({shorten(why, 300)}): it is passed on as text, and the "
            "schema is no longer offered",
        )
        return without_structure(answer)

    def _repeats_older(self, sent: SentCall, call: Call, text: str) -> bool:
        """Queues a call again that ended because its tool could not ask: it is sent in the older era.

        As with every question of the modern era, the call ends where the tool asks, and the tool starts anew.
        """
        peer = self._connection.peer if self._connection is not None else None
        if peer is None or not peer.modern or not sent.accepts or sent.attempts >= MAX_ATTEMPTS:
            return False
        if NO_BACK_CHANNEL.search(text) is None or not self._use_older_era():
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
                self._wake()
                if self._connection is not None:  # over HTTP, a connection outlives the server's process
                    asyncio.get_running_loop().call_later(RESEND_SECONDS, self._send_again, call)
            else:
                self._end(call, failure(Code.UNAVAILABLE, str(error), Stage.NOT_DISPATCHED, retry_safe=True))
            return
        del self.pending[call.id]
        if error.stage is Stage.ACCEPTED:
            call.accepted = True
        self.takes_calls = False  # so that the dispatcher does not send the call here again
        try:
            why = str(error) if str(error).startswith("server ") else f"server {self.source!r} {error}"
            self._dispatcher.endings.handler_ended([call], why, time.monotonic())
        finally:
            self.takes_calls = True

    def _end(self, call: Call, result: pb.ToolResult) -> None:
        result.call_id = call.id
        self.used_at = now = time.monotonic()
        self._dispatcher.results(self, [result], now)

    # -- progress and log ---------------------------------------------------------------------------------------------

    def _progressed(self, sent: SentCall, params: Mapping[str, Any]) -> None:
        if sent.call is not None:
            self._dispatcher.progress(
                self,
                [
                    pb.ToolProgress(
                        call_id=sent.call.id,
                        progress=number_of(params.get("progress")),
                        total=number_of(params.get("total")),
                        message=str(params.get("message") or ""),
                    )
                ],
                time.monotonic(),
            )

    def log_message(self, text: str, stream: str = "") -> None:
        """Sends a log message of the server to the caller whose call it belongs to, if that is known."""
        sent = self._sent.get(stream) or self._of_request(stream)
        if sent is None and len(self._sent) == 1:
            sent = next(iter(self._sent.values()))
        if sent is not None and sent.call is not None:
            message = pb.ToolProgress(call_id=sent.call.id, message=text)
            self._dispatcher.progress(self, [message], time.monotonic())

    # -- questions ----------------------------------------------------------------------------------------------------

    def take_request(self, incoming: Incoming, connection: McpConnection) -> None:
        """Takes a request of the server: a call ends with its question if the caller can answer.

        Any other request is refused at once, also while the server starts: it may wait for the answer.
        """
        needs = QUESTIONS.get(incoming.method)
        if incoming.method == ELICITATION:
            needs = "elicitation.url" if incoming.params.get("mode") == "url" else "elicitation.form"
        if needs is None:
            connection.refuse(incoming, McpCode.METHOD_NOT_FOUND, f"the bus does not know {incoming.method!r}")
            return
        sent = self._call_of(incoming)
        if sent is None and needs not in LEGACY_ACCEPTS:
            text = f"the bus does not declare {needs}, and no call runs that accepts it"
            connection.refuse(incoming, McpCode.METHOD_NOT_FOUND, text)
            return
        if sent is None:
            text = f"{incoming.method} outside of a call, or while calls of several users run: no user can be asked"
            connection.refuse(incoming, McpCode.INVALID_REQUEST, text)
            return
        if needs not in sent.accepts:
            text = f"the caller of this tool cannot be asked: it does not accept {needs}"
            connection.refuse(incoming, McpCode.INVALID_REQUEST, text)
        elif len(sent.questions) >= MAX_QUESTIONS or (sent.call is not None and self._parked.is_full):
            connection.refuse(
                incoming, McpCode.INTERNAL, "too many questions of this server wait for answers: ask later"
            )
        else:
            sent.question_count += 1
            sent.questions[f"question-{sent.question_count}"] = incoming
            if sent.call is not None:  # else the caller gets it after its answers to the earlier questions
                self._park(sent, sent.call)

    def _call_of(self, incoming: Incoming) -> SentCall | None:
        """Returns the call that a question belongs to, parked or not; None if that is not certain."""
        if incoming.stream:
            return self._sent.get(incoming.stream) or self._of_request(incoming.stream)
        parked = [(each.owner, each.held) for each in self._parked]
        owned = [*parked, *((_owner(each.call), each) for each in self._sent.values() if each.call is not None)]
        users = {owner[1:] for owner, _ in owned}
        has_others = self._connection is not None and self._connection.has_pending(FEATURE_METHODS)
        return owned[-1][1] if len(users) == 1 and not has_others else None

    def _of_request(self, request: str) -> SentCall | None:
        """Returns the call that has this id at the server; after a resume it differs from the id of the bus's call."""
        parked = (each.held for each in self._parked)
        return next((each for each in (*self._sent.values(), *parked) if each.request == request), None)

    def _park(self, sent: SentCall, call: Call, task_questions: Mapping[str, Any] | None = None) -> None:
        """Ends a call with the questions of its server, and stores the server's side until the answers arrive."""
        questions = task_questions or {
            key: {"method": each.method, "params": each.params} for key, each in sent.questions.items()
        }
        self._sent.pop(call.id, None)
        sent.call = None
        state = self._parked.park(sent, _owner(call))
        self._end(call, pb.ToolResult(input_requests_json=dump_json(questions), request_state=state))

    def _resume(self, call: Call, state: str, responses_json: str) -> None:
        """Resumes a parked call with the answers of its caller."""
        parked = self._parked.take(state, _owner(call))
        connection = self._connection
        if parked is None or connection is None:
            text = (
                "these answers belong to no waiting call: it has expired, or the server was restarted; call again "
                "without answers"
            )
            self._end(call, failure(Code.INVALID_ARGUMENTS, text, Stage.NOT_DISPATCHED))
            return
        answers = json.loads(responses_json or "{}")
        sent = parked.held
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
        elif call is not None and state.get("statusMessage"):
            message = pb.ToolProgress(call_id=call.id, message=str(state["statusMessage"]))
            self._dispatcher.progress(self, [message], time.monotonic())


def _owner(call: Call | None) -> tuple[str, ...]:
    """Returns the owner of a call, who may resume it: the tool, the caller's account and the user."""
    if call is None:
        return ()
    user = call.context.user_id if call.context is not None else ""
    return (call.entry.name, call.caller.principal.account, user)
