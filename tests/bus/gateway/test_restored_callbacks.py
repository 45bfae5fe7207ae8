"""A restored registration counts only after its plugin has shown that it is there, and still has the tool (REST-44)."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.bus.gateway.calling import client
from tests.faults.callbacks import CallbackPlugin, Legacy, Start, names, starting
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.storage.store import FILE
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError
from toolbus.sdk import Host

NOT_REGISTERED = b'{"output": {"error": "gone"}, "is_error": true, "error": "TOOL_NOT_REGISTERED"}'
DISOWNED = {
    "TOOL_NOT_REGISTERED": ("200 OK", NOT_REGISTERED),
    "404": ("404 Not Found", b"no such route"),
    "410": ("410 Gone", b""),
}
SILENT = (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a bus on this test's data directory."""
    return starting(tmp_path / "data")


def restart(plugin: CallbackPlugin) -> None:
    """Ends whoever listens there, and lets another program take the port."""
    plugin.leave()
    plugin.come()
    plugin.requests.clear()


async def error_of(bus: Bus, name: str = "x") -> CallError:
    error = (await bus.call(name, {"private": 1})).error
    assert error is not None
    return error


def stored_listeners(tmp_path: Path) -> list[str]:
    """What is in the store of a running bus: what the next one has if this one is killed now."""
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as store:
        return [json.loads(value)["listener"] for (value,) in store.execute("SELECT value FROM registrations")]


async def unconfirmed(bus: Bus) -> list[str]:
    """What `toolbus list --all` shows as unconfirmed."""
    async with Host(bus.grpc_addresses[0]) as host:
        return [each.name for each in await host.list(include_offline=True) if each.state == "unconfirmed"]


async def kind_and_text(bus: Bus) -> tuple[Any, str]:
    error = await error_of(bus)
    return (error.code, error.stage, error.retry_safe), error.message


