"""Mounts another bus: attaches to it as a host that watches its catalog, and offers its own tools here.

A call is passed on as it came, with its role, user, level, deadline, trace, and the questions that its caller answers;
what comes back is the other bus's word, with code, stage and progress. Calls are never held here: while the other bus
does not answer, its tools are listed as offline, and each call is refused at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.core import Core
from toolbus.common.text import clean_line, shorten
from toolbus.errors import Code, NotPermitted, PeerLost, RequestError, Stage, ToolBusError
from toolbus.functions.call_context import CallOptions, Inputs
from toolbus.parts.mcp.client.calls import CONFIRM_SECONDS, HandlerOwner, MountHandler, failure
from toolbus.parts.mcp.client.connection import ServerInfo, ServerLists
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState, MountStatus
from toolbus.parts.mcp.messages.hops import with_hop
from toolbus.parts.mcp.messages.tools import write_native
from toolbus.protocol.tool import MAX_LEVEL, MAX_TIMEOUT_SECONDS, Progress, Result
from toolbus.sdk.connection import Connection, open_connection
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.credential import Credential
from toolbus.sdk.host import LIST_SECONDS, HostDelegate, LoopCalls, refuse_calls
from toolbus.sdk.listing import Listing
from toolbus.sdk.outgoing_calls import OutgoingCall, PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")

USUAL_LEVELS = 1_023  # the highest level of users that most buses have is below
RESTS = 5  # times what the last listing took: the pause before the next one, of a catalog that always changes
OFFERED = ("live", "suspect", "draining")


class BusHandler(MountHandler):
    """The handler of a mounted bus in the registry.

    Attributes:
        roles: those that have a tool at the other bus, by the name that it has there.
    """

    speaks_mcp = False

    def __init__(self, entry: MountEntry, dispatcher: Dispatcher, owner: HandlerOwner) -> None:
        super().__init__(entry, dispatcher, owner)
        self.roles: Mapping[str, Collection[str]] = {}
        self._bus: Connection | None = None  # None before the first
        self._link: LoopCalls | None = None  # sends calls; None while the other bus takes none
        self.results_to: LoopCalls | None = None  # brings results to this bus's loop; None before the first connection
        self._why = ""  # why it does not
        self._outs: dict[str, OutgoingCall] = {}  # by the id of the call of this bus
        self._arrived: deque[tuple[OutgoingCall, Result | Progress]] = deque()  # not delivered yet

    @property
    def load(self) -> int:
        """How many calls run at the other bus."""
        return len(self._outs)

    def has(self, call: Call) -> bool:
        """Tells whether a call runs at the other bus."""
        return call.id in self._outs

    def resume(self, bus: Connection, link: LoopCalls) -> None:
        """Sends calls over a connection."""
        self._bus, self._link, self.session_state = bus, link, wire.SESSION_STATE_LIVE

    def pause(self, why: str) -> None:
        """Sends no more calls; those that were sent may still end."""
        self._link, self._why, self.session_state = None, why, wire.SESSION_STATE_OFFLINE

    def lose(self, why: str) -> None:
        """Ends the calls that were sent: their results will not come."""
        self.pause(why)
        outs, self._outs = self._outs, {}
        if self._bus is not None:
            self._bus.cancel(*outs.values())
        for out in outs.values():
            call: Call = out.target
            text = f"{why}; whether {call.entry.name!r} ran is not known: check before calling it again"
            stage, again = Stage.ACCEPTED if call.accepted else Stage.UNKNOWN, call.declaration.tool.repeatable
            self.end(call, failure(Code.UNAVAILABLE, text, stage, retry_safe=again))

    # -- calls (`Handler`) --------------------------------------------------------------------------------------------

    def pass_on(self, call: Call, now: float) -> None:
        """Sends a call, or refuses it."""
        self.used_at = now
        if self._link is None:  # its tools have just gone offline
            self.refuse(call, self._why)
            return
        if call.trace is not None:
            call.trace.sent = now
        theirs = self.names.get(call.entry.bare_name, call.entry.bare_name)
        options = self._options(call, theirs, now)
        out = OutgoingCall(theirs, str(call.arguments_json), self._deliver, call, options, wants_progress=True)
        out.soft_deadline = out.started_at  # it neither waits here nor is repeated: that is for its caller to decide
        self._outs[call.id] = out
        self._link.begin(out)

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels a call at the other bus; its slot is free after a moment."""
        out = self._outs.pop(call.id, None)
        if out is not None and self._bus is not None:
            self._bus.cancel(out)
        asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm, call)
        return False

    def stage(self, call: Call) -> Stage:
        """Returns the stage of a call, as far as this bus knows."""
        return Stage.DISPATCHED if call.id in self._outs else Stage.NOT_DISPATCHED

    def _options(self, call: Call, theirs: str, now: float) -> CallOptions:
        exchange, trace, context, inputs = call.exchange, call.trace, call.context, None
        if exchange is not None:
            inputs = Inputs(exchange.accepts, json.loads(exchange.responses_json or "{}"), exchange.state)
            context = context or pb.CallContext()  # only with one are questions answered
        role = call.declaration.tool.role or call.role
        return CallOptions(
            timeout=min(max(call.deadline - now, 0.001), MAX_TIMEOUT_SECONDS),
            role=role if role in self.roles.get(theirs, ()) else None,
            context=context,
            inputs=inputs,
            traceparent=trace.traceparent if trace is not None else "",
            tracestate=trace.tracestate if trace is not None else "",
        )

    # -- answers ------------------------------------------------------------------------------------------------------

    def _deliver(self, out: OutgoingCall, item: Result | Progress) -> None:
        """Takes progress or the result; on the connection's loop, perhaps on another thread."""
        self._arrived.append((out, item))
        if len(self._arrived) == 1 and (link := self.results_to) is not None:
            link.run(self._take_arrived)

    def _take_arrived(self, _: None) -> None:
        """Passes on what has come, the results together."""
        now, results = time.monotonic(), []
        while self._arrived:
            out, item = self._arrived.popleft()
            call: Call = out.target
            if self._outs.get(call.id) is not out:
                continue  # it was cancelled
            if isinstance(item, Progress):
                message = pb.ToolProgress(call_id=call.id, message=item.message, output_chunk=item.chunk)
                message.progress, message.total = item.progress, item.total
                message.content.extend(item.content)
                self._dispatcher.progress(self, [message], now)
            else:
                del self._outs[call.id]
                results.append(_result_of(call, item))
        self.used_at = now
        self._dispatcher.results(self, results, now)


