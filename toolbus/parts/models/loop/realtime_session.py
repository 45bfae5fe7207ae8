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
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeAlias

from toolbus.common.newest import NewestCache
from toolbus.errors import Code, InvalidRequest, PeerLost, SetupError, Stage
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.conversation import Answered, Delta, Ending, Json, ModelCall, Usage
from toolbus.parts.models.dialects.dialect import (
    CallsCancelled,
    RealtimeDialect,
    ResponseBegan,
    ResponseEnded,
    ResponseRefused,
    SpeechBegan,
    SpeechEnded,
    ToolChoice,
    as_mapping,
)
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.loop.approval import Approval, Approve, RepeatGuard, check_hook
from toolbus.parts.models.loop.export_cache import export_within
from toolbus.parts.models.loop.loop_events import CallEnded, CallEvent, ReasoningDelta, TextDelta
from toolbus.parts.models.loop.loop_settings import LoopSettings
from toolbus.parts.models.loop.loop_tools import LoopTools
from toolbus.parts.models.loop.result_cut import ResultCutter
from toolbus.parts.models.loop.round_calls import CallRunner, RoundCalls, quote_name, unknown_tool
from toolbus.parts.models.loop.tool_source import ToolSource, missing_after_restart
from toolbus.parts.models.loop.turn_reply import CallDone, refusal
from toolbus.protocol.tool import CallError, Result


# Pure state: `RealtimeSession` reports the provider's events and sends what the state allows. A provider begins one
# response at a time: by itself when the user stops speaking, or on request. So no response is requested while the
# user speaks, and a request that came too late (the provider had begun a response by itself) is repeated after that
# response.
class TurnTaking:
    """The state of one session."""

    def __init__(self) -> None:
        self.user_speaking = False
        self.pausing = False  # whether the user has just stopped: the provider may begin a response by itself
        self._announces = False  # whether the provider reports the begin of a response; OpenAI does, Gemini does not
        self._requested = False  # whether a response was requested and has not begun
        self._may_be_refused = False  # whether that request may still be refused: no response has ended since
        self._busy = False  # whether the provider refused it because of a response that has not ended
        self._repeats = False  # whether a refused request was, or will be, repeated without a response since
        self._request_due = False  # whether a response is still to be requested: to results, or by the program
        self._choice: ToolChoice = "auto"  # of the next request
        self._sent_choice: ToolChoice = "auto"  # of the last request, which may be refused

    @property
    def can_send_results(self) -> bool:
        """Whether results can be sent, provided that no response is known to be in progress."""
        return not (self._requested or self._busy or self.pausing)

    @property
    def can_request_response(self) -> bool:
        """Whether to request a response to results that were sent before."""
        return self._request_due and self.can_send_results and not self.user_speaking

    def start_sending(self) -> bool:
        """Results, or a due request, are being sent. Returns whether to request a response."""
        request = not self.user_speaking
        self._request_due = not request
        self._requested = request and self._announces
        self._may_be_refused = request
        return request

    def request_response(self, choice: ToolChoice) -> None:
        """The program wants a response; with a choice, one that the provider begins by itself does not do."""
        self._choice, self._request_due = choice, True

    def take_choice(self) -> ToolChoice:
        """Returns the choice of the request that is being sent."""
        self._sent_choice, self._choice = self._choice, "auto"
        return self._sent_choice

    def sending_failed(self) -> None:
        """The results or the request could not be sent."""
        self._requested = self._may_be_refused = False

    def response_began(self) -> None:
        """A response began, with all results that were sent. The user's speech is over, even if not reported."""
        self._announces = True
        self._requested = self._busy = self._repeats = self.user_speaking = self.pausing = False
        self._request_due = self._choice != "auto"

    def response_ended(self) -> None:
        """A response is over."""
        self._busy = self._may_be_refused = self._repeats = False

    def request_refused(self) -> bool:
        """The provider refused a request because of a response in progress. A request of this side is due again.

        Returns whether to repeat it after a pause if no response is in progress: once, since that response may have
        ended before the provider refused the request, and then nothing else comes.
        """
        if not (self._may_be_refused or self._requested):
            return False
        self._requested = self._may_be_refused = False
        self._busy = self._request_due = True
        if self._choice == "auto":
            self._choice = self._sent_choice
        is_first, self._repeats = not self._repeats, True
        return is_first

    def refusal_ended(self) -> None:
        """No response is in progress, and none has ended since a request was refused."""
        self._busy = False

    def speech_began(self) -> None:
        """The user speaks."""
        self.user_speaking, self.pausing = True, False

    def speech_ended(self) -> bool:
        """The user stopped, or the audio buffer was cleared. Returns whether a pause begins."""
        was_speaking, self.user_speaking = self.user_speaking, False
        self.pausing = self.pausing or was_speaking
        return was_speaking

    def pause_ended(self) -> None:
        """The provider had time to begin a response by itself."""
        self.pausing = False