async def test_a_plugin_that_outlives_the_bus_and_registers_once_has_its_tools_back_at_once(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        for _ in range(2):
            async with start() as bus:
                assert names(bus, away=False) == ["x"]
                assert plugin.bytes == 0, "nothing was sent to find that out"
        async with start() as bus:
            assert (await bus.call("x", {"n": 1})).output == {"n": 1}


async def test_another_program_on_the_port_gets_nothing_and_its_tool_is_in_no_list(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(user="me:secret@"))
        restart(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            assert names(bus, away=False) == []
            assert await legacy.listed() == {"A": [], "B": []}
            async with client(bus) as http:
                exported = (await http.get("/api/tools/export?dialect=openai")).json()
            assert exported["tools"] == []
            assert await unconfirmed(bus) == ["x"]
            kind, text = await kind_and_text(bus)
            assert kind == SILENT
            assert "has not shown" in text
        assert (plugin.requests, plugin.bytes) == ([], 0)


async def test_a_watchdog_that_misses_its_tool_in_the_list_registers_it_again_and_has_it_back(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("x", "y"):
                await legacy.ask("register", name=name, callback_url=plugin.url())
        restart(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            assert await legacy.listed() == {"A": [], "B": []}
            await legacy.ask("register", name="x", callback_url=plugin.url())
            assert names(bus, away=False) == ["x"], "the other one may be gone"
            assert await unconfirmed(bus) == ["y"]
            assert (await bus.call("x", {"n": 1})).output == {"n": 1}
        async with start() as bus:
            assert names(bus, away=False) == ["x"]


@pytest.mark.parametrize("answer", DISOWNED.values(), ids=DISOWNED.keys())
async def test_a_plugin_that_answers_that_it_has_no_such_tool_loses_it_until_it_registers(
    start: Start, answer: tuple[str, bytes]
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("x", "y"):
                await legacy.ask("register", name=name, callback_url=plugin.url(name))
        plugin.answers["x"] = answer
        async with start() as bus:
            assert names(bus, away=False) == ["x", "y"]
            assert (await error_of(bus)).code is Code.TOOL
            assert names(bus) == ["y"]
        async with start() as bus, Legacy.of(bus) as legacy:
            assert names(bus) == ["y"]
            await legacy.ask("register", name="x", callback_url=plugin.url("x"))
            for _ in range(2):  # within one run it is the plugin's own business (REST-42)
                assert (await error_of(bus)).code is Code.TOOL
            assert names(bus, away=False) == ["y", "x"]


@pytest.mark.parametrize("first", ["still_there", "called", "idle"])
@pytest.mark.parametrize("answer", DISOWNED.values(), ids=DISOWNED.keys())
async def test_a_server_that_was_started_again_without_its_tools_loses_each_at_its_first_call(
    start: Start, answer: tuple[str, bytes], first: str
) -> None:
    """Whichever is called first: also one that was never called before, or gave results before."""
    tools = ("called", "idle", "still_there")
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in tools:
                await legacy.ask("register", name=name, callback_url=plugin.url(name))
            assert not (await bus.call("called")).is_error
            restart(plugin)
            plugin.answers |= dict.fromkeys(("called", "idle"), answer)
            for name in sorted(tools, key=lambda each: each != first):
                if name == "still_there":
                    assert not (await bus.call(name)).is_error
                else:
                    assert (await error_of(bus, name)).code is Code.TOOL
            assert names(bus) == ["still_there"]
            assert await legacy.listed() == {"A": ["still_there"], "B": ["still_there"]}
            del plugin.answers["called"]
            await legacy.ask("register", name="called", callback_url=plugin.url("called"))
            assert names(bus, away=False) == ["still_there", "called"], "its watchdog brings it back at once"
            assert (await bus.call("called", {"n": 1})).output == {"n": 1}
        async with start() as bus:
            assert names(bus, away=False) == ["still_there", "called"]


@pytest.mark.parametrize(
    ("answer", "has_answered", "calls"),
    [
        ("TOOL_NOT_REGISTERED", True, 1),
        ("TOOL_NOT_REGISTERED", False, 3),
        ("404", True, 3),
        ("410", True, 3),
        ("404", False, 0),  # its URL may be wrong from the start (REST-42)
    ],
)
async def test_a_server_that_goes_on_loses_a_tool_that_it_does_not_have_any_more(
    start: Start, answer: str, has_answered: bool, calls: int
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url("x"))
            if has_answered:
                await bus.call("x")
            for number in range(1, 5):
                assert names(bus, away=False) == ["x"]
                plugin.answers["x"] = DISOWNED[answer]
                await error_of(bus)
                if number == calls:
                    assert names(bus) == []
                    return
            assert calls == 0


async def test_a_tool_that_does_not_find_what_it_looks_for_now_and_then_stays(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url("x"))
            for _ in range(3):
                plugin.answers.clear()
                assert not (await bus.call("x")).is_error
                plugin.answers["x"] = DISOWNED["404"]
                for _ in range(2):
                    await error_of(bus)
            assert names(bus, away=False) == ["x"]


async def test_a_404_after_a_result_is_the_answer_of_the_tool(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url("x"))
        async with start() as bus:
            assert not (await bus.call("x")).is_error
            plugin.answers["x"] = DISOWNED["404"]
            await error_of(bus)
            assert names(bus, away=False) == ["x"]
            plugin.answers["x"] = DISOWNED["TOOL_NOT_REGISTERED"]
            await error_of(bus)
            assert names(bus) == []


async def test_a_restored_tool_whose_plugin_ends_trusts_no_program_that_takes_its_port(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        async with start() as bus, Legacy.of(bus) as legacy:
            assert not (await bus.call("x")).is_error
            restart(plugin)
            kind, text = await kind_and_text(bus)
            assert kind == SILENT
            assert "nothing was sent" in text
            assert "register again" in text
            assert names(bus, away=False) == []
            assert await unconfirmed(bus) == ["x"]
            assert plugin.requests == []
            await legacy.ask("register", name="x", callback_url=plugin.url())
            restart(plugin)  # what is registered in this run comes back by itself (REST-43)
            assert not (await bus.call("x")).is_error


async def test_a_restored_tool_whose_plugin_has_ended_is_not_probed(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        async with start() as bus:
            plugin.leave()
            kind, text = await kind_and_text(bus)
            assert kind == SILENT
            assert "no program listens there any more" in text
            handler: Any = bus.list(include_offline=True)[0].entry.handlers()[0]
            assert handler.origin.probing is None


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lets this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_bus_without_a_free_file_descriptor_refuses_the_call_and_keeps_the_restored_tool(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        async with start() as bus:
            with no_descriptor_left():
                kind, text = await kind_and_text(bus)
            assert kind == SILENT
            assert "no file descriptor left" in text
            assert names(bus, away=False) == ["x"]
            assert (await bus.call("x", {"n": 1})).output == {"n": 1}


async def test_an_operator_confirms_a_source(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name, source in (("x", "one"), ("y", "one"), ("z", "two")):
                await legacy.ask("register", name=name, callback_url=plugin.url(), source=source)
        restart(plugin)
        async with start() as bus:
            assert (await bus.call("toolbus:confirm", {"source": "one"})).output == {
                "source": "one",
                "confirmed": ["x", "y"],
            }
            assert names(bus, away=False) == ["x", "y"]
            assert not (await bus.call("x")).is_error
            assert (await bus.call("toolbus:confirm", {"source": "one"})).output == {"source": "one", "confirmed": []}
        async with start() as bus:
            assert names(bus, away=False) == ["x", "y"], "with the socket that the operator trusted"


async def test_a_tool_that_waits_for_its_plugin_says_what_brings_it_back_while_the_plugin_is_away_and_after(
    start: Start,
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("x", "y"):
                await legacy.ask("register", name=name, callback_url=plugin.url(), source="one")
        plugin.leave()
        async with start() as bus, Legacy.of(bus) as legacy:
            away = (await error_of(bus)).message
            assert "accepts no connection" in away
            assert "let it register again, or trust it with `toolbus confirm one`" in away
            plugin.come()
            await legacy.ask("register", name="y", callback_url=plugin.url(), source="one")
            there = (await error_of(bus)).message
            assert "accepts no connection" not in there
            assert "let it register again, or trust it with `toolbus confirm one`" in there


async def test_a_plugin_that_listens_only_after_it_registered_outlives_a_bus_that_is_killed_before_any_call(
    start: Start, tmp_path: Path
) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
            plugin.come()
            await until(lambda: stored_listeners(tmp_path) == [plugin.listener_id], "its socket in the store")
            assert plugin.connections == 0
        async with start() as bus:
            assert names(bus, away=False) == ["x"]


async def test_a_plugin_that_was_started_again_in_one_run_outlives_a_bus_that_is_killed_after_its_result(
    start: Start, tmp_path: Path
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("x", "y"):
                await legacy.ask("register", name=name, callback_url=plugin.url())
            assert not (await bus.call("x")).is_error
            restart(plugin)
            assert stored_listeners(tmp_path) != [plugin.listener_id] * 2
            assert not (await bus.call("x")).is_error
            assert stored_listeners(tmp_path) == [plugin.listener_id] * 2, "before the call has ended"
        async with start() as bus:
            assert names(bus, away=False) == ["x", "y"]


async def test_a_source_without_a_confirmed_tool_is_not_serving(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), source="shy")
        restart(plugin)
        async with start() as bus, Legacy.of(bus) as legacy, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as line:
            health = health_pb2_grpc.HealthStub(line)
            asked = health_pb2.HealthCheckRequest(service="toolbus.source.shy")
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await legacy.ask("register", name="x", callback_url=plugin.url(), source="shy")
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
