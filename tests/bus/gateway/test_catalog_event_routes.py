"""GET /api/tools/events: what a watcher learns, what one that comes back learns, and watchers that do not read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.bus.gateway.calling import Connection, client, events, invoke
from tests.faults.raw_peer import RawPeer, tool
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until
from toolbus.bus import Bus
from toolbus.bus.catalog.changes import MAX_CHANGES
from toolbus.protocol.limits import Timings
from toolbus.testing import running_bus

URL = "http://127.0.0.1:1/nobody"
PATH = "/api/tools/events"
Words = dict[str, Any]


@pytest.fixture
def timings() -> Timings:
    return Timings()


@pytest.fixture
async def bus(timings: Timings) -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", timings=timings, grace_seconds=WAIT_SECONDS) as bus:
        yield bus


@pytest.fixture
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as http:
        yield http


class Watcher:
    """One open stream."""

    def __init__(self, found: AsyncGenerator[tuple[str, Any, str]]) -> None:
        self._found = found

    async def next(self) -> Words:
        """The next change; its id must be its revision."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                kind, data, id = await anext(self._found)
                if kind != ":":
                    break
        assert (kind, id) == ("catalog", str(data["revision"]))
        assert list(data) == ["revision", "full", "added", "changed", "removed"]
        assert "toolbus" not in [each["source"] for each in (*data["added"], *data["changed"], *data["removed"])]
        found: Words = data
        return found

    async def until(self, field: str, *names: str) -> Words:
        """The next change that has all the names in a field; changes may come in one event or in several."""
        missing = set(names)
        while True:
            change = await self.next()
            missing -= {each["name"] for each in change[field]}
            if not missing:
                return change


