"""Defines `ToolScope`, a call as its handler sees it: context, deadline, cancellation, progress, calls of other tools.

A handler gets it by a parameter annotated `ToolScope`, or named `ctx` without annotation; the SDK fills that parameter
and never shows it to a model. All methods may be called from any thread, and only `call_sync` blocks. The scope knows
no connection: it gets `send_progress` and `caller`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from toolbus.common.text import dump_json, parse_json
from toolbus.functions.call_context import NO_CONTEXT, CallContext, CallOptions
from toolbus.protocol.json_schema import normal_form
from toolbus.protocol.questions import ELICITATION, Answer, Question, fault_of_answer
from toolbus.protocol.tool import Result, dump_arguments
from toolbus.v1 import tool_pb2 as pb

# A function that asks runs again from its beginning for each answer. The earlier answers come back in the call's
# `request_state`, which the SDK writes and reads as `{"answers": {key: answer}}`.

_ANSWERS = "answers"


class InputNeeded(BaseException):
    """Ends a run with questions. It is not an Exception, so that a handler's own `except Exception` lets it pass.

    Args:
        questions: `{"method": …, "params": …}` by key.
        state: a text that comes back with the answers.
    """

    def __init__(self, questions: Mapping[str, Mapping[str, Any]], state: str = "") -> None:
        super().__init__(f"the function asks {', '.join(map(repr, questions))} and runs again with the answers")
        self.questions = questions
        self.state = state

    def result(self, call_id: str) -> Result:
        """Returns the result that ends the call.

        Raises:
            TypeError, ValueError: JSON cannot hold a question.
        """
        return Result(call_id, input_requests_json=dump_json(self.questions), request_state=self.state)


class CallInputs:
    """The questions that a caller can answer, and its answers; for one run of the tool's function.

    Attributes:
        accepts: the kinds of questions that the caller can answer.
        state: the request_state, as it came.
    """

    __slots__ = ("_known", "_responses_json", "_unnamed", "accepts", "state")

    def __init__(self, accepts: tuple[str, ...] = (), responses_json: str = "", state: str = "") -> None:
        self.accepts = accepts
        self.state = state
        self._responses_json = responses_json
        self._known: dict[str, Any] | None = None  # answers by key; None before they are first read
        self._unnamed = 0  # how many questions without a key this run has asked

    @property
    def responses(self) -> dict[str, Any]:
        """The answers that came with this call, parsed anew at each access."""
        return _object(self._responses_json)

    def answers(self, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the answers to questions.

        Raises:
            InputNeeded: some are missing, or do not fit their question.
        """
        if self._known is None:
            earlier = _object(self.state).get(_ANSWERS)
            self._known = {**(earlier if isinstance(earlier, dict) else {}), **self.responses}
        known = self._known
        missing = {}
        for key, question in questions.items():
            parsed = Question(key, str(question.get("method")), question.get("params") or {})
            if key not in known or fault_of_answer(parsed, known[key]):
                missing[key] = question
        if missing:
            rest = {key: answer for key, answer in known.items() if key not in missing}
            raise InputNeeded(missing, dump_json({_ANSWERS: rest}) if rest else "")
        return {key: known[key] for key in questions}

    def elicited(self, params: Mapping[str, Any], key: str) -> Answer:
        """Returns a person's answer.

        Args:
            params: of the question.
            key: names the question; "" names it by its place in the run and its text, so that another question at that
                place never gets this answer.

        Raises:
            InputNeeded: it is not answered yet.
        """
        if not key:
            self._unnamed += 1
            digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
            key = f"{self._unnamed}-{digest[:8]}"
        if params.get("mode") == "url":
            params = {**params, "elicitationId": key}
        return Answer.from_json(self.answers({key: {"method": ELICITATION, "params": params}})[key])


def inputs_of(call: pb.ToolCall) -> CallInputs | None:
    """Returns the questions that the caller of a call can answer, with its answers; None if it can answer nothing."""
    if not call.accepts:
        return None
    return CallInputs(tuple(call.accepts), call.input_responses_json, call.request_state)


def _object(text: str) -> dict[str, Any]:
    """Returns the JSON object of a text, an empty one if the text is something else: callers can send anything."""
    try:
        value = parse_json(text) if text else {}
    except (ValueError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}


log = logging.getLogger(__name__)

CANCELLED_SECONDS = 0.1  # between two checks of a blocked thread whether its call was cancelled


class NestedCaller(Protocol):
    """Calls another tool for a scope; the connection provides it.

    The future's result is the call's, and a failed call is no exception; cancelling the future cancels the call.
    """

    def __call__(self, name: str, arguments_json: str, options: CallOptions) -> concurrent.futures.Future[Result]: ...


