"""Runs the configured mounts of one bus, each independent of the others."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from toolbus.bus.core import Core
from toolbus.parts.mcp.client.login_watch import LoginWatch
from toolbus.parts.mcp.client.mount import Mount, MountTimings
from toolbus.parts.mcp.client.mount_entry import MountEntry
from toolbus.parts.mcp.client.mount_features import MountFeatures
from toolbus.parts.mcp.client.mount_handler import MountHandler
from toolbus.parts.mcp.client.mount_manifest import MountManifest
from toolbus.parts.mcp.client.mount_output import MountOutput
from toolbus.parts.mcp.client.mount_status import MountState, MountStatus
from toolbus.parts.mcp.client.mounts_file import compare
from toolbus.parts.mcp.client.offer import MountOffer
from toolbus.parts.mcp.client.stdio import StdioTransport
from toolbus.parts.mcp.client.transport import Transport
from toolbus.processes.child_environment import MCP_SERVER
from toolbus.processes.duplex_process import DuplexProgram
from toolbus.processes.lifeline import Lifeline

log = logging.getLogger("toolbus.mounts")

OpenTransport = Callable[[MountEntry], Transport]
_SERVING = (MountState.LIVE, MountState.DEGRADED, MountState.STOPPED)


def open_remote(directory: Path | None, entry: MountEntry) -> Transport:
    """Returns the transport to a server over HTTP; with a token, unless its operator wrote an Authorization.

    Args:
        directory: the data directory; None: the bus stores no tokens.
    """
    # A bus without such a server loads no HTTP client.
    from toolbus.parts.mcp.client.authorization import TokenAuthorization
    from toolbus.parts.mcp.client.http import HttpTransport

    has_own = directory is None or any(name.lower() == "authorization" for name in entry.headers)
    tokens = None if has_own or directory is None else TokenAuthorization(entry.name, entry.url, directory)
    return HttpTransport(entry.name, entry.url, entry.headers, tokens)


class Mounts:
    """The mounts of one bus, by name.

    Args:
        manifest: stores declarations and approvals.
        open_remote: makes a transport to a server over HTTP.

    Attributes:
        output: the standard error of the servers.
    """

    def __init__(
        self,
        core: Core,
        manifest: MountManifest,
        open_remote: OpenTransport,
        *,
        timings: MountTimings | None = None,
    ) -> None:
        self._core = core
        self._manifest = manifest
        self._open_remote = open_remote
        self._timings = timings or MountTimings()
        self._logins = LoginWatch(core.config.data_dir)
        self._mounts: dict[str, Mount] = {}
        self._launchers: dict[str, asyncio.Lock] = {}  # held during first starts, by program: `npx`, `uvx`
        self._lifeline: Lifeline | None = None  # None before the first process
        self.output = MountOutput(lambda: self)
        self._changing = asyncio.Lock()
        core.signals.on_source(self._source_changed)

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

    def statuses(self) -> list[MountStatus]:
        """Returns the status of each mount."""
        return [mount.status() for mount in self]

    def serving(self, source: str) -> bool | None:
        """Tells whether the tools of a mount can be called; None if it does not exist."""
        mount = self._mounts.get(source)
        return None if mount is None else mount.state in _SERVING

    async def apply(self, entries: Mapping[str, MountEntry]) -> None:
        """Starts, restarts and stops mounts until exactly these run; unchanged entries are not touched."""
        async with self._changing:
            difference = compare({mount.name: mount.entry for mount in self}, entries)
            ending = [*difference.removed, *(entry.name for entry in difference.changed)]
            await asyncio.gather(*(self._mounts.pop(name).stop() for name in ending))
            for entry in (*difference.changed, *difference.added):
                mount = self._mounts[entry.name] = self._make(entry)
                mount.start()

    async def stop(self) -> None:
        """Ends all servers and their processes."""
        async with self._changing:
            mounts, self._mounts = self._mounts, {}
            self._logins.close()
            await asyncio.gather(*(mount.stop() for mount in mounts.values()))
            if self._lifeline is not None:
                self._lifeline.close()
                self._lifeline = None

    def _make(self, entry: MountEntry) -> Mount:
        core = self._core
        mount: Mount
        handler = MountHandler(
            entry.name,
            entry.max_in_flight,
            core.dispatcher,
            wake=lambda: mount.wake(),
            stale=lambda: mount.relist("tools"),
            output_broken=lambda tool, why: mount.output_broken(tool, why),
            use_older_era=lambda: mount.use_older_era(),
            rate=entry.rate,
        )
        offer = MountOffer(
            entry,
            handler,
            MountFeatures(entry, lambda: mount.connected(), lambda: mount.wake()),
            self._manifest,
            core,
        )
        mount = Mount(
            entry,
            partial(self._open_remote if entry.is_remote else self._open_program, entry),
            offer,
            handler,
            first_start=None
            if entry.is_remote
            else self._launchers.setdefault(Path(entry.command).name, asyncio.Lock()),
            on_state=self._state_changed,
            timings=self._timings,
        )
        return mount

    def _state_changed(self, mount: Mount) -> None:
        self._core.signals.source_changed(mount.name)
        if mount.state is MountState.NEEDS_LOGIN:
            self._logins.wait(mount.name, mount.restart)

    def _open_program(self, entry: MountEntry) -> Transport:
        program = DuplexProgram(
            (entry.command, *entry.args),
            {**MCP_SERVER.choose(os.environ), **entry.env},
            str(entry.cwd) if entry.cwd is not None else str(Path.home()),
        )
        return StdioTransport(entry.name, program, self._living, partial(self.output.take, entry.name))

    def _living(self) -> Lifeline:
        if self._lifeline is None:
            self._lifeline = Lifeline()
        return self._lifeline
