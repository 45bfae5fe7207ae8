import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState, MountTimings
from toolbus.parts.mcp.client.mounts import Mounts
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.processes.supervisor import RestartPolicy
from toolbus.protocol.tool import Result

SERVER = Path(__file__).parents[3] / "support" / "mcp_server.py"


QUICK = MountTimings(
    start_seconds=60.0, relist_seconds=0.01, restarts=RestartPolicy(backoff_seconds=0.01, max_deaths=3)
)


ERAS = pytest.mark.parametrize("era", ["legacy", "modern"])


class House:
    """A bus with mounts."""

    def __init__(self, bus: Bus, manifest: MountManifest, timings: MountTimings) -> None:
        self.bus = bus
        self.mounts = Mounts(bus.core, manifest, lambda entry: pytest.fail("no remote server here"), timings=timings)
        self.revisions: list[int] = []

    async def mount(self, *switches: str, name: str = "small", **entry: Any) -> Mount:
        arguments = ("-I", "-S", str(SERVER), *switches)
        await self.mounts.apply({name: MountEntry(name, command=sys.executable, args=arguments, **entry)})
        mount = self.mounts.get(name)
        assert mount is not None
        return mount

    async def live(self, *switches: str, **entry: Any) -> Mount:
        mount = await self.mount(*switches, **entry)
        await until(lambda: mount.state in (MountState.LIVE, MountState.DEGRADED))
        return mount

    async def call(self, name: str, arguments: dict[str, Any] | str | None = None, **options: Any) -> Result:
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.bus.call(f"small:{name}", arguments, **options)

    def names(self) -> set[str]:
        return {each.tool.name for each in self.bus.list()}


@asynccontextmanager
async def house_of(manifest: MountManifest, timings: MountTimings = QUICK) -> AsyncIterator[House]:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off"), rooms=(McpServerRoom,)) as bus:
        house = House(bus, manifest, timings)
        try:
            yield house
        finally:
            await house.mounts.stop()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with house_of(MountManifest(None)) as house:
        yield house
