"""Stands for one connection where a peer has several buses: a plugin attaches to all, a host to one after the other.

`Plugin` and `Host` use both classes as they use `Connection`, of which each bus has its own. All of them run on one
loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from secrets import token_hex
from typing import Any

from toolbus.errors import Code, PeerLost, Stage, ToolBusError
from toolbus.functions.workers import ChangeSignal, Inbox
from toolbus.parts.buses.addresses import LOOKUP_SECONDS, Addresses, choose, follow
from toolbus.protocol.session import State
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk.attempt import ANSWERED, Delegate, IncomingCall
from toolbus.sdk.connection import Answer, Connection, Postponed, TakeCalls
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.listing import list_request
from toolbus.sdk.outgoing_calls import OutgoingCall, OutgoingCalls, PeerSession
from toolbus.sdk.plugin_client import MAX_IN_FLIGHT, PluginDelegate
from toolbus.sdk.shared_loop import CLOSED, SharedLoop
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.connection")


@dataclass(frozen=True, slots=True)
class BusesTimings:
    """How long a peer waits for a bus before it goes to another one, in seconds. Tests use other values.

    Attributes:
        answer: for an attach, and for a bus that owes an answer; then the next bus is tried.
        tick: between two looks at a bus that owes an answer.
        ping: without a message of it, after which it is asked for one.
        give_up: more, for the calls that a silent bus has: then those that may run twice are made at the next bus.
        lose: more, for its other calls: they end as lost with it.
        hold: that a call which may have run waits for a bus that lists its tool, to learn whether it may run again.
        lookup: between two look-ups of names.
        ready: for further buses, once one has answered a plugin.
    """

    answer: float = 1.0
    tick: float = 0.25
    ping: float = 0.5
    give_up: float = 0.5
    lose: float = 0.25
    hold: float = 5.0
    lookup: float = LOOKUP_SECONDS
    ready: float = 1.0


TIMINGS = BusesTimings()
MAX_USERS = 16  # users for whom a lost host asks which of its lost calls may run again


class Connections:
    """What both kinds share: one loop, the addresses, and the end.

    Attributes:
        settings: of the peer; the address names all buses.
        shared, loop, changes: as of a `Connection`, of all its connections together.
    """

    def __init__(self, settings: ConnectionSettings, timings: BusesTimings = TIMINGS) -> None:
        self.settings = settings
        self.addresses = Addresses(settings)
        self.shared = SharedLoop(f"toolbus-{settings.source}")
        self.loop = self.shared.loop
        self.changes = ChangeSignal()
        self._timings = timings
        self._inbox = Inbox(self.loop)
        self._loops: set[asyncio.Task[None]] = set()  # go on until the end, which cancels them
        self._tasks: set[asyncio.Task[None]] = set()  # end by themselves, soon once it is over
        self._closing = False
        self._over = False
        self._error: ToolBusError | None = None  # why all connections have ended for good; None unless they have
        self._closed_text = f"the connection of {settings.source!r} is closed"

    @property
    def each(self) -> Sequence[Connection]:
        """The connections that exist now."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether it ends, or has ended."""
        return self._closing or self._over

    def start(self) -> None:
        """Starts the thread, which begins to connect."""
        self.shared.start()
        self._inbox.put(lambda _: self._repeat(self._live()))

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs one of the coroutines on the loop, as `Connection.submit`."""
        return self.shared.submit(coroutine)

    def stop_thread(self) -> None:
        """Ends the thread; for after `close`."""
        self.addresses.close()
        self.shared.stop()
        self._inbox.run_remaining()
        for connection in self.each:
            connection.stop_thread()

    async def ended(self) -> None:
        """Waits until no bus is left to connect to; raises as `Connection.ended`."""
        while not self._over:
            await self.changes.next()
        if self._error is not None:
            raise self._error

    async def close(self, reason: str = "closed", grace_seconds: float = 0.0) -> None:
        self._closing = True
        self.changes.notify()
        await asyncio.gather(*(each.close(reason, grace_seconds) for each in self.each))
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(None)

    async def _live(self) -> None:
        raise NotImplementedError

    def _repeat(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loops.add(self.loop.create_task(coroutine))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, error: ToolBusError | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self.changes.notify()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_over:
            raise PeerLost(self._closed_text)


def is_leaving(session: PeerSession | None) -> bool:
    """Tells whether the bus has sent a drain."""
    return session is not None and session.state is State.LEAVING


# -- plugins -----------------------------------------------------------------------------------------------------------


class PluginConnections(Connections):
    """The connections of a plugin, one to each bus. The plugin's own limit of calls is theirs together."""

    def __init__(
        self,
        settings: ConnectionSettings,
        delegate: PluginDelegate,
        take_calls: TakeCalls,
        timings: BusesTimings = TIMINGS,
    ) -> None:
        super().__init__(settings, timings)
        self._delegate = delegate
        self._take_calls = take_calls
        self._limit = settings.max_in_flight or MAX_IN_FLIGHT
        self._members: dict[str, Connection] = {}

    def __repr__(self) -> str:
        return f"<PluginConnections {self.settings.source} to {', '.join(self._members)}>"

    @property
    def each(self) -> Sequence[Connection]:
        """The connections to the buses that answer; all of them while none does."""
        members = tuple(self._members.values())
        return tuple(each for each in members if each.session is not None) or members

    # -- what `Plugin` and its `Runner` use, from any thread -----------------------------------------------------------

    def begin(self, out: OutgoingCall) -> None:
        each = [self._owner(out.parent_session)] if out.parent_session is not None else self.each
        if each and each[0] is not None:
            each[0].begin(out)
        else:
            text = "the call that made this one has ended" if out.parent_session is not None else CLOSED
            out.fail(Code.UNAVAILABLE, text, Stage.NOT_DISPATCHED)

    def answer(self, session: PeerSession, result: Result) -> None:
        if (owner := self._owner(session)) is not None:
            owner.answer(session, result)

    def answer_all(self, answers: list[Answer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        by_session: dict[int, list[Answer]] = {}
        for answer in answers:
            by_session.setdefault(id(answer[0]), []).append(answer)
        for part in by_session.values():
            if (owner := self._owner(part[0][0])) is not None:
                owner.answer_all(part, loop)

    def report(self, session: PeerSession, progress: pb.ToolProgress) -> None:
        if (owner := self._owner(session)) is not None:
            owner.report(session, progress)

    def postpone(self, job: Postponed) -> bool:
        owner = self._owner(job.session)
        return owner is not None and owner.postpone(job)

    def tools_changed(self) -> None:
        """Declares the tools again at each bus."""
        for each in tuple(self._members.values()):
            each.tools_changed()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Waits until one bus has confirmed all tools, and the others too if they answer within a moment.

        Raises:
            RequestError: no bus takes this peer or its tools.
            PeerLost: it was closed.
        """
        while not self._members:
            self._check()
            await self.changes.next()
        waiting = [self.loop.create_task(each.ready()) for each in self._members.values()]
        try:
            pending: set[asyncio.Task[None]] = set(waiting)
            while pending and not any(_succeeded(task) for task in waiting):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=self._timings.ready)
            if not any(_succeeded(task) for task in waiting):
                await waiting[0]
        finally:
            for task in waiting:
                task.cancel()

    async def _live(self) -> None:
        self._update()
        if self.addresses.names:
            self._repeat(follow(self.addresses, self._update, self._timings.lookup))
        while not self._closing:
            members = self._members.values()
            if members and all(each.error is not None for each in members):
                self._end(next(iter(members)).error)
                return
            await self.changes.next()

    def _update(self) -> None:
        """Connects to buses that are new, and forgets those that neither have an address any more nor answer."""
        now = [] if self._closing else self.addresses.now()
        for address in now:
            if address not in self._members:
                settings = self.addresses.settings_of(address)
                delegate = self._delegate.of_bus(address)
                member = Connection(settings, delegate, self._take, self.shared, self.changes)
                delegate.declare = member.tools_changed
                self._members[address] = member
                member.start()
        for address in tuple(self._members):
            if address not in now and self._members[address].session is None and not self._closing:
                self._delegate.forget_bus(address)
                self._spawn(self._members.pop(address).close())
        self.changes.notify()

    def _owner(self, session: PeerSession | None) -> Connection | None:
        return next((each for each in tuple(self._members.values()) if each.session is session), None)

    def _take(
        self, connection: Connection, session: PeerSession, calls: Mapping[str, pb.ToolCall]
    ) -> Mapping[str, IncomingCall]:
        """Takes calls as far as the limit of all buses together goes, and refuses the others."""
        taken = sum(len(each.session.in_flight) for each in self._members.values() if each.session is not None)
        room = max(0, self._limit - taken)
        refused = list(calls)[room:]
        accepted = calls if not refused else {call_id: calls[call_id] for call_id in list(calls)[:room]}
        text = (
            f"plugin {self.settings.source!r} runs {self._limit} calls of all its buses, as many as its max_in_flight "
            "allows: try again"
        )
        limit = ("max_in_flight", float(self._limit))
        error = CallError(Code.OVERLOADED, text, Stage.NOT_DISPATCHED, True, limit)
        for call_id in refused:
            connection.answer(session, Result(call_id, is_error=True, error=error))
        # The runner answers, reports and calls by what it is given here; each of that finds its own connection.
        begun = self._take_calls(self, session, accepted) if accepted else {}  # type: ignore[arg-type]
        return {**begun, **dict.fromkeys(refused, ANSWERED)}


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


# -- hosts -------------------------------------------------------------------------------------------------------------


class _OfOneBus(Delegate):
    """Passes on what the bus in use sends, and nothing of others."""

    def __init__(self, connections: HostConnections, delegate: Any) -> None:
        self.connection: Connection | None = None  # set right after the constructor
        self._connections = connections
        self._delegate = delegate

    def tools(self) -> Sequence[pb.Tool]:
        return ()

    def subscriptions(self) -> Sequence[Any]:
        subscriptions: Sequence[Any] = self._delegate.subscriptions()
        return subscriptions

    def notifications_after(self) -> int:
        return int(self._delegate.notifications_after()) if self._is_used else 0

    def attached(self, attached: wire.Attached) -> None:
        if self.connection is not None:
            self._connections.use(self.connection)
        if self._is_used:
            self._delegate.attached(attached)

    def event(self, event: wire.Event) -> None:
        if self._is_used:
            self._delegate.event(event)

    @property
    def _is_used(self) -> bool:
        return self.connection is not None and self._connections.used is self.connection


class LostCalls:
    """The calls of a host that a lost bus may have run, until it is known whether they may run again."""

    def __init__(self, connections: HostConnections, seconds: float) -> None:
        self._connections = connections
        self._seconds = seconds
        # With the error of those that may not, and until when they wait, by the loop's time.
        self._held: dict[OutgoingCall, tuple[Result, float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, out: OutgoingCall, lost: Result) -> bool:
        """Holds a call; returns whether it is the first, so that `settle` has to run."""
        until = min(asyncio.get_running_loop().time() + self._seconds, out.soft_deadline)
        self._held[out] = lost, until
        return len(self._held) == 1

    def fail(self) -> None:
        held, self._held = self._held, {}
        for out, (lost, _) in held.items():
            out.finish(lost)

    async def settle(self) -> None:
        """Makes the calls again whose tools are repeatable, as the next bus lists them; ends the others.

        A tool that the next bus does not list may come: its plugin attaches there again.
        """
        connections, clock = self._connections, asyncio.get_running_loop().time
        await asyncio.sleep(0)  # calls that are lost together are held together
        try:
            while held := dict(self._held):
                nearest = min(until for _, until in held.values())
                await connections.changes.until(lambda: connections.connected or connections.is_over, nearest - clock())
                calls = [out for out in held if not out.ended]
                repeatable, absent = await self.look_up(calls, nearest - clock()) if calls else (set(), set())
                for out, (lost, until) in held.items():
                    if out in absent and clock() < until and not connections.is_over:
                        continue
                    if self._held.pop(out, None) and (out not in repeatable or not self.begin_again(out, lost)):
                        out.finish(lost)
                if self._held:
                    await connections.changes.until(lambda: connections.is_over, TIMINGS.tick)
        except BaseException:
            self.fail()
            raise

    def begin_again(self, out: OutgoingCall, lost: Result) -> bool:
        """Makes a call again that may have run, with the error in which it would end; returns whether it has time."""
        if out.ended or asyncio.get_running_loop().time() >= out.soft_deadline or self._connections.is_over:
            return False
        out.last_refusal = lost  # its caller learns that an earlier attempt may have run
        self._connections.begin_now((out,))
        return True

    async def look_up(
        self, calls: Sequence[OutgoingCall], seconds: float
    ) -> tuple[set[OutgoingCall], set[OutgoingCall]]:
        """Returns the calls whose tools the bus in use lists as repeatable, for the user of each, or does not list."""
        users: list[tuple[pb.CallContext | None, list[OutgoingCall]]] = []
        for out in calls:
            same = next((group for context, group in users if context == out.options.context), None)
            if same is None:
                users.append((out.options.context, [out]))
            else:
                same.append(out)
        repeatable: set[OutgoingCall] = set()
        absent: set[OutgoingCall] = set()
        for context, group in users[:MAX_USERS]:
            request = list_request(None, sorted({out.name for out in group}), "", True, 0, None)
            if context is not None:
                request.context.CopyFrom(context)
            tools: Sequence[wire.ListedTool] = ()
            with suppress(ToolBusError):
                tools = (await self._connections.unary("List", request, max(seconds, TIMINGS.tick))).tools
            listed, may = {each.tool.name for each in tools}, {each.tool.name for each in tools if each.repeatable}
            repeatable.update(out for out in group if out.name in may)
            absent.update(out for out in group if out.name not in listed)
        return repeatable, absent


class HostConnections(Connections):
    """The connections of a host, to one bus at a time.

    It moves to the next bus when the one in use is lost, drains, or owes an answer for too long. Calls that no bus can
    have begun move with it; those that may have run move if their tool is repeatable by the listing of the next bus.

    Attributes:
        used: the connection to the bus in use; None while there is none.
        begin_now: sends calls on the loop, by the bus in use or as soon as there is one.
    """

    def __init__(
        self, settings: ConnectionSettings, delegate: Any, take_calls: TakeCalls, timings: BusesTimings = TIMINGS
    ) -> None:
        super().__init__(settings, timings)
        self.used: Connection | None = None
        self._delegate = delegate
        self._take_calls = take_calls
        self._lobby = OutgoingCalls(self.loop, settings.address, token_hex(4))  # calls wait here for a bus
        self._lobby.elsewhere = self._move
        self.begin_now = self._lobby.begin_many
        self._candidates: dict[str, Connection] = {}  # that are being tried
        self._former: set[Connection] = set()  # that finish their calls
        self._last = ""  # the address of the bus that was used last; "" before the first
        self._asking = 0  # unary requests that wait for the bus in use
        self._lost = LostCalls(self, timings.hold)

    def __repr__(self) -> str:
        return f"<HostConnections {self.settings.source} {self.used!r}>"

    # -- what hosts use, from any thread -------------------------------------------------------------------------------

    @property
    def calls(self) -> HostConnections:
        """This, as what tells about calls."""
        return self

    @property
    def connected(self) -> bool:
        """Whether a bus takes calls now."""
        return self.used is not None and self.used.calls.connected

    @property
    def no_bus_reason(self) -> str:
        """Why no bus answers; "" while one does, or before the first look."""
        return self._lobby.no_bus_reason

    @property
    def unfinished(self) -> int:
        """The number of calls whose callers still wait."""
        return self._lobby.unfinished + len(self._lost) + sum(each.calls.unfinished for each in self.each)

    @property
    def each(self) -> Sequence[Connection]:
        """The connections that exist now, that to the bus in use first."""
        own = () if self.used is None else (self.used,)
        return tuple(dict.fromkeys((*own, *self._former, *self._candidates.values())))

    @property
    def identity(self) -> str:
        """The name that the key of this host proved to the bus in use; "" without one."""
        return self.used.identity if self.used is not None else ""

    @property
    def expires(self) -> datetime | None:
        return self.used.expires if self.used is not None else None

    def begin_many(self, calls: Iterable[OutgoingCall], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """As `Connection.begin_many`; on the loop too."""
        if loop is not None and self.shared.turn(loop, self._begin_all, calls):
            return
        if not self._inbox.put(self._begin_all, calls):
            for out in calls:
                out.fail(Code.UNAVAILABLE, CLOSED, Stage.NOT_DISPATCHED)

    def begin(self, out: OutgoingCall) -> None:
        self.begin_many((out,))

    def cancel(self, *calls: OutgoingCall) -> None:
        self._inbox.put(self._cancel, calls)

    def tools_changed(self) -> None:
        """Subscribes anew at the bus in use."""
        self._inbox.put(lambda _: self.used.tools_changed() if self.used is not None else None)

    def unanswered(self, seconds: float) -> PeerLost:
        return PeerLost(self._lobby.unanswered(seconds))

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """As `Connection.ready`, for any of the buses."""
        while not self.connected:
            self._check()
            await self.changes.next()

    async def unary(self, method: str, request: Any, timeout: float) -> Any:
        """As `Connection.unary`; a request whose bus is lost goes to the next one."""
        deadline = self.loop.time() + timeout
        while (left := deadline - self.loop.time()) > 0:
            if not await self.changes.until(self._has_bus, left):
                break
            with suppress(PeerLost):
                return await self._ask(method, request, max(deadline - self.loop.time(), 0.001))
            await asyncio.sleep(self.settings.timings.first_pause)
        raise self.unanswered(timeout)

    async def _ask(self, method: str, request: Any, timeout: float) -> Any:
        """Sends a request to the bus in use.

        Raises:
            PeerLost: it was lost, or another bus is in use meanwhile.
        """
        used = self.used
        assert used is not None  # nothing ran since it was there
        asked = self.loop.create_task(used.unary(method, request, timeout))
        asked.add_done_callback(lambda _: self.changes.notify())
        self._asking += 1
        try:
            await self.changes.until(lambda: asked.done() or self.used is not used, timeout + 1.0)
            if asked.done():
                return asked.result()
            raise self.unanswered(timeout)
        finally:
            self._asking -= 1
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def _has_bus(self) -> bool:
        self._check()
        return self.connected

    def use(self, connection: Connection) -> None:
        """Uses a bus that has answered, unless another one is in use."""
        if self.used is not None or self._closing:
            return
        self.used, address = connection, connection.settings.address
        if address != self._last:
            self._delegate.moved()
            if self._last:
                log.warning("host %s uses the bus at %s now", self.settings.source, address)
        self._last = address
        self.begin_now = connection.calls.begin_many
        connection.calls.begin_many(self._lobby.take_unsent())
        self.changes.notify()

    async def close(self, reason: str = "closed", grace_seconds: float = 0.0) -> None:
        await super().close(reason, grace_seconds)
        self._fail_rest(self._closed_text, Code.CANCELLED)

    async def _live(self) -> None:
        await self.addresses.refresh()
        while not self._closing:
            await self._find()
            if self.used is None:
                return
            await self._watch(self.used)

    async def _find(self) -> None:
        """Tries one bus after the other, and then all together, until one answers."""
        for address in self._order():
            self._try(address)
            await self.changes.until(partial(self._is_decided, address), self._timings.answer)
            if self.used is not None:
                break
        while self.used is None and not self._closing:
            reasons = [f"{at}: {each.calls.no_bus_reason}" for at, each in self._candidates.items()]
            self._lobby.no_bus_reason = "; ".join(each for each in reasons if not each.endswith(": "))
            if self._candidates and all(each.error is not None for each in self._candidates.values()):
                error = next(iter(self._candidates.values())).error
                self._end(error)
                self._fail_rest(str(error))
                return
            await self.changes.next(self._timings.lookup)
            if self.addresses.names and self.used is None:
                await self.addresses.refresh()
                for address in self._order():
                    self._try(address)
        tried, self._candidates = self._candidates, {}
        for each in tried.values():
            if each is not self.used:
                self._spawn(each.close())

    def _order(self) -> list[str]:
        """Returns the addresses in the order in which they are tried: after the one that was used last, that last."""
        now = self.addresses.now()
        if self._last in now:
            place = now.index(self._last) + 1
            return now[place:] + now[:place]
        return now

    def _try(self, address: str) -> None:
        if address not in self._candidates and self.used is None and not self._closing:
            delegate = _OfOneBus(self, self._delegate)
            settings = self.addresses.settings_of(address)
            connection = Connection(settings, delegate, self._take_calls, self.shared, self.changes)
            delegate.connection = self._candidates[address] = connection
            connection.calls.elsewhere = self._move
            connection.start()

    def _is_decided(self, address: str) -> bool:
        candidate = self._candidates.get(address)
        failed = candidate is None or candidate.error is not None or bool(candidate.calls.no_bus_reason)
        return self.used is not None or self._closing or failed

    async def _watch(self, used: Connection) -> None:
        """Returns when the bus in use is no longer to be used."""
        timings, clock = self._timings, self.loop.time
        session = used.session
        asked_at = -1.0  # when the bus was asked for a sign of life that it owes; below 0 for none
        while True:
            looked_at = clock()
            await self.changes.until(
                lambda: self._closing or used.session is not session or is_leaving(session), timings.tick
            )
            if self._closing:
                return
            if used.session is not session or session is None:
                self._leave(used)
                used.drop()
                self._spawn(self._retire(used))
                return
            if is_leaving(session):
                self._leave(used)
                self._spawn(self._retire(used))
                return
            now = clock()
            if session.last_heard >= asked_at or now - looked_at > 2 * timings.tick:
                asked_at = -1.0  # it has answered, or this process stood still itself
            if asked_at >= 0:
                if now - asked_at >= timings.answer:
                    log.warning("the bus at %s has not answered for %.1f s", used.settings.address, timings.answer)
                    self._leave(used)
                    self._spawn(self._give_up(used, session, asked_at))
                    return
            elif used.echoes and (session.pending or self._asking) and now - session.last_heard >= timings.ping:
                asked_at = now
                session.send_own_heartbeat()

    def _leave(self, connection: Connection) -> None:
        """Sends no more calls by a connection; those that it has not sent move."""
        connection.retire()
        self.used, self.begin_now = None, self._lobby.begin_many
        self._former.add(connection)
        self._lobby.begin_many(connection.calls.take_unsent())
        self.changes.notify()

    async def _give_up(self, connection: Connection, session: PeerSession, asked_at: float) -> None:
        """Lets a silent bus answer for some time, then ends the connection to it."""

        def answered() -> bool:
            return session.last_heard >= asked_at or connection.session is not session

        async def is_silent(seconds: float) -> bool:
            await self.changes.until(lambda: answered() or self.is_over, seconds)
            return not answered() and not self.is_over

        if await is_silent(self._timings.give_up):
            await self._repeat_pending(connection, session)
            if await is_silent(self._timings.lose):
                connection.drop()
        await self._retire(connection)

    async def _repeat_pending(self, connection: Connection, session: PeerSession) -> None:
        """Makes the calls of a silent bus again whose tools are repeatable; that bus begins none of them later."""
        pending: list[OutgoingCall] = [out for out in session.pending.values() if not out.ended]
        if not pending or not self.settings.repeat:
            return
        repeatable, _ = await self._lost.look_up(pending, self._timings.answer)
        for out in pending:
            if out in repeatable and session.pending.get(out.call_id) is out and not out.ended:
                text = f"the bus at {connection.settings.address} stands still; it may have run {out.name!r}"
                lost = Result(out.call_id, is_error=True, error=CallError(Code.UNAVAILABLE, text, Stage.UNKNOWN))
                connection.calls.cancel(out)
                del session.pending[out.call_id]
                out.ended = False  # only that attempt is cancelled
                if not self._lost.begin_again(out, lost):
                    out.finish(lost)

    async def _retire(self, connection: Connection) -> None:
        """Waits until the calls of a connection have ended, then closes it."""
        while connection.calls.unfinished and not self._closing and connection.session is not None:
            await self.changes.next(self._timings.tick)
        await connection.close()
        self._former.discard(connection)
        self.changes.notify()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin_all(self, calls: Iterable[OutgoingCall]) -> None:
        self.begin_now(calls)

    def _cancel(self, calls: Iterable[OutgoingCall]) -> None:
        for out in calls:
            for each in self.each:
                if each.session is not None and out.call_id in each.session.pending:
                    each.calls.cancel(out)
                    break
            else:
                self._lobby.cancel(out)

    def _move(self, out: OutgoingCall, lost: Result | None) -> None:
        """Makes a call again that its bus did not begin; one that it may have begun is held for now.

        Args:
            lost: the error of a call that may have run.
        """
        if self.is_over:
            error = lost.error if lost is not None else None
            stage = error.stage if error is not None else Stage.NOT_DISPATCHED
            out.fail(Code.CANCELLED if self._closing else Code.UNAVAILABLE, self._closed_text, stage)
        elif lost is None:
            self.begin_now((out,))
        elif not self.settings.repeat:
            out.finish(lost)
        else:
            if self._lost.add(out, lost):
                self._spawn(self._lost.settle())

    def _fail_rest(self, text: str, code: Code = Code.UNAVAILABLE) -> None:
        """Ends the calls that wait for a bus, and those that are made later."""
        self._lobby.close(text, code)
        self.begin_now = self._lobby.begin_many
        self._lost.fail()


class Several:
    """What the SDK and commands use where an address names several buses."""

    @staticmethod
    def check(settings: ConnectionSettings) -> None:
        """Checks the addresses of a peer.

        Raises:
            SetupError: one of them breaks its rule, or the peer's token or credential cannot be used there.
        """
        Addresses(settings)

    choose = staticmethod(choose)

    @staticmethod
    def connect(kind: str, settings: ConnectionSettings, delegate: Any, take_calls: Any) -> Any:
        """Returns what connects a peer of a kind, ``host`` or ``plugin``, to all its buses."""
        return (HostConnections if kind == "host" else PluginConnections)(settings, delegate, take_calls)
