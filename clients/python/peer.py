"""Connects one peer to the bus, with the generated stubs alone: a pattern for client libraries in other languages.

This file is the life of the connection, in the order of docs/protocol.md: attach, read, reconnect with backoff, leave.
`handlers.py` answers the calls of the bus, `host.py` makes calls, `link.py` holds the state of one stream, `outbox.py`
makes the messages, `wire.py` is gRPC. `toolbus conformance` checks a copy. For Python programs `toolbus.sdk` is better:
it also runs blocking handlers, and finds out why TLS fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from call import Call
from handlers import Handler, Tools
from host import Calls
from link import TICK_SECONDS, Link
from watch import CATALOG, NOTIFICATIONS, Watch
from wire import Connection, Refused, StatusError, Stream, connect, read_credential

from toolbus.v1 import tool_bus_service_pb2 as messages
from toolbus.v1 import tool_pb2 as pb

__all__ = ["Call", "Peer", "Refused", "StatusError"]

logger = logging.getLogger("toolbus.peer")

ADDRESS = "127.0.0.1:48930"
ATTACH_SECONDS = 10.0  # for connecting, and for the answer to the attach
MISSED_HEARTBEATS = 4  # after so many intervals without a message the bus counts as lost
STEADY_SECONDS = 1.0  # a session that lived so long resets the backoff
EXPIRY_SECONDS = 3 * 86_400.0  # before a key expires: then a warning is logged
# After these statuses another attempt would be refused too.
FINAL = (
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "ALREADY_EXISTS",
    "UNIMPLEMENTED",
)
# Status → upper end of the first pause before another attempt, and of the longest, in seconds.
PAUSES = {"RESOURCE_EXHAUSTED": (0.5, 10.0), "INTERNAL": (0.5, 10.0)}
OTHER_PAUSES = (0.05, 0.8)


class Peer:
    """Holds one stream to the bus while `run` runs: offers tools, answers calls, makes calls.

    Attributes:
        address: where the bus is.
        attached: set while the bus has accepted this peer.
        refused: (name, role) of the tools that the bus refused, with its reason.
    """

    def __init__(self, address: str, source: str, token: str = "", credential: str = "", **fields: Any) -> None:
        """Makes a peer.

        Args:
            address: `HOST:PORT`, `unix:PATH`, `tls:HOST:PORT` or `mtls:HOST:PORT`; "" means TOOLBUS_ADDRESS, then that
                of the credential.
            source: whose tools and calls these are.
            token: binds the source; "" means TOOLBUS_TOKEN.
            credential: the file that proves who this peer is, to a bus on another machine; "" means
                TOOLBUS_CREDENTIAL, or none.
            fields: further ones of `messages.Attach`: max_in_flight, qualified, notices.
        """
        self._credential = credential or os.environ.get("TOOLBUS_CREDENTIAL", "")
        address = address or os.environ.get("TOOLBUS_ADDRESS", "")
        self.address: str = address or read_credential(self._credential).get("address", ADDRESS)
        self.attached = asyncio.Event()
        self.refused: dict[tuple[str, str], str] = {}
        # In every attach: the bus recognizes a peer that reconnects by its source and instance.
        self._identity = messages.Attach(
            protocol_version=1,
            source=source,
            instance=secrets.token_hex(16),
            token=token or os.environ.get("TOOLBUS_TOKEN", ""),
            **fields,
        )
        self._calls = Calls()
        self._tools = Tools(self._calls.call)
        self._watch = Watch()
        self._link: Link | None = None  # the current stream; None between two
        self._connection: Connection | None = None  # of that stream
        self._leaving = asyncio.Event()  # set when this peer must not attach again
        self._running: asyncio.Task[None] | None = None  # `run`, inside of `async with`
        self._refusal: Refused | None = None  # why `run` ended; None unless the bus refused this peer
        self._shown_waiting: set[tuple[str, str]] = set()  # (name, role) of the waiting tools that were logged
        self._shown = ""  # why the last attempt failed, as it was logged; empty while attached

    async def __aenter__(self) -> Peer:
        """Runs the peer in the background, as hosts do."""
        self._running = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leaves once no call is in flight."""
        self.drain()
        if self._running is not None:
            with contextlib.suppress(Refused):  # calls have returned it
                await self._running

    # -- what an application does --------------------------------------------------------------------------------------

    def tool(self, description: str, parameters: dict[str, Any], **fields: Any) -> Callable[[Handler], Handler]:
        """Offers an async function `handler(arguments, call)`, under its own name or the `name` given.

        It returns its output, or a `pb.ToolResult` with further fields; `fields` are further ones of `pb.Tool`.
        """

        def offer(handler: Handler) -> Handler:
            name = fields.pop("name", handler.__name__)
            schema = json.dumps(parameters)
            tool = pb.Tool(name=name, description=description, parameters_json=schema, **fields)
            self._tools.add(tool, handler)
            self._declare_soon()
            return handler

        return offer

    def remove_tool(self, name: str) -> None:
        """Withdraws a tool."""
        self._tools.remove(name)
        self._declare_soon()

    async def run(self) -> None:
        """Attaches, serves and reconnects, until `drain` is called or the bus sends a drain that is final.

        Raises:
            Refused: the bus answered with a status that another attempt would not change.
        """
        failures = 0  # attempts since the last steady session
        key_ended = False  # whether the session before ended because the bus no longer accepts its key
        try:
            while not self._leaving.is_set():
                end, lived = await self._serve()
                again = lived < STEADY_SECONDS and (lived < 0 or key_ended)
                key_ended = end.code == "UNAUTHENTICATED"
                if end.code in FINAL or (key_ended and again):
                    raise Refused(str(end))
                if lived >= STEADY_SECONDS:
                    failures = 0
                if not self._leaving.is_set():
                    await self._pause(end, failures)
                failures += 1
        except Refused as refusal:
            self._refusal = refusal
            raise
        finally:
            self._leaving.set()
            refused = f"the bus refuses this peer: {self._refusal}"
            self._calls.close(refused if self._refusal else "this peer has left the bus")
            self._watch.close()

    def drain(self, reason: str = "leaving") -> None:
        """Shuts down gracefully: the bus sends no new calls, those in flight are finished, then `run` returns."""
        self._leaving.set()
        self.attached.clear()
        self._calls.close("this peer is leaving the bus")
        if self._link is not None:
            self._link.drain(reason)

    async def call(self, name: str, arguments: Any, **options: Any) -> pb.ToolResult:
        """Calls any tool of the bus; see `Calls.call`. A failure is a result with `error` set."""
        return await self._calls.call(name, arguments, **options)

    async def list(self, **conditions: Any) -> messages.ListResponse:
        """Lists the tools, all pages in one; `conditions` are fields of `messages.ListRequest`.

        Raises:
            Refused: the bus refused this peer.
            StatusError: the bus refused the request, the connection broke, or this peer has left.
        """
        await self._attached_or_over()
        if self._refusal is not None:
            raise self._refusal
        if self._connection is None:
            raise StatusError("UNAVAILABLE", "this peer has left the bus")
        connection, whole = self._connection, messages.ListResponse()
        while True:
            page = await connection.list_tools(messages.ListRequest(**conditions, page_token=whole.next_page_token))
            whole.next_page_token = ""
            whole.MergeFrom(page)
            if not page.next_page_token:
                return whole

    def watch(self) -> AsyncGenerator[messages.CatalogChange, None]:
        """Yields the whole catalog (`full`), then its changes; after a reconnect the whole catalog again."""
        return self._subscribe(CATALOG)

    def notifications(self) -> AsyncGenerator[messages.Notification, None]:
        """Yields the notifications of plugins to users; after a reconnect also those that this peer missed."""
        return self._subscribe(NOTIFICATIONS)

    # -- one stream ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> tuple[StatusError, float]:
        """Runs one stream from its attach to its end; returns its status, and how long the session was live."""
        async with connect(self.address, self._credential) as connection:
            stream = connection.invoke()
            link = Link(stream.give_up, self._identity.max_in_flight)
            self._link, self._connection = link, connection
            self._declare(link)
            writer = asyncio.create_task(stream.write_all(link.outbox))
            monitor = asyncio.create_task(self._monitor(link, stream))
            end = StatusError("OK", "the bus ended the stream")
            try:
                while (message := await stream.read()) is not None:
                    self._receive(message, link)
            except StatusError as error:
                end = error
            finally:
                monitor.cancel()
                self._link = self._connection = None
                self.attached.clear()
                self._tools.lost(link)
                self._calls.lost(link, all_read=end.code == "OK" and link.drain_received)
                link.end()
                stream.give_up("this side has ended")
                writer.cancel()  # grpcio does not release a write that waits for a connection
                await writer
            return end, link.seconds()

    async def _monitor(self, link: Link, stream: Stream) -> None:
        """Gives up a stream on which the bus is silent. A time in which this process stood still does not count."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(TICK_SECONDS, link.heartbeat_seconds))
            if link.standstill.look():
                link.heard_at = loop.time()
            silence = ATTACH_SECONDS if link.attached is None else MISSED_HEARTBEATS * link.heartbeat_seconds
            if loop.time() - link.heard_at > silence:
                stream.give_up(f"the bus has sent nothing for {silence:g} s")

    async def _pause(self, end: StatusError, failures: int) -> None:
        """Waits before another attempt: a random time, the upper end doubling."""
        first, longest = PAUSES.get(end.code, OTHER_PAUSES)
        pause = random.uniform(0.0, min(longest, first * 2 ** min(failures, 10)))
        if str(end) != self._shown:
            self._shown = str(end)
            logger.warning("not attached to %s (%s): trying again, at least every %g s", self.address, end, longest)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), pause)

    # -- messages of the bus -------------------------------------------------------------------------------------------

    def _receive(self, message: messages.InvokeResponse, link: Link) -> None:
        """Handles the fields of a message, in the order of the protocol."""
        link.standstill.look()
        link.heard_at = asyncio.get_running_loop().time()
        if message.HasField("attached"):
            self._attached(message.attached, link)
        for event in message.events:
            self._note(event, link)
        if message.calls:
            self._tools.begin(message.calls, link)
        if message.progress:
            self._calls.progress(message.progress, link)
        if message.results:
            self._calls.results(message.results, link)
        for cancel in message.cancels:
            self._tools.cancel(cancel.call_id, link)
        if message.heartbeat.from_peer:
            self._tools.begin(link.standstill.echoed(message.heartbeat.sequence), link)
        elif message.HasField("heartbeat"):
            link.outbox.put("heartbeat", message.heartbeat)
        if message.HasField("drain"):
            self._drained(message.drain, link)
        link.when_idle()

    def _attached(self, attached: messages.Attached, link: Link) -> None:
        """Takes the answer to an attach; the first one opens the session."""
        if attached.refused and not attached.refused_total:  # the attach itself: everything stays as it was
            logger.warning("the bus refused the tools: %s", attached.refused[0].error)
        else:
            self._note_refused(attached.refused, anew=True)
        self._note_waiting(attached.waiting)
        if link.attached is None:
            link.open(attached)
            self._shown = ""
            if 0 < attached.expires_seconds < EXPIRY_SECONDS:
                hours = attached.expires_seconds / 3600
                logger.warning("the key of %s expires in %.1f hours: renew it", attached.identity, hours)
            if not link.leaving:
                self.attached.set()
                self._calls.open(link)
        self._declare_soon()

    def _note(self, event: messages.Event, link: Link) -> None:
        """Takes an event. Events for the author are logged as warnings; unknown kinds are ignored."""
        kind = event.WhichOneof("kind")
        if kind == "catalog":
            self._watch.catalog(event.catalog)
        elif kind == "notification":
            self._watch.notification(event.notification)
        elif kind == "tool_overwritten":
            name, source = event.tool_overwritten.name, event.tool_overwritten.by_source
            logger.warning("the tool %r is not offered any more: the source %r took its name", name, source)
        elif kind == "tool_removed":
            logger.warning("the tool %r is not offered any more: another client withdrew it", event.tool_removed.name)
        elif kind == "permission_denied":
            denied = event.permission_denied
            logger.warning("the bus refused %r: the permission %r is missing", denied.operation, denied.permission)
        elif kind == "permission_changed":
            permission, granted = event.permission_changed.permission, event.permission_changed.granted
            logger.warning("the permission %r was %s", permission, "granted" if granted else "revoked")
            if permission == "tools" and granted:
                link.declared = 0  # the bus withdrew the tools when it revoked the permission
                self._declare_soon()
        elif kind == "tools_reviewed":
            reviewed = event.tools_reviewed
            offered = {*reviewed.registered, *(tool.name for tool in reviewed.waiting)}
            self.refused = {key: why for key, why in self.refused.items() if key[0] not in offered}
            self._note_refused(reviewed.refused)
            self._note_waiting(reviewed.waiting)

    def _note_waiting(self, tools: Iterable[messages.WaitingTool]) -> None:
        """Logs which tools wait for a role; each once."""
        for tool in tools:
            if (key := (tool.name, tool.role)) not in self._shown_waiting:
                self._shown_waiting.add(key)
                logger.warning("the tool %r waits for role %r, which the bus does not have", tool.name, tool.role)

    def _note_refused(self, tools: Iterable[messages.RefusedTool], *, anew: bool = False) -> None:
        """Stores which tools the bus refused; logs each once, not again after every reconnect."""
        before = self.refused
        self.refused = {} if anew else dict(before)
        for tool in tools:
            key = tool.name, tool.role
            self.refused[key] = tool.error
            if before.get(key) != tool.error:
                logger.warning("the bus does not offer the tool %r: %s", tool.name, tool.error)

    def _drained(self, drain: messages.Drain, link: Link) -> None:
        link.drain_received = link.leaving = True
        self.attached.clear()
        self._calls.pause()  # new calls wait for the next stream
        if drain.reason in ("replaced", "requested"):
            logger.warning("the bus ends this peer's session: %s", drain.reason)
            self._leaving.set()
            self._calls.close(f"the bus ended this peer's session: {drain.reason}")

    # -- the attach ----------------------------------------------------------------------------------------------------

    def _declare(self, link: Link) -> None:
        """Puts an attach with the current tools into the outbox."""
        attach = messages.Attach(
            tools=self._tools.declarations(),
            subscribe=self._watch.subscribed,
            notifications_after=self._watch.newest,
        )
        attach.MergeFrom(self._identity)
        link.declared = self._tools.version
        link.outbox.put("attach", attach)

    def _declare_soon(self) -> None:
        """Attaches again if the tools have changed; all changes of one turn of the loop go into one attach."""
        if self._link is not None and self._link.attached is not None:
            asyncio.get_running_loop().call_soon(self._declare_again, self._link)

    def _declare_again(self, link: Link) -> None:
        if link.declared != self._tools.version and not link.leaving and not link.outbox.closed:
            self._declare(link)

    async def _attached_or_over(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self.attached, self._leaving)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _subscribe(self, feed: messages.Subscription.ValueType) -> AsyncGenerator[Any, None]:
        if feed not in self._watch.subscribed:
            self._watch.subscribed.append(feed)
            if self._link is not None and self._link.attached is not None and not self._link.leaving:
                self._declare(self._link)
        async for item in self._watch.read(feed):
            yield item