# Pure state: it knows which calls belong to which response and which responses can be answered; it sends nothing.
@dataclass(slots=True)
class ResponseCall:
    """A call of a response.

    Attributes:
        round: the number of its response among those of the session, from 1.
        order: its place among the calls of the response, from 0.
        started: seconds since the epoch.
        result: None while it runs.
        task: None where the call was refused.
    """

    call: ModelCall
    round: int
    order: int
    started: float
    result: Result | None = None
    task: asyncio.Task[None] | None = None

    def done(self, result: Result, ended: float) -> CallDone:
        """Returns the record of the call's end, in seconds since the epoch."""
        return CallDone(self.call, result, self.round, self.order, self.started, ended)


@dataclass(slots=True)
class OpenResponse:
    """A response of the model and its unanswered calls.

    Attributes:
        number: among the responses of the session, from 1.
        export: the tools that were offered when it began.
        runner: runs its calls.
        over: whether no more calls will come.
        calls: by id, in their order.
    """

    number: int
    export: Export
    runner: RoundCalls
    over: bool
    calls: dict[str, ResponseCall] = field(default_factory=dict)

    def add(self, call: ModelCall, started: float) -> ResponseCall:
        """Adds a call, which the response must not have."""
        response_call = self.calls[call.id] = ResponseCall(call, self.number, len(self.calls), started)
        return response_call


class OpenResponses(dict[str, OpenResponse]):
    """The open responses of one session, by id."""

    def __init__(self, runner: CallRunner) -> None:
        super().__init__()
        self._runner = runner
        self._began = 0  # responses so far

    def find(self, response_id: str, export: Export, *, over: bool) -> OpenResponse:
        """Returns a response; a new one where the id is unknown.

        Args:
            over: for a new one. A response whose begin the provider did not report is over with each call.
        """
        response = self.get(response_id)
        if response is None:
            self._began += 1
            calls = RoundCalls(self._runner, export, self._began)
            response = self[response_id] = OpenResponse(self._began, export, calls, over)
        return response

    @property
    def in_progress(self) -> bool:
        """Whether the model is still giving a response."""
        return any(not response.over for response in self.values())

    @property
    def running(self) -> int:
        """The number of calls without a result."""
        return sum(each.result is None for response in self.values() for each in response.calls.values())

    @property
    def call_ids(self) -> list[str]:
        """The ids of all unanswered calls."""
        return [call_id for response in self.values() for call_id in response.calls]

    def complete(self) -> list[str]:
        """Returns the ids of responses whose calls all have results: none while a response is in progress."""
        if self.in_progress:
            return []
        return [
            response_id
            for response_id, response in self.items()
            if all(each.result is not None for each in response.calls.values())
        ]

    def pop_calls(self, response_ids: Iterable[str]) -> list[ResponseCall]:
        """Removes responses. Returns their calls."""
        return [each for response_id in response_ids for each in self.pop(response_id).calls.values()]

    def pop_cancelled(self, call_ids: Iterable[str]) -> list[ResponseCall]:
        """Removes calls from their responses. Returns those that there were."""
        cancelled = frozenset(call_ids)
        return [
            response.calls.pop(call_id)
            for response in self.values()
            for call_id in tuple(response.calls)
            if call_id in cancelled
        ]


