"""Lists and calls tools of a bus: `Host` for asyncio, `SyncHost` for programs that block.

Both are thin: the connection does the work. For `Host` it runs in turns of the first loop that makes a call
(`SharedLoop`). For `SyncHost` it runs on its own thread, and the caller's thread waits.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from sys import modules
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from toolbus.errors import Code, PeerLost, RequestError, SetupError, Stage
from toolbus.functions.call_context import CallContext, CallOptions, Inputs
from toolbus.functions.input_rounds import OnInput, OnInputSync, answered, answered_sync
from toolbus.functions.workers import Inbox
from toolbus.protocol.tool import CallError, Progress, Result, dump_arguments
from toolbus.sdk.attempt import ANSWERED, Delegate, IncomingCall
from toolbus.sdk.connection import Connection, open_connection
from toolbus.sdk.connection_settings import ConnectionSettings, find_credential
from toolbus.sdk.generation import Generate
from toolbus.sdk.lent_model import LEND_SECONDS, LENT_IN_FLIGHT, MAX_TOKENS, lend
from toolbus.sdk.listing import CatalogChange, ListedTool, Listing, list_request
from toolbus.sdk.notification import Notification
from toolbus.sdk.outgoing_calls import OutgoingCall, PeerSession
from toolbus.sdk.tracing import API, CallSpan, begin_call
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential
    from toolbus.sdk.plugin_client import Plugin


Feed = Literal["catalog", "notifications"]
MAX_UNREAD = 1000  # items of a feed that wait for their reader
_SUBSCRIPTIONS = {"catalog": wire.SUBSCRIPTION_CATALOG, "notifications": wire.SUBSCRIPTION_NOTIFICATIONS}


class FeedReader:
    """What a reader of a feed has not read yet.

    One that is far behind loses the oldest notifications, which `lost` of the next counts, and gets the whole catalog
    in place of its changes.

    Args:
        wake: called when there is something to read and was nothing before.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._wake = wake

    def put(self, item: Any, whole: Callable[[], CatalogChange] | None = None) -> None:
        """Adds a notification, or a change of the catalog, which ``whole`` returns whole."""
        with self._lock:
            self._items.append(item)
            count = len(self._items)
            if count > MAX_UNREAD and whole is not None:
                self._items = deque((whole(),))
            elif count > MAX_UNREAD:
                lost, following = self._items.popleft().lost + 1, self._items[0]
                self._items[0] = replace(following, lost=following.lost + lost)
        if count == 1:
            self._wake()

    def take(self) -> deque[Any]:
        """Returns everything that waits, oldest first."""
        with self._lock:
            items, self._items = self._items, deque()
        return items


