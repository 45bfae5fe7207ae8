"""Gives each user of a mount a server of their own: a process, or a session over HTTP with their token.

The mount itself only lists what its server declares, with the operator's login or with none, and runs no call. So what
one user's server keeps, answers or lists never reaches another. A user is whom a call is for, as its caller proved.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from toolbus.bus.calls.call import Call, InputExchange
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.core import Core
from toolbus.common.text import dump_json
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.parts.mcp.client.calls import BUSY_SECONDS, MountHandler, failure
from toolbus.parts.mcp.client.connection import McpConnection
from toolbus.parts.mcp.client.entries import MAX_IN_FLIGHT, MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState
from toolbus.parts.mcp.client.transport import Lost, NeedsLogin, Transport
from toolbus.parts.mcp.client.user_logins import User, UserLogins
from toolbus.parts.mcp.features import Requester
from toolbus.protocol.questions import ELICITATION, NEEDS_INPUT, URL
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")

USER_IDLE_SECONDS = 300.0  # without a call, after which a user's server ends, where the mount names no other time
WAIT_SECONDS = 60.0  # how long a call waits for a login that its user has begun, within most of its own timeout
STATE = "toolbus:login"  # the request_state of a call that waits for a login
KEY = "login"  # of the question
_LOOK_SECONDS = 0.5  # between two looks whether a server is idle that has to end
_LISTED_SECONDS = 0.01  # after which the process that lists a program's tools ends


class UserHandler(MountHandler):
    """The handler of a mount in the registry where each user has a server: it passes each call to that of its user."""

    def __init__(self, entry: MountEntry, dispatcher: Dispatcher, mount: PerUserMount) -> None:
        super().__init__(entry, dispatcher, mount)
        self.max_in_flight = min(MAX_IN_FLIGHT, entry.max_in_flight * entry.max_users)
        self._entry = entry
        self._mount = mount
        self._waiting: dict[str, asyncio.Task[None]] = {}  # what calls wait for that have no server yet, by id

    @property
    def load(self) -> int:
        """How many calls of all users run."""
        return len(self.pending)

    def attach(self, connection: McpConnection) -> None:
        """Does nothing: this connection only lists."""

    def detach(self) -> None:
        """Does nothing: the users' servers go on."""

    def fail_waiting(self, why: str) -> None:
        """Does nothing: no call waits for the server that lists."""

    def pass_on(self, call: Call, now: float) -> None:
        """Passes a call to the server of its user; one that waited for a login waits until that has ended."""
        user, exchange = User.of(call), call.exchange
        if exchange is not None and exchange.state == STATE:
            self._later(call, self._go_on(call, user, exchange))
        else:
            self._run(call, user)

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels a call at the server of its user."""
        waiting = self._waiting.pop(call.id, None)
        if waiting is not None:
            waiting.cancel()
            return True
        server = self._mount.server_with(call)
        return server is None or server.handler.cancel(call, reason)

    def stage(self, call: Call) -> Stage:
        server = self._mount.server_with(call)
        if server is not None:
            return server.handler.stage(call)
        return Stage.NOT_DISPATCHED if call.id in self._waiting else Stage.DISPATCHED

    def ask(self, call: Call, user: User, error: NeedsLogin) -> None:
        """Ends a call with the question that its user has to log in."""
        self._later(call, self._ask(call, user, error))

    def _run(self, call: Call, user: User) -> None:
        server = self._mount.server_of(user)
        what = ""
        if server is None:
            what = f"{self._entry.max_users} users are busy at mount {self.source!r} (max_users)"
        elif (load := server.handler.load) >= self._entry.max_in_flight:
            what = f"mount {self.source!r} runs {load} calls of one user (max_in_flight)"
        else:
            server.handler.pass_on(call, time.monotonic())
        if what:
            self.refuse(call, f"{what}: retry later", Code.OVERLOADED, BUSY_SECONDS)

    def _later(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        task = self._waiting[call.id] = asyncio.create_task(self._ending(call, work), name=f"login for {call.id}")
        task.add_done_callback(lambda _: self._waiting.pop(call.id, None))

    async def _ending(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        """Does some work, whose failure ends the call."""
        try:
            await work
        except ToolBusError as error:
            self.refuse(call, str(error))
        except Exception:
            log.exception("internal error in a login at mount %s", self.source)
            self.end(call, failure(Code.INTERNAL, "a fault of the bus; its log has the details", Stage.NOT_DISPATCHED))

    async def _ask(self, call: Call, user: User, error: NeedsLogin) -> None:
        link = await self._mount.logins.begin(self._entry, user, error.challenge)
        text = f"{user.shown} has to log in at {self.source}"
        if call.exchange is not None and URL in call.exchange.accepts:
            params = {"mode": "url", "message": f"{text}.", "url": link, "elicitationId": link.rpartition("/")[2]}
            questions = {KEY: {"method": ELICITATION, "params": params}}
            self.end(call, pb.ToolResult(input_requests_json=dump_json(questions), request_state=STATE))
            return
        self.refuse(call, f"{text}: have this user open {link}, then call again", reason=NEEDS_INPUT)

    async def _go_on(self, call: Call, user: User, exchange: InputExchange) -> None:
        """Runs a call after its user was asked to log in."""
        answer = json.loads(exchange.responses_json or "{}").get(KEY)
        if not isinstance(answer, dict) or answer.get("action") != "accept":
            self._mount.logins.cancel(self.source, user)
            text = f"{user.shown} did not log in at {self.source}, which this tool needs"
            self.end(call, failure(Code.TOOL, text, Stage.NOT_DISPATCHED, reason="declined"))
            return
        left = call.deadline - time.monotonic()
        await self._mount.logins.ended(self.source, user, min(WAIT_SECONDS, 0.8 * left))
        call.exchange = InputExchange(exchange.accepts)
        self._run(call, user)


class UserServer(Mount):
    """The server of one user: a process, or a session over HTTP. Nothing of what it declares is offered."""

    offers = False

    def __init__(
        self, mount: PerUserMount, user: User, open_transport: Callable[[], Transport], core: Core, **options: Any
    ) -> None:
        self.user = user
        self._mount = mount
        self._asked = False  # whether the running server has refused a call
        super().__init__(mount.entry, open_transport, mount.manifest, core, **options)

    def __repr__(self) -> str:
        return f"<UserServer {self.entry.name} {self.state.value}>"

    @property
    def _idle_seconds(self) -> float:
        return self.entry.idle_seconds or USER_IDLE_SECONDS

    def _make_handler(self, core: Core) -> MountHandler:
        return MountHandler(self.entry, core.calls.dispatcher, self, self._mount.handler)

    def begin(self, peer: Any) -> None:
        """Starts the server.

        Args:
            peer: how the server described itself before; None if that is not known.
        """
        self._peer = peer
        self._needed.set()
        self._running = asyncio.create_task(self._run(), name=f"a user's server of mount {self.name}")

    def wake(self) -> None:
        """Starts the server if it does not run, also where its user had to log in."""
        if self.state is not MountState.FAILED:
            self._needed.set()

    async def connected(self) -> McpConnection:
        """Returns the connection to the server; see `Mount.connected`."""
        self.handler.used_at = time.monotonic()
        if self.state is MountState.NEEDS_LOGIN:
            self.restart()
        return await super().connected()

    def take_login(self, call: Call, error: NeedsLogin) -> bool:
        """Has the user of a call asked to log in; False where no login helps."""
        if self.entry.exchange_at or not self.entry.is_remote:
            return False
        self._asked = True
        self._mount.handler.ask(call, self.user, error)
        return True

    def relist(self, *kinds: str) -> None:
        """Has the mount list again, by its own server: what this one lists is for its user only."""
        self._mount.list_again(*kinds)

    def output_broken(self, tool: str, why: str) -> None:
        """Notes that a result broke the output schema of its tool, without what the result says."""
        self._mount.output_broken(tool, f"a user's result of {tool} breaks its own output schema: it is passed as text")

    async def _serve(self) -> str:
        self._asked = False
        died = await super()._serve()
        return "" if self._asked else died  # the next call opens a session with the user's token

    def _refused(self, error: NeedsLogin) -> None:
        self._needed.clear()
        self._set(MountState.NEEDS_LOGIN, str(error))
        self.handler.ask_waiting(error)


class PerUserMount(Mount):
    """A mount where each user has a login: its own server lists, those of the users run calls.

    Args:
        logins: has users log in.
        open_for: makes the transport of a user's server.
    """

    handler: UserHandler

    def __init__(
        self,
        entry: MountEntry,
        open_transport: Callable[[], Transport],
        manifest: Any,
        core: Core,
        *,
        logins: UserLogins,
        open_for: Callable[[User], Transport],
        **options: Any,
    ) -> None:
        self.logins = logins
        self.manifest = manifest
        self._core = core
        self._open_for = open_for
        self._servers: dict[User, UserServer] = {}
        self._endings: set[asyncio.Task[None]] = set()  # of users' servers
        self._options = {name: options[name] for name in ("first_start", "timings")}
        super().__init__(entry, open_transport, manifest, core, **options)

    @property
    def users(self) -> int:
        """How many users have a server of their own."""
        return len(self._servers)

    @property
    def connected_users(self) -> list[User]:
        """The users who have one."""
        return list(self._servers)

    @property
    def _idle_seconds(self) -> float:
        return 0.0 if self.entry.is_remote else _LISTED_SECONDS

    def _make_handler(self, core: Core) -> MountHandler:
        return UserHandler(self.entry, core.calls.dispatcher, self)

    async def _connected_for(self, asker: Requester) -> McpConnection:
        server = self.server_of(User.of_requester(asker))
        if server is None:
            raise Lost(f"has {self.entry.max_users} users already (max_users): retry later")
        return await server.connected()

    # -- servers of users ---------------------------------------------------------------------------------------------

    def server_of(self, user: User) -> UserServer | None:
        """Returns the server of a user, which is started if needed; None if all that may run are busy."""
        server = self._servers.get(user)
        if server is not None:
            return server
        if len(self._servers) >= self.entry.max_users:
            idle = [each for each in self._servers.values() if each.handler.is_idle]
            if not idle:
                return None
            self._drop(min(idle, key=lambda each: each.handler.used_at))
        if self.entry.is_remote and self.state is MountState.STOPPED:
            self.wake()  # its lists may have changed since they were stored
        open_transport = functools.partial(self._open_for, user)
        server = UserServer(self, user, open_transport, self._core, on_state=self._user_moved, **self._options)
        self._servers[user] = server
        server.begin(self._peer)
        return server

    def server_with(self, call: Call) -> UserServer | None:
        """Returns the server that has a call; None if none has."""
        return next((each for each in self._servers.values() if each.handler.has(call)), None)

    async def end_user(self, user: User) -> None:
        """Ends the server of a user, and its calls."""
        server = self._servers.get(user)
        if server is not None:
            await self._drop(server)

    def end_when_idle(self, user: User) -> None:
        """Ends the server of a user as soon as it runs no call."""
        server = self._servers.get(user)
        if server is not None and server.handler.is_idle:
            self._drop(server)
        elif server is not None:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self.end_when_idle, user)

    def list_again(self, *kinds: str) -> None:
        """Reads lists again, with the server that lists; starts it if it does not run."""
        if self._connection is not None:
            self.relist(*kinds)
        elif self.state in (MountState.STOPPED, MountState.LIVE):
            self.wake()

    def _user_moved(self, server: Mount) -> None:
        assert isinstance(server, UserServer)
        is_over = server.state is MountState.FAILED or (server.state is MountState.STOPPED and server.handler.is_idle)
        if is_over and self._servers.get(server.user) is server:
            self._drop(server)

    def _drop(self, server: UserServer) -> asyncio.Task[None]:
        self._servers.pop(server.user, None)
        server.handler.fail_waiting("the server of this user was ended: retry later")
        task = asyncio.create_task(server.stop())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    # -- the server that lists ----------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Ends all servers and withdraws the tools."""
        for server in list(self._servers.values()):
            self._drop(server)
        await asyncio.gather(*self._endings, return_exceptions=True)
        await super().stop()

    def logged_in(self) -> None:
        """Lists again, since its operator has logged in."""
        super().restart()

    def restart(self) -> None:
        """Ends the servers of the users, whose next calls start them again, and lists again."""
        for server in list(self._servers.values()):
            self._drop(server)
        super().restart()

    def _set(self, state: MountState, reason: str = "", fix: str = "") -> None:
        if state is MountState.STOPPED and self.offer.tools and not self.entry.is_remote:
            reason = self.offer.why_degraded  # the process has listed; those of the users run calls
            state = MountState.DEGRADED if reason else MountState.LIVE
        super()._set(state, reason, fix)

    def _give_up(self, state: MountState, reason: str, fix: str) -> None:
        if not self.offer.tools:
            super()._give_up(state, reason, fix)
            return
        self._needed.clear()  # the tools of its last listing are called with the users' own servers
        self.wants_login = state is MountState.NEEDS_LOGIN
        self._set(MountState.DEGRADED, f"it cannot list its tools again: {reason}", fix)
