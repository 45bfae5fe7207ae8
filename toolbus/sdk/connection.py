"""One peer's connection to the bus: a thread with a loop, on it one Invoke stream, attached again for ever.

The shell round `Session` and `OutgoingCalls`: one read loop and one write loop, nothing per call. Everything that an
author writes runs elsewhere, so a handler that blocks is never taken for a plugin that hangs. Who answers the bus's
calls is the `Delegate`'s business; this module carries their answers.

Each attempt has a channel of its own: a channel keeps the back-off of its failures, which on loopback is far too long.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.aio

from toolbus.errors import Code, InvalidRequest, PeerLost, ProtocolError, Stage, ToolBusError
from toolbus.functions.threads import ChangeSignal, Inbox, LoopThread
from toolbus.sdk.attempt import (
    FATAL,
    MESSAGE_BYTES,
    PAUSE_FIRST,
    ConnectionSettings,
    Delegate,
    Ending,
    IncomingCall,
    Link,
    attach_of,
    error_of,
    fitting,
    message_of,
    portions,
    status_of,
)
from toolbus.sdk.outgoing_calls import OutgoingCall, OutgoingCalls, PeerSession
from toolbus.session import State
from toolbus.tool import Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from grpcio's stubs

SILENCE_SECONDS = 40.0  # four heartbeats of an idle session
OPENING_SECONDS = 10.0  # for the bus to answer an attach
CLOSING_SECONDS = 2.0  # for the bus to end a stream after our half-close
WRITER_SECONDS = 0.2  # for a writer to hear that its stream has ended
STEADY_SECONDS = 1.0  # a session that lived this long starts the back-off anew

_STAY_AWAY = {
    "replaced": "another process attached with the same source and instance",
    "requested": "an operator asked this peer to go",
}


class Connection:
    """A peer's one connection. Methods are safe from any thread, coroutines belong on ``loop`` (see `ask`)."""

    def __init__(self, settings: ConnectionSettings, delegate: Delegate) -> None:
        self.settings = settings
        self._delegate = delegate
        self._thread = LoopThread(f"toolbus-{settings.source}")
        self.loop = self._thread.loop
        self._inbox = Inbox(self.loop)
        self.calls = OutgoingCalls(self.loop, settings.address, secrets.token_hex(4))
        self._link: Link | None = None  # the current attempt; None between two
        self._task: asyncio.Task[None] | None = None  # runs `_live`; None before the start
        self._changes = ChangeSignal(self.loop)  # of the state, for those who wait for one
        self._dirty = False  # whether the declared tools changed since the last attach
        self._refused: tuple[str, ...] = ()  # why the last attach's tools were not taken
        self._closing = False  # whether we want to end
        self._error: ToolBusError | None = None  # why we had to end; None while that is not so
        self._over = False  # whether we have ended
        self._closed_text = f"the connection of {settings.source!r} is closed"
        self._complained = False  # whether the log has been told that there is no bus
        self._arms: dict[str, Callable[[Link, Any], None]] = {
            "attached": self._on_attached,
            "events": self._on_events,
            "calls": self._on_calls,
            "progress": lambda link, items: self.calls.progress(link.session, items),
            "results": lambda link, items: self.calls.results(link.session, items),
            "cancels": self._on_cancels,
            "heartbeat": lambda link, heartbeat: link.session.echo(heartbeat),
            "drain": self._on_drain,
        }

    def __repr__(self) -> str:
        session = self._link.session if self._link else None
        return f"<Connection {self.settings.source} to {self.settings.address} {session!r} {self.calls!r}>"

    # From any thread.

    def start(self) -> None:
        """Starts the thread, which begins to connect."""
        self._thread.start()
        self._inbox.put(self._begin)

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call; its result comes through ``out.deliver``."""
        if not self._inbox.put(self.calls.begin, out):
            out.fail(Code.UNAVAILABLE, "this connection is closed: make a new one", Stage.NOT_DISPATCHED)

    def cancel(self, out: OutgoingCall) -> None:
        """Takes a call back; nothing is delivered for it afterwards."""
        self._inbox.put(self.calls.cancel, out)

    def answer(self, session: PeerSession, result: Result) -> None:
        """Answers a call of the bus. Only the first answer is sent, and none once the session is over."""
        self._inbox.put(self._answer, (session, result))

    def report(self, session: PeerSession, progress: pb.ToolProgress) -> None:
        """Sends a sign of life of a call of the bus."""
        self._inbox.put(self._report, (session, progress))

    def tools_changed(self) -> None:
        """Declares the tools anew; changes in a row become one."""
        self._inbox.put(self._mark_dirty)

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the error that no bus answered within so long: where it was looked for, why, and the cure."""
        return PeerLost(self.calls.unanswered(seconds))

    def ask(self, coroutine: Any) -> Future[Any]:
        """Runs one of the coroutines below on the connection's loop.

        Raises:
            PeerLost: the connection is closed.
        """
        try:
            return self._thread.ask(coroutine)
        except RuntimeError:
            raise PeerLost("this connection is closed: make a new one") from None

    def stop_thread(self) -> None:
        """Ends the thread; for after `close`."""
        self._thread.stop()
        self._inbox.run_left()  # calls that another thread made meanwhile: they end in an error

    # On the loop.

    async def ready(self) -> None:
        """Waits until the bus has confirmed everything that is declared now.

        Raises:
            RequestError: the bus refuses this peer or its tools, for a reason that waiting does not cure.
            PeerLost: the connection was closed.
        """
        while True:
            self._check()
            link = self._link
            if link is not None and link.attached is not None and not link.attaching and not self._dirty:
                if self._refused:
                    raise InvalidRequest(
                        f"the bus refused the tools of {self.settings.source!r}: {'; '.join(self._refused)}"
                    )
                return
            await self._changes.next()

    async def ended(self) -> None:
        """Waits until the connection has ended for good.

        Raises:
            RequestError: the bus refuses this peer, for a reason that waiting does not cure.
            PeerLost: another process took this peer's place, or an operator asked it to go.
        """
        while not self._over:
            await self._changes.next()
        if self._error is not None:
            raise self._error

    async def unary(self, method: str, request: Any, timeout: float) -> Any:
        """Asks one of the service's other RPCs, as soon as there is a connection.

        Only for what may be asked twice.

        Raises:
            ToolBusError: the bus's sentence; PeerLost where there was no bus in time.
        """
        until = self.loop.time() + timeout
        while True:
            left = until - self.loop.time()
            if not await self._changes.until(self._connected, left):
                raise self.unanswered(timeout)
            link = self._link
            assert link is not None  # connected, and nothing ran since
            try:
                return await getattr(link.stub, method)(request, timeout=max(left, 0.001))
            except grpc.aio.AioRpcError as problem:
                if problem.code() is not grpc.StatusCode.UNAVAILABLE and link is self._link:
                    raise error_of(problem.code(), problem.details() or "") from None
            except asyncio.CancelledError:  # the channel was closed under it
                task = asyncio.current_task()
                if link is self._link or (task is not None and task.cancelling()):
                    raise
            await asyncio.sleep(PAUSE_FIRST)

    async def close(self, reason: str = "closed", grace_seconds: float = 0.0) -> None:
        """Says goodbye, finishes what the bus asked for within the grace period, and ends. May be called again."""
        self._closing = True
        self._changes.tell()
        link = self._link
        if link is not None and link.attached is not None:
            link.session.send_drain(reason, grace_seconds)
            await self._finish_asked(link, grace_seconds)
        self.calls.close(self._closed_text, Code.CANCELLED)
        if link is not None and link is self._link:
            link.end_direction()
            if link.attached is not None and not link.session.in_flight:
                await self._until_gone(link, CLOSING_SECONDS)
            link.stream.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _finish_asked(self, link: Link, grace_seconds: float) -> None:
        """Waits until the bus, which has read our goodbye, ends the stream because nothing is owed any more.

        We do not look at what we owe ourselves: calls may be on their way that the bus sent before it read on.
        """
        until = self.loop.time() + grace_seconds
        while link is self._link and (left := until - self.loop.time()) > 0:
            heard = link.session.last_heard
            await self._until_gone(link, min(left, CLOSING_SECONDS))
            if not link.session.in_flight and link.session.last_heard == heard:
                return
        if link.session.in_flight:
            log.warning("%d calls were not finished within %g s", len(link.session.in_flight), grace_seconds)

    async def _until_gone(self, link: Link, seconds: float) -> None:
        await self._changes.until(lambda: link is not self._link, seconds)

    def _connected(self) -> bool:
        self._check()
        return self._link is not None and self._link.attached is not None

    # The life of the connection.

    def _begin(self, _: None) -> None:
        self._task = self.loop.create_task(self._live())

    async def _live(self) -> None:
        attempt = 0
        try:
            while not self._closing:
                link = Link(self.settings.address, self.loop.time())
                ending = await self._follow(link)
                if self._is_final(link, ending):
                    break
                attempt = 0 if ending.seconds >= STEADY_SECONDS else attempt + 1
                self._tell_loss(ending)
                await self._changes.until(lambda: self._closing, ending.pause(attempt))
        except Exception as problem:
            log.exception("a fault of the SDK ended the connection of %s", self.settings.source)
            self._error = ToolBusError(f"a fault of the SDK: {problem!r}")
        finally:
            self._over = True
            self.calls.close(self._closed_text)
            self._changes.tell()

    async def _follow(self, link: Link) -> Ending:
        """Runs one attempt from its attach to its end."""
        self._link = link
        self._attach(link)
        writer = self.loop.create_task(link.write())
        watch = self.loop.call_later(OPENING_SECONDS, self._watch_silence, link, self.loop.time() + OPENING_SECONDS)
        try:
            ending = await self._read(link)
        finally:
            watch.cancel()
            self._lose(link)
            link.stream.cancel()
            link.end_direction()
            # A writer is never cancelled while its stream lives: it ends because that has ended. But grpcio leaves a
            # write for ever that waits for the first metadata of a stream that was cancelled before they were sent.
            await asyncio.wait([writer], timeout=WRITER_SECONDS)
            writer.cancel()
            await link.channel.close(None)
        return ending

    async def _read(self, link: Link) -> Ending:
        session, stream, arms = link.session, link.stream, self._arms
        code, text = grpc.StatusCode.OK, "the bus ended the stream"
        try:
            while (frame := await stream.read()) is not _EOF:
                for arm, value in session.receive(frame, self.loop.time()):
                    arms[arm](link, value)
                if session.state is State.LEAVING:
                    self._finish_if_idle(link)
        except grpc.aio.AioRpcError as problem:
            code, text = status_of(problem)
        except ProtocolError as problem:
            code, text = grpc.StatusCode.INTERNAL, str(problem)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            code, text = grpc.StatusCode.UNAVAILABLE, "the bus fell silent"
        seconds = self.loop.time() - link.live_at if link.attached is not None else -1.0
        if code is grpc.StatusCode.OK and link.draining:
            text = f"the bus said goodbye: {link.draining}"
            link.all_read = link.draining != "replaced"
        return Ending(code, text, seconds)

    def _lose(self, link: Link) -> None:
        """Settles what hung on a session that is over."""
        session = link.session
        pending, in_flight = session.end()
        self._link = None
        self.calls.lost(session, pending, all_read=link.all_read)
        for each in in_flight:
            each.cancel("the connection to the bus broke")
        self._changes.tell()

    def _watch_silence(self, link: Link, due: float) -> None:
        """Gives up a bus that says nothing; it sends a heartbeat whenever it has nothing else to say."""
        if link is not self._link:
            return
        now = self.loop.time()
        attached = link.attached
        if attached is None:
            link.stream.cancel()
            return
        allowed = 4 * attached.heartbeat_seconds if attached.heartbeat_seconds > 0 else SILENCE_SECONDS
        if now - due > allowed / 4:  # we stood still ourselves: a suspended machine, a debugger
            link.session.restart_pulse(now)
        if (silent := now - link.session.last_heard) > allowed:
            log.warning("the bus at %s has been silent for %.1f s", self.settings.address, silent)
            link.stream.cancel()
            return
        self.loop.call_at(now + allowed / 4, self._watch_silence, link, now + allowed / 4)

    def _is_final(self, link: Link, ending: Ending) -> bool:
        """Decides whether to stay away, and says so in the log."""
        if self._closing:
            return True
        source, address = self.settings.source, self.settings.address
        if link.draining in _STAY_AWAY:
            self._error = PeerLost(f"{source!r} left the bus at {address} for good: {_STAY_AWAY[link.draining]}")
            log.warning("%s", self._error)
        elif self._error is not None:
            log.error("%s", self._error)
        elif ending.seconds < 0 and ending.code in FATAL:
            text = ending.text or ending.code.name
            if ending.code is grpc.StatusCode.UNIMPLEMENTED:
                text = f"what listens at {address} is no toolbus: check the address ({text})"
            self._error = error_of(ending.code, text)
            log.error("the bus at %s refuses %s: %s", address, source, self._error)
            self._delegate.refused([tool.name for tool in self._delegate.declared()], text)
        if self._error is None:
            return False
        self.calls.close(str(self._error))
        return True

    def _tell_loss(self, ending: Ending) -> None:
        address = self.settings.address
        self.calls.trouble = ending.cause
        if ending.seconds >= 0:
            self._complained = False
            log.warning("lost the bus at %s: %s; attaching again", address, ending.cause)
        elif not self._complained:
            self._complained = True
            log.warning("no bus at %s yet: %s; trying until there is one", address, ending.cause)

    # Attaching.

    def _attach(self, link: Link) -> None:
        """Puts an attach with everything that is declared now into a frame of its own."""
        self._dirty = False
        self._refused = ()
        first, *link.rest = portions(self._delegate.declared())
        attach = attach_of(self.settings, first, self._delegate.subscriptions())
        link.attaching = True
        outbox = link.session.outbox
        outbox.seal()
        outbox.room(attach.ByteSize()).attach.CopyFrom(attach)
        outbox.seal()

    def _on_attached(self, link: Link, attached: wire.Attached) -> None:
        copy = wire.Attached()
        copy.CopyFrom(attached)
        first = link.attached is None
        link.attached = copy
        limits = copy.limits
        if first:
            link.live_at = self.loop.time()
            self._complained = False
            self.calls.trouble = ""
            link.session.open(limits.calls_in_flight or 256, limits.message_bytes or MESSAGE_BYTES)
        # Often one for all, and said once.
        self._refused = tuple(dict.fromkeys(each.error for each in copy.refused if each.error))
        why = "; ".join(self._refused)
        self._delegate.attached([each.name for each in copy.refused], why)
        count = len(copy.registered) + sum(map(len, link.rest))
        address, source = self.settings.address, self.settings.source
        if self._refused:
            log.error("the bus at %s refused the tools of %s: %s; the connection stays", address, source, why)
        elif first:
            log.info("attached to the bus at %s as %s with %d tools", address, source, count)
        if link.rest and not self._refused:
            self.loop.create_task(self._register_rest(link))
        else:
            self._attach_done(link)
        if first:
            self.calls.opened(link.session, limits.arguments_bytes or MESSAGE_BYTES)

    async def _register_rest(self, link: Link) -> None:
        """Offers the tools that did not fit into the attach."""
        assert link.attached is not None  # its answer led here
        try:
            for portion in link.rest:
                await link.stub.Register(wire.RegisterRequest(session_id=link.attached.session_id, tools=portion))
        except grpc.aio.AioRpcError as problem:
            if link is not self._link:
                return
            text = problem.details() or problem.code().name
            log.error("the bus at %s refused tools of %s: %s", self.settings.address, self.settings.source, text)
            self._delegate.refused([tool.name for portion in link.rest for tool in portion], text)
            if problem.code() in FATAL:
                self._error = error_of(problem.code(), text)
            link.stream.cancel()
            return
        if link is self._link:
            self._attach_done(link)

    def _attach_done(self, link: Link) -> None:
        link.attaching = False
        self._attach_if_dirty()
        self._changes.tell()

    def _mark_dirty(self, _: None) -> None:
        self._dirty = True
        self._attach_if_dirty()

    def _attach_if_dirty(self) -> None:
        """Declares what changed, unless an attach is on its way: then its answer comes back here."""
        link = self._link
        if not self._dirty or link is None or link.attaching or link.session.drain_sent:
            return
        if link.session.state is State.LIVE:
            self._attach(link)

    # Arms.

    def _on_calls(self, link: Link, calls: Iterable[pb.ToolCall]) -> None:
        session, take = link.session, self._delegate.take
        for call in calls:
            if call.call_id not in session.in_flight:
                session.in_flight[call.call_id] = take(self, session, call)

    def _on_cancels(self, link: Link, cancels: Iterable[pb.ToolCancel]) -> None:
        for cancel in cancels:
            in_flight: IncomingCall | None = link.session.in_flight.get(cancel.call_id)
            if in_flight is not None:
                in_flight.cancel(cancel.reason)

    def _on_events(self, link: Link, events: Iterable[wire.Event]) -> None:
        for event in events:
            self._delegate.event(event)

    def _on_drain(self, link: Link, drain: wire.Drain) -> None:
        link.draining = drain.reason or "shutdown"
        link.session.leave()
        log.info("the bus at %s says goodbye: %s", self.settings.address, link.draining)

    def _answer(self, item: tuple[PeerSession, Result]) -> None:
        session, result = item
        if session.in_flight.pop(result.call_id, self) is self:
            return  # answered already, or its session is over
        link = self._link
        size = len(result.output_json) + 64 + sum(block.ByteSize() for block in result.content)
        if size > 65_536 and link is not None and link.attached is not None:
            result = fitting(result, size, link.attached.limits.result_bytes or session.max_item_bytes)
            size = min(size, session.max_item_bytes)
        session.outbox.room(size).results.append(message_of(result))
        if link is not None and session.state is State.LEAVING:
            self._finish_if_idle(link)

    def _report(self, item: tuple[PeerSession, pb.ToolProgress]) -> None:
        session, progress = item
        if progress.call_id in session.in_flight:
            session.outbox.room(progress.ByteSize()).progress.append(progress)

    def _finish_if_idle(self, link: Link) -> None:
        """Half-closes once the bus has said goodbye and neither side owes the other anything."""
        if not link.session.pending and not link.session.in_flight:
            link.end_direction()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over or self._closing:
            raise PeerLost(self._closed_text)
