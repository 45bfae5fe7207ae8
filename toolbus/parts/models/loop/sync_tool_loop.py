"""A tool loop for programs without asyncio: turns run on the event loop of a thread, and block their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from toolbus.errors import SetupError
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.dialect import ToolChoice
from toolbus.parts.models.loop.endpoint import Endpoint
from toolbus.parts.models.loop.loop_events import Finished, LoopEvent
from toolbus.parts.models.loop.loop_settings import LoopSettings
from toolbus.parts.models.loop.tool_loop import ToolLoop
from toolbus.parts.models.loop.turn_reply import Messages, Reply

T = TypeVar("T")


class SyncToolLoop:
    """As `ToolLoop`, for one program without asyncio. Use it as a context manager, or `close` it.

    Turns of several threads run at the same time. The endpoint's client is the provider's asynchronous one, and is used
    on the thread of this loop alone.

    Args:
        source: a `toolbus.SyncHost`, or any source of a `ToolLoop`.
        options: as of `ToolLoop`; `approve` runs on the loop's thread.
    """

    def __init__(self, source: Any, endpoint: Endpoint, settings: LoopSettings | None = None, **options: Any) -> None:
        is_sync = hasattr(source, "unanswered") and not asyncio.iscoroutinefunction(source.list)
        self._tool_loop = ToolLoop(_SyncHostView(source) if is_sync else source, endpoint, settings, **options)
        self._loop: asyncio.AbstractEventLoop | None = None  # None before the first turn
        self._thread: threading.Thread | None = None  # the same
        self._closed = False
        self._lock = threading.Lock()  # guards the start of turns and of the loop

    def __repr__(self) -> str:
        return f"<SyncToolLoop {self._tool_loop!r}>"

    def run(
        self,
        messages: Messages,
        *,
        context: CallContext | None = None,
        tool_choice: ToolChoice = "auto",
        output_type: Any = None,
        on_event: Callable[[LoopEvent], object] | None = None,
    ) -> Reply:
        """Runs one turn: see `ToolLoop.run`. KeyboardInterrupt cancels it.

        Args:
            on_event: called with each event of the turn, on the loop's thread; not together with `output_type`.

        Raises:
            SetupError: the loop is closed.
        """
        if on_event is None or output_type is not None:
            return self._wait(
                self._tool_loop.run(messages, context=context, tool_choice=tool_choice, output_type=output_type)
            )
        return self._wait(self._streamed(messages, context, tool_choice, on_event))

    async def _streamed(
        self,
        messages: Messages,
        context: CallContext | None,
        tool_choice: ToolChoice,
        on_event: Callable[[LoopEvent], object],
    ) -> Reply:
        async for event in self._tool_loop.stream(messages, context=context, tool_choice=tool_choice):
            on_event(event)
            if isinstance(event, Finished):
                return event.reply
        raise AssertionError("a stream ends with Finished")

    def close(self) -> None:
        """Ends the thread; turns that run are cancelled."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, turn: Coroutine[Any, Any, T]) -> T:
        with self._lock:  # else the loop could end before it has the turn, which nothing would end then
            if self._closed:
                turn.close()
                raise SetupError("this SyncToolLoop is closed: make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="toolbus turns", daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(turn, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped, and cancels what is left of it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class _SyncHostView:
    """A `SyncHost` as a `Host` is for a tool loop: each request waits on a thread of its own."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __repr__(self) -> str:
        return repr(self._host)

    @property
    def settling(self) -> bool:
        """As of the host."""
        return bool(self._host.settling)

    def unanswered(self, seconds: float) -> Any:
        """As of the host."""
        return self._host.unanswered(seconds)

    async def list(self, *arguments: Any, **options: Any) -> Any:
        """As of the host."""
        return await asyncio.to_thread(self._host.list, *arguments, **options)

    async def call(self, *arguments: Any, on_progress: Any = None, **options: Any) -> Any:
        """As of the host; progress comes on the event loop."""
        if on_progress is not None:
            loop, given = asyncio.get_running_loop(), on_progress
            options["on_progress"] = lambda progress: loop.call_soon_threadsafe(given, progress)
        return await asyncio.to_thread(self._host.call, *arguments, **options)
