"""Serves one Invoke RPC: one read loop and one write loop around a session.

Session, presence and dispatcher decide what happens between them; none of these ever waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.streams.held_calls import HeldBudget, HeldCalls
from toolbus.bus.streams.joined_results import HeldOutboxes, JoinedResults
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.presence import Presence
from toolbus.errors import ToolBusError, grpc_status
from toolbus.session import State
from toolbus.stall import StallWatch
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.grpc")

CONNECTION_LOST_SECONDS = 0.05  # until the loop is notified that the connection of a half-closed stream broke

Context = grpc.aio.ServicerContext[Any, Any]

_COUNTED = frozenset({"calls", "results"})  # the fields whose items the traffic counts


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts that the streams of one server share."""

    presence: Presence
    dispatcher: Dispatcher
    attach: Callable[[Peer, wire.Attach, float], None]
    stalls: StallWatch
    held_budget: HeldBudget
    held_outboxes: HeldOutboxes


class InvokeStream:
    """One Invoke RPC: reads frames into the session, writes what waits in its outbox."""

    def __init__(self, shared: SharedParts, peer: Peer, context: Context) -> None:
        presence, dispatcher = shared.presence, shared.dispatcher
        self._presence = presence
        self._peer = peer
        self._held = HeldCalls(peer, dispatcher, shared.stalls, shared.held_budget)
        self._stalls = shared.stalls
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[str, str]] = self._loop.create_future()  # how the RPC is to end
        self._idle: asyncio.Future[None] | None = None  # what the writer waits for while the outbox is empty
        peer.close = self._close
        peer.outbox.wake = self._wake
        peer.outbox.flooded = self._flooded
        self._handle: dict[str, Callable[[Any, float], None]] = {
            "attach": lambda attach, now: shared.attach(peer, attach, now),
            "calls": lambda calls, now: dispatcher.calls(peer, calls, now),
            "progress": lambda progress, now: dispatcher.progress(peer, progress, now),
            "results": JoinedResults(peer, dispatcher, shared.held_outboxes).take,
            "cancels": lambda cancels, now: dispatcher.endings.cancels(peer, cancels, now),
            "heartbeat": self._heartbeat,
            "drain": lambda drain, now: presence.drain_received(peer),
        }
        self._plain = {field: self._handle[field] for field in ("calls", "cancels", "heartbeat")}

    def _heartbeat(self, heartbeat: wire.Heartbeat, now: float) -> None:
        if heartbeat.from_peer:  # any other is an echo: like every frame it shows that the peer is alive
            self._peer.echo(heartbeat)

    def hold(self) -> bool:
        """Holds calls that may be older than the end of a stall; returns whether any can come."""
        if self._peer.state is State.CLOSED or self._peer.half_closed:
            return False
        now = time.monotonic()
        if self._stalls.suspended:  # the tick judges a stall that the monotonic clock has counted
            self._peer.restart_pulse(now)
        self._held.begin(now)
        self._handle.update(calls=self._held.calls, cancels=self._held.cancels, heartbeat=self._held_heartbeat)
        return True

    def settle(self) -> None:
        """Stops holding where nothing came since the stall."""
        self._held.settle(time.monotonic())
        self._resume()

    def _held_heartbeat(self, heartbeat: wire.Heartbeat, now: float) -> None:
        if heartbeat.from_peer:
            self._peer.echo(heartbeat)
        else:
            self._held.echo(heartbeat, now)
            self._resume()

    def _resume(self) -> None:
        if not self._held.holding:
            self._handle.update(self._plain)

    async def run(self) -> None:
        """Runs both loops until the session has ended, then ends the RPC.

        Not a TaskGroup: it would cancel a blocked write, which poisons every later one, and wait for it. A writer that
        is stuck on a peer that never reads is left behind; the RPC ends with the connection.
        """
        reading = self._loop.create_task(self._read())
        writing = self._loop.create_task(self._write())
        opening = self._loop.call_later(self._peer.timings.attach_seconds, self._never_attached)
        try:
            status, text = await self._ended
            reading.cancel()
            # A status sent beside a pending write fails (TOO_MANY_OPERATIONS), and the RPC would never end.
            await asyncio.shield(writing)
            if status != "OK":
                await self._context.abort(grpc.StatusCode[status], text)
        except asyncio.CancelledError:
            self._disconnected("its connection broke")
            raise
        finally:
            opening.cancel()
            reading.cancel()
            self._peer.outbox.discard()
            self._wake()
            self._held.drop()

    async def _read(self) -> None:
        peer, read, handle, stalls = self._peer, self._context.read, self._handle, self._stalls
        clock, stall_clock, traffic = time.monotonic, stalls.clock, self._presence.traffic
        try:
            while True:
                frame = await read()
                if stall_clock() > stalls.due:
                    stalls.notice()
                now = clock()
                if frame is grpc.aio.EOF:  # type: ignore[attr-defined]  # the published stubs lag behind
                    break
                suspect = peer.suspect
                traffic.frames_in += 1
                for field, value in peer.receive(frame, now):
                    if field in _COUNTED:
                        traffic.items_in += len(value)
                    handle[field](value, now)
                if suspect:
                    self._presence.recovered(peer)
                if peer.state is State.LEAVING:
                    self._leave_if_done()
            if peer.state is State.OPENING:
                self._end("INVALID_ARGUMENT", "the stream ended before its first message: send attach first")
            elif peer.state is not State.CLOSED:
                if self._held:  # the peer cannot echo; this task is cancelled meanwhile if its connection broke
                    await asyncio.sleep(CONNECTION_LOST_SECONDS)
                    self._held.release(clock())
                self._presence.half_closed(peer, clock())
                self._leave_if_done()
        except ToolBusError as error:
            self._end(*grpc_status(error))
        except DecodeError as error:
            self._end("INVALID_ARGUMENT", f"a message cannot be decoded as InvokeRequest: {error}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if type(error).__module__.startswith("grpc"):
                self._disconnected("its connection broke")
            else:
                log.exception("a fault of the bus ended the session of %s", peer.source or "a new peer")
                self._end(*grpc_status(error))

    async def _write(self) -> None:
        peer, outbox, write = self._peer, self._peer.outbox, self._context.write
        traffic = self._presence.traffic
        try:
            await self._context.send_initial_metadata(())  # clients such as tonic's wait for it before they write
            while True:
                frame = None if outbox.held else outbox.take()
                if frame is not None:
                    if peer.traced:
                        peer.note_sent(time.monotonic())
                    traffic.frames_out += 1
                    traffic.items_out += len(frame.calls) + len(frame.results)
                    await write(frame)
                    continue
                if self._peer.state is State.LEAVING:
                    self._leave_if_done()
                if self._peer.state is State.CLOSED:
                    return
                self._idle = self._loop.create_future()
                await self._idle
        except Exception:  # whatever a write raises means that the peer has disconnected
            self._disconnected("its connection broke")

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _never_attached(self) -> None:
        if self._peer.state is State.OPENING:
            seconds = self._peer.timings.attach_seconds
            self._disconnected(f"no attach arrived within {seconds:g} s: send it as the first message")

    def _leave_if_done(self) -> None:
        if self._peer.idle and not self._held:
            self._end("OK", "its stream ended" if self._peer.half_closed else "it left")

    def _flooded(self) -> None:
        outbox = self._peer.outbox
        if outbox.waiting_bytes > outbox.max_bytes:
            limit, why = "waiting_bytes", f"more than {outbox.max_bytes} bytes wait for it"
        else:
            limit, why = (
                "held_bytes",
                f"more than {outbox.pool.max_bytes} bytes wait for all peers, most for it",
            )
        text = f"the peer reads too slowly: {why} (limit {limit})"
        # Later: the dispatcher is in the middle of a frame.
        self._loop.call_soon(self._end, "RESOURCE_EXHAUSTED", text)

    def _disconnected(self, why: str) -> None:
        self._end("UNAVAILABLE", why)

    def _end(self, status: str, text: str) -> None:
        self._presence.end(self._peer, text, time.monotonic(), status=status)

    def _close(self, status: str, text: str) -> None:
        if not self._ended.done():
            self._ended.set_result((status, text))
        self._peer.outbox.held = False
        self._wake()
