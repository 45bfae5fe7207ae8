"""Runs the configured mounts of one bus, each independent of the others."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.core import Core
from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest, Stage
from toolbus.parts.mcp.client.authorization import LoginKeeper, TokenAuthorization, token_path
from toolbus.parts.mcp.client.entries import USER_REFERENCES, MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState, MountTimings
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.parts.mcp.client.transport import Lost, StdioTransport, Transport
from toolbus.parts.mcp.client.user_logins import User, UserLogins
from toolbus.parts.mcp.client.user_servers import PerUserMount
from toolbus.processes.child_environment import MCP_SERVER
from toolbus.processes.lifeline import Lifeline
from toolbus.processes.output_tail import OutputTails
from toolbus.processes.supervisor import PluginReport, ReportKind

if TYPE_CHECKING:
    from toolbus.parts.mcp.client.http_link import Authorization
    from toolbus.parts.mcp.client.token_exchange import TokenExchange

log = logging.getLogger("toolbus.mounts")

OpenTransport = Callable[..., Transport]  # takes an entry, and the authorization of a user
_SERVING = (MountState.LIVE, MountState.DEGRADED, MountState.STOPPED)


def open_remote(
    directory: Path | None,
    entry: MountEntry,
    authorization: Authorization | None = None,
    *,
    keeper: LoginKeeper | None = None,
) -> Transport:
    """Returns the transport to a server over HTTP; with a token, unless its operator wrote an Authorization.

    Args:
        directory: the data directory; None: the bus stores no tokens.
        authorization: of one user; None: that of the mount.
        keeper: as of `TokenAuthorization`.
    """
    from toolbus.parts.mcp.client.http import HttpTransport  # a bus without such a server does not load it

    has_own = any(name.lower() == "authorization" for name in entry.headers)
    if authorization is None and directory is not None and not has_own:
        authorization = TokenAuthorization(entry.name, entry.url, token_path(directory, entry.name), keeper=keeper)
    return HttpTransport(entry.name, entry.url, entry.headers, authorization)


class Mounts:
    """The mounts of one bus, by name.

    Args:
        manifest: stores declarations and approvals.
        open_remote: makes a transport to a server over HTTP.
        logins: of users; None: no user can log in.

    Attributes:
        output: the standard error of the servers.
    """

    def __init__(
        self,
        core: Core,
        manifest: MountManifest,
        open_remote: OpenTransport,
        *,
        logins: UserLogins | None = None,
        timings: MountTimings | None = None,
    ) -> None:
        self._core = core
        self._manifest = manifest
        self._open_remote = open_remote
        self._keeper = core.rooms.provider(LoginKeeper)
        self._timings = timings or MountTimings()
        self._polls: dict[Mount, asyncio.Task[None]] = {}  # of the tokens of mounts that need a login
        self.logins = logins or UserLogins(None, lambda: "")
        self._mounts: dict[str, Mount] = {}
        self._launchers: dict[str, asyncio.Lock] = {}  # held during first starts, by program: `npx`, `uvx`
        self._lifeline: Lifeline | None = None  # None before the first process
        self.output = MountOutput(lambda: self)
        self._changing = asyncio.Lock()
        core.signals.on_source.append(self._source_changed)

    def __repr__(self) -> str:
        return f"<Mounts {' '.join(map(repr, self._mounts.values()))}>"

    def __iter__(self) -> Iterator[Mount]:
        return iter(list(self._mounts.values()))

    def get(self, name: str) -> Mount | None:
        """Returns a mount; None if it does not exist."""
        return self._mounts.get(name)

    def _source_changed(self, source: str) -> None:
        mount = self._mounts.get(source)
        if mount is not None:
            mount.offer.permission_changed()

    def serving(self, source: str) -> bool | None:
        """Tells whether the tools of a mount can be called; None if it does not exist."""
        mount = self._mounts.get(source)
        return None if mount is None else mount.state in _SERVING

    async def log_out(self, mount: str, user: User) -> bool:
        """Ends the login of a user: their server, and all that is kept of them. Tells whether anything was.

        Raises:
            SetupError: a file cannot be removed.
        """
        running = self._mounts.get(mount)
        if isinstance(running, PerUserMount):
            await running.end_user(user)
        return await asyncio.to_thread(self.logins.forget, mount, user)

    async def apply(self, entries: Mapping[str, MountEntry]) -> None:
        """Starts, restarts and stops mounts until exactly these run; unchanged entries are not touched."""
        async with self._changing:
            wanted = {name: entry for name, entry in entries.items() if not entry.disabled}
            ending = [mount.name for mount in self if wanted.get(mount.name) != mount.entry]
            for poll in [self._polls[self._mounts[name]] for name in ending if self._mounts[name] in self._polls]:
                poll.cancel()
            await asyncio.gather(*(self._mounts.pop(name).stop() for name in ending))
            for entry in wanted.values():
                if entry.name not in self._mounts:
                    mount = self._mounts[entry.name] = self._make(entry)
                    mount.start()

    async def stop(self) -> None:
        """Ends all servers and their processes."""
        async with self._changing:
            mounts, self._mounts = self._mounts, {}
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(self.logins.close(), *(mount.stop() for mount in mounts.values()))
            if self._lifeline is not None:
                self._lifeline.close()
                self._lifeline = None

    def _make(self, entry: MountEntry) -> Mount:
        launcher = None if entry.is_remote else self._launchers.setdefault(Path(entry.command).name, asyncio.Lock())
        open_transport = partial(self._open_remote if entry.is_remote else self._open_program, entry)
        options: Any = {"first_start": launcher, "on_state": self._state_changed, "timings": self._timings}
        if entry.bus:
            from toolbus.parts.mcp.client.bus_mount import BusMount  # the SDK, which other mounts do not need

            return BusMount(entry, open_transport, self._manifest, self._core, **options)
        if not entry.is_per_user:
            return Mount(entry, open_transport, self._manifest, self._core, **options)
        options |= {"logins": self.logins, "open_for": self._opener_for_users(entry)}
        return PerUserMount(entry, open_transport, self._manifest, self._core, **options)

    def _opener_for_users(self, entry: MountEntry) -> Callable[[User], Transport]:
        """Returns what makes the transport of one user's server."""
        exchange = None
        if entry.exchange_at:
            from toolbus.parts.mcp.client.token_exchange import ExchangedAuthorization, TokenExchange, token_of

            exchange = TokenExchange(entry, partial(token_of, self._core))

        def open_for(user: User) -> Transport:
            if not entry.is_remote:
                return self._open_program(entry, user, exchange)
            if exchange is not None:
                return self._open_remote(entry, ExchangedAuthorization(exchange, user))
            how = f"{user.shown} gets a link to log in from any call of a tool of {entry.name}"
            path = self.logins.token_file(entry.name, user)
            options: Any = {"keeper": self._keeper, "turns": self.logins.turns}
            return self._open_remote(entry, TokenAuthorization(entry.name, entry.url, path, how, **options))

        return open_for

    def _state_changed(self, mount: Mount) -> None:
        self._core.signals.source_changed(mount.name)
        data_dir = self._core.config.data_dir
        if mount.wants_login and data_dir is not None and mount not in self._polls:
            path = token_path(data_dir, mount.name)
            poll = asyncio.create_task(_poll(path, stamp_of(path), mount.logged_in))
            self._polls[mount] = poll
            poll.add_done_callback(lambda _: self._polls.pop(mount, None))

    def _open_program(
        self, entry: MountEntry, user: User | None = None, exchange: TokenExchange | None = None
    ) -> Transport:
        async def program() -> ServerProgram:
            values = dict.fromkeys(USER_REFERENCES, "")  # the server that lists has no user
            if user is not None:
                texts = "\n".join((*entry.args, *entry.env.values()))
                used = [name for name in USER_REFERENCES if f"${{{name}}}" in texts]
                if "\0" in user.id:
                    raise Lost("cannot run for a user whose id holds a NUL", Stage.NOT_DISPATCHED)
                values["user:id"] = user.id
                if "user:dir" in used:
                    values["user:dir"] = str(await asyncio.to_thread(self.logins.folder, entry.name, user))
                if "user:token" in used and exchange is not None:
                    values["user:token"] = await exchange.token(user)
                    mount = self._mounts.get(entry.name)
                    if isinstance(mount, PerUserMount):  # a process keeps its variables: the next gets another token
                        asyncio.get_running_loop().call_later(exchange.seconds(user), mount.end_when_idle, user)
            return ServerProgram(
                (entry.command, *(_filled(each, values) for each in entry.args)),
                {**MCP_SERVER.choose(os.environ), **{name: _filled(each, values) for name, each in entry.env.items()}},
                str(entry.cwd) if entry.cwd is not None else str(Path.home()),
            )

        return StdioTransport(entry.name, program, self._living, partial(self.output.take, entry.name))

    def _living(self) -> Lifeline:
        if self._lifeline is None:
            self._lifeline = Lifeline()
        return self._lifeline


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Returns a text with the values of a user in it; a value is never read for references again."""
    return re.sub(r"\$\{(user:[a-z]+)\}", lambda match: values.get(match[1], match[0]), text)


# -- the standard error of servers -------------------------------------------------------------------------------------


class MountOutput:
    """The output of the mounts of one bus.

    Args:
        mounts: returns the current mounts.
    """

    source = "toolbus.mounts"

    def __init__(self, mounts: Callable[[], Iterable[Mount]]) -> None:
        self._mounts = mounts
        self._tails = OutputTails()

    def take(self, name: str, line: str) -> None:
        """Stores a line of a server."""
        if not self._tails.has(name):
            self._tails.keep({name, *(mount.name for mount in self._mounts())})
        self._tails(PluginReport(name, ReportKind.OUTPUT, line, "stderr"))

    def plugins(self) -> list[dict[str, Any]]:
        """Returns the state of each mount that runs a program."""
        tails = {row["plugin"]: row for row in self._tails.described()}
        rows = []
        for mount in self._mounts():
            if mount.entry.is_remote:
                continue
            status, row = mount.status(), tails.get(mount.name, {"lines": 0, "next": 0, "since": 0.0})
            about = {"state": status.state.value, "pid": status.pid, "restarts": status.restarts}
            rows.append({**row, "plugin": mount.name, **about, "last_exit": status.last_error})
        return rows

    async def read(self, plugin: str, lines: int, since: int, wait_seconds: float) -> dict[str, Any]:
        if not self._tails.has(plugin):
            self._find(plugin)
            return {"lines": [], "lost": 0, "next": 0}
        return await self._tails.read(plugin, lines, since, wait_seconds)

    def restart(self, plugin: str) -> None:
        self._find(plugin).restart()

    def stop(self, plugin: str) -> None:
        """Refuses: a mount runs as long as it is in the file of mounts."""
        raise InvalidRequest(f"{quote(plugin)} is a mount: `toolbus mounts remove {plugin}` removes it")

    def _find(self, name: str) -> Mount:
        for mount in self._mounts():
            if mount.name == name:
                return mount
        names = list_names(each.name for each in self._mounts())
        raise InvalidRequest(f"there is no mount {quote(name)}; there are: {names}")


# -- logins ------------------------------------------------------------------------------------------------------------

POLL_SECONDS = 1.0  # between two looks at the file of tokens


async def _poll(path: Path, before: Stamp, then: Callable[[], object]) -> None:
    """Calls `then` once a file is not as it was before."""
    while stamp_of(path) == before:
        await asyncio.sleep(POLL_SECONDS)
    then()
