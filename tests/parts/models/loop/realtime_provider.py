"""Provides a realtime provider in memory that enforces the rules of the real ones, and tools to call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from tests.parts.models.loop.scripted_model import FunctionSource
from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.dialects.dialect import RealtimeDialect
from toolbus.parts.models.dialects.openai_event_parser import BUSY
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.parts.models.loop.loop_events import CallEnded
from toolbus.parts.models.loop.realtime_session import RealtimeSession

Value = TypeVar("Value")


class Provider:
    """The provider's end of a session. It takes down what arrives and every rule that was broken."""

    def __init__(self) -> None:
        self.sent: list[Json] = []
        self.tools: list[str] = []
        self.outputs: dict[str, str] = {}  # by call_id
        self.requests = 0  # for a response
        self.violations: list[str] = []
        self.next_error: Exception | None = None  # raised by the next event, once
        self._speaking: set[str] = set()
        self._called: set[str] = set()
        self._began = self._response_due = False  # whether a response ever began; whether the next one was asked for
        self._user_speaks = False  # whether the user speaks
        self._changed = asyncio.Condition()

    async def send(self, event: Json) -> None:
        await asyncio.sleep(0)  # a socket lets others run
        if self.next_error is not None:
            error, self.next_error = self.next_error, None
            raise error
        self.take(event)
        async with self._changed:
            self._changed.notify_all()

    def take(self, event: Json) -> None:
        self.sent.append(event)
        match event:
            case {"type": "session.update", "session": session}:
                self.tools = [tool["name"] for tool in session["tools"]]
            case {"type": "conversation.item.create", "item": {"call_id": call_id, "output": output}}:
                if call_id not in self._called or call_id in self.outputs:
                    self.violations.append(f"output of {call_id}, which is not open")
                self.outputs[call_id] = output
            case {"type": "response.create"}:
                if self._speaking or self._response_due:
                    self.violations.append("asked to go on while speaking, or about to")
                if self._user_speaks:
                    self.violations.append("asked to go on while the user speaks")
                self._response_due = self._began
                self.requests += 1

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS), self._changed:
            await self._changed.wait_for(true)

    def begin(self, response: str = "r1") -> Json:
        self._speaking.add(response)
        self._began, self._response_due, self._user_speaks = True, False, False
        return {"type": "response.created", "response": {"id": response}}

    def starts_speaking(self) -> Json:
        self._user_speaks = True
        return {"type": "input_audio_buffer.speech_started", "audio_start_ms": 10, "item_id": "i1"}

    def stops_speaking(self) -> Json:
        self._user_speaks = False
        return {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": 20, "item_id": "i1"}

    def busy(self) -> Json:
        """Refuses to go on."""
        self._response_due = False
        return {"type": "error", "error": {"type": "invalid_request_error", "code": BUSY, "message": "Wait."}}

    def call(self, call_id: str, name: str, response: str = "r1", /, **arguments: Any) -> Json:
        self._called.add(call_id)
        return {
            "type": "response.function_call_arguments.done",
            "response_id": response,
            "call_id": call_id,
            "name": name,
            "arguments": json.dumps(arguments),
        }

    def end(self, response: str = "r1", status: str = "completed") -> Json:
        self._speaking.discard(response)
        return {"type": "response.done", "response": {"id": response, "status": status, "output": []}}


class ChangingSource(FunctionSource):
    """A source that tells of its changes."""

    def __init__(self, **functions: Any) -> None:
        super().__init__(**functions)
        self.revisions: asyncio.Queue[int] = asyncio.Queue()

    async def changes(self) -> AsyncIterator[int]:
        yield self.revision
        while (revision := await self.revisions.get()) >= 0:
            yield revision


class BlockedTool:
    """A tool that runs until it is let go."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go = asyncio.Event()

    async def run(self) -> str:
        self.running.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "blocked"


def add(a: int = 0, b: int = 0) -> int:
    return a + b


def greet(name: str = "you") -> str:
    return f"hello {name}"


async def with_timeout(work: Awaitable[Value]) -> Value:
    async with asyncio.timeout(WAIT_SECONDS):
        return await work


async def opened(
    source: FunctionSource, provider: Provider, dialect: RealtimeDialect | None = None, **options: Any
) -> RealtimeSession:
    session = RealtimeSession(dialect or OpenAIRealtime(), source, provider.send, **options)
    await session.sync()
    return session


async def run_pending() -> None:
    """Lets everything run that can."""
    for _ in range(30):
        await asyncio.sleep(0)


def sets(ended: asyncio.Event) -> Callable[[Any], None]:
    """Returns a watcher that sets an event when a call ends."""
    return lambda notifications: ended.set() if isinstance(notifications, CallEnded) else None


async def feed(session: RealtimeSession, *events: Json) -> None:
    for event in events:
        await with_timeout(session.feed(event))


def live_calls(*calls: tuple[str, str]) -> Json:
    return {"tool_call": {"function_calls": [{"id": call_id, "name": name, "args": {}} for call_id, name in calls]}}
