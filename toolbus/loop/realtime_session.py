"""Connects a realtime model, which talks over a socket that stays open, to a source of tools: `RealtimeSession`.

The socket's owner passes in every event of the provider, and a function that sends. The session keeps the provider's
list of tools equal to the catalog, makes the calls that the model requests, and answers each one. It opens and reads
no socket itself, and may only be used from one event loop.

The calls of one response are answered together, when the response is over and all of them have ended: a provider
refuses a second response while one is in progress, and would otherwise answer to half of the results. While the user
speaks, results are sent without a request for a response: most providers then begin one by themselves; otherwise the
session requests it a second after the user has stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from toolbus.dialects.conversation import Delta, Json, ModelCall
from toolbus.dialects.dialect import ToolChoice, as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.realtime_dialect import (
    CallsCancelled,
    RealtimeDialect,
    ResponseBegan,
    ResponseEnded,
    ResponseRefused,
    SpeechBegan,
    SpeechEnded,
)
from toolbus.errors import Code, InvalidRequest, PeerLost, Stage
from toolbus.functions.call_context import CallContext
from toolbus.loop.approval import Approval, Approve, check_hook
from toolbus.loop.call_rate_limit import WINDOW_CALLS, WINDOW_SECONDS, CallRateLimit
from toolbus.loop.loop_events import CallEnded, ReasoningDelta, TextDelta
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.loop_tools import LoopTools
from toolbus.loop.open_responses import OpenResponses, ResponseCall, answered
from toolbus.loop.realtime_events import (
    CallRefused,
    ResponseDone,
    SendFailed,
    SessionEvent,
    Sync,
)
from toolbus.loop.repeat_guard import RepeatGuard
from toolbus.loop.result_cut import ResultCutter
from toolbus.loop.round_calls import CallRunner, RoundCalls, quote_name, unknown_tool
from toolbus.loop.session_tools import SessionTools
from toolbus.loop.tool_source import ToolSource
from toolbus.loop.turn_taking import TurnTaking
from toolbus.tool import CallError, Result

log = logging.getLogger("toolbus.loop")

PAUSE_SECONDS = 1.0  # for a provider to begin a response by itself; such providers need a tenth of it


class RealtimeSession:
    """Keeps the tools of one realtime session up to date and answers its calls.

    Use it as an async context manager, or call `close` at the end.
    """

    def __init__(
        self,
        dialect: RealtimeDialect,
        tools: ToolSource,
        send: Callable[[Json], object],
        *,
        context: CallContext | None = None,
        window_calls: int = WINDOW_CALLS,
        window_seconds: float = WINDOW_SECONDS,
        on_event: Callable[[SessionEvent], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause_seconds: float = PAUSE_SECONDS,
        approve: Approve | None = None,
        settings: LoopSettings | None = None,
    ) -> None:
        """Creates the session's side of the bus. Nothing is sent before `sync` or `follow`.

        Args:
            send: takes one event for the provider, as a dict; may be async.
            context: on whose behalf calls are made; None means the context of the source.
            window_calls, window_seconds: the rate limit: how many calls may be made within a sliding window of time;
                further ones are refused with an error as their result.
            on_event: receives all events of the session; its exceptions are logged.
            pause_seconds: how long a provider has to begin a response by itself after the user has stopped speaking.
            approve: is called before calls, as by a `ToolLoop`, but also again for a call that was refused before,
                since a session has no turns.
            settings: only `call_timeout`, `needs_approval` and `result_bytes` are used.

        Raises:
            SetupError: a limit is not above 0, or `approve` is not a function.
        """
        self._dialect = dialect
        self._tools = tools
        self._send = send
        self._rate_limit = CallRateLimit(window_calls, window_seconds, clock)
        self._on_event = on_event
        self._pause_seconds = pause_seconds
        settings = settings or LoopSettings()
        loop_tools = LoopTools(LoopSettings(), None)  # none are offered: a session has no rounds
        approval = None
        if approve is not None:
            approval = Approval(check_hook(approve), settings.needs_approval, self._notify, remembers=False)
        context = context if context is not None else getattr(tools, "context", None)
        self._session_tools = SessionTools(dialect, tools, self._send_events, self._notify, lambda: self._closed)
        self._responses = OpenResponses(
            CallRunner(tools, settings, context, loop_tools, RepeatGuard(0), self._notify, approval)
        )
        self._cutter = ResultCutter(settings.result_bytes or 0)
        self._turn_taking = TurnTaking()
        self._pause: asyncio.TimerHandle | None = None  # None until the user has spoken
        self._send_lock = asyncio.Lock()  # keeps the events of an answer together
        self._tasks: set[asyncio.Task[None]] = set()  # all running tasks
        self._follower: asyncio.Task[None] | None = None  # None until `follow`
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"tools={len(self.export.tools)} calls={self._responses.running}"
        return f"<RealtimeSession {self._dialect.name} {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def export(self) -> Export:
        """The tools that the session has."""
        return self._session_tools.export

    @property
    def closed(self) -> bool:
        """Whether the session is closed, and no longer sends events."""
        return self._closed

    # -- tools -------------------------------------------------------------------------------------------------------

    async def setup(self) -> Json:
        """Returns the provider's message that sets the current tools, for the program that opens the session to send.

        The tools count as sent. A dialect whose tools are fixed at connect needs it; with others it saves the first
        `sync`.
        """
        return await self._session_tools.setup()

    async def sync(self) -> Sync:
        """Sends the current tools to the session if they have changed. Returns once they are sent.

        A session whose tools are fixed returns NEW_SESSION: it continues with its tools until its owner opens another
        one with the `setup` of a new `RealtimeSession`.

        Raises:
            Exception: any error of `send` or the source; the session then counts as having its previous tools.
        """
        return await self._session_tools.sync()

    def follow(self) -> asyncio.Task[None]:
        """Starts to `sync` now and whenever the catalog changes, until the session is closed or the source ends.

        Returns the task that does it, the same one each time. An update that could not be sent is reported as
        `SendFailed`, and is sent with the next change.
        """
        if self._follower is None:
            self._follower = self._start(self._follow())
        return self._follower

    async def _follow(self) -> None:
        settling: asyncio.Task[None] | None = None  # None until a bus that had restarted lacked tools
        try:
            async for _ in self._tools.changes():
                await self._sync_or_report()
                if self._session_tools.waits and (settling is None or settling.done()):
                    settling = self._start(self._sync_when_settled())
        except Exception as error:
            self._report_failure("it no longer follows the catalog", error)

    async def _sync_when_settled(self) -> None:
        await self._session_tools.settled()
        await self._sync_or_report()  # removes tools that were not registered again, for which no change is reported

    async def _sync_or_report(self) -> None:
        try:
            await self.sync()
        except Exception as error:
            self._report_failure("the tools could not be sent", error)

    # -- events ------------------------------------------------------------------------------------------------------

    async def feed(self, event: Any) -> None:
        """Takes one event of the provider. Calls run in separate tasks; this method never waits for one.

        Unknown or malformed events are ignored.

        Args:
            event: a mapping, or an object of the provider's SDK.

        Raises:
            TypeError: it is neither.
        """
        if self._closed:
            return
        try:
            message = as_mapping(event)
        except TypeError:
            kind = type(event).__name__
            raise TypeError(
                f"a {kind} is not an event of a realtime session: feed a mapping, such as json.loads(text) returns, or "
                "an object of the provider's SDK"
            ) from None
        for parsed in self._session_tools.parser.feed(message):
            match parsed:
                case Delta():
                    self._notify(TextDelta(parsed.text) if parsed.kind == "text" else ReasoningDelta(parsed.text))
                case ResponseBegan():
                    self._turn_taking.response_began()
                    self._responses.get(parsed.id, self.export, over=False)
                case ModelCall():
                    self._take(parsed)
                case CallsCancelled():
                    self._cancel(parsed.ids, answers=parsed.answers)
                case ResponseRefused():
                    self._turn_taking.request_refused()
                case SpeechBegan():
                    self._turn_taking.speech_began()
                case SpeechEnded():
                    self._pause_for_response()
                case ResponseEnded():
                    self._turn_taking.response_ended()
                    self._responses.end(parsed.id)
                    self._notify(ResponseDone(parsed.ending, parsed.reason, parsed.usage))
        self._send_if_ready()

    def _take(self, call: ModelCall) -> None:
        """Makes a call, or refuses it."""
        response = self._responses.get(call.response, self.export, over=True)
        if call.id in response.calls:
            return  # a provider cannot distinguish the answers of two calls with one id
        response_call = response.add(call, time.time())
        if call.known:
            response_call.result = self._rate_limit.refusal(quote_name(call))
        else:
            response_call.result = unknown_tool(call, response.export)
        if response_call.result is None:
            response_call.task = self._start(self._run(response_call, response.runner))
        else:
            self._notify(CallRefused(response_call.done(response_call.result, time.time())))

    async def _run(self, call: ResponseCall, runner: RoundCalls) -> None:
        done = await runner.run(call.call, call.order)
        call.result = self._cutter.cut(done.answered.result)
        self._send_if_ready()

    def _send_if_ready(self) -> None:
        """Starts to send the results that can be sent now, or the request for a response that is due."""
        if self._ready() or self._can_request_response():
            self._start(self._send_ready())

    def _ready(self) -> list[str]:
        """Returns the responses whose results can be sent: none while a response is in progress or about to begin."""
        return self._responses.complete() if self._turn_taking.can_send_results else []

    def _can_request_response(self) -> bool:
        return self._turn_taking.can_request_response and not self._responses.in_progress

    def _pause_for_response(self) -> None:
        """The user has stopped speaking: gives the provider time to begin a response by itself."""
        if not self._turn_taking.speech_ended():
            return
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(self._pause_seconds, self._end_pause)

    def _end_pause(self) -> None:
        self._turn_taking.pause_ended()
        if not self._closed:
            self._send_if_ready()

    def request_response(self, tool_choice: ToolChoice = "auto") -> None:
        """Makes the model respond, as soon as no response is in progress and the user does not speak.

        Without a choice, a response that the provider begins by itself meanwhile counts as this one.

        Args:
            tool_choice: for this response: `auto`, `none`, `required`, or the name of the tool that it has to call.

        Raises:
            InvalidRequest: the session has no such tool, or its provider no such choice.
        """
        self._dialect.request(self.export, tool_choice)  # checks the choice
        if not self._closed:
            self._turn_taking.request_response(tool_choice)
            self._send_if_ready()

    # -- end of calls and of the session -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancels all calls that run or wait to be answered. They are answered without a request for a response."""
        self._cancel(self._responses.call_ids)

    async def close(self) -> None:
        """Ends all work and sends no more events. Later events are ignored, and a later `sync` returns CLOSED."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        others = [task for task in self._tasks if task is not asyncio.current_task()]  # `send` may call this
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._responses.clear()

    def _cancel(self, ids: Iterable[str], *, answers: bool = True) -> None:
        cancelled = self._responses.pop_cancelled(ids)
        for call in cancelled:
            self._stop(call)
        if cancelled and answers:
            self._start(self._send_cancelled(cancelled))

    def _stop(self, call: ResponseCall) -> None:
        """Ends a call that still runs. A call with a result keeps it."""
        if call.result is not None or call.task is None:
            return
        call.task.cancel()
        text = f"the call of {quote_name(call.call)} was cancelled before it ended: the user interrupted"
        call.result = Result(is_error=True, error=CallError(Code.CANCELLED, text, Stage.UNKNOWN))
        self._notify(CallEnded(call.done(call.result, time.time())))

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _send_ready(self) -> None:
        try:
            async with self._send_lock:  # checks again: a response may have begun while this waited
                calls = self._responses.pop_calls(self._ready())
                if calls or self._can_request_response():
                    events = self._dialect.answers(answered(calls), self.export.names, go_on=False)
                    if self._turn_taking.start_sending():
                        events += self._request()
                    await self._write(events)
        except Exception as error:
            self._turn_taking.sending_failed()
            self._report_failure("answers could not be sent", error)

    def _request(self) -> list[Json]:
        """Returns the events that request a response, with the program's choice."""
        try:
            return self._dialect.request(self.export, self._turn_taking.take_choice())
        except InvalidRequest as error:  # the chosen tool was withdrawn meanwhile
            self._report_failure("a response is requested without the choice of a tool", error)
            return self._dialect.request()

    async def _send_cancelled(self, calls: Sequence[ResponseCall]) -> None:
        try:
            await self._send_events(self._dialect.answers(answered(calls), self.export.names, go_on=False))
        except Exception as error:
            self._report_failure("answers to cancelled calls could not be sent", error)

    async def _send_events(self, events: Sequence[Json]) -> None:
        async with self._send_lock:
            await self._write(events)

    async def _write(self, events: Sequence[Json]) -> None:
        """Sends events; the caller holds the send lock."""
        for event in events:
            if self._closed:
                raise PeerLost("the realtime session is closed: no more events are sent to it")
            sending = self._send(event)
            if inspect.isawaitable(sending):
                await sending

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_failure(self, what: str, error: Exception) -> None:
        log.warning("%s session: %s: %s: %s", self._dialect.name, what, type(error).__name__, error)
        self._notify(SendFailed(error))

    def _notify(self, event: SessionEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event of a %s session failed at %s", self._dialect.name, type(event).__name__)