@asynccontextmanager
async def watching(http: httpx.AsyncClient, query: str = "", **headers: str) -> AsyncIterator[Watcher]:
    async with http.stream("GET", f"{PATH}{query}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-cache"
        yield Watcher(events(answer))  # type: ignore[arg-type]


def _names(listed: list[Words]) -> list[str]:
    return [each["name"] for each in listed]


async def _register(http: httpx.AsyncClient, name: str, **more: Any) -> None:
    answer = await http.post("/api/tools/register", json={"name": name, "callback_url": URL, "source": "rest", **more})
    assert answer.json()["ok"]


async def test_first_comes_everything_then_what_changes_by_any_way(bus: Bus, http: httpx.AsyncClient) -> None:
    @bus.tool(timeout=7)  # type: ignore[untyped-decorator]
    def here(days: int) -> None:
        """Says something."""

    async with watching(http) as watcher:
        first = await watcher.next()
        assert (first["full"], first["changed"], first["removed"]) == (True, [], [])
        (listed,) = first["added"]
        parameters = listed.pop("parameters")
        assert parameters["properties"]["days"]["type"] == "integer"
        assert listed == {
            "name": "here",
            "description": "Says something.",
            "source": "local",
            "callback_url": None,
            "is_remote": False,
            "roles": ["default"],
            "timeout_seconds": 7.0,
            "schema_hash": bus.list()[0].tool.schema_hash,
        }
        await _register(http, "posted")
        change = await watcher.until("added", "posted")
        assert (change["full"], change["added"][0]["callback_url"]) == (False, URL)
        await _register(http, "posted", description="another")
        change = await watcher.until("changed", "posted")
        assert change["changed"][0]["description"] == "another"
        bus.add_role("New")
        assert (await watcher.until("changed", "here", "posted"))["revision"] == bus.registry.revision
        bus.remove_tool("here")
        assert (await watcher.until("removed", "here"))["removed"] == [{"name": "here", "source": "local"}]
        await http.post("/api/tools/clear", json={"source": "rest"})
        assert (await watcher.until("removed", "posted"))["removed"] == [{"name": "posted", "source": "rest"}]
        assert bus.list() == []


async def test_a_plugin_that_disconnects_and_reconnects_removes_and_adds_its_tools(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    async with watching(http) as watcher:
        assert (await watcher.next())["added"] == []
        async with RawPeer(bus.grpc_addresses[0]) as peer:
            peer.open()
            await peer.attach("flaky", tool("flaky"))
            await watcher.until("added", "flaky")
        await watcher.until("removed", "flaky")
        async with RawPeer(bus.grpc_addresses[0]) as peer:
            peer.open()
            await peer.attach("flaky", tool("flaky"))
            await watcher.until("added", "flaky")


async def test_an_offline_callback_is_removed_and_added_when_it_is_registered_again(
    http: httpx.AsyncClient,
) -> None:
    async with watching(http) as watcher:
        await watcher.next()
        await _register(http, "away")
        await watcher.until("added", "away")
        for _ in range(3):  # REST-43
            assert (await invoke(http, "away"))["error"]["code"] == "UNAVAILABLE"
        await watcher.until("removed", "away")
        await _register(http, "away")
        await watcher.until("added", "away")


async def test_a_client_that_reconnects_gets_exactly_what_it_missed(bus: Bus, http: httpx.AsyncClient) -> None:
    for name in ("kept", "changed", "gone"):
        await _register(http, name)
    async with watching(http) as watcher:
        known = (await watcher.next())["revision"]
    await _register(http, "changed", description="new")
    await _register(http, "came and went")
    await http.post("/api/tools/unregister", json={"name": "came and went"})
    await http.post("/api/tools/unregister", json={"name": "gone"})
    await _register(http, "new")
    ways: list[tuple[str, dict[str, str]]] = [
        (f"?since={known}", {}),
        ("", {"Last-Event-ID": str(known)}),
        ("?since=0", {"Last-Event-ID": str(known)}),  # a browser that comes back to the address it began with
    ]
    for query, headers in ways:
        async with watching(http, query, **headers) as watcher:
            missed = await watcher.next()
        assert (missed["full"], missed["revision"]) == (False, bus.registry.revision)
        assert _names(missed["added"]) == ["new"]
        assert _names(missed["changed"]) == ["changed"]
        assert _names(missed["removed"]) == ["gone"]
    async with watching(http, f"?since={bus.registry.revision - 1}") as watcher:  # another, at the same revision
        missed = await watcher.next()
    assert (_names(missed["added"]), missed["changed"], missed["removed"]) == (["new"], [], [])
    async with watching(http) as watcher:
        assert _names((await watcher.next())["added"]) == ["kept", "changed", "new"]


async def test_a_client_with_the_newest_revision_gets_nothing_until_a_change(bus: Bus, http: httpx.AsyncClient) -> None:
    await _register(http, "old")
    async with watching(http, f"?since={bus.registry.revision}") as watcher:
        await _register(http, "new")
        assert _names((await watcher.next())["added"]) == ["new"]


async def test_an_unknown_revision_gets_everything(bus: Bus, http: httpx.AsyncClient) -> None:
    await _register(http, "one")
    newest = bus.registry.revision
    for known in ("0", "1", str(newest + 1), "9" * 18, "9" * 30, "-1", "x", ""):
        async with watching(http, **{"Last-Event-ID": known}) as watcher:
            first = await watcher.next()
        assert (first["full"], _names(first["added"])) == (True, ["one"]), known
    early, specs = newest, (_spec(0), _spec(1))
    for number in range(MAX_CHANGES // 2 + 10):  # each is a change that takes away and one that adds
        bus.add_tool(specs[number % 2], source="busy")
        bus.remove_tool(f"busy{number % 2}", source="busy")
    async with watching(http, f"?since={early}") as watcher:
        assert (await watcher.next())["full"]


def _spec(number: int, description: str = "Does nothing.") -> Any:
    from toolbus.functions.tool_spec import spec_of
    from toolbus.sdk import llm_tool

    @llm_tool(name=f"busy{number}", description=description)
    def busy() -> None: ...

    return spec_of(busy)


async def test_an_invalid_revision_is_a_422(http: httpx.AsyncClient) -> None:
    for since in ("-1", "x", "1.5"):
        answer = await http.get(f"{PATH}?since={since}")
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["query", "since"]


async def test_fifty_clients_all_see_every_tool_and_one_that_reads_nothing_delays_no_other(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    async with Connection(bus) as silent, asyncio.TaskGroup() as group:
        await silent.ask("GET", PATH)
        started = asyncio.Barrier(51)

        async def watch() -> set[str]:
            names: set[str] = set()
            async with client(bus) as own, watching(own) as watcher:
                await watcher.next()
                await started.wait()
                while "tool19" not in names:
                    names.update(_names((await watcher.next())["added"]))
            return names

        watchers = [group.create_task(watch()) for _ in range(50)]
        await started.wait()
        for number in range(20):
            await _register(http, f"tool{number}", description="x" * 1_000)
        for watcher in watchers:
            assert await watcher == {f"tool{number}" for number in range(20)}


@pytest.mark.parametrize("timings", [Timings(ping_seconds=0.01)])
async def test_a_quiet_stream_sends_pings(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", PATH) as answer:
        found = events(answer)
        assert (await anext(found))[0] == "catalog"
        for _ in range(3):
            assert (await anext(found))[:2] == (":", "ping")


async def test_a_client_that_disconnects_leaves_nothing_behind(bus: Bus, http: httpx.AsyncClient) -> None:
    async with watching(http) as watcher:
        await watcher.next()
        assert bus.core.signals.watching == 1
    async with Connection(bus) as connection:
        await connection.ask("GET", PATH)
        await connection.read_until(b"event: catalog")
        connection.cut()
        await until(lambda: not bus.core.signals.watching, "the watchers to be forgotten")


# -- the end of the bus --------------------------------------------------------------------------------------------


async def test_a_bus_with_open_streams_and_running_calls_stops_within_a_second() -> None:
    async with running_bus(http="127.0.0.1:0") as bus, asyncio.TaskGroup() as group:
        entered = asyncio.Semaphore(0)

        @bus.tool
        async def hangs() -> None:
            entered.release()
            await asyncio.Event().wait()

        async def watch() -> int:
            async with client(bus) as own, own.stream("GET", PATH) as answer:
                entered.release()
                return len([kind async for kind, _, _ in events(answer)])

        async def call(accept: str) -> str:
            async with client(bus, headers={"Accept": accept}) as own:
                if accept == "*/*":
                    return str((await invoke(own, "hangs"))["error"]["code"])
                async with own.stream("POST", "/api/tools/invoke", json={"name": "hangs"}) as answer:
                    ((kind, result, _),) = [each async for each in events(answer)]
                    assert kind == "result"
                    return str(result["error"]["code"])

        watchers = [group.create_task(watch()) for _ in range(5)]
        calls = [group.create_task(call(accept)) for accept in ("*/*", "text/event-stream")]
        for _ in range(7):
            await asyncio.wait_for(entered.acquire(), WAIT_SECONDS)
        stopwatch = Stopwatch()
        await bus.stop()
        assert stopwatch.seconds() < 1.0
        assert [await each for each in watchers] == [1] * 5
        assert [await each for each in calls] == ["UNAVAILABLE"] * 2


async def test_a_client_that_reads_nothing_does_not_keep_the_bus_from_stopping() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        for number in range(400):
            bus.add_tool(_spec(number, "x" * 16_000))
        async with Connection(bus) as silent:  # not before: a connection that asks nothing for long is closed
            await silent.ask("GET", PATH)
            await until(lambda: bus.core.signals.watching, "the watcher to be served")
            stopwatch = Stopwatch()
            await bus.stop()
            assert stopwatch.seconds() < 2.0
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "every task to end")
