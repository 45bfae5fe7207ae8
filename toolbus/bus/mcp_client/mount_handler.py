"""Runs the tools of a mounted MCP server: each call of the bus is one `tools/call`, and each answer a result.

The registry has one handler for a mount, from its first tool to its end, whatever happens to the server's process. A
call that comes while no server runs waits for one, up to its deadline. A call that was sent when the server died ends
at once, with its stage; whether it is retried is up to its caller.
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
from toolbus.bus.catalog.slots import Slots
from toolbus.bus.mcp_client.call_messages import (
    failure,
    is_stale,
    number_of,
    read_answer,
    read_error,
    unreadable,
    write_params,
    write_trace,
)
from toolbus.bus.mcp_client.mcp_connection import FEATURE_METHODS, Incoming, McpConnection
from toolbus.bus.mcp_client.parked_calls import ParkedCalls
from toolbus.bus.mcp_client.remote_task import RemoteTask
from toolbus.bus.mcp_client.transport import Busy, Lost, NeedsLogin
from toolbus.errors import Code, Stage
from toolbus.mcp.headers import param_headers
from toolbus.mcp.jsonrpc import McpCode, RpcError
from toolbus.text import dump_json
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")

MAX_ATTEMPTS = 3  # of a call that certainly did not reach its server
CONFIRM_SECONDS = 1.0  # a cancelled call keeps its slot so long: servers do not say when they have ended it
BUSY_SECONDS = 0.1  # the hint when to retry at a server that does not read
RESEND_SECONDS = 0.25  # before a call that did not reach its server over HTTP is sent again
MAX_QUESTIONS = 8  # of one call that wait for answers
ELICITATION = "elicitation/create"
QUESTIONS = {"sampling/createMessage": "sampling", "roots/list": "roots"}  # elicitation has two modes


class SentCall:
    """The server's side of one call: it outlives the call of the bus while it is parked.

    Attributes:
        call: of the bus; None while it is parked.
        request: its id at the server.
        accepts: what its caller can answer.
        asked: how many questions the server has asked about it.
        waiting: requests of the server that wait for answers, by key of the question.
        outcome: what the server answered while the call was parked; None before.
        task: where the server answered with a task; None else.
    """

    __slots__ = ("accepts", "asked", "attempts", "call", "outcome", "request", "task", "waiting")

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.request = call.id
        self.accepts: Collection[str] = call.exchange.accepts if call.exchange is not None else ()
        self.asked = 0
        self.attempts = 1
        self.waiting: dict[str, Incoming] = {}
        self.outcome: tuple[msgspec.Raw | None, Exception | None] | None = None
        self.task: RemoteTask | None = None


class MountHandler:
    """What the registry knows of one mount.

    Args:
        wake: called when calls wait for a server.
        stale: called when the server does not know a tool any more.
        rate: calls a second that it gets; 0: no limit.

    Attributes:
        names: by our name of a tool, the server's.
        param_names: by our name, which arguments go into headers over HTTP; most tools have none.
        used_at: when it last had to do with a call.
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
        self.used_at = time.monotonic()
        self._quota = Quota(rate or None)
        self._dispatcher = dispatcher
        self._wake = wake
        self._stale = stale
        self._connection: McpConnection | None = None  # None while no server is ready for calls
        self._json_names: dict[str, str] = {}  # names of the server's tools as JSON
        self._queue: dict[str, tuple[Call, int]] = {}  # calls that were not sent, by id, and which attempt is next
        self._sent: dict[str, SentCall] = {}  # by the id of the bus's call
        self._parked: ParkedCalls[SentCall] = ParkedCalls(self._give_up)

    def __repr__(self) -> str:
        state = "ready" if self._connection is not None else "waiting"
        return f"<MountHandler {self.source} {state} sent={len(self._sent)} queued={len(self._queue)}>"

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a call is left at the server."""
        return not self.pending and not len(self._parked)

    # -- the server comes and goes ------------------------------------------------------------------------------------

    def attach(self, connection: McpConnection) -> None:
        """Sends calls over a connection from now on, first those that wait."""
        self._connection = connection
        queue, self._queue = self._queue, {}
        for call, attempt in queue.values():
            self._send(call, attempt)

    def detach(self) -> None:
        """Has calls wait from now on: the server is gone. What was sent has ended by `McpConnection.closed`."""
        self._connection = None
        self._parked.clear()

    def fail_waiting(self, why: str) -> None:
        """Ends the calls that wait for a server, since none will come."""
        queue, self._queue = self._queue, {}
        for call, _ in queue.values():
            self._end(call, failure(Code.UNAVAILABLE, why, Stage.NOT_DISPATCHED, retry_safe=True))

    # -- calls (`Handler`) --------------------------------------------------------------------------------------------

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Sends calls, or has them wait for the server."""
        self.used_at = now
        passed, wait = self._quota.take(len(calls), now)
        for call in calls[:passed]:
            self._send(call, 1)
        for call in calls[passed:]:
            text = f"mount {self.source!r} gets at most {self._quota.rate:g} calls a second (rate): retry later"
            self._end(call, failure(Code.OVERLOADED, text, Stage.NOT_DISPATCHED, retry_safe=True, wait=wait))

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels a call at the server, which does not confirm it: its slot is free a moment later."""
        if self._queue.pop(call.id, None) is not None:
            return True
        sent = self._sent.pop(call.id, None)
        if sent is not None:
            self._cancel_at_server(sent, reason)
        asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm, call)
        return False

    def stage(self, call: Call) -> Stage:
        """Returns how far a call has got: what was written to the server may have been read."""
        return Stage.NOT_DISPATCHED if call.id in self._queue else Stage.DISPATCHED

    def _send(self, call: Call, attempt: int) -> None:
        connection = self._connection
        if connection is None:
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
                write_params(call, self._json_of(theirs)),
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
        except Lost:  # its end is noticed in a moment
            del self._sent[call.id]
            self._queue[call.id] = (call, attempt)

    def _json_of(self, name: str) -> str:
        """Returns the name of a tool as JSON text; there are as many as the server has tools."""
        text = self._json_names.get(name)
        if text is None:
            text = self._json_names[name] = dump_json(name)
        return text

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
        for incoming in sent.waiting.values():
            connection.refuse(incoming, McpCode.INTERNAL, f"the call was cancelled: {reason}")
        sent.waiting.clear()
        if sent.task is not None:
            sent.task.cancel()
        else:
            connection.cancel(sent.request, reason)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answered(self, sent: SentCall, raw: msgspec.Raw | None, error: Exception | None) -> None:
        """Takes the answer to a call, or why there is none."""
        call = sent.call
        if call is None:  # parked: its caller gets it when it comes back
            sent.outcome = (raw, error)
            return
        if raw is not None:
            self._take_result(sent, call, raw)
            return
        self._sent.pop(call.id, None)
        if isinstance(error, Lost):
            self._lost(call, sent.attempts, error)
        elif isinstance(error, RpcError):
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
            result = read_answer(answer)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as fault:
            result = unreadable(call, fault)
        self._sent.pop(call.id, None)
        self._end(call, result)

    def _lost(self, call: Call, attempts: int, error: Lost) -> None:
        """Ends a call whose server is gone, or sends it again where it certainly did not arrive."""
        if self.pending.get(call.id) is not call:
            return
        if error.stage is Stage.NOT_DISPATCHED:
            if attempts < MAX_ATTEMPTS and not isinstance(error, NeedsLogin):
                self._queue[call.id] = (call, attempts + 1)
                self._wake()
                if self._connection is not None:  # over HTTP a connection outlives its server
                    asyncio.get_running_loop().call_later(RESEND_SECONDS, self._send_again, call)
            else:
                self._end(call, failure(Code.UNAVAILABLE, str(error), Stage.NOT_DISPATCHED, retry_safe=True))
            return
        del self.pending[call.id]
        if error.stage is Stage.ACCEPTED:
            call.accepted = True
        self.takes_calls = False  # or the dispatcher would send it here again
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
        """Hands a log message of the server to the caller that it is for, where that is known."""
        sent = self._sent.get(stream) or self._of_request(stream)
        if sent is None and len(self._sent) == 1:
            sent = next(iter(self._sent.values()))
        if sent is not None and sent.call is not None:
            message = pb.ToolProgress(call_id=sent.call.id, message=text)
            self._dispatcher.progress(self, [message], time.monotonic())

    # -- questions ----------------------------------------------------------------------------------------------------

    def take_request(self, incoming: Incoming) -> None:
        """Takes a question of the server: the call that it is about ends with it, where its caller can answer."""
        connection = self._connection
        if connection is None:
            return
        needs = QUESTIONS.get(incoming.method)
        if incoming.method == ELICITATION:
            needs = "elicitation.url" if incoming.params.get("mode") == "url" else "elicitation.form"
        if needs is None:
            connection.refuse(incoming, McpCode.METHOD_NOT_FOUND, f"the bus does not know {incoming.method!r}")
            return
        sent = self._call_of(incoming)
        if sent is None:
            text = f"{incoming.method} outside of a call, or while calls of several users run: nobody can be asked"
            connection.refuse(incoming, McpCode.INVALID_REQUEST, text)
            return
        if needs not in sent.accepts:
            text = f"the caller of this tool cannot be asked: it does not accept {needs}"
            connection.refuse(incoming, McpCode.INVALID_REQUEST, text)
        elif len(sent.waiting) >= MAX_QUESTIONS or (sent.call is not None and self._parked.is_full):
            connection.refuse(
                incoming, McpCode.INTERNAL, "too many questions of this server wait for answers: ask later"
            )
        else:
            sent.asked += 1
            sent.waiting[f"question-{sent.asked}"] = incoming
            if sent.call is not None:  # else it is asked as soon as the caller has answered what came before
                self._park(sent, sent.call)

    def _call_of(self, incoming: Incoming) -> SentCall | None:
        """Returns the call that a question is about, parked or not; None where that is not certain."""
        if incoming.stream:
            return self._sent.get(incoming.stream) or self._of_request(incoming.stream)
        parked = [(each.owner, each.held) for each in self._parked]
        owned = [*parked, *((_owner(each.call), each) for each in self._sent.values() if each.call is not None)]
        askers = {owner[1:] for owner, _ in owned}
        asks_features = self._connection is not None and self._connection.asks(FEATURE_METHODS)
        return owned[-1][1] if len(askers) == 1 and not asks_features else None

    def _of_request(self, request: str) -> SentCall | None:
        """Returns the call that has this id at the server: one that was parked goes on under another one here."""
        parked = (each.held for each in self._parked)
        return next((each for each in (*self._sent.values(), *parked) if each.request == request), None)

    def _park(self, sent: SentCall, call: Call, asked: Mapping[str, Any] | None = None) -> None:
        """Ends a call with the questions of its server, and waits for the answers."""
        questions = asked or {key: {"method": each.method, "params": each.params} for key, each in sent.waiting.items()}
        self._sent.pop(call.id, None)
        sent.call = None
        state = self._parked.park(sent, _owner(call), questions)
        self._end(call, pb.ToolResult(input_requests_json=dump_json(questions), request_state=state))

    def _resume(self, call: Call, state: str, responses_json: str) -> None:
        """Goes on with a parked call, whose caller has the answers."""
        parked = self._parked.take(state, _owner(call))
        connection = self._connection
        if parked is None or connection is None:
            text = (
                "what this answers does not wait any more: its time has passed, or the server was started again; call "
                "again without answers"
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
        for key in list(sent.waiting):
            if isinstance(answers.get(key), dict):
                connection.respond(sent.waiting.pop(key), answers[key])
        if sent.waiting:  # not all was answered, or more was asked meanwhile
            self._park(sent, call)

    def _give_up(self, sent: SentCall) -> None:
        self._cancel_at_server(sent, "nobody answered in time")

    def _task_moved(self, sent: SentCall, state: Mapping[str, Any], error: Exception | None) -> None:
        """Takes what a task of the server has come to: its result, its questions, or how far it is."""
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
    """Returns who may go on with a call: the same tool for the same caller and user."""
    if call is None:
        return ()
    user = call.context.user_id if call.context is not None else ""
    return (call.entry.name, call.caller.principal.account, user)
