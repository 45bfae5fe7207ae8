"""`RealtimeSession`: tools for a model that speaks over a socket which stays open.

It stands between whoever owns that socket and a source of tools. The owner hands it every event of the provider and a
way to send; it keeps the session's tools as the catalog is, makes the calls that the model asks for, and answers
each one. It opens and reads no socket itself, and may only be used from one event loop.

The calls of one response are answered together, when the response is over and all of them have ended: a provider
refuses to begin a response while another one is being spoken, and would speak about half of the results first. While
the user speaks, results are sent without asking the model to go on: most providers have it answer by themselves then;
where one does not, the model is asked a second after the user has stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from toolbus.dialects.conversation import Answered, Delta, Json, ModelCall
from toolbus.dialects.dialect import as_mapping
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
from toolbus.errors import Code, PeerLost, Stage
from toolbus.functions.call_context import CallContext
from toolbus.loop.call_rate_limit import WINDOW_CALLS, WINDOW_SECONDS, CallWindow
from toolbus.loop.loop_events import CallEnded, ReasoningDelta, TextDelta
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.loop_tools import OwnTools
from toolbus.loop.realtime_events import CallRefused, NewSessionNeeded, RealtimeNews, SendFailed, Sync, ToolsSent
from toolbus.loop.repeat_guard import RepeatGuard
from toolbus.loop.round_calls import Answer, Caller, shown, unknown
from toolbus.loop.tool_source import ToolSource
from toolbus.loop.turn_reply import CallDone
from toolbus.loop.turn_taking import Floor
from toolbus.tool import CallError, Result

log = logging.getLogger("toolbus.loop")

PAUSE_SECONDS = 1.0  # that a provider has to begin a response by itself; those that do take a tenth of that


@dataclass(slots=True)
class _Asked:
    """A call of a response."""

    call: ModelCall
    order: int  # among the calls of its response, from 0
    started: float  # seconds since the epoch
    result: Result | None = None  # None while it runs
    task: asyncio.Task[None] | None = None  # None where it was refused


@dataclass(slots=True)
class _Response:
    """What one response of the model asks for."""

    number: int  # of the session's responses, from 1
    export: Export  # what was offered when it began
    answer: Answer  # runs its calls
    over: bool  # whether no more calls will come
    asked: dict[str, _Asked] = field(default_factory=dict)  # without an answer, by id, in the order of the calls

    @property
    def ended(self) -> bool:
        """Whether all its calls have."""
        return all(each.result is not None for each in self.asked.values())


class RealtimeSession:
    """Keeps the tools of one realtime session and answers its calls.

    Use it as an async context manager, or `close` it in the end.
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
        on_event: Callable[[RealtimeNews], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the session's side of the bus. Nothing is sent before `sync` or `follow`.

        Args:
            send: takes one event for the provider, as a dict; may be async.
            context: on whose behalf calls are made; None means as the source says.
            window_calls, window_seconds: how many calls may be made within a sliding length of time; further ones are
                answered with a refusal.
            on_event: told everything that happens; what it raises is logged.

        Raises:
            SetupError: a limit is not above 0.
        """
        self._dialect = dialect
        self._tools = tools
        self._send = send
        self._window = CallWindow(window_calls, window_seconds, clock)
        self._on_event = on_event
        settings = LoopSettings()
        own = OwnTools(settings, None)  # none: no rounds are counted here
        context = context if context is not None else getattr(tools, "context", None)
        self._caller = Caller(tools, settings, context, own, RepeatGuard(0), self._tell)
        self._export = dialect.export(())  # what the session has
        self._parser = dialect.parser(self._export.names)
        self._responses: dict[str, _Response] = {}  # that are being spoken, or have calls without an answer
        self._began = 0  # responses so far
        self._floor = Floor()  # whether there is an opportunity to send results
        self._pause: asyncio.TimerHandle | None = None  # None until the user has spoken
        self._syncing = asyncio.Lock()  # one sync at a time
        self._sending = asyncio.Lock()  # answers stay together
        self._tasks: set[asyncio.Task[None]] = set()  # all that is running
        self._following: asyncio.Task[None] | None = None  # None until `follow`
        self._closed = False

    def __repr__(self) -> str:
        running = sum(each.result is None for response in self._responses.values() for each in response.asked.values())
        state = "closed" if self._closed else f"tools={len(self._export.tools)} calls={running}"
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
        return self._export

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closed

    # -- tools -------------------------------------------------------------------------------------------------------

    async def setup(self) -> Json:
        """Returns the provider's message that sets the tools of now, for whoever opens the session to send.

        They count as sent. A dialect whose tools are fixed at connect needs it; with others it saves the first `sync`.
        """
        async with self._syncing:
            _, tools = await self._tools.tools()
            self._has(self._dialect.export(tools))
            return self._dialect.session_update(self._export)

    async def sync(self) -> Sync:
        """Gives the session the tools of now, where it has others. Returns once they are sent.

        A session whose tools are fixed answers NEW_SESSION: it goes on with the tools that it has until its owner
        opens another one with the `setup` of a new `RealtimeSession`.

        Raises:
            Exception: whatever `send` or the source raised; the session counts as having the tools that it had.
        """
        async with self._syncing:
            if self._closed:
                return Sync.CLOSED
            _, tools = await self._tools.tools()
            export = self._dialect.export(tools)
            if export.tools == self._export.tools:
                self._has(export)  # what calls carry may have changed even so
                return Sync.UNCHANGED
            if self._dialect.fixed_at_connect:
                self._tell(NewSessionNeeded(export))
                return Sync.NEW_SESSION
            try:
                async with self._sending:
                    await self._write([self._dialect.session_update(export)])
            except Exception:
                if self.closed:  # meanwhile; who waits for all sessions need not wait for this one
                    return Sync.CLOSED
                raise
            self._has(export)
            self._tell(ToolsSent(export))
            return Sync.SENT

    def follow(self) -> asyncio.Task[None]:
        """Starts to `sync` now and whenever the catalog changes, until the session is closed or the source ends.

        Returns the task that does it, the same one each time. An update that could not be sent is told as
        `SendFailed`, and goes with the next change.
        """
        if self._following is None:
            self._following = self._start(self._follow())
        return self._following

    async def _follow(self) -> None:
        try:
            async for _ in self._tools.changes():
                try:
                    await self.sync()
                except Exception as error:
                    self._failed("the tools could not be sent", error)
        except Exception as error:
            self._failed("it no longer follows the catalog", error)

    def _has(self, export: Export) -> None:
        self._export = export
        self._parser.names = export.names

    # -- events ------------------------------------------------------------------------------------------------------

    async def feed(self, event: Any) -> None:
        """Takes one event of the provider. Calls run by themselves; this never waits for one.

        An event that is unknown or malformed does nothing.

        Args:
            event: a mapping, or an object of the provider's SDK.

        Raises:
            TypeError: it is neither.
        """
        if self._closed:
            return
        try:
            told = as_mapping(event)
        except TypeError:
            kind = type(event).__name__
            raise TypeError(
                f"a {kind} is no event of a realtime session: feed a mapping, such as json.loads(text) returns, or an "
                "object of the provider's SDK"
            ) from None
        for said in self._parser.feed(told):
            match said:
                case Delta():
                    self._tell(TextDelta(said.text) if said.kind == "text" else ReasoningDelta(said.text))
                case ResponseBegan():
                    self._floor.began()
                    self._response(said.id, over=False)
                case ModelCall():
                    self._take(said)
                case CallsCancelled():
                    self._cancel(said.ids, answers=said.answers)
                case ResponseRefused():
                    self._floor.refused()
                case SpeechBegan():
                    self._floor.speech_began()
                case SpeechEnded():
                    self._pause_for_response()
                case ResponseEnded():
                    self._floor.ended()
                    if ended := self._responses.get(said.id):
                        ended.over = True
        self._answer()

    def _response(self, response_id: str, *, over: bool) -> _Response:
        """Returns a response, a new one where it is not known: one that nobody announced is over with each call."""
        response = self._responses.get(response_id)
        if response is None:
            self._began += 1
            answer = Answer(self._caller, self._export, self._began)
            response = self._responses[response_id] = _Response(self._began, self._export, answer, over)
        return response

    def _take(self, call: ModelCall) -> None:
        """Makes a call, or refuses it."""
        response = self._response(call.response, over=True)
        if call.id in response.asked:
            return  # two calls with one id could only be answered as one
        asked = response.asked[call.id] = _Asked(call, len(response.asked), time.time())
        asked.result = self._window.refusal(shown(call)) if call.known else unknown(call, response.export)
        if asked.result is None:
            asked.task = self._start(self._run(asked, response.answer))
        else:
            self._tell(CallRefused(_done(asked, asked.result, response.number)))

    async def _run(self, asked: _Asked, answer: Answer) -> None:
        done = await answer.run(asked.call, asked.order)
        asked.result = done.result
        self._answer()

    def _answer(self) -> None:
        """Has the results sent that can be sent now, and the model asked to go on where that was left out."""
        if self._ready() or self._owes_request():
            self._start(self._send_ready())

    def _ready(self) -> list[str]:
        """Returns the responses whose results can be sent: none while the model is speaking, or about to."""
        if not self._floor.takes_results or self._spoken():
            return []
        return [key for key, response in self._responses.items() if response.ended]

    def _owes_request(self) -> bool:
        return self._floor.owes_request and not self._spoken()

    def _spoken(self) -> bool:
        """Whether a response is under way."""
        return any(not response.over for response in self._responses.values())

    def _pause_for_response(self) -> None:
        """The user has stopped: gives the provider time to begin a response by itself."""
        if not self._floor.speech_ended():
            return
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._paused)

    def _paused(self) -> None:
        self._floor.paused()
        if not self._closed:
            self._answer()

    # -- ends --------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancels all calls that run or wait to be answered. They are answered, and the model is not asked to go on."""
        self._cancel([call_id for response in self._responses.values() for call_id in response.asked])

    async def close(self) -> None:
        """Ends all work; nothing more is sent. Later events are ignored, and a later `sync` finds it closed."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        others = [task for task in self._tasks if task is not asyncio.current_task()]  # `send` may be what closes it
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._responses.clear()

    def _cancel(self, ids: Iterable[str], *, answers: bool = True) -> None:
        wanted = frozenset(ids)
        gone: list[_Asked] = []
        for response in self._responses.values():
            for call_id in tuple(response.asked):
                if call_id in wanted:
                    asked = response.asked.pop(call_id)
                    self._stop(asked, response.number)
                    gone.append(asked)
        if gone and answers:
            self._start(self._send_cancelled(gone))

    def _stop(self, asked: _Asked, number: int) -> None:
        """Ends a call where it still runs. One that has its result keeps it: it has happened."""
        if asked.result is not None or asked.task is None:
            return
        asked.task.cancel()
        words = f"the call of {shown(asked.call)} was cancelled before it ended: the user interrupted"
        asked.result = Result(is_error=True, error=CallError(Code.CANCELLED, words, Stage.UNKNOWN))
        self._tell(CallEnded(_done(asked, asked.result, number)))

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _send_ready(self) -> None:
        try:
            async with self._sending:  # looks once more: a response may have begun before it was our turn
                asked = [each for key in self._ready() for each in self._responses.pop(key).asked.values()]
                if asked:
                    go_on = self._floor.sends()
                    await self._write(self._dialect.answers(_answered(asked), self._export.names, go_on=go_on))
                elif self._owes_request():
                    self._floor.sends()
                    await self._write(self._dialect.request())
        except Exception as error:
            self._floor.failed()
            self._failed("answers could not be sent", error)

    async def _send_cancelled(self, asked: Sequence[_Asked]) -> None:
        try:
            async with self._sending:
                await self._write(self._dialect.answers(_answered(asked), self._export.names, go_on=False))
        except Exception as error:
            self._failed("answers to cancelled calls could not be sent", error)

    async def _write(self, events: Sequence[Json]) -> None:
        """Sends events; whoever calls it holds the lock."""
        for event in events:
            if self._closed:
                raise PeerLost("the realtime session is closed: nothing is sent to it any more")
            sent = self._send(event)
            if inspect.isawaitable(sent):
                await sent

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _failed(self, what: str, error: Exception) -> None:
        log.warning("%s session: %s: %s: %s", self._dialect.name, what, type(error).__name__, error)
        self._tell(SendFailed(error))

    def _tell(self, news: RealtimeNews) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(news)
        except Exception:
            log.exception("on_event of a %s session failed at %s", self._dialect.name, type(news).__name__)


def _answered(asked: Iterable[_Asked]) -> list[Answered]:
    return [Answered(each.call, each.result) for each in asked if each.result is not None]


def _done(asked: _Asked, result: Result, number: int) -> CallDone:
    return CallDone(asked.call, result, number, asked.order, asked.started, time.time())
