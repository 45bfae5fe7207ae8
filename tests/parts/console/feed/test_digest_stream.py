"""Streams of digests over HTTP: everything first, then what changes, the same for all who watch."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.parts.console.feed.console_bus import console_bus, following
from tests.support.waiting import until
from toolbus import Plugin
from toolbus.parts.console.feed import Row


async def test_a_stream_begins_with_everything_and_goes_on_with_what_changed() -> None:
    async with console_bus() as (bus, client), following(client) as stream:
        first = await stream.digest()
        assert stream.retry > 0
        assert first["full"]
        assert [(row["source"], row["kind"], row["tools"]) for row in first["sources"] if row["kind"] != "bus"] == [
            ("local", "function", 1)
        ]
        assert first["addresses"]["http"] == bus.http_address
        assert (first["sessions"], first["calls"], first["running"]) == ([], [], [])

        await bus.call("add", {"a": 1, "b": 2})
        await bus.call("add", {"a": "x"})
        digests = [await stream.digest()]
        while sum(each["ended"] for each in digests) < 2:
            digests.append(await stream.digest())
        assert [each["number"] - first["number"] for each in digests] == list(range(1, len(digests) + 1))
        assert not any(each["full"] or each["sources"] for each in digests)
        calls = [call for each in digests for call in each["calls"]]
        assert sorted((call["number"], call["name"], call["outcome"]) for call in calls) == [
            (1, "add", "OK"),
            (2, "add", "INVALID_ARGUMENTS"),
        ]
        assert sum(each["failed"] for each in digests) == 1
        assert (digests[-1]["total"], digests[-1]["total_failed"]) == (2, 1)
        assert 0 <= digests[-1]["loop_lag"] < 60
        source, name, count, failed, median, most, last = [row for each in digests for row in each["tools"]][-1]
        assert (source, name, count, failed) == ("local", "add", 2, 1)
        assert 0 <= median <= most < 60
        assert first["at"] <= last <= digests[-1]["at"]


async def test_tools_that_were_called_before_the_first_watcher_are_in_the_first_digest() -> None:
    async with console_bus() as (bus, client):

        @bus.tool
        def one() -> None:
            pass

        @bus.tool
        def two() -> None:
            pass

        for name in ("two", "one", "two", "add"):
            await bus.call(name, {"a": 1, "b": 2} if name == "add" else {})
        async with following(client) as stream:
            first = await stream.digest()
        assert [(row[1], row[2]) for row in first["tools"]] == [("two", 2), ("one", 1), ("add", 1)]
        async with following(client) as again:
            assert (await again.digest())["tools"] == first["tools"]


async def test_without_counts_of_tools_a_digest_has_none() -> None:
    async with console_bus(metrics=False) as (bus, client):
        await bus.call("add", {"a": 1, "b": 2})
        async with following(client) as stream:
            first = await stream.digest()
        assert (first["tools"], first["ended"]) == ([], 1)


async def test_sessions_and_sources_come_change_and_go() -> None:
    async with console_bus() as (bus, client), following(client) as stream:
        await stream.digest()
        plugin = Plugin("weather", address=bus.grpc_addresses[0])

        @plugin.tool
        def sun() -> str:
            return "yes"

        async with plugin:
            sessions: list[Row] = []
            sources: list[Row] = []
            while not any(row.get("tools") for row in sources) or not sessions:
                digest = await stream.digest()
                sessions += digest["sessions"]
                sources += digest["sources"]
            assert sources[-1] == {
                "source": "weather",
                "kind": "peer",
                "state": "attached",
                "sessions": 1,
                "refused": 0,
                "tools": 1,
            }
            session = sessions[-1]
            assert (session["source"], session["state"], session["tools"]) == ("weather", "attached", 1)
            assert session["attached"] <= digest["at"]
        closed: list[str] = []
        gone: list[str] = []
        while not (closed and gone):
            digest = await stream.digest()
            closed, gone = closed + digest["closed"], gone + digest["gone"]
        assert (closed, gone) == ([session["session"]], ["weather"])


async def test_a_source_shows_the_end_of_its_grace_period_and_that_it_may_not_offer_tools() -> None:
    async with console_bus(grace_seconds=60.0) as (bus, client):
        presence = bus.core.sessions.presence
        plugin = Plugin("weather", address=bus.grpc_addresses[0])

        @plugin.tool
        def sun() -> str:
            return "yes"

        async with plugin, following(client) as stream:
            await plugin.ready()
            bus.revoke("weather")
            row: Row = {}
            while not row.get("silenced"):
                row = next((each for each in (await stream.digest())["sources"] if each["source"] == "weather"), {})
            assert (row["state"], row["tools"], "offline_since" in row) == ("attached", 0, False)
            bus.grant("weather")
            await plugin.ready()
            await until(lambda: "weather" in bus.core.catalog.registry.sources(), "its tools to be back")
            presence.draining = True  # nobody can attach
            presence.end(next(iter(presence.by_source["weather"].values())), "it is lost", time.monotonic())
            while row["state"] != "offline":
                digest = await stream.digest()
                row = next((each for each in digest["sources"] if each["source"] == "weather"), row)
            assert 0 <= digest["at"] - row["offline_since"] < 30
            assert row["offline_until"] == pytest.approx(row["offline_since"] + 60.0)
            assert "silenced" not in row


async def test_a_running_call_is_shown_with_its_stage_until_it_ends() -> None:
    async with console_bus() as (bus, client), following(client) as stream:
        await stream.digest()
        go_on = asyncio.Event()

        @bus.tool
        async def slow() -> str:
            await go_on.wait()
            return "done"

        call = asyncio.ensure_future(bus.call("slow"))
        running: list[dict[str, object]] = []
        while not running:
            running = (await stream.digest())["running"]
        assert [(each["name"], each["source"], each["stage"], each["parent"]) for each in running] == [
            ("slow", "local", "dispatched", "")
        ]
        go_on.set()
        while running:
            running = (await stream.digest())["running"]
        await call


async def test_nothing_is_read_without_watchers() -> None:
    async with console_bus() as (_, client):
        assert "toolbus digests" not in _tasks()
        async with following(client) as stream:
            await stream.digest()
            assert "toolbus digests" in _tasks()
        await until(lambda: "toolbus digests" not in _tasks(), "the builder to end")
        async with following(client) as stream:
            assert (await stream.digest())["full"]


def _tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks()]


async def test_calls_by_which_operators_follow_are_neither_running_nor_recorded_nor_slow() -> None:
    async with console_bus(slow_seconds=0.001) as (bus, client), following(client) as stream:
        await stream.digest()
        following_calls = asyncio.create_task(bus.call("toolbus:calls", {"since": 0, "wait_seconds": 60}))
        digest = await stream.digest()
        while not digest["in_flight"]:
            digest = await stream.digest()
        assert digest["running"] == []
        await bus.call("add", {"a": 1, "b": 2})
        assert [call["name"] for call in (await following_calls).unwrap()] == ["add"]
        assert [call["name"] for call in (await bus.call("toolbus:calls")).unwrap()] == ["add"]
        slow = (await bus.call("toolbus:slow_calls")).unwrap()
        assert [call["tool"] for call in slow["calls"] if call["tool"] != "add"] == []
