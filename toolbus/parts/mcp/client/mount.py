"""Runs one mounted MCP server: starts it when it is needed, offers its declarations, restarts it when it dies.

The tools of the last run are offered before the server has started; the first call starts it. A restart with the same
declarations changes nothing in the catalog.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolbus.bus.calls.call import Call
from toolbus.bus.core import Core
from toolbus.common.text import clean_line, dump_json, shorten
from toolbus.errors import ToolBusError
from toolbus.parts.mcp.client.calls import MountHandler
from toolbus.parts.mcp.client.connection import (
    AUTO,
    CHANGED,
    DiedOfProbe,
    Incoming,
    McpConnection,
    ServerInfo,
    open_connection,
    read_lists,
)
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.features import MountFeatures
from toolbus.parts.mcp.client.offer import Left, MountManifest, MountOffer
from toolbus.parts.mcp.client.transport import Busy, Lost, NeedsLogin, Transport
from toolbus.parts.mcp.features import Requester
from toolbus.parts.mcp.messages.jsonrpc import RpcError
from toolbus.processes.supervisor import RestartPolicy, stats_of_group


class MountState(Enum):
    """The state of a mount."""

    STARTING = "starting"  # its server is installed, started, or listing its tools
    LIVE = "live"
    DEGRADED = "degraded"  # live, but not all its tools are offered
    OFFLINE = "offline"  # the bus that it stands for does not answer
    RESTARTING = "restarting"  # its server died and is started again
    NEEDS_LOGIN = "needs login"
    STOPPED = "stopped"  # its server does not run; a call starts it
    FAILED = "failed"  # its server is given up until an operator restarts it


_GENERATIONS = itertools.count(1)  # of the mounts of this process


@dataclass(frozen=True, slots=True)
class MountStatus:
    """The status of a mount, for operators.

    Attributes:
        reason: why it is in its state; "" if the state is enough.
        fix: what the operator should do; "" for nothing.
        era: ``modern`` or ``legacy``; "" before the first handshake.
        server: its own name and version.
        left: tools that it declares and the bus does not offer.
        hidden: how many tools `allow` and `deny` leave out.
        changed: subjects whose declaration differs from what is trusted, see `fingerprints`.
        pid: of its process; 0 while none runs.
        memory_bytes: of its process group; 0 if the system does not tell.
        restarts: how often it was started again after it died.
        generation: higher for each new server that an operator has it start: a change of its entry, or a restart.
        last_error: why it last died or failed.
        users: how many users have a process or session of their own, where each has a login.
        notices: hints for people about its tools, by name.
        warnings: about the server: lists that it does not end, results that break its own schemas.
    """

    name: str
    state: MountState
    reason: str = ""
    fix: str = ""
    era: str = ""
    version: str = ""
    server: str = ""
    tools: int = 0
    prompts: int = 0
    resources: int = 0
    left: tuple[Left, ...] = ()
    hidden: int = 0
    changed: tuple[str, ...] = ()
    pid: int = 0
    memory_bytes: int = 0
    restarts: int = 0
    generation: int = 0
    last_error: str = ""
    in_flight: int = 0
    users: int = 0
    notices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def memory_of_group(group: int) -> int:
    """Returns the resident memory of a process group in bytes; 0 on other systems than Linux."""
    if not group:
        return 0
    return sum(int(stat[21]) for stat in stats_of_group(group)) * os.sysconf("SC_PAGE_SIZE")


# -- one server --------------------------------------------------------------------------------------------------------

log = logging.getLogger("toolbus.mounts")

MAX_RELIST_SECONDS, RESTS = 30.0, 20  # the longest pause before lists are read again; times the last, which ends it
MAX_LOGGED = 500  # characters of a server's own log message in the log of the bus

FIX_FAILED = "correct its entry, or run `toolbus mounts restart {name}`"
FIX_LOGIN = "run `toolbus mounts add {name} --url … --login`"


@dataclass(frozen=True, slots=True)
class MountTimings:
    """Timeouts and pauses of a mount, in seconds.

    Attributes:
        start_seconds: until a server has listed its declarations.
        longest_start_seconds: the same while its log grows: `npx` and `uvx` install first.
        relist_seconds: before a changed list is read again, so that several changes are one.
        era_seconds: how long calls may run on before a change of the era is given up.
        restarts: when a server that died is started again, and when it is given up.
    """

    start_seconds: float = 60.0
    longest_start_seconds: float = 300.0
    relist_seconds: float = 0.2
    era_seconds: float = 30.0
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


class Mount:
    """One mounted server. All methods belong to the bus's loop.

    Args:
        open_transport: makes the transport of each start.
        manifest: stores declarations and approvals.
        first_start: held during the first start of a server: installers lock their caches.
        on_state: called at each change of the state.

    Attributes:
        offers: whether the bus offers what the server declares; not what it declares to one user.
    """

    offers = True

    def __init__(
        self,
        entry: MountEntry,
        open_transport: Callable[[], Transport],
        manifest: MountManifest,
        core: Core,
        *,
        first_start: asyncio.Lock | None = None,
        on_state: Callable[[Mount], None] = lambda mount: None,
        timings: MountTimings | None = None,
    ) -> None:
        self.entry = entry
        self.handler = self._make_handler(core)
        self.features = MountFeatures(entry, self._connected_for, self.wake)
        self.offer = MountOffer(entry, self.handler, self.features, manifest, core)
        self.state = MountState.STOPPED
        self.reason = "not started yet"
        self.fix = ""
        self.restarts = 0
        self.last_error = ""
        self.wants_login = False  # whether only its operator's login lets it go on; set when it is given up
        self._open_transport = open_transport
        self._first_start = first_start or asyncio.Lock()
        self._on_state = on_state
        self._timings = timings or MountTimings()
        self._peer: ServerInfo | None = None  # from the last handshake; None before the first
        self._transport: Transport | None = None  # of the newest start; None before the first
        self._closing: set[asyncio.Task[None]] = set()  # each ends one server
        self._connection: McpConnection | None = None  # None unless a server is ready
        self._current: McpConnection | None = None  # of the newest start, ready or not
        self._died = ""  # why the running server died; "" while it lives
        self.generation = next(_GENERATIONS)
        self._needed = asyncio.Event()  # set when a server has to run
        self._ready = asyncio.Event()  # set while one is ready
        self._was_ready = False  # whether the newest server became ready
        self._over = asyncio.Event()  # set when the running server has ended, or has to end
        self._deadline: asyncio.Timeout | None = None  # of a start; None while no server starts
        self._began = 0.0  # when that start began
        self._listed_at, self._relist_pause = -math.inf, 0.0  # when lists were read again, and after which pause
        self._relisting: asyncio.Task[None] | None = None  # reads changed lists again; None while none changed
        self._stale: set[str] = set()  # kinds of changed lists
        self._changing_era: asyncio.Task[None] | None = None  # waits to speak the older era; None before the first
        self._speaks_only_modern = False  # whether the server has refused the older era
        self._running: asyncio.Task[None] | None = None  # None until `start`, and after `stop`

    def __repr__(self) -> str:
        return f"<Mount {self.entry.name} {self.state.value}>"

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def users(self) -> int:
        """How many users have a server of their own."""
        return 0

    @property
    def _idle_seconds(self) -> float:
        """Without a call, after which the server ends; 0: never."""
        return self.entry.idle_seconds

    def _make_handler(self, core: Core) -> MountHandler:
        return MountHandler(self.entry, core.calls.dispatcher, self)

    async def _connected_for(self, asker: Requester) -> McpConnection:
        """Returns the connection for a request of an MCP client; see `connected`."""
        return await self.connected()

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Offers the declarations of the last run; starts the server if it has none, or is eager."""
        self._peer = self.offer.restore()
        if self._peer is None or self.entry.eager:
            self._needed.set()
        self._running = asyncio.create_task(self._run(), name=f"mount {self.name}")

    async def stop(self) -> None:
        """Ends the server and withdraws its tools."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.gather(*self._closing, return_exceptions=True)
        if self.offers:
            self.offer.withdraw()

    def restart(self) -> None:
        """Restarts the server, also one that was given up or waits for a login."""
        self.generation = next(_GENERATIONS)
        self.wants_login = False
        if self.state in (MountState.FAILED, MountState.NEEDS_LOGIN):
            self._set(MountState.STARTING)
        self._over.set()
        self._needed.set()

    def wake(self) -> None:
        """Starts the server if it does not run. One that was given up stays so."""
        if self.state not in (MountState.FAILED, MountState.NEEDS_LOGIN):
            self._needed.set()

    async def connected(self) -> McpConnection:
        """Returns the connection to the server, which is started first if it does not run.

        Raises:
            Lost: the server cannot be started.
        """
        while self._connection is None:
            if self.state in (MountState.FAILED, MountState.NEEDS_LOGIN) or self._running is None:
                raise Lost(self.reason or self.state.value)
            self.wake()
            ready = asyncio.create_task(self._ready.wait())
            try:
                await asyncio.wait((ready, self._running), timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready.cancel()
        return self._connection

    async def _run(self) -> None:
        """Runs one server after the other."""
        deaths: deque[float] = deque(maxlen=self._timings.restarts.max_deaths)
        attempt = 0
        while True:
            if not self._needed.is_set():
                await self._needed.wait()
            self._needed.clear()
            self._over.clear()
            self._set(MountState.RESTARTING if deaths else MountState.STARTING, self.last_error if deaths else "")
            self._was_ready = False
            try:
                death = await self._serve()
            except NeedsLogin as error:
                self._refused(error)
                continue
            except (Lost, Busy, RpcError, TimeoutError, OSError, ToolBusError) as error:
                death = f"cannot be started: {_explain(error)}"
            except Exception as error:
                log.exception("internal error in mount %s", self.name)
                death = f"cannot be used because of a bug of the bus: {_explain(error)}"
            if not death:  # the server was idle, or an operator restarts it
                self._set(MountState.STOPPED, "idle" if not self._needed.is_set() else "restarted")
                deaths.clear()
                continue
            if self.log_lines:
                death = f"{death}; the last line of its log: {shorten(self.log_lines[-1], 200)}"
            self.last_error = death
            now = time.monotonic()
            deaths.append(now)
            log.warning("mount %s: server %s", self.name, death)
            if self.entry.is_remote:  # other operators restart it, so the bus tries as long as it is configured
                self.handler.fail_waiting(f"server {self.name!r} {death}")
            elif self._timings.restarts.give_up_reason(1, tuple(deaths), ""):
                text = f"died {len(deaths)} times within {self._timings.restarts.window_seconds:g} s: {death}"
                self._give_up(MountState.FAILED, text, FIX_FAILED.format(name=self.name))
                deaths.clear()
                attempt = 0
                continue
            attempt = 0 if self._was_ready else attempt  # the backoff grows only while the server cannot start
            self._set(MountState.RESTARTING, death)
            with contextlib.suppress(TimeoutError):  # not `wait_for`, which may swallow the cancel of `stop`
                async with asyncio.timeout(self._timings.restarts.backoff(attempt)):
                    await self._until_retry()
            attempt += 1
            self.restarts += 1
            self._needed.set()

    async def _until_retry(self) -> None:
        """Waits until an operator restarts the mount, or a call needs a remote server, which is cheap to try."""
        self._over.clear()
        if not self.entry.is_remote:
            await self._over.wait()
            return
        self._needed.clear()
        await asyncio.sleep(self._timings.restarts.backoff(0))
        await self._needed.wait()

    def _give_up(self, state: MountState, reason: str, fix: str) -> None:
        self._needed.clear()
        self.wants_login = state is MountState.NEEDS_LOGIN
        self.last_error = reason
        self._set(state, reason, fix)
        log.error("mount %s: %s: %s; %s", self.name, state.value, reason, fix)
        self.handler.fail_waiting(f"server {self.name!r}: {reason}")
        if self.offers:
            self.offer.take_offline(reason)

    def _refused(self, error: NeedsLogin) -> None:
        self._give_up(MountState.NEEDS_LOGIN, str(error), FIX_LOGIN.format(name=self.name))

    def take_login(self, call: Call, error: NeedsLogin) -> bool:
        """Leaves a call to its handler, which ends it: only the operator can log in."""
        return False

    def logged_in(self) -> None:
        """Goes on after its operator has logged in."""
        self.restart()

    def _set(self, state: MountState, reason: str = "", fix: str = "") -> None:
        self.state, self.reason, self.fix = state, reason, fix
        self._on_state(self)

    # -- one run of the server ----------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        """Runs the server once. Returns why it died; "" if the mount ended it.

        Raises:
            NeedsLogin, Lost, RpcError, TimeoutError: the server cannot be started.
        """
        known = self._peer
        self._died = ""
        connection = self._connect()
        try:
            lock = self._first_start if known is None else contextlib.nullcontext()
            async with lock, self._starting():
                try:
                    peer = await self._handshake(connection, None if known is None else known.modern)
                except DiedOfProbe:
                    log.info("mount %s: the server exits at server/discover: it is started again as legacy", self.name)
                    await self._close(connection)
                    connection = self._connect()
                    peer = await self._handshake(connection, False)
                listing = await read_lists(connection, peer) if self.offers else None
            if known is not None and not known.modern and peer.modern:
                self._speaks_only_modern = True
            self._peer = peer
            if listing is not None:
                await self.offer.take(peer, listing)
            self._became_ready(connection, peer)
            await self._until_over()
            return self._died
        finally:
            self._ready.clear()
            self._connection = None
            self.handler.detach()
            self.features.detach()
            for task in (self._relisting, self._changing_era):
                if task is not None:
                    task.cancel()
            await self._close(connection)

    async def _close(self, connection: McpConnection) -> None:
        """Ends a server and its processes. Continues when the caller is cancelled; `stop` waits for it."""
        closing = asyncio.create_task(connection.close(), name=f"end of mount {self.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def _connect(self) -> McpConnection:
        transport = self._transport = self._open_transport()
        connection: McpConnection

        def on_closed(why: str) -> None:
            if connection is self._current:
                self._died = why
                if self._connection is not None:
                    self._connection = None
                    self._set(MountState.RESTARTING, why)
                self.handler.detach()
                self._over.set()

        self._current = connection = McpConnection(
            transport,
            on_request=self._take_request,
            on_notification=self._take_notification,
            on_closed=on_closed,
            on_activity=self._moved,
            name=self.name,
        )
        return connection

    async def _handshake(self, connection: McpConnection, modern: bool | None) -> ServerInfo:
        self._over.clear()
        await connection.transport.start(connection)
        return await open_connection(connection, modern=modern, era=self.entry.era)

    @contextlib.asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        self._began = asyncio.get_running_loop().time()
        seconds = self._timings.start_seconds
        try:
            async with asyncio.timeout(seconds) as self._deadline:
                yield
        except TimeoutError:
            raise Lost(f"did not list its tools within {seconds:g} s, and its log has stopped") from None
        finally:
            self._deadline = None

    def _moved(self) -> None:
        """Extends the deadline of a start, since the server is active."""
        if self._deadline is not None:
            timings, now = self._timings, asyncio.get_running_loop().time()
            when = min(now + timings.start_seconds, self._began + timings.longest_start_seconds)
            with contextlib.suppress(RuntimeError):  # the start has just ended
                self._deadline.reschedule(max(when, self._began + timings.start_seconds))

    def _became_ready(self, connection: McpConnection, peer: ServerInfo) -> None:
        if connection.closed_why is not None:
            return
        self._connection = connection
        self._show_live()
        if self.offers:
            self.features.attach(connection, peer)
        self.handler.attach(connection)
        self._ready.set()
        self._was_ready = True
        log.info("mount %s: live %s tools=%d", self.name, peer.version, self.offer.tools)

    def _show_live(self) -> None:
        why = self.offer.why_degraded
        self._set(MountState.DEGRADED if why else MountState.LIVE, why)

    async def _until_over(self) -> None:
        """Waits until the server has ended, has to be restarted, or was idle for `idle_seconds`."""
        idle = self._idle_seconds
        while not self._over.is_set():
            left = None if not idle else max(0.01, self.handler.used_at + idle - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._over.wait()
            quiet = time.monotonic() - self.handler.used_at
            if idle and quiet >= idle and self.handler.is_idle and not self.features.subscribed:
                return

    # -- messages of the server ---------------------------------------------------------------------------------------

    def _take_request(self, incoming: Incoming) -> None:
        if self._current is not None:
            self.handler.take_request(incoming, self._current)

    def _take_notification(self, method: str, params: Mapping[str, Any], stream: str) -> None:
        if method in CHANGED:
            self.features.heard()
            self.relist(*CHANGED[method])
        elif method == "notifications/resources/updated":
            self.features.updated(str(params.get("uri") or ""))
        elif method == "notifications/message":
            data = params.get("data")
            text = shorten(data if isinstance(data, str) else dump_json(data), 4000)
            level, shown = clean_line(str(params.get("level") or "info")), shorten(clean_line(text), MAX_LOGGED)
            log.info("%s [%s]: %s", self.name, level, shown)
            self.handler.log_message(text, stream)

    def relist(self, *kinds: str) -> None:
        """Reads lists of the server again after `relist_seconds`; further changes until then are included."""
        self._stale.update(kinds)
        if self._relisting is None and self._connection is not None:
            self._relisting = asyncio.create_task(self._relist(self._connection), name=f"lists of mount {self.name}")

    async def _relist(self, connection: McpConnection) -> None:
        try:
            while self._stale and connection.peer is not None:
                # A server whose lists change all the time is read less and less often.
                rested = time.monotonic() - self._listed_at > RESTS * self._relist_pause
                least = self._timings.relist_seconds
                self._relist_pause = least if rested else min(2 * self._relist_pause, max(MAX_RELIST_SECONDS, least))
                await asyncio.sleep(self._relist_pause)
                kinds, self._stale = tuple(self._stale), set()
                async with asyncio.timeout(self._timings.start_seconds):
                    listing = await read_lists(connection, connection.peer, kinds)
                await self.offer.take(connection.peer, listing)
                self._listed_at = time.monotonic()
                self._show_live()
        except (Lost, Busy, RpcError, TimeoutError) as error:
            log.warning("mount %s: its lists could not be read again: %s", self.name, _explain(error))
        finally:
            self._relisting = None

    # -- the older era ------------------------------------------------------------------------------------------------

    def use_older_era(self) -> bool:
        """Starts to speak the older era, since the server can ask in that one only. Returns whether it will be tried.

        The server is restarted as soon as its calls have ended; calls wait meanwhile.
        """
        if self.entry.era != AUTO or self._speaks_only_modern or self._connection is None:
            return False
        if self._changing_era is None or self._changing_era.done():
            self._changing_era = asyncio.create_task(self._change_era(), name=f"era of mount {self.name}")
        return True

    async def _change_era(self) -> None:
        if not await self.handler.ended(self._timings.era_seconds) or self._peer is None:
            log.warning("mount %s: its calls did not end in time, so its server still cannot ask", self.name)
            self.handler.release()
            return
        log.info("mount %s: its tools ask in the middle of calls, which needs the older era", self.name)
        self._peer = dataclasses.replace(self._peer, modern=False)
        self.restart()

    def output_broken(self, tool: str, why: str) -> None:
        """Notes that a result broke the output schema of its own tool."""
        self.offer.output_broken(tool, why)

    # -- for operators ------------------------------------------------------------------------------------------------

    async def review_again(self) -> None:
        """Offers the declarations again after an approval."""
        await self.offer.review_again()
        if self._connection is not None:
            self._show_live()

    @property
    def log_lines(self) -> list[str]:
        """The newest lines of the server's log."""
        return list(getattr(self._transport, "log_lines", ()))

    def status(self) -> MountStatus:
        """Returns the current status; takes some milliseconds, since it reads the memory of processes."""
        return _status_of(self, self._peer, int(getattr(self._transport, "pid", 0)))


def _status_of(mount: Mount, peer: ServerInfo | None, pid: int) -> MountStatus:
    info = dict(peer.info) if peer is not None else {}
    declared = mount.offer.declared
    return MountStatus(
        name=mount.name,
        state=mount.state,
        reason=mount.reason,
        fix=mount.fix,
        era="" if peer is None else "modern" if peer.modern else "legacy",
        version="" if peer is None else peer.version,
        server=" ".join(clean_line(str(info[key])) for key in ("name", "version") if info.get(key)),
        tools=mount.offer.tools,
        prompts=len(mount.features.declared("prompts")),
        resources=len(mount.features.declared("resources")),
        left=declared.left,
        hidden=declared.hidden,
        changed=mount.offer.changed,
        pid=pid,
        memory_bytes=memory_of_group(pid),
        restarts=mount.restarts,
        generation=mount.generation,
        last_error=mount.last_error,
        in_flight=len(mount.handler.pending),
        users=mount.users,
        notices=declared.notices,
        warnings=mount.offer.warnings,
    )


def _explain(error: BaseException) -> str:
    if isinstance(error, RpcError):
        return f"it answered with error {error.code}: {shorten(clean_line(error.message), 300)}"
    return shorten(clean_line(str(error)), 500) or type(error).__name__