def _result_of(call: Call, result: Result) -> pb.ToolResult:
    """Returns the result for this bus; a call that the other bus lost may be repeated where its tool allows it."""
    error = result.error
    if error is not None and error.code is Code.UNAVAILABLE and call.declaration.tool.repeatable:
        error = dataclasses.replace(error, retry_safe=True)
    return dataclasses.replace(result, call_id=call.id, error=error).to_wire()


class Watching(HostDelegate):
    """The delegate of a mount's connection.

    Args:
        changed: called at each change of the catalog.

    Attributes:
        attached_to: the other bus's answer to the newest attach.
    """

    def __init__(self, settle: float, changed: Callable[[], object]) -> None:
        super().__init__(settle)
        self.attached_to = wire.Attached()
        self._changed = changed
        self.subscribe("catalog")

    def attached(self, attached: wire.Attached) -> None:
        super().attached(attached)
        self.attached_to = attached

    def event(self, event: wire.Event) -> None:
        self._changed()


class BusMount(Mount):
    """One mounted bus, or several with the same tools, of which one is used at a time."""

    handler: BusHandler

    def __init__(self, entry: MountEntry, open_transport: Any, manifest: Any, core: Core, **options: Any) -> None:
        super().__init__(entry, open_transport, manifest, core, **options)
        self._beat = core.program.timings.busy_heartbeat_seconds
        self._most_missed = core.program.timings.missed_heartbeats
        self._changed = asyncio.Event()  # set when the other bus, or the connection to it, has changed
        self._was_ever_live = False
        self._level = MAX_LEVEL  # of users for whom lists are asked for: the highest that the other bus lets be stated

    def _make_handler(self, core: Core) -> BusHandler:
        return BusHandler(self.entry, core.calls.dispatcher, self)

    def start(self) -> None:
        """Lists the tools of the last run as offline, and connects."""
        super().start()
        self._go_offline("is not connected yet")

    async def stop(self) -> None:
        """Disconnects and withdraws the tools."""
        self.handler.lose(f"mount {self.name} was removed")
        await super().stop()

    def restart(self) -> None:
        super().restart()
        self._changed.set()

    def relist(self, *kinds: str) -> None:
        """Reads the list again."""
        self._changed.set()

    async def review_again(self) -> None:
        """Offers the declarations again after an approval."""
        await super().review_again()
        if self.state is MountState.OFFLINE:
            self.offer.take_offline(self.reason)
        else:
            self._show_live()

    def status(self) -> MountStatus:
        return dataclasses.replace(super().status(), era="bus" if self._peer is not None else "")

    # -- life ---------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        attempt = 0
        while True:
            self._over.clear()
            self._was_ready = False
            try:
                why = await self._follow()
            except (ToolBusError, OSError) as error:
                why = shorten(clean_line(str(error)), 500)
            except Exception as error:
                log.exception("internal error in mount %s", self.name)
                why = f"cannot be used because of a bug of the bus: {error!r}"
            self._go_offline(why or "is connected anew")
            self.handler.lose(f"bus {self.name!r} {why}" if why else f"mount {self.name} was restarted")
            attempt = 0 if self._was_ready else attempt + 1
            if why:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timings.restarts.backoff(attempt)):
                        await self._over.wait()
            self.restarts += 1

    async def _follow(self) -> str:
        """Follows the other bus over one connection. Returns why that has to end; "" for a restart.

        Raises:
            ToolBusError: the other bus refuses this one, or the address or credential cannot be used.
        """
        self._level = MAX_LEVEL
        settings, loop = await asyncio.to_thread(self._settings), asyncio.get_running_loop()
        changed = partial(loop.call_soon_threadsafe, self._changed.set)
        watching = Watching(settings.timings.settle, changed)
        connection = open_connection(settings, watching, refuse_calls, "host")
        connection.start()
        self.handler.results_to = link = LoopCalls(connection, loop)
        ended = asyncio.wrap_future(connection.submit(connection.ended()))
        notices = connection.submit(_notice(connection, changed))
        try:
            missed, session, revision, rests_until = 0, None, 0, 0.0
            while not self._over.is_set():
                if ended.done():
                    ended.result()
                    return "has ended the connection"
                current = session_of(connection)
                if current is None:
                    session = None
                    self._go_offline(_why_away(connection))
                    await self._wait(self._beat)
                    continue
                try:
                    newest = await self._revision(connection)
                    if current is not session or missed or (newest != revision and loop.time() >= rests_until):
                        began = loop.time()
                        listing = await self._list(connection)
                        session, revision, missed = current, listing.revision, 0
                        await self._take(listing, watching.attached_to, connection, link)
                        newest, rests_until = revision, loop.time() + RESTS * (loop.time() - began)
                except PeerLost:
                    missed += 1
                    if missed * 2 >= self._most_missed:
                        self._go_offline("does not answer")
                    if missed >= self._most_missed:
                        return "does not answer"
                    continue
                await self._wait(self._beat if newest == revision else max(rests_until - loop.time(), 0.001))
            return ""
        finally:
            notices.cancel()
            self.handler.pause(f"mount {self.name} is not connected")
            closing = asyncio.ensure_future(self._close_bus(connection, ended))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_bus(self, connection: Connection, ended: asyncio.Future[None]) -> None:
        with suppress(ToolBusError):
            await asyncio.wrap_future(connection.submit(connection.close()))
        await asyncio.gather(ended, return_exceptions=True)
        await asyncio.to_thread(connection.stop_thread)

    def _settings(self) -> ConnectionSettings:
        entry = self.entry
        return ConnectionSettings(
            f"bus:{re.sub(r'[^A-Za-z0-9_.-]+', '-', socket.gethostname())[:64] or 'mount'}",
            entry.bus,
            max_in_flight=entry.max_in_flight,
            token=entry.token,
            credential=Credential.read(entry.credential) if entry.credential else None,
        )

    async def _wait(self, seconds: float) -> None:
        """Waits for a change, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # `wait_for` may swallow a cancel that comes together with a change
                await self._changed.wait()
        self._changed.clear()

    def _go_offline(self, why: str) -> None:
        """Takes the tools offline, unless they are."""
        reason = f"bus {self.entry.bus} {why}"
        if self.state is MountState.OFFLINE and self.reason == reason:
            return
        if self.last_error:  # else it has just been mounted
            log.warning("mount %s: offline: %s", self.name, reason)
        self.handler.pause(reason)
        self.last_error = reason
        self._set(MountState.OFFLINE, reason)
        self.offer.take_offline(reason)

    # -- the catalog of the other bus ---------------------------------------------------------------------------------

    async def _revision(self, connection: Connection) -> int:
        """Returns the revision of the other bus's catalog, which also shows that it answers."""
        request = wire.ListRequest(names=["-"])
        return int((await self._ask(connection, request, self._beat)).revision)

    async def _list(self, connection: Connection) -> Listing:
        """Lists the tools for users of every level, as far as this bus may state one; offline ones too."""
        request = wire.ListRequest(include_offline=True)
        request.context.attributes["level"] = str(self._level)
        pages: list[wire.ListResponse] = []
        while not pages or pages[-1].next_page_token:
            request.page_token = pages[-1].next_page_token if pages else ""
            try:
                pages.append(await self._ask(connection, request, LIST_SECONDS))
            except NotPermitted:
                if not self._level:
                    raise
                self._level = await self._highest_level(connection)
                return await self._list(connection)
        return Listing.of_pages(pages, 0)

    async def _highest_level(self, connection: Connection) -> int:
        """Finds the highest level that the key of this mount may state, which no message of a bus tells."""
        allowed, refused = 0, self._level
        while refused - allowed > 1:
            level = USUAL_LEVELS if refused == MAX_LEVEL and not allowed else (allowed + refused) // 2
            request = wire.ListRequest(names=["-"])
            request.context.attributes["level"] = str(level)
            try:
                await self._ask(connection, request, LIST_SECONDS)
                allowed = level
            except NotPermitted:
                refused = level
        return allowed

    async def _ask(self, connection: Connection, request: wire.ListRequest, seconds: float) -> wire.ListResponse:
        """Sends a request.

        Raises:
            PeerLost: it was not answered in time.
            RequestError: the other bus refuses it.
        """
        asked = asyncio.wrap_future(connection.submit(connection.unary("List", request, seconds)))
        try:
            answer: wire.ListResponse = await asked
        except RequestError:
            raise
        except ToolBusError as error:
            raise PeerLost(str(error)) from None
        return answer

    async def _take(self, listing: Listing, attached: wire.Attached, connection: Connection, link: LoopCalls) -> None:
        """Offers what is listed; a tool that has just gone offline there stays offered, for its plugin may be back."""
        roles: dict[str, set[str]] = {}
        declarations = []
        for each in listing:
            if each.state in OFFERED or (each.state == "offline" and each.name in self.handler.roles):
                roles.setdefault(each.name, set()).update(each.roles)
                declaration = write_native(each.name, each.tool, hints_trusted=each.repeatable)
                declarations.append(with_hop(declaration, attached.boot_id))
        about = {"name": "toolbus", "version": attached.bus_version}
        self._peer = ServerInfo(True, attached.bus_version, {}, about)
        self.handler.roles = roles
        self.handler.resume(connection, link)
        await self.offer.take(self._peer, ServerLists({"tools": declarations}))
        if session_of(connection) is None:
            self.offer.take_offline(self.reason)  # it was lost meanwhile, which the next look sees
            return
        was_live, self._was_ready = self.state is not MountState.OFFLINE, True
        self.last_error = self.last_error if self._was_ever_live else ""
        self._was_ever_live = True
        self._show_live()
        if not was_live:
            log.info("mount %s: live toolbus %s tools=%d", self.name, attached.bus_version, self.offer.tools)


def session_of(connection: Connection) -> PeerSession | None:
    """Returns the session that takes calls now; None while there is none."""
    used = connection.used
    session = used.session if used is not None else None
    return session if session is not None and session.takes_calls else None


def _why_away(connection: Connection) -> str:
    used = connection.used
    if used is not None and used.session is not None:
        return "is shutting down"
    reason = clean_line(connection.calls.no_bus_reason)
    return f"does not answer{f' ({reason})' if reason else ''}"


async def _notice(connection: Connection, changed: Callable[[], object]) -> None:
    """Reports each change of the session; on the connection's loop."""
    before: PeerSession | None = None
    while True:
        if (session := session_of(connection)) is not before:
            before = session
            changed()
        await connection.changes.next()
