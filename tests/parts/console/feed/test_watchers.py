"""Those who watch share digests; too many, the slow ones and those of a bus that stops are told to come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.console.feed.console_bus import TIMINGS, console_bus, following
from tests.support.waiting import until, within
from toolbus.bus import Bus
from toolbus.bus.access.identity import LOCAL
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.functions.tool_spec import spec_of
from toolbus.parts.console.app import BUSY_RETRY_SECONDS, STREAM_PATH, ConsoleApp, Logins
from toolbus.parts.console.feed import MAX_FRAMES, MAX_WATCHERS, DigestFeed, Ended, Frame, Readings, Row, TooSlow
from toolbus.sdk import llm_tool


def feed_of(bus: Bus) -> DigestFeed:
    return DigestFeed(bus.core.calls.records, bus.core.calls.metrics, Readings(bus.core, dict, 0.0), TIMINGS)


async def test_all_who_watch_get_the_same_bytes() -> None:
    async with console_bus() as (bus, _):
        feed = feed_of(bus)
        streams = [feed.stream() for _ in range(3)]
        first = await within(asyncio.gather(*map(anext, streams)))
        assert first[0].event is first[1].event is first[2].event
        await bus.call("add", {"a": 1, "b": 2})
        second = await within(asyncio.gather(*map(anext, streams)))
        assert second[0].event is second[1].event is second[2].event
        assert second[0].number == first[0].number + 1
        feed.close()
        for stream in streams:
            await stream.aclose()


async def test_a_watcher_beyond_the_limit_gets_a_time_to_reconnect() -> None:
    async with console_bus() as (_, client), contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(following(client)) for _ in range(MAX_WATCHERS)]
        for stream in streams:
            assert (await stream.digest())["full"]
        async with following(client) as late:
            name, data = await within(late.event())
            assert name == "busy", (name, data)
            assert "as many consoles" in data["detail"]
            assert late.retry >= BUSY_RETRY_SECONDS[0] * 1000
            assert await within(late.to_the_end()) == []
        await stack.aclose()
        async with following(client) as again:
            while (await within(again.event()))[0] == "busy":
                pytest.fail("the places of those who left were not free")


async def test_who_falls_behind_begins_anew() -> None:
    async with console_bus() as (bus, _):
        feed = feed_of(bus)
        slow, quick = feed.stream(), feed.stream()
        first = await within(anext(slow))
        await within(anext(quick))
        number = first.number
        while number <= first.number + MAX_FRAMES:
            await bus.call("add", {"a": 1, "b": 2})
            number = (await within(anext(quick))).number
        with pytest.raises(TooSlow):
            await anext(slow)
        feed.close()
        await quick.aclose()


async def test_a_client_that_takes_no_bytes_is_cut_off() -> None:
    async with console_bus() as (bus, _):
        feed = feed_of(bus)
        app = ConsoleApp(Path(), feed, Logins(bus.core.sessions.doorman, None), bus.core.audit, "", send_seconds=0.05)
        scope = {"type": "http", "method": "GET", "path": STREAM_PATH, "scheme": "http", IDENTITY: LOCAL}

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await within(app(scope, receive, send))
        assert feed.watchers == 0
        feed.close()


async def test_a_stream_says_that_the_bus_drains_and_ends_in_good_order_when_it_stops() -> None:
    async with console_bus() as (bus, client), following(client) as stream:
        await stream.digest()
        await bus.drain(0.2)
        while not (await stream.digest())["draining"]:
            pass
        stopping = asyncio.ensure_future(bus.stop())
        assert set(await within(stream.to_the_end())) <= {"digest"}
        await within(stopping)


async def test_a_wait_for_a_digest_does_not_delay_the_shutdown() -> None:
    async with console_bus() as (bus, _):
        known = (await bus.call("toolbus:digest")).output["number"]
        waiting = asyncio.ensure_future(bus.call("toolbus:digest", {"since": known, "wait_seconds": 60}))
        await until(lambda: bus.core.calls.dispatcher.in_flight.active)
        await bus.drain(30)
        assert (await within(waiting)).output["draining"]


async def test_a_client_of_an_earlier_bus_gets_everything() -> None:
    async with console_bus() as (_, client), following(client) as stream:
        before = await stream.digest()
    known = {"Last-Event-ID": str(before["number"])}
    async with console_bus() as (_, client), following(client, **known) as stream:
        after = await stream.digest()
    assert after["full"]
    assert after["instance"] != before["instance"]
    assert after["number"] > before["number"]


async def test_the_tool_answers_with_everything_first_and_then_with_what_changed() -> None:
    async with console_bus() as (bus, _):

        async def ask(**arguments: Any) -> dict[str, Any]:
            answer: dict[str, Any] = (await within(bus.call("toolbus:digest", arguments))).output
            return answer

        first = await ask()
        assert first["full"]
        await bus.call("add", {"a": 1, "b": 2})
        second = await ask(since=first["number"], wait_seconds=60)
        assert (second["number"], second["full"], second["ended"]) == (first["number"] + 1, False, 1)
        again = await ask(since=first["number"])
        assert again == second  # the one before the newest: nothing is lost
        assert (await ask(since=second["number"]))["number"] == second["number"] + 1  # waits for nothing
        assert (await ask(since=first["number"]))["full"]
        assert [call["name"] for call in (await ask())["calls"]] == ["add"]  # its own calls are no records


async def test_a_stream_of_a_feed_that_was_closed_ends_at_once() -> None:
    async with console_bus() as (bus, _):
        feed = feed_of(bus)
        feed.close()
        with pytest.raises(Ended):
            await anext(feed.stream())


async def test_requests_for_digests_are_not_news_in_the_next_one() -> None:
    async with console_bus() as (bus, _):
        first = (await bus.call("toolbus:digest")).output
        for _ in range(3):
            first = (await bus.call("toolbus:digest", {"since": first["number"]})).output
            assert [row[1] for row in first["tools"]] == []
        assert bus.core.calls.metrics.of("toolbus", "toolbus:digest") is None


async def _to_the_end(stream: AsyncIterator[Frame]) -> None:
    async for _ in stream:
        pass


class _FaultyReadings(Readings):
    """Readings that fail once, when asked to."""

    fails = False

    def running(self) -> list[Row]:
        if self.fails:
            self.fails = False
            raise RuntimeError("a fault")
        return super().running()


async def test_after_a_digest_that_failed_watchers_begin_anew_and_miss_nothing() -> None:
    async with console_bus() as (bus, _):
        readings = _FaultyReadings(bus.core, dict, 0.0)
        feed = DigestFeed(bus.core.calls.records, bus.core.calls.metrics, readings, TIMINGS)
        stream = feed.stream()
        first = await within(anext(stream))
        readings.fails = True
        bus.add_tool(spec_of(llm_tool(name="new")(lambda: 1)), "somebody")
        with pytest.raises(TooSlow):
            await within(_to_the_end(stream))
        whole = json.loads(await within(feed.after(first.number, 0.0)))
        assert whole["full"]
        assert "somebody" in [row["source"] for row in whole["sources"]]
        feed.close()