class ToolScope:
    """One call, as its handler sees it.

    Attributes:
        call_id: the bus's id of this call.
        request_id: the caller's id of this call if the plugin is a qualified one; else the bus's.
        caller_source: the source that made this call if the tool runs in the bus's own process; else "".
        tool: the name by which the tool was called.
        role: the role that the tool is for, else the one that the caller or a parent call named; empty without either.
        context: the call's context, as the host states it.
        deadline: when the caller stops waiting, by `time.monotonic()`; None without a timeout.
        cancel_reason: why the call was cancelled; None unless it was.
    """

    __slots__ = (
        "__weakref__",
        "_caller",
        "_ended",
        "_event",
        "_inputs",
        "_send_progress",
        "call_id",
        "caller_source",
        "cancel_reason",
        "context",
        "deadline",
        "principal",
        "request_id",
        "role",
        "tool",
    )

    # Held while an event is made, so that two threads cannot make two.
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        call_id: str = "",
        tool: str = "",
        *,
        context: CallContext = NO_CONTEXT,
        deadline: float | None = None,
        send_progress: Callable[[pb.ToolProgress], None] | None = None,
        caller: NestedCaller | None = None,
        principal: object = None,
        caller_source: str = "",
        request_id: str = "",
        role: str = "",
        inputs: CallInputs | None = None,
    ) -> None:
        """Makes a scope; for connections, and for tests of handlers, which may write `ToolScope()`.

        Args:
            send_progress: takes each progress, from any thread and without blocking; None drops it.
            caller: calls other tools; None without a bus.
            principal: who made the outermost call if the tool runs in the bus's own process; else None.
            request_id: the caller's id of the call; "" if unknown.
            inputs: the questions that the caller can answer, and its answers; None if it can answer nothing.
        """
        self._inputs = inputs
        self.call_id = call_id
        self.request_id = request_id or call_id
        self.tool = tool
        self.role = role
        self.context = context
        self.deadline = deadline
        self.principal = principal
        self.caller_source = caller_source
        self.cancel_reason: str | None = None
        self._send_progress = send_progress
        self._caller = caller
        self._event: threading.Event | None = None  # None until first used
        self._ended = False  # True once the handler has ended: later progress of its threads is dropped

    @classmethod
    def of(
        cls,
        call: pb.ToolCall,
        *,
        send_progress: Callable[[pb.ToolProgress], None] | None = None,
        caller: NestedCaller | None = None,
        principal: object = None,
        caller_source: str = "",
    ) -> ToolScope:
        """Makes the scope of a call that has just arrived; it copies all that it needs out of the message."""
        return cls(
            call.call_id,
            call.name,
            context=CallContext.from_wire(call.context) if call.HasField("context") else NO_CONTEXT,
            deadline=time.monotonic() + call.timeout_seconds if call.timeout_seconds > 0 else None,
            send_progress=send_progress,
            caller=caller,
            principal=principal,
            caller_source=caller_source,
            request_id=call.request_id,
            role=call.role,
            inputs=inputs_of(call) if call.HasField("context") else None,
        )

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"cancelled: {self.cancel_reason}" if self.is_cancelled else "running"
        return f"<{type(self).__name__} {self.tool} {self.call_id} {state}>"

    if not TYPE_CHECKING:  # type checkers then report unknown names

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"the ctx of a call has no {name}: it has context, user_id, channel_id, platform, call() and "
                "progress(); a host sends further values in context.attributes"
            )

    @property
    def cancelled(self) -> threading.Event:
        """Set when the call is cancelled. A sync handler checks it, or waits on it instead of sleeping."""
        if self._event is None:
            with self._making:
                if self._event is None:
                    event = threading.Event()
                    self._event = event
                    if self.cancel_reason is not None:
                        event.set()
        return self._event

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self.cancel_reason is not None

    @property
    def user_id(self) -> str:
        """The user for whom the call is made; empty if the host has not stated one: then assume no user."""
        return self.context.user_id

    @property
    def channel_id(self) -> str:
        """The conversation in which the call was made: the attribute `channel_id`, else `channel`; empty if unknown."""
        return self.context.attributes.get("channel_id") or self.context.attributes.get("channel", "")

    @property
    def platform(self) -> str:
        """The service of the conversation: the attribute `platform`; empty if unknown."""
        return self.context.attributes.get("platform", "")

    @property
    def can_call(self) -> bool:
        """Whether it is connected to a bus, so that it can call other tools."""
        return self._caller is not None

    def raise_if_cancelled(self) -> None:
        """Ends a handler whose call was cancelled; a cheap check for loops.

        Raises:
            asyncio.CancelledError: the call was cancelled.
        """
        if self.cancel_reason is not None:
            raise asyncio.CancelledError(self.cancel_reason)

    def time_left(self) -> float:
        """Returns the seconds until the deadline, never below 0; infinity without one."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def progress(
        self,
        progress: float = 0.0,
        *,
        total: float = 0.0,
        message: str = "",
        chunk: str = "",
        content: Sequence[pb.ContentBlock] = (),
    ) -> None:
        """Reports progress to the caller, and resets the idle timeout.

        Progress that UTF-8 cannot encode is left out, with a warning in the log.

        Args:
            progress: the amount of work that is done.
            total: the whole amount, in the same unit; 0 means unknown.
            message: a text for people.
            chunk: the next piece of the output. The result must still have the whole output.
            content: parts that are ready before the result.
        """
        if self._ended or self._send_progress is None:
            return
        try:
            item = pb.ToolProgress(
                call_id=self.call_id,
                progress=progress,
                total=total,
                message=message,
                output_chunk=chunk,
                content=content,
            )
        except UnicodeEncodeError as problem:  # half of a surrogate pair
            log.warning("progress of tool %s is left out: %s", self.tool, problem)
            return
        self._send_progress(item)

    @property
    def accepts(self) -> tuple[str, ...]:
        """The kinds of questions that the caller can answer, such as `elicitation.form`, `sampling`."""
        return self._inputs.accepts if self._inputs is not None else ()

    @property
    def input_responses(self) -> Mapping[str, Any]:
        """The answers that came with this call, by key; for handlers that return their questions themselves."""
        return self._inputs.responses if self._inputs is not None else {}

    @property
    def request_state(self) -> str:
        """The state that this tool returned with its questions, as the caller sent it back: do not trust it."""
        return self._inputs.state if self._inputs is not None else ""

    async def elicit(
        self, message: str, schema: Mapping[str, Any] | None = None, *, url: str = "", key: str = ""
    ) -> Answer:
        """Asks the person behind the caller, by a form or, with ``url``, by a page to open.

        It ends this run, and the function runs again from its beginning with the answer: ask before you change
        anything. Check `Answer.accepted`: a person may decline. If the caller cannot ask a person, the call ends in an
        error that names the question. If an answer does not fit the form, the person is asked again.

        Args:
            schema: JSON Schema of the form: an object with properties of text, number, integer, boolean, or a list of
                choices; the properties alone are enough. None only asks whether the person agrees.
            key: names the question; needed only if ``message`` or ``schema`` differs from run to run.
        """
        return self.elicit_sync(message, schema, url=url, key=key)

    def elicit_sync(
        self, message: str, schema: Mapping[str, Any] | None = None, *, url: str = "", key: str = ""
    ) -> Answer:
        """Does what `elicit` does, for handlers that are plain functions; it blocks nothing."""
        params: dict[str, Any] = {"mode": "url", "message": message, "url": url}
        if not url:
            form = normal_form(dict(schema)).schema if schema else {}
            params = {"mode": "form", "message": message}
            params["requestedSchema"] = {"type": "object", "properties": {}, **form}
        return self._answerable().elicited(params, key)

    async def ask(self, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Asks several questions of any kind at once, and returns the answers by key; otherwise as `elicit`.

        Args:
            questions: for each key an object with ``method`` (``elicitation/create``, ``sampling/createMessage``,
                ``roots/list``) and ``params``, as the Model Context Protocol defines them.
        """
        return self.ask_sync(questions)

    def ask_sync(self, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Does what `ask` does, for handlers that are plain functions; it blocks nothing."""
        return self._answerable().answers(questions)

    def _answerable(self) -> CallInputs:
        if self._inputs is None:
            self._inputs = CallInputs()
        return self._inputs

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        schema_hash: str = "",
    ) -> Result:
        """Calls another tool as part of this call: same context, no longer than this call, cancelled with it.

        A call that fails is a result with `error`; only arguments that JSON cannot hold raise.

        Args:
            timeout: seconds; None means the tool's own.
        """
        options = CallOptions(timeout, role, schema_hash=schema_hash, parent_call_id=self.call_id)
        return await asyncio.wrap_future(self._begin(name, arguments, options))

    def call_sync(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        schema_hash: str = "",
    ) -> Result:
        """Does what `call` does, for handlers that are plain functions: blocks their thread until the result comes.

        Raises:
            asyncio.CancelledError: this call was cancelled, and the other one with it.
            RuntimeError: the thread runs an event loop, which it would block.
        """
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"call_sync({name!r}) would block the event loop of an async handler: await call()")
        options = CallOptions(timeout, role, schema_hash=schema_hash, parent_call_id=self.call_id)
        result = self._begin(name, arguments, options)
        while True:
            try:
                return result.result(CANCELLED_SECONDS)
            except TimeoutError:
                if self.is_cancelled and result.cancel():
                    self.raise_if_cancelled()

    def _begin(
        self, name: str, arguments: Mapping[str, Any] | str | None, options: CallOptions
    ) -> concurrent.futures.Future[Result]:
        if self._caller is None:
            raise RuntimeError(f"tool {self.tool!r} cannot call {name!r}: this scope is not connected to a bus")
        return self._caller(name, dump_arguments(arguments), options)

    def cancel(self, reason: str = "cancelled") -> None:
        """Marks the call as cancelled; for the connection. The first reason stays."""
        with self._making:
            if self.cancel_reason is None:
                self.cancel_reason = reason or "cancelled"
            if self._event is not None:
                self._event.set()

    def end(self) -> None:
        """Drops all progress from now on; called when the handler has ended."""
        self._ended = True