class HostDelegate(Delegate):
    """The `Delegate` of a host. Everything runs on the connection's loop, but for `subscribe` and `settling`."""

    def __init__(self, settle: float) -> None:
        """Makes the delegate of a connection whose `ConnectionTimings.settle` is given."""
        self._settle = settle
        self._settled_at = 0.0  # until when plugins may be reconnecting after a restart of the bus
        self._boot_id = ""  # of the bus that answered last; "" before an attach, or if the bus states none
        self._subscribed: dict[Feed, None] = {}  # the feeds that have had a reader
        self._readers: dict[Feed, set[FeedReader]] = {"catalog": set(), "notifications": set()}
        self._mirror: dict[tuple[str, str], ListedTool] = {}  # (name, source) → tool, as of `_revision`
        self._revision = -1  # below 0 until the bus has sent a full list
        self._newest = 0  # the number of the last notification; 0 before the first

    def subscribe(self, feed: Feed) -> bool:
        """Subscribes to a feed from the next attach on; returns False if it was subscribed before."""
        if feed in self._subscribed:
            return False
        self._subscribed[feed] = None
        return True

    def tools(self) -> Sequence[pb.Tool]:
        return ()

    def subscriptions(self) -> Sequence[Any]:
        return [_SUBSCRIPTIONS[feed] for feed in list(self._subscribed)]

    def notifications_after(self) -> int:
        return self._newest

    @property
    def settling(self) -> bool:
        """Whether the bus has restarted so recently that plugins may still be reconnecting."""
        return time.monotonic() < self._settled_at

    def attached(self, attached: wire.Attached) -> None:
        if self._boot_id not in ("", attached.boot_id):
            self._settled_at = time.monotonic() + self._settle
        self._boot_id = attached.boot_id

    def event(self, event: wire.Event) -> None:
        match event.WhichOneof("kind"):
            case "catalog":
                self._publish("catalog", self._mirrored(CatalogChange.from_wire(event.catalog)))
            case "notification":
                notification = Notification.from_wire(event.notification)
                self._newest = max(self._newest, notification.number)
                self._publish("notifications", notification)

    def moved(self) -> None:
        """Forgets what belongs to the last bus: the next one counts for itself, and need not have started just now."""
        self._boot_id, self._settled_at, self._newest = "", 0.0, 0

    async def read(self, feed: Feed, reader: FeedReader) -> None:
        """Passes a feed on to a reader; the first item of the catalog's is the whole catalog, if it is known."""
        self._readers[feed].add(reader)
        if feed == "catalog" and self._revision >= 0:
            reader.put(self._catalog())

    async def unread(self, feed: Feed, reader: FeedReader) -> None:
        """Stops passing a feed on to a reader."""
        self._readers[feed].discard(reader)

    def _publish(self, feed: Feed, item: Any) -> None:
        for reader in self._readers[feed]:
            reader.put(item, self._catalog if feed == "catalog" else None)

    def _catalog(self) -> CatalogChange:
        return CatalogChange(self._revision, True, tuple(self._mirror.values()))

    def _mirrored(self, change: CatalogChange) -> CatalogChange:
        if change.full:
            self._mirror.clear()
        for removed in change.removed:
            self._mirror.pop((removed.name, removed.source), None)
        for listed in (*change.added, *change.changed):
            self._mirror[listed.name, listed.source] = listed
        self._revision = change.revision
        return change


def refuse_calls(
    connection: Connection, session: PeerSession, calls: Mapping[str, pb.ToolCall]
) -> Mapping[str, IncomingCall]:
    """Refuses calls of the bus: a host offers no tools."""
    error = CallError(Code.NOT_FOUND, "this peer offers no tools", Stage.NOT_DISPATCHED)
    for call_id in calls:
        connection.answer(session, Result(call_id, is_error=True, error=error))
    return dict.fromkeys(calls, ANSWERED)