def answered(calls: Iterable[ResponseCall]) -> list[Answered]:
    """Returns calls with their results, as a dialect writes them."""
    return [Answered(each.call, each.result) for each in calls if each.result is not None]


# Above this rate a model calls tools instead of talking to its user.
WINDOW_CALLS = 4
WINDOW_SECONDS = 15.0


class CallRateLimit:
    """Counts the calls of the last seconds. A refused call does not count, so the limit always ends.

    Raises:
        SetupError: from the constructor, if a limit is not above 0.
    """

    def __init__(self, calls: int, seconds: float, clock: Callable[[], float]) -> None:
        for label, value in (("window_calls", calls), ("window_seconds", seconds)):
            if not value > 0:  # NaN is refused too
                raise SetupError(f"{label} is {value!r}: give it a number above 0")
        self._calls = calls
        self._seconds = seconds
        self._clock = clock
        self._made: deque[float] = deque()  # when the calls of the window were made, oldest first

    def refusal(self, name: str) -> Result | None:
        """Returns the error that replaces a call's result; None if the call may be made, which then counts.

        Args:
            name: of the tool, as the model knows it.
        """
        now = self._clock()
        while self._made and now - self._made[0] >= self._seconds:
            self._made.popleft()
        if len(self._made) < self._calls:
            self._made.append(now)
            return None
        wait = self._made[0] + self._seconds - now
        error = CallError(
            Code.OVERLOADED,
            f"{name} was not run: a live conversation may make {self._calls} tool calls in {self._seconds:g} seconds, "
            f"and the next call is possible in {math.ceil(wait)} seconds. Call no tool until then, also not with other "
            "arguments: tell the user what you already know.",
            Stage.NOT_DISPATCHED,
            limit=("window_calls", float(self._calls)),
            retry_after_seconds=wait,
        )
        return Result(is_error=True, error=error)


class Sync(Enum):
    """The outcome of `RealtimeSession.sync`."""

    UNCHANGED = "the session has these tools already"
    SENT = "the session has them now"
    NEW_SESSION = "its tools were fixed when it opened: only a new session can have them"
    CLOSED = "the session is closed"


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A call was not made: its tool is not offered, or there were too many calls."""

    done: CallDone


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response of the model is over.

    Attributes:
        ending: `complete`; `cut` if the token limit was reached or the user interrupted; `refused`; `failed`.
        reason: the provider's reason for an ending that is not `complete`; else "".
        usage: its tokens; None if the provider does not report them.
    """

    ending: Ending
    reason: str
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class ToolsSent:
    """The session has these tools now; `export.left_out` and `export.losses` report what could not be expressed."""

    export: Export


