"""Tests that buses which mount each other over MCP never grow each other's catalogs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.client.mount_cases import ERAS
from tests.parts.mcp.server.asking import Mounted
from tests.support.waiting import until
from toolbus.bus import Bus, Config
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState, MountTimings
from toolbus.parts.mcp.client.mounts import Mounts, open_remote
from toolbus.parts.mcp.client.offer import Declared, MountManifest, tools_of
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages.hops import MAX_HOPS, PATH_META, why_refused, with_hop
from toolbus.parts.mcp.messages.tools import write_declaration
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.processes.supervisor import RestartPolicy
from toolbus.protocol.limits import Limits

QUICK = MountTimings(relist_seconds=0.01, restarts=RestartPolicy(backoff_seconds=0.01, max_backoff_seconds=0.05))
PLAIN = {"name": "read", "inputSchema": {"type": "object"}}


class Site:
    """A bus with one tool, that others mount at `/mcp` and that mounts others."""

    def __init__(self, name: str, bus: Bus, url: str) -> None:
        self.name = name
        self.bus = bus
        self.url = url
        self.mounts = Mounts(bus.core, MountManifest(None), partial(open_remote, None), timings=QUICK)
        self.offer(f"of_{name}")

    def offer(self, name: str) -> None:
        async def tool() -> str:
            return self.name

        self.bus.offer("own", spec_of(llm_tool(name=name)(tool)))

    async def mount(self, *others: Site, era: str = "auto") -> None:
        await self.mounts.apply({each.name: MountEntry(each.name, url=each.url, era=era) for each in others})
        await until(lambda: all(each.state in (MountState.LIVE, MountState.DEGRADED) for each in self.mounts))

    def of(self, name: str) -> Mount:
        mount = self.mounts.get(name)
        assert mount is not None
        return mount

    def names(self) -> set[str]:
        return {each.tool.name for each in self.bus.list() if not each.tool.name.startswith("toolbus:")}


@asynccontextmanager
async def sites(*names: str) -> AsyncIterator[list[Site]]:
    async with AsyncExitStack() as stack:
        opened = []
        for name in names:
            config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")
            bus = await stack.enter_async_context(Bus(config, rooms=(GatewayRoom, McpServerRoom)))
            opened.append(Site(name, bus, f"http://{bus.http_address}/mcp"))
            stack.push_async_callback(opened[-1].mounts.stop)
        yield opened


async def settled(site: Site, *names: str) -> None:
    await until(lambda: site.names() == set(names))


async def listening(site: Site, other: Site) -> None:
    """Waits until a mount hears of changes: it opens its subscription after it has listed."""
    for number in count():
        other.offer(f"probe_{number}")
        with suppress(AssertionError):
            await until(lambda: any(":probe_" in name for name in site.names()), seconds=0.2)
            break
    for probe in range(number + 1):
        other.bus.remove_tool(f"probe_{probe}", "own")
    await until(lambda: not any(":probe_" in name for name in site.names()))


async def test_prompts_and_resources_do_not_come_back_either() -> None:
    async with sites("a", "b") as (a, b):
        features_of(b.bus.core).add(Mounted("m", prompts=["p"], resources=["x://0"]))
        await a.mount(b)
        assert [each["name"] for each in a.of("b").features.declared("prompts")] == ["m_p"]
        await b.mount(a)
        [line] = b.of("a").offer.warnings
        assert ("b_m_p" in line, line.startswith("3 of its tools")) == (True, True)
        assert (b.of("a").features.declared("prompts"), b.of("a").features.declared("resources")) == ([], [])


@ERAS
async def test_two_buses_that_mount_each_other_get_each_others_own_tools_and_nothing_comes_back(era: str) -> None:
    async with sites("a", "b") as (a, b):
        await a.mount(b, era=era)
        await b.mount(a, era=era)
        await settled(a, "of_a", "b:of_b")
        await settled(b, "of_b", "a:of_a")
        # A tool that comes later travels once, and its echo is refused at home: with its name in the mount's line.
        await listening(a, b)
        await listening(b, a)
        b.offer("later")
        await settled(a, "of_a", "b:of_b", "b:later")
        await until(lambda: "b_later" in str(b.of("a").offer.warnings))
        [line] = b.of("a").offer.warnings
        assert "came from this bus" in line
        assert b.of("a").state is MountState.LIVE
        assert b.names() == {"of_b", "later", "a:of_a"}
        assert (await b.bus.call("a:of_a")).output == "a"


async def test_a_bus_that_mounts_itself_offers_nothing_twice() -> None:
    async with sites("a") as (a,):
        await a.mount(a)
        await until(lambda: bool(a.of("a").offer.warnings))
        assert a.names() == {"of_a"}


async def test_a_ring_of_three_ends_where_it_began() -> None:
    async with sites("a", "b", "c") as (a, b, c):
        for site, following in ((a, b), (b, c), (c, a)):
            await site.mount(following)
        await settled(a, "of_a", "b:of_b", "b:c_of_c")
        await settled(b, "of_b", "c:of_c", "c:a_of_a")
        await settled(c, "of_c", "a:of_a", "a:b_of_b")
        assert (await c.bus.call("a:b_of_b")).output == "b"


def declared(*declarations: Any, **limits: int) -> Declared:
    return tools_of(MountEntry("north", url="http://127.0.0.1/mcp"), declarations, Limits(**limits))


def test_the_path_of_a_tool_grows_by_each_bus_and_ends_with_the_last_one() -> None:
    listed = PLAIN
    for hop in range(MAX_HOPS):
        assert why_refused(listed, "mine") == ""
        [tool] = declared(listed).tools
        listed = with_hop(write_declaration("read", tool), f"bus-{hop}")
    assert listed["_meta"] == {PATH_META: ["bus-0", "bus-1", "bus-2", "bus-3"]}
    assert why_refused(listed, "mine") == ""
    assert "bus" in why_refused(listed, "bus-2")
    assert "more than 4 buses" in why_refused(with_hop(listed, "bus-4"), "mine")


def test_the_path_stays_where_the_other_metadata_are_too_large() -> None:
    large = with_hop({**PLAIN, "_meta": {"x": "y" * 2000}}, "bus-0")
    [tool] = declared(large, schema_bytes=1000).tools
    assert write_declaration("read", tool)["_meta"] == {PATH_META: ["bus-0"]}


@pytest.mark.parametrize("meta", [None, 5, [], {PATH_META: "x"}, {PATH_META: {}}, {PATH_META: [1, None, {}]}])
def test_a_path_of_another_form_harms_nobody(meta: Any) -> None:
    assert why_refused({**PLAIN, "_meta": meta}, "mine") == ""
    assert with_hop({**PLAIN, "_meta": meta}, "mine")["_meta"][PATH_META][-1] == "mine"


def test_the_name_of_a_bus_in_paths_stays_with_its_data_and_differs_from_all_others(tmp_path: Path) -> None:
    def id_of(data_dir: Path | None) -> str:
        return features_of(Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=data_dir), rooms=()).core).bus_id

    first, second = tmp_path / "first", tmp_path / "second"
    assert id_of(first) == id_of(first)
    assert len({id_of(first), id_of(second), id_of(None), id_of(None)}) == 4


async def test_a_server_that_withdraws_its_last_tool_offers_none() -> None:
    async with sites("a", "b") as (a, b):
        await a.mount(b)
        await settled(a, "of_a", "b:of_b")
        await listening(a, b)
        assert b.bus.remove_tool("of_b", "own")
        await settled(a, "of_a")