class HostBase:
    """The base of both hosts: the settings, the connection, its end."""

    def __init__(
        self,
        address: str | None = None,
        *,
        source: str | None = None,
        instance: str | None = None,
        max_in_flight: int = 0,
        token: str | None = None,
        credential: Credential | str | Path | None = None,
        repeat: bool = True,
    ) -> None:
        """Makes a host; it connects when it is entered or started.

        Args:
            address: where the bus listens; None means TOOLBUS_ADDRESS, then the credential's, then 127.0.0.1:48930.
                With several (``a:48931,b:48931`` or ``dns:NAME:PORT``) the host uses one at a time.
            source: the caller's name in the bus's records and logs; None means ``host:`` and the process's id.
            instance: tells several hosts of one source apart; None generates one.
            max_in_flight: calls that it may have in flight at once; further ones wait here. 0 means 256.
            token: proves that this host may use a bound source; None means TOOLBUS_TOKEN.
            credential: proves who this host is, to a bus on another machine: a file of `toolbus keys add`. None means
                TOOLBUS_CREDENTIAL. The file is read again at each connection.
            repeat: with several buses, whether a call that a lost bus may have run is made again at the next one, if
                its tool is read-only or idempotent there.

        Raises:
            SetupError: an argument breaks its rule, or the credential cannot be used.
        """
        settings = ConnectionSettings(
            source or f"host:{os.getpid()}",
            address or "",
            instance or "",
            max_in_flight,
            token=token or "",
            credential=find_credential(credential),
            repeat=repeat,
        )
        self._delegate = HostDelegate(settings.timings.settle)
        self._open = functools.partial(open_connection, settings, self._delegate, refuse_calls, "host")
        self._connection, self._made_by = self._open(), os.getpid()
        self._listed_by: Connection | None = None  # the bus of the last listing; None before the first
        self._began = 0  # the process that uses it; 0 while none does
        self._beginning = threading.Lock()  # several threads may make the first calls
        self._closed = False
        self._lender: Plugin | None = None  # offers this host's model; None while it lends none

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connection!r}>"

    @property
    def source(self) -> str:
        """The caller's name in the bus's records and logs."""
        return self._connection.settings.source

    @property
    def identity(self) -> str:
        """The name that this host's key proved, as the bus reported at the last attach; "" without a key."""
        return self._connection.identity

    @property
    def expires(self) -> datetime | None:
        """When that key expires, as the bus reported at the last attach; None if it does not."""
        return self._connection.expires

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the bus now; without one, calls wait for it."""
        return bool(self._began) and self._connection.calls.connected

    @property
    def settling(self) -> bool:
        """Whether the bus has restarted so recently that its list may lack tools: their plugins are reconnecting."""
        return self._delegate.settling

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the error that no bus answered within some seconds: its address, why, and how to fix it."""
        return self._connection.unanswered(seconds)

    def _begin(self, feed: Feed | None = None) -> Connection:
        if self._closed:
            raise PeerLost(f"host {self.source!r} is closed: make a new one")
        subscribe = feed is not None and self._delegate.subscribe(feed)
        if not self._began:
            with self._beginning:
                if not self._began:
                    if os.getpid() != self._made_by:  # a fork would share its loop's descriptors with this process
                        self._connection = self._open()
                    self._began = os.getpid()
                    self._connection.start()
        elif self._began != os.getpid():
            raise SetupError(f"host {self.source!r} was used before this process was forked: make one in each process")
        elif subscribe:
            self._connection.tools_changed()  # attaches again, now with the subscription
        return self._connection

    async def _list(self, request: wire.ListRequest, timeout: float) -> Listing:
        """Requests all pages of a list; on the connection's loop. Pages and revisions of another bus mean nothing."""
        pages: list[wire.ListResponse] = []
        known = request.if_revision
        while not pages or pages[-1].next_page_token:
            bus = self._connection.used
            request.page_token = pages[-1].next_page_token if pages else ""
            request.if_revision = known if self._listed_by in (None, bus) else 0
            try:
                pages.append(await self._connection.unary("List", request, timeout))
            except RequestError:
                if self._connection.used is bus:
                    raise
            if self._connection.used is not bus and bus is not None:
                pages.clear()
        self._listed_by = self._connection.used
        return Listing.of_pages(pages, request.if_revision)

    async def _finish_calls(self, grace_seconds: float) -> None:
        """Waits until no call is in flight; on the connection's loop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        while self._connection.calls.unfinished and loop.time() < until:
            await asyncio.sleep(0.01)  # an event for each result would make every call slower


# `Host` has a `LoopCalls` for each loop on which it is used. The calls of one turn go to the connection together. If
# the connection runs in the program's own turns (`SharedLoop`), the results of a message are delivered at once; if it
# runs on its thread, with one wake-up. `SyncHost` has one `ThreadCaller`.

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 0.0008  # that calls of threads wait for each other; selectors round it up to a millisecond

OnProgress = Callable[[Progress], object]
Arguments = Mapping[str, Any] | str | None
NamedArguments = tuple[str, Arguments]
"""The name of a tool, and the arguments of a call: what JSON can hold, or JSON text."""


class LoopCalls:
    """The calls that one loop makes on one connection."""

    __slots__ = ("_begun", "_connection", "_context", "_inbox", "loop", "shared")

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connection = connection
        self.shared = connection.shared
        self._inbox = Inbox(loop)
        self._begun: list[OutgoingCall] = []  # in this turn of the loop
        self._context = Context()  # of the callbacks, so that none sees a variable of a caller
        self.shared.join(loop)

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call, with all others of this turn."""
        if not self._begun:
            self.loop.call_soon(self._send, context=self._context)
        self._begun.append(out)

    def begin_many(self, calls: Sequence[OutgoingCall]) -> None:
        """Sends several calls, with all others of this turn."""
        for out in calls:
            self.begin(out)

    def run(self, function: Callable[[Any], object], argument: Any = None) -> None:
        """Calls a function soon on this loop; called on the connection's loop."""
        if self.shared.in_turn_of is self.loop:
            self.loop.call_soon(function, argument, context=self._context)
        else:
            self._inbox.put(function, argument)

    def set_result(self, future: asyncio.Future[Any], result: Any) -> None:
        """Sets the result of a future of this loop; called on the connection's loop."""
        if self.shared.in_turn_of is self.loop:  # on the thread of the task
            if not future.done():
                future.set_result(result)
        else:
            self._inbox.put(_set_result, (future, result))

    def _send(self) -> None:
        calls, self._begun = self._begun, []
        self._connection.begin_many(calls, self.loop)


