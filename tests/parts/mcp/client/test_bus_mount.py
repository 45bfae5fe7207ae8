"""Tests buses that mount another bus: what is passed on, what is refused, and what callers see when it goes."""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.served_bus import address_of, start_bus
from tests.support.waiting import until, within
from toolbus.bus import Bus, Config
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.parts.identity.key_store import CredentialRequest
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.mcp.client.entries import BUS_IN_FLIGHT, MountEntry
from toolbus.parts.mcp.client.files import read_document
from toolbus.parts.mcp.client.mount import Mount, MountState, MountTimings
from toolbus.parts.mcp.client.mounts import Mounts, open_remote
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.processes.supervisor import RestartPolicy
from toolbus.sdk import Answer, CallContext, Host, Plugin, Progress, ToolScope
from toolbus.testing import running_bus

QUICK = MountTimings(relist_seconds=0.01, restarts=RestartPolicy(backoff_seconds=0.01, max_backoff_seconds=0.05))
UP = (MountState.LIVE, MountState.DEGRADED)


class Site:
    """A bus that others mount, over gRPC or MCP, and that mounts others."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.name, self.bus = name, bus
        self.grpc = bus.grpc_addresses[0]
        self.mounts = Mounts(bus.core, MountManifest(None), functools.partial(open_remote, None), timings=QUICK)
        self.entries: dict[str, MountEntry] = {}

    def offer(self, name: str, source: str = "own", **options: Any) -> None:
        async def tool() -> str:
            return self.name

        self.bus.offer(source, spec_of(llm_tool(name=name, **options)(tool)))

    async def mount(self, other: Site, **options: Any) -> Mount:
        """Mounts another one natively, and waits until its tools are there."""
        return await self.add(MountEntry(other.name, bus=other.grpc, **options))

    async def mount_mcp(self, other: Site) -> Mount:
        return await self.add(MountEntry(other.name, url=f"http://{other.bus.http_address}/mcp"))

    async def add(self, entry: MountEntry) -> Mount:
        self.entries[entry.name] = entry
        await self.mounts.apply(self.entries)
        mount = self.mounts.get(entry.name)
        assert mount is not None
        await until(lambda: mount.state in UP)
        return mount

    def names(self) -> set[str]:
        return {each.tool.name for each in self.bus.list() if not each.tool.name.startswith("toolbus:")}

    def warnings(self, mount: str) -> str:
        found = self.mounts.get(mount)
        assert found is not None
        return "; ".join(found.offer.warnings)


@asynccontextmanager
async def sites(*names: str) -> AsyncIterator[list[Site]]:
    async with AsyncExitStack() as stack:
        opened = []
        for name in names:
            config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", drain_seconds=0.1)
            bus = await stack.enter_async_context(Bus(config, rooms=(StreamsRoom, GatewayRoom, McpServerRoom)))
            opened.append(Site(name, bus))
            opened[-1].offer(f"of_{name}")
            stack.push_async_callback(opened[-1].mounts.stop)
        yield opened


async def settled(site: Site, *names: str) -> None:
    await until(lambda: site.names() == set(names))


async def test_the_own_tools_of_another_bus_are_offered_and_called() -> None:
    async with sites("edge", "north") as (edge, north):
        mount = await edge.mount(north)
        await settled(edge, "of_edge", "north:of_north")
        assert (await edge.bus.call("north:of_north")).output == "north"
        north.offer("later")
        await settled(edge, "of_edge", "north:of_north", "north:later")
        north.bus.remove_tool("of_north", "own")
        await settled(edge, "of_edge", "north:later")
        assert (mount.status().era, mount.status().tools) == ("bus", 1)


@asynccontextmanager
async def plugin_at(site: Site) -> AsyncIterator[list[str]]:
    """A plugin of the other bus: what is passed on reaches a program behind two buses; yields what it began."""
    plugin, began = Plugin("work", address=site.grpc), list[str]()

    @plugin.tool
    async def context(scope: ToolScope) -> dict[str, Any]:
        """Tells what came."""
        own = scope.context
        level = own.attributes.get("level", "")
        return {"user": own.user_id, "level": level, "role": scope.role, "trace": own.traceparent}

    @plugin.tool(min_level=3)
    async def high() -> str:
        return "high"

    @plugin.tool
    async def slow(scope: ToolScope) -> str:
        began.append("slow")
        scope.progress(0.5, total=1.0, message="half")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            began.append("cancelled")
            raise
        return "done"

    @plugin.tool(read_only=True)
    async def reads(scope: ToolScope) -> str:
        scope.progress(0.5)
        began.append("reads")
        await asyncio.sleep(30)
        return "done"

    @plugin.tool
    async def asks(scope: ToolScope) -> str:
        return str(await scope.elicit("Your name?", {"name": {"type": "string"}}))

    @plugin.tool
    async def fails() -> str:
        raise ValueError("broken")

    async with plugin:
        await plugin.ready()
        yield began


async def test_user_level_role_and_trace_come_through_and_a_hidden_tool_stays_hidden() -> None:
    async with sites("edge", "north") as (edge, north), plugin_at(north), Host(edge.grpc) as host:
        await edge.mount(north)
        trace = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
        stated = CallContext("ann", {"level": "4"}, traceparent=trace)
        told = (await host.call("north:context", context=stated)).output
        assert (told["user"], told["level"], told["trace"][3:35]) == ("ann", "4", trace[3:35])
        assert (await host.call("north:high", context=stated)).output == "high"
        below = await host.call("north:high", context=CallContext("ann", {"level": "2"}))
        assert below.error is not None
        assert below.error.code is Code.NOT_FOUND
        assert "north:high" not in {each.name for each in await host.list()}


def greeting(role: str) -> str:
    """Greets."""
    return role


async def test_each_role_reaches_its_own_tool_and_a_role_that_the_other_bus_lacks_reaches_tools_for_all() -> None:
    here, there = ("pirate", "cook", "captain"), ("pirate", "cook", "judge")
    async with AsyncExitStack() as stack:
        bus, own = [await stack.enter_async_context(running_bus(roles=roles)) for roles in (there, here)]
        host = await stack.enter_async_context(Host(own.grpc_addresses[0]))
        edge, plugin = Site("edge", own), Plugin("work", address=bus.grpc_addresses[0])
        stack.push_async_callback(edge.mounts.stop)
        for role in ("pirate", "cook"):
            bus.offer(f"of-{role}", spec_of(llm_tool(name="greet", role=role)(functools.partial(greeting, role))))

        async def asked(scope: ToolScope) -> str:
            """Tells for which role it runs."""
            return str(scope.role)

        plugin.add_tool(asked, name="asked")
        plugin.add_tool(functools.partial(greeting, "judge"), name="judges", role="judge")
        async with plugin:
            await plugin.ready()
            await edge.mount(Site("north", bus))
            for role in ("pirate", "cook"):
                assert (await host.call("north:greet", role=role)).output == role
                assert (await host.call("north:asked", role=role)).output == role
            assert (await host.call("north:asked", role="captain")).error is None
            assert {each.name for each in await host.list("captain")} == {"north:asked"}
            waiting = {each.name: each.state for each in await host.list(include_offline=True)}
            assert waiting["north:judges"] == "waiting"


async def test_over_mutual_tls_tools_are_listed_up_to_the_level_that_the_key_may_state(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, now=time.time(), host="localhost")
    made = keys.store.add(
        "edge", template("host"), CredentialRequest(tmp_path / "edge.toolbus", 90, "mtls:localhost:1")
    )
    served: Any = {"grpc": ("mtls:localhost:0",), "data_dir": tmp_path}
    async with running_bus(unix=False, **served) as bus, sites("edge") as (edge,):
        north = Site("north", bus)
        for level in (0, 89, 90):
            north.offer(f"level_{level}", min_level=level)
        port = north.grpc.rpartition(":")[2]
        await edge.add(MountEntry("north", bus=f"mtls:localhost:{port}", credential=str(made.file)))
        ann = CallContext("ann", {"level": "89"})
        async with Host(edge.grpc) as host:
            names = {each.name for each in await host.list(context=ann)}
            assert {name for name in names if name.startswith("north:")} == {"north:level_0", "north:level_89"}
            assert (await host.call("north:level_89", context=ann)).output == "north"


async def test_progress_questions_and_failures_of_the_tool_come_through() -> None:
    async with sites("edge", "north") as (edge, north), plugin_at(north), Host(edge.grpc) as host:
        await edge.mount(north)
        seen: list[Progress] = []
        call = asyncio.create_task(host.call("north:slow", timeout=0.5, on_progress=seen.append))
        late = await call
        assert late.error is not None
        assert (late.error.code, late.error.stage) == (Code.DEADLINE_EXCEEDED, Stage.ACCEPTED)
        assert [(each.progress, each.message) for each in seen] == [(0.5, "half")]
        asked = await host.call("north:asks", on_input=lambda question: Answer("accept", {"name": "Ann"}))
        assert "Ann" in str(asked.output)
        failed = await host.call("north:fails")
        assert failed.error is not None
        assert (failed.error.code, failed.error.stage, failed.error.reason) == (Code.TOOL, Stage.ACCEPTED, "ValueError")


async def test_a_cancel_reaches_the_far_tool() -> None:
    async with sites("edge", "north") as (edge, north), plugin_at(north) as started, Host(edge.grpc) as host:
        await edge.mount(north)
        call = asyncio.create_task(host.call("north:slow"))
        await until(lambda: started == ["slow"])
        call.cancel()
        await until(lambda: started == ["slow", "cancelled"])


async def test_a_bus_that_goes_is_listed_as_offline_and_calls_are_answered_at_once_with_the_reason() -> None:
    async with sites("edge") as (edge,), Host(edge.grpc) as host:
        async with sites("north") as (north,), plugin_at(north):
            mount = await edge.mount(north)
            seen: list[Progress] = []
            lost = asyncio.create_task(host.call("north:slow", on_progress=seen.append))
            again = asyncio.create_task(host.call("north:reads", timeout=5.0, on_progress=seen.append))
            await until(lambda: len(seen) == 2)
            await north.bus.stop()
        await until(lambda: mount.state is MountState.OFFLINE)
        error = (await lost).error
        assert error is not None
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.ACCEPTED, False)
        error = (await again).error
        assert error is not None
        assert error.retry_safe
        assert "north:of_north" not in {each.name for each in await host.list()}
        offline = {each.name: each for each in await host.list(include_offline=True)}["north:of_north"]
        assert offline.state == "offline"
        assert north.grpc in offline.last_error
        began = asyncio.get_running_loop().time()
        error = (await host.call("north:of_north")).error
        assert asyncio.get_running_loop().time() - began < 5.0
        assert error is not None
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
        assert north.grpc in error.message
        assert edge.mounts.serving("north") is False


async def test_a_bus_that_starts_while_the_other_is_away_lists_its_last_tools_as_offline() -> None:
    manifest = MountManifest(None)
    async with sites("edge") as (edge,):
        async with sites("north") as (north,):
            edge.mounts = Mounts(edge.bus.core, manifest, functools.partial(open_remote, None), timings=QUICK)
            await edge.mount(north)
            await edge.mounts.stop()
        assert edge.names() == {"of_edge"}
        edge.mounts = Mounts(edge.bus.core, manifest, functools.partial(open_remote, None), timings=QUICK)
        await edge.mounts.apply(edge.entries)
        error = (await edge.bus.call("north:of_north")).error
        assert error is not None
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
        assert edge.names() == {"of_edge"}
        await edge.mounts.stop()


async def test_a_bus_that_comes_back_is_called_again() -> None:
    async with sites("edge") as (edge,):
        async with sites("north") as (north,):
            mount = await edge.mount(north)
        await until(lambda: mount.state is MountState.OFFLINE)
        config = Config(grpc=(north.grpc,), http="off")
        async with Bus(config, rooms=(StreamsRoom,)) as bus:
            again = Site("north", bus)
            again.offer("of_north")
            await until(lambda: mount.state is MountState.LIVE)
            assert (await edge.bus.call("north:of_north")).output == "north"


async def test_a_bus_that_stands_still_is_offline_within_its_heartbeats_and_runs_nothing_later(tmp_path: Path) -> None:
    config = Config(grpc=("127.0.0.1:0",), http="off", heartbeat_seconds=0.2, missed_heartbeats=4)
    with start_bus(tmp_path, "--http", "off", "--grpc", "127.0.0.1:0") as process:
        async with Bus(config, rooms=(StreamsRoom,)) as bus:
            edge, runs = Site("edge", bus), list[str]()
            plugin = Plugin("work", address=address_of(process))

            @plugin.tool
            async def note(text: str) -> str:
                runs.append(text)
                return text

            async with plugin:
                await plugin.ready()
                mount = await edge.add(MountEntry("north", bus=address_of(process)))
                process.send(signal.SIGSTOP)
                stuck = asyncio.create_task(bus.call("north:note", {"text": "stuck"}))
                await until(lambda: mount.state is MountState.OFFLINE)
                error = (await within(stuck)).error
                assert error is not None
                assert (error.code, error.stage) == (Code.UNAVAILABLE, Stage.UNKNOWN)
                at_once = (await within(bus.call("north:note", {"text": "no"}))).error
                assert at_once is not None
                assert at_once.stage is Stage.NOT_DISPATCHED
                process.send(signal.SIGCONT)
                await until(lambda: mount.state is MountState.LIVE)
                assert (await bus.call("north:note", {"text": "again"})).output == "again"
                assert runs == ["again"]
            await edge.mounts.stop()


async def test_an_unmounted_bus_takes_its_tools_and_calls_along() -> None:
    async with sites("edge", "north") as (edge, north), plugin_at(north) as started, Host(edge.grpc) as host:
        await edge.mount(north)
        seen: list[Progress] = []
        call = asyncio.create_task(host.call("north:slow", on_progress=seen.append))
        await until(lambda: bool(seen and started))
        await edge.mounts.apply({})
        error = (await call).error
        assert error is not None
        assert (error.code, error.stage) == (Code.UNAVAILABLE, Stage.ACCEPTED)
        assert edge.names() == {"of_edge"}


def test_a_bus_gets_as_many_calls_at_once_as_from_any_host_and_its_token_from_the_environment() -> None:
    written: dict[str, Any] = {"north": {"bus": "127.0.0.1:1", "token": "${NORTH}"}}
    written["few"] = {"bus": "dns:north:48931", "toolbus": {"max_in_flight": 3}}
    read = read_document({"mcpServers": written}, "mcp.json", {"NORTH": "secret"})
    assert (read.refused, read.notices) == ({}, ())
    assert (read.entries["north"].max_in_flight, read.entries["north"].token) == (BUS_IN_FLIGHT, "secret")
    assert read.entries["few"].max_in_flight == 3
    assert "secret" not in repr(read.entries["north"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bus": "127.0.0.1:1", "url": "http://127.0.0.1"}, "both url and bus"),
        ({"bus": "127.0.0.1:1", "headers": {"a": "b"}}, "headers"),
        ({"bus": "127.0.0.1:1", "era": "legacy"}, "era"),
        ({"url": "http://127.0.0.1", "token": "x"}, "token"),
        ({"bus": "http://127.0.0.1:1"}, "http://127.0.0.1:1"),
        ({}, "neither command nor url nor bus"),
    ],
)
def test_an_entry_says_what_does_not_go_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        MountEntry("north", **fields)


# -- no circles --------------------------------------------------------------------------------------------------------


async def test_two_buses_that_mount_each_other_offer_each_others_own_tools_only() -> None:
    async with sites("a", "b") as (a, b):
        await a.mount(b)
        await b.mount(a)
        await settled(a, "of_a", "b:of_b")
        await settled(b, "of_b", "a:of_a")
        await until(lambda: "came from this bus" in a.warnings("b"))
        assert (await b.bus.call("a:of_a")).output == "a"


async def test_a_bus_that_mounts_itself_says_so() -> None:
    async with sites("a") as (a,):
        mount = await a.mount(a)
        assert a.names() == {"of_a"}
        assert "came from this bus" in mount.offer.warnings[0]


@pytest.mark.parametrize("transit", [False, True])
async def test_a_triangle_ends_where_it_began(transit: bool) -> None:
    async with sites("a", "b", "c") as (a, b, c):
        for site, other in ((a, b), (b, c), (c, a)):
            await site.mount(other, transit=transit)
        await until(lambda: "b:of_b" in a.names() and "c:of_c" in b.names() and "a:of_a" in c.names())
        if not transit:
            await until(lambda: "came to it from another bus" in a.warnings("b"))
            assert a.names() == {"of_a", "b:of_b"}
            return
        await until(lambda: len(a.names()) == len(b.names()) == len(c.names()) == 3)
        await until(lambda: "came from this bus" in a.warnings("b"))
        [through] = a.names() - {"of_a", "b:of_b"}
        assert (await a.bus.call(through)).output == "c"


async def test_native_and_mcp_mounts_in_a_circle_end_too() -> None:
    async with sites("a", "b", "c") as (a, b, c):
        await a.mount(b, transit=True)
        await b.mount_mcp(c)
        await c.mount(a, transit=True)
        await b.mount_mcp(a)
        await a.mount_mcp(c)
        await asyncio.sleep(0.5)
        sizes = [len(each.names()) for each in (a, b, c)]
        await asyncio.sleep(1.0)
        assert [len(each.names()) for each in (a, b, c)] == sizes
        assert max(sizes) <= 8
        assert not any(name.count("of_a") for name in a.names() - {"of_a"})


async def test_two_replicas_under_one_address_that_mount_it_end_too() -> None:
    async with sites("r0", "r1") as (first, second):
        address = f"{first.grpc},{second.grpc}"
        for site in (first, second):
            site.entries["all"] = MountEntry("all", bus=address, transit=True)
            await site.mounts.apply(site.entries)
        await until(lambda: all(next(iter(each.mounts)).state in UP for each in (first, second)))
        await asyncio.sleep(0.5)
        assert all(len(each.names()) <= 3 for each in (first, second))


async def test_more_than_four_hops_are_refused() -> None:
    async with sites("a", "b", "c", "d", "e", "f") as chain:
        for site, other in zip(chain[1:], chain, strict=False):
            await site.mount(other, transit=True)
        last = chain[-1]
        await until(lambda: "more than 4 buses" in last.warnings("e"))
        assert len(last.names()) == 5  # its own, and those of the four before it


async def test_of_several_addresses_another_bus_goes_on() -> None:
    async with sites("edge", "n0") as (edge, first):
        async with sites("n1") as (second,):
            second.offer("both")
            first.offer("both")
            entry = MountEntry("north", bus=f"{second.grpc},{first.grpc}")
            mount = await edge.add(entry)
            await until(lambda: "north:both" in edge.names())
        await until(lambda: mount.state is MountState.LIVE and "north:of_n0" in edge.names())
        result = await edge.bus.call("north:both")
        assert result.output == "n0", result