@dataclass(frozen=True, slots=True)
class NewSessionNeeded:
    """The tools have changed, and the provider fixes them when a session opens."""

    export: Export


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Answers or tools could not be sent, or the catalog is no longer followed. The next `sync` sends tools again."""

    error: Exception


SessionEvent: TypeAlias = (
    TextDelta | ReasoningDelta | CallEvent | CallRefused | ResponseDone | ToolsSent | NewSessionNeeded | SendFailed
)


log = logging.getLogger("toolbus.loop")

SETTLE_PAUSE = 0.25  # seconds between two checks whether a restarted bus still waits for its plugins


class SessionTools:
    """The tools of one session.

    Args:
        send: sends events to the provider.
        notify: receives `ToolsSent` and `NewSessionNeeded`.
        is_closed: tells whether the session is closed.

    Attributes:
        export: the tools that the session has.
        parser: reads the provider's events, with the names of these tools.
        waits: whether the last `sync` changed nothing, because the bus has just restarted and still lacks tools.
    """

    def __init__(
        self,
        dialect: RealtimeDialect,
        source: ToolSource,
        send: Callable[[Sequence[Json]], Awaitable[None]],
        notify: Callable[[SessionEvent], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._dialect = dialect
        self._source = source
        self._send = send
        self._notify = notify
        self._is_closed = is_closed
        self._lock = asyncio.Lock()  # one update at a time
        self.export = dialect.export(())
        self.parser = dialect.parser(self.export.names)
        self.waits = False

    async def setup(self) -> Json:
        """Returns the provider's message that sets the current tools, which then count as sent."""
        async with self._lock:
            _, tools = await self._source.tools()
            self._use(export_within(self._dialect, tools))
            return self._dialect.session_update(self.export)

    async def sync(self) -> Sync:
        """Sends the current tools if they have changed, as `RealtimeSession.sync` says."""
        async with self._lock:
            if self._is_closed():
                return Sync.CLOSED
            _, tools = await self._source.tools()
            missing = missing_after_restart(self._source, self.export.kept, tools)
            self.waits = bool(missing)
            if missing:
                log.info(
                    "%s session: the bus has restarted, and %d tools are not registered yet",
                    *(self._dialect.name, len(missing)),
                )
                return Sync.UNCHANGED
            export = export_within(self._dialect, tools)
            if export.tools == self.export.tools:
                self._use(export)  # schema hashes, which calls carry, may have changed
                return Sync.UNCHANGED
            if self._dialect.fixed_at_connect:
                self._notify(NewSessionNeeded(export))
                return Sync.NEW_SESSION
            try:
                await self._send([self._dialect.session_update(export)])
            except Exception:
                if self._is_closed():  # meanwhile: not an error for a caller that syncs many sessions
                    return Sync.CLOSED
                raise
            self._use(export)
            self._notify(ToolsSent(export))
            return Sync.SENT

    def _use(self, export: Export) -> None:
        if export.left_out and export.left_out != self.export.left_out:
            last, count = export.left_out[-1], len(export.left_out)
            log.warning("%s session: %d tools are not offered; %r: %s", self._dialect.name, count, last.tool, last.why)
        self.export = export
        self.parser.names = export.names


MAX_SEEN = 3_000  # ids of calls that are recognized if a message with them comes again
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
            pause_seconds: how long a provider has to begin a response by itself after the user has stopped speaking,
                and to end the response for which it refused a request, if none is known to be in progress.
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
        self._refusal: asyncio.TimerHandle | None = None  # None until a request was refused
        self._seen: NewestCache[str, None] = NewestCache(MAX_SEEN)  # ids of calls that are unique in the session
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
        while getattr(self._tools, "settling", False):
            await asyncio.sleep(SETTLE_PAUSE)
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
                    self._responses.find(parsed.id, self.export, over=False)
                case ModelCall():
                    self._take(parsed)
                case CallsCancelled():
                    self._cancel(parsed.ids, answers=parsed.answers)
                case ResponseRefused():
                    if self._turn_taking.request_refused():
                        self._refusal = asyncio.get_running_loop().call_later(self._pause_seconds, self._end_refusal)
                case SpeechBegan():
                    self._turn_taking.speech_began()
                case SpeechEnded():
                    self._pause_for_response()
                case ResponseEnded():
                    self._turn_taking.response_ended()
                    if response := self._responses.get(parsed.id):
                        response.over = True
                    self._notify(ResponseDone(parsed.ending, parsed.reason, parsed.usage))
        self._send_if_ready()

    def _take(self, call: ModelCall) -> None:
        """Makes a call, or refuses it."""
        if session_id := call.extra.get("id"):  # Gemini's ids are of the session: a message may come twice
            if session_id in self._seen:
                return
            self._seen[session_id] = None
        response = self._responses.find(call.response, self.export, over=True)
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

    def _end_refusal(self) -> None:
        if not self._closed and not self._responses.in_progress:
            self._turn_taking.refusal_ended()
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
        for timer in filter(None, (self._pause, self._refusal)):
            timer.cancel()
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
        call.result = refusal(Code.CANCELLED, text, Stage.UNKNOWN)
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