def deliver(out: OutgoingCall, item: Result | Progress) -> None:
    """Delivers to the task that waits for a call; the target is its `LoopCalls`, future and ``on_progress``."""
    caller, future, on_progress = out.target
    if isinstance(item, Result):
        if caller.shared.in_turn_of is not caller.loop:
            caller.set_result(future, item)
        elif not future.done():  # as `set_result` does it
            future.set_result(item)
    else:
        caller.run(_report, (future, on_progress, item))


class ThreadCaller:
    """The calls that threads make on one connection; each thread blocks until it has its result.

    Threads that got their results together often call again together. So the first of them waits for the others,
    `TOGETHER_SECONDS` at most: one message for all costs the bus less than one for each.
    """

    __slots__ = ("_begun", "_connection", "_expected", "_timed")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun: deque[OutgoingCall] = deque()  # those that the connection has not taken yet
        self._expected = 0  # results that were just delivered; as many calls may follow
        self._timed = False  # whether a timer will send the calls

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call; from any thread."""
        self._begun.append(out)  # before it reads `_expected`: `_taken` resets that, then takes the calls
        if len(self._begun) >= self._expected:
            self.send()

    def send(self) -> None:
        """Sends the waiting calls now; from any thread, and once more when the connection is closed."""
        self._connection.begin_many(self._taken())

    def deliver(self, out: OutgoingCall, item: Result | Progress) -> None:
        """Delivers to the queue that is a call's target; on the connection's loop."""
        if isinstance(item, Result):
            self._expected += 1
            if self._expected > 1 and not self._timed:
                self._timed = True
                self._connection.loop.call_later(TOGETHER_SECONDS, self._send_rest)
        out.target.put(item)

    def _send_rest(self) -> None:
        self._timed = False
        self._connection.calls.begin_many(self._taken())

    def _taken(self) -> Iterator[OutgoingCall]:
        """Yields the waiting calls, as the connection takes them."""
        self._expected = 0
        with suppress(IndexError):
            while True:
                yield self._begun.popleft()


class Batch:
    """Calls whose caller waits for all of them together."""

    __slots__ = ("_done", "_left", "_spans", "calls")

    def __init__(self, calls: Sequence[NamedArguments], timeout: float | None, done: Callable[[], object]) -> None:
        """Makes the calls, without sending them.

        Args:
            calls: names and arguments.
            timeout: seconds; None means each tool's own.
            done: called when all have ended, on the connection's loop.

        Raises:
            TypeError, ValueError: JSON cannot hold some arguments, or the timeout is not above 0.
        """
        options = CallOptions.of(timeout, None, None, "", None)
        self.calls = [
            OutgoingCall(name, dump_arguments(arguments), self._ended, options=options) for name, arguments in calls
        ]
        self._left = len(self.calls)
        self._done = done
        # By call; empty where the program traces nothing.
        spans = {out: begin_call(out) for out in self.calls} if API in modules else {}
        self._spans: dict[OutgoingCall, CallSpan] = {out: span for out, span in spans.items() if span is not None}

    @property
    def results(self) -> list[Result]:
        """The results in the order of the calls, once all have ended."""
        return [out.target for out in self.calls]

    def give_up(self) -> None:
        """Ends the spans of the calls that are not answered: their caller waits no more."""
        while self._spans:
            out, span = self._spans.popitem()
            span.end(out.call_id, None)

    def _ended(self, out: OutgoingCall, result: Result | Progress) -> None:
        out.target = result
        if self._spans and (span := self._spans.pop(out, None)) is not None:
            span.end(out.call_id, out.target)
        self._left -= 1
        if not self._left:
            self._done()


def _set_result(item: tuple[asyncio.Future[Any], Any]) -> None:
    future, result = item
    if not future.done():  # else it was cancelled meanwhile
        future.set_result(result)


def _report(item: tuple[asyncio.Future[Result], OnProgress | None, Progress]) -> None:
    future, on_progress, progress = item
    if on_progress is not None and not future.cancelled():
        try:
            on_progress(progress)
        except Exception:
            log.exception("on_progress raised; the call goes on")


LIST_SECONDS = 30.0  # for a listing, waiting for a connection included
CLOSE_SECONDS = 10.0


class Host(HostBase):
    """Lists and calls tools, from asyncio. Safe to use from several loops.

    Use it as an async context manager, or `close` it in the end.
    """

    @functools.cached_property
    def _callers(self) -> dict[asyncio.AbstractEventLoop, LoopCalls]:
        """The caller of each loop: it passes the calls of one turn to the connection together."""
        return {}

    _caller: LoopCalls | None = None  # that of the loop that called last; None before the first call and once closed

    def _caller_of(self, loop: asyncio.AbstractEventLoop) -> LoopCalls:
        connection = self._begin()
        if loop not in self._callers:
            for ended in [each for each in list(self._callers) if each.is_closed()]:
                self._callers.pop(ended, None)
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

    def watch(self) -> AsyncGenerator[CatalogChange]:
        """Yields the whole catalog, then its changes, for ever; all again after a reconnect or 1,000 unread changes.

        Raises:
            PeerLost, RequestError: the connection has ended for good.
        """
        return self._feed("catalog")

    def notifications(self) -> AsyncGenerator[Notification]:
        """Yields the notifications of plugins to users, for ever; after a reconnect also those that it missed.

        Of more than 1,000 that are unread the oldest are left out, which `Notification.lost` counts.

        Raises:
            PeerLost, RequestError: the connection has ended for good.
        """
        return self._feed("notifications")

    async def _feed(self, feed: Feed) -> AsyncGenerator[Any]:
        connection = self._begin(feed)
        inbox, arrived = Inbox(asyncio.get_running_loop()), asyncio.Event()

        def wake() -> None:
            inbox.put(lambda _: arrived.set())

        reader, over = FeedReader(wake), False
        ended = connection.submit(connection.ended())
        ended.add_done_callback(lambda _: wake())
        try:
            await self._run(self._delegate.read(feed, reader))
            while not over:
                await arrived.wait()
                arrived.clear()
                over = ended.done()  # before the last ones are taken
                for item in reader.take():
                    yield item
            if not self._closed:
                ended.result()  # raises the reason
        finally:
            ended.cancel()
            if not self._closed:
                connection.submit(self._delegate.unread(feed, reader))

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
        arrived, over = threading.Event(), False
        reader = FeedReader(arrived.set)
        ended = connection.submit(connection.ended())
        ended.add_done_callback(lambda _: arrived.set())
        try:
            self._run(self._delegate.read(feed, reader))
            while not over:
                arrived.wait()
                arrived.clear()
                over = ended.done()
                yield from reader.take()
            if not self._closed:
                ended.result()
        finally:
            ended.cancel()
            if not self._closed:
                connection.submit(self._delegate.unread(feed, reader))

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
