"""Lists and calls tools of a bus: `Host` for asyncio, `SyncHost` for programs that block.

Both are thin: the connection does the work. For `Host` it runs in turns of the first loop that makes a call
(`SharedLoop`). For `SyncHost` it runs on its own thread, and the caller's thread waits.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import aclosing
from sys import modules
from types import TracebackType
from typing import Any, Self

from toolbus.errors import SetupError
from toolbus.functions.call_context import CallContext
from toolbus.functions.call_options import CallOptions, Inputs
from toolbus.functions.input_rounds import OnInput, OnInputSync, answered, answered_sync
from toolbus.functions.threads import Inbox
from toolbus.sdk.generation import Generate
from toolbus.sdk.host_base import HostBase
from toolbus.sdk.host_delegate import Feed
from toolbus.sdk.lent_model import LEND_SECONDS, LENT_IN_FLIGHT, MAX_TOKENS, lend
from toolbus.sdk.listing import CatalogChange, Listing, list_request
from toolbus.sdk.loop_calls import Arguments, Batch, LoopCalls, OnProgress, ThreadCaller, deliver
from toolbus.sdk.notification import Notification
from toolbus.sdk.outgoing_calls import OutgoingCall
from toolbus.sdk.tracing import API, begin_call
from toolbus.tool import Progress, Result, dump_arguments

LIST_SECONDS = 30.0  # for a listing, waiting for a connection included
CLOSE_SECONDS = 10.0


class Host(HostBase):
    """Lists and calls tools, from asyncio. Safe to use from several loops.

    Use it as an async context manager, or `close` it in the end.
    """

    @functools.cached_property
    def _callers(self) -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls]:
        """The caller of each loop: it passes the calls of one turn to the connection together."""
        return weakref.WeakKeyDictionary()

    _caller: LoopCalls | None = None  # that of the loop that called last; None before the first call and once closed

    def _caller_of(self, loop: asyncio.AbstractEventLoop) -> LoopCalls:
        connection = self._begin()
        if loop not in self._callers:
            self._callers[loop] = LoopCalls(connection, loop)
        self._caller = caller = self._callers[loop]
        return caller

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self) -> None:
        """Waits until the bus has answered.

        Raises:
            RequestError: the bus refuses this host; the text has the reason.
        """
        await self._run(self._begin().ready())

    async def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        background_after: float | None = None,
        on_progress: OnProgress | None = None,
        on_input: OnInput | None = None,
        inputs: Inputs | None = None,
    ) -> Result:
        """Calls a tool. A failed call is a Result with ``error``, never an exception.

        Without a connection it waits for one, and it is retried where that is safe, both within the timeout. Cancelling
        the task that awaits it cancels the call.

        Args:
            arguments: a dict of JSON values, or JSON text.
            timeout: seconds; None means the tool's own. More than 300 counts as 300.
            role: considers only the tools of this role.
            context: the user and the conversation, for the tool; only hosts may state it.
            schema_hash: of the declaration that the caller knows; the call is refused once the tool has changed.
            background_after: seconds after which the call becomes a task: the result then is an object with its
                ``task_id``, for the tools ``toolbus:check_task`` and ``toolbus:await_task``, and the work may go on
                for 24 hours, or for ``timeout`` if that is given. None means never.
            on_progress: called on this loop with each progress.
            on_input: answers the questions of a tool (`Question`), async or plain: it returns an `Answer`, the fields
                of the form (accepted), or None (cancelled). The call is made again with the answers, 10 times at most,
                each time with its whole timeout. Its exceptions are raised here.
            inputs: the kinds of questions that this call accepts, and its answers; None accepts forms if there is
                ``on_input``, else nothing. Without ``on_input`` a result that `asks` is returned, for a program that
                answers later.

        Raises:
            TypeError, ValueError: JSON cannot hold the arguments, or the timeout is not above 0.
        """
        if on_input is not None:
            return await answered(
                *(self.call, name, dump_arguments(arguments), on_input, inputs),
                timeout=timeout,
                role=role,
                context=context,
                schema_hash=schema_hash,
                background_after=background_after,
                on_progress=on_progress,
            )
        loop = asyncio.get_running_loop()
        caller = self._caller
        if caller is None or caller.loop is not loop:
            caller = self._caller_of(loop)
        future: asyncio.Future[Result] = loop.create_future()
        out = OutgoingCall(
            name,
            dump_arguments(arguments),
            deliver,
            (caller, future, on_progress),
            CallOptions.of(timeout, role, context, schema_hash, background_after, inputs),
            wants_progress=on_progress is not None,
        )
        span = begin_call(out) if API in modules else None
        caller.begin(out)
        try:
            result = await future
        except asyncio.CancelledError:
            self._connection.cancel(out)
            if span is not None:
                span.end(out.call_id, None)
            raise
        if span is not None:
            span.end(out.call_id, result)
        return result

    async def call_many(self, calls: Sequence[tuple[str, Arguments]], *, timeout: float | None = None) -> list[Result]:
        """Calls several tools at once; returns the results in the order of the calls."""
        if not calls:
            return []
        loop = asyncio.get_running_loop()
        caller = self._caller_of(loop)
        future: asyncio.Future[None] = loop.create_future()
        batch = Batch(calls, timeout, lambda: caller.set_result(future, None))
        caller.begin_many(batch.calls)
        try:
            await future
        except asyncio.CancelledError:
            self._connection.cancel(*batch.calls)
            batch.give_up()
            raise
        return batch.results

    async def list(
        self,
        role: str | None = None,
        *,
        names: Sequence[str] = (),
        source: str = "",
        include_offline: bool = False,
        include_refused: bool = False,
        if_revision: int = 0,
        context: CallContext | None = None,
        timeout: float = LIST_SECONDS,
    ) -> Listing:
        """Lists the tools that this host can call.

        Args:
            role: tools of this role only.
            names: these only.
            source: tools of this source only.
            include_offline: adds tools that no call can reach: their plugin is offline, or their role does not exist.
            include_refused: adds the declarations that the bus refused, as `Listing.refused`.
            if_revision: the revision that the caller knows; the listing is empty if it is still the newest.
            context: the user for whom it lists.
            timeout: seconds, waiting for a connection included.

        Raises:
            RequestError: no such role.
            PeerLost: no bus answered in time.
        """
        self._begin()
        request = list_request(role, names, source, include_offline, if_revision, context, include_refused)
        listing: Listing = await self._run(self._list(request, timeout))
        return listing

    async def watch(self) -> AsyncIterator[CatalogChange]:
        """Yields the whole catalog, then its changes, for ever; after a reconnect the whole catalog again.

        Raises:
            PeerLost, RequestError: the connection has ended for good.
        """
        async with aclosing(self._feed("catalog")) as changes:
            async for change in changes:
                yield change

    async def notifications(self) -> AsyncIterator[Notification]:
        """Yields the notifications of plugins to users, for ever; after a reconnect also those that it missed.

        Raises:
            PeerLost, RequestError: the connection has ended for good.
        """
        async with aclosing(self._feed("notifications")) as notifications:
            async for notification in notifications:
                yield notification

    async def _feed(self, feed: Feed) -> AsyncGenerator[Any]:
        connection = self._begin(feed)
        items: asyncio.Queue[Any] = asyncio.Queue()
        inbox = Inbox(asyncio.get_running_loop())

        def put(item: Any) -> None:
            inbox.put(items.put_nowait, item)

        ended = connection.submit(connection.ended())
        ended.add_done_callback(lambda _: put(None))
        try:
            await self._run(self._delegate.read(feed, put))
            while (item := await items.get()) is not None:
                yield item
            if not self._closed:
                ended.result()  # raises the reason
        finally:
            ended.cancel()
            if not self._closed:
                connection.submit(self._delegate.unread(feed, put))

    async def lend(
        self,
        generate: Generate,
        *,
        max_tokens: int = MAX_TOKENS,
        timeout: float = LEND_SECONDS,
        max_in_flight: int = LENT_IN_FLIGHT,
    ) -> None:
        """Lends this host's model to plugins that have the permission ``generation``, until the host is closed.

        It offers the tool ``host:generate`` in a session of its own. Several hosts may lend; calls are shared between
        them. Plugins can ask when this returns; without a bus it returns after 10 s, and lends when there is one.

        Args:
            generate: async, gets a `GenerationRequest` and returns a `Generation` or a text; its exception is the error
                of that request.
            max_tokens: the limit for one answer; requests for more are refused.
            timeout: seconds for one answer, at most 300.
            max_in_flight: requests at once; more are refused with OVERLOADED.

        Raises:
            SetupError: a bound is out of range, or this host lends already.
        """
        if self._lender is not None:
            raise SetupError("this host lends its model already: make a host for each model")
        self._begin()
        settings = self._connection.settings
        self._lender = await lend(settings, generate, max_tokens, timeout, max_in_flight)

    async def drain(self, grace_seconds: float = CLOSE_SECONDS) -> None:
        """Waits for the calls in flight, at most ``grace_seconds``, then closes. It accepts new calls until then."""
        if self._began and not self._closed:
            await self._run(self._finish_calls(grace_seconds))
        await self.close()

    async def close(self) -> None:
        """Disconnects; calls in flight end in CANCELLED. Closing again does nothing."""
        if self._lender is not None:
            await self._lender.close(0.0)
        if self._closed or not self._began:
            self._closed = True
            return
        self._closed, self._caller = True, None
        await self._run(self._connection.close())
        await asyncio.to_thread(self._connection.stop_thread)

    async def _run(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(self._connection.submit(coroutine))


class SyncHost(HostBase):
    """The same for programs without asyncio: every method blocks the thread that calls it. Safe from any thread."""

    @functools.cached_property
    def _caller(self) -> ThreadCaller:
        return ThreadCaller(self._connection)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> None:
        """As `Host.ready`."""
        self._run(self._begin().ready())

    def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        timeout: float | None = None,
        role: str | None = None,
        context: CallContext | None = None,
        schema_hash: str = "",
        background_after: float | None = None,
        on_progress: OnProgress | None = None,
        on_input: OnInputSync | None = None,
        inputs: Inputs | None = None,
    ) -> Result:
        """As `Host.call`; an exception in the waiting thread (KeyboardInterrupt) cancels the call."""
        if on_input is not None:
            return answered_sync(
                *(self.call, name, dump_arguments(arguments), on_input, inputs),
                timeout=timeout,
                role=role,
                context=context,
                schema_hash=schema_hash,
                background_after=background_after,
                on_progress=on_progress,
            )
        connection, caller = self._begin(), self._caller
        arrived: queue.SimpleQueue[Result | Progress] = queue.SimpleQueue()
        out = OutgoingCall(
            name,
            dump_arguments(arguments),
            caller.deliver,
            arrived,
            CallOptions.of(timeout, role, context, schema_hash, background_after, inputs),
            wants_progress=on_progress is not None,
        )
        span = begin_call(out) if API in modules else None
        caller.begin(out)
        try:
            while isinstance(item := arrived.get(), Progress):
                if on_progress is not None:
                    on_progress(item)
        except BaseException:
            connection.cancel(out)
            if span is not None:
                span.end(out.call_id, None)
            raise
        if span is not None:
            span.end(out.call_id, item)
        return item

    def call_many(self, calls: Sequence[tuple[str, Arguments]], *, timeout: float | None = None) -> list[Result]:
        """As `Host.call_many`."""
        connection = self._begin()
        if not calls:
            return []
        done = threading.Event()
        batch = Batch(calls, timeout, done.set)
        connection.begin_many(batch.calls)
        try:
            done.wait()
        except BaseException:
            connection.cancel(*batch.calls)
            batch.give_up()
            raise
        return batch.results

    def list(
        self,
        role: str | None = None,
        *,
        names: Sequence[str] = (),
        source: str = "",
        include_offline: bool = False,
        include_refused: bool = False,
        if_revision: int = 0,
        context: CallContext | None = None,
        timeout: float = LIST_SECONDS,
    ) -> Listing:
        """As `Host.list`."""
        self._begin()
        request = list_request(role, names, source, include_offline, if_revision, context, include_refused)
        listing: Listing = self._run(self._list(request, timeout))
        return listing

    def watch(self) -> Generator[CatalogChange]:
        """As `Host.watch`."""
        return self._feed("catalog")

    def notifications(self) -> Generator[Notification]:
        """As `Host.notifications`."""
        return self._feed("notifications")

    def _feed(self, feed: Feed) -> Generator[Any]:
        connection = self._begin(feed)
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        put = items.put
        ended = connection.submit(connection.ended())
        ended.add_done_callback(lambda _: put(None))
        try:
            self._run(self._delegate.read(feed, put))
            while (item := items.get()) is not None:
                yield item
            if not self._closed:
                ended.result()
        finally:
            ended.cancel()
            if not self._closed:
                connection.submit(self._delegate.unread(feed, put))

    def drain(self, grace_seconds: float = CLOSE_SECONDS) -> None:
        """As `Host.drain`."""
        if self._began and not self._closed:
            self._run(self._finish_calls(grace_seconds))
        self.close()

    def close(self) -> None:
        """As `Host.close`."""
        if self._closed or not self._began:
            self._closed = True
            return
        self._closed = True
        self._run(self._connection.close())
        self._connection.stop_thread()
        self._caller.send()  # calls that were made meanwhile end in an error

    def _run(self, coroutine: Any) -> Any:
        return self._connection.submit(coroutine).result()
