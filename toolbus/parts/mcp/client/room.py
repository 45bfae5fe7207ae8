"""Mounts MCP servers: runs those that the files of mounts name, and offers their tools on the bus.

A bus without such a file loads none of its code.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from toolbus.bus.core import Core, Room
from toolbus.common.text import clean_line
from toolbus.parts.mcp.client.mount_tools import MountTools

if TYPE_CHECKING:
    from toolbus.parts.mcp.client.mount_output import MountOutput
    from toolbus.parts.mcp.client.mounts import Mounts
    from toolbus.parts.mcp.client.mounts_follower import ConfiguredMounts, MountsFollower

log = logging.getLogger("toolbus.mounts")


class McpClientRoom(Room):
    """The mounted MCP servers of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.mounts: Mounts | None = None  # None until the first mount
        self.configured: ConfiguredMounts | None = None  # the content of the files; None where none can exist
        self._tools = MountTools(core.audit)
        self._follower: MountsFollower | None = None  # None where no file can exist
        self._following: asyncio.Task[None] | None = None  # None until started

    @property
    def approver(self) -> MountTools:
        """Approves changes of mounted servers."""
        return self._tools

    @property
    def output(self) -> MountOutput | None:
        """The output of the servers; None where none is mounted."""
        return None if self.mounts is None else self.mounts.output

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools for mounts."""
        return self._tools.tools()

    async def open(self) -> None:
        """Reads the files.

        Raises:
            SetupError: the named one, or that of secrets, cannot be read.
        """
        config = self.core.config
        if config.data_dir is None and config.mcp_servers is None:
            return
        from toolbus.parts.mcp.client.mounts_file import FILE
        from toolbus.parts.mcp.client.mounts_follower import MountsFollower, variables_for

        own = config.data_dir / FILE if config.data_dir is not None else None
        self._tools.file = "" if own is None else str(own)
        self._follower = MountsFollower(own, config.mcp_servers, variables_for(config.mcp_secrets, os.environ))
        self.configured = self._follower.read_first()

    async def start(self) -> None:
        """Offers the known tools of the servers, starts unknown servers, and follows the files from now on."""
        if self._follower is None or self.configured is None:
            return
        await self._apply(self.configured)
        self._following = asyncio.create_task(self._follow(self._follower), name="files of mounts")

    async def stop(self) -> None:
        """Ends every server and its processes."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self.mounts is not None:
            await self.mounts.stop()
        self._tools.close()

    def serving(self, source: str) -> bool | None:
        """Tells whether a mount can be called; None for another source."""
        return self.mounts.serving(source) if self.mounts is not None else None

    def sources(self) -> Iterable[str]:
        """Names the mounts."""
        return [mount.name for mount in self.mounts] if self.mounts is not None else []

    async def _follow(self, follower: MountsFollower) -> None:
        async for configured in follower.follow():
            try:
                await self._apply(configured)
            except Exception:  # the next change may be better
                log.exception("a fault of the bus: the changed mounts were not started")

    async def _apply(self, configured: ConfiguredMounts) -> None:
        self.configured = self._tools.configured = configured
        for text in (*configured.notices, *configured.refused.values(), *configured.errors.values()):
            log.warning("%s", clean_line(text))
        if self.mounts is None:
            if not configured.entries:
                return
            self.mounts = self._open_mounts()
        await self.mounts.apply(configured.entries)

    def _open_mounts(self) -> Mounts:
        from toolbus.parts.mcp.client.mount_manifest import FILE, MountManifest
        from toolbus.parts.mcp.client.mounts import Mounts, open_remote

        directory = self.core.config.data_dir
        manifest = MountManifest(directory / FILE if directory is not None else None)
        mounts = Mounts(self.core, manifest, partial(open_remote, directory))
        self._tools.follow(mounts, manifest)
        return mounts
