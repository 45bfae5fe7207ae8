"""Tests of notifications from a plugin to hosts: over gRPC, over HTTP, and after a lost connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.faults.raw_peer import RawPeer
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.bus.access.budgets import LONG_BYTES
from toolbus.errors import CallFailed
from toolbus.sdk import Host, NekoPluginBase, Notification, Plugin, SyncHost, lifecycle
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0") as bus:
        yield bus


@pytest_asyncio.fixture
async def plugin(bus: Bus) -> AsyncIterator[Plugin]:
    async with Plugin("kitchen", address=bus.grpc_addresses[0]) as plugin:
        yield plugin


class Following:
    """A host that collects notifications until it is left."""

    def __init__(self, bus: Bus) -> None:
        self.host = Host(bus.grpc_addresses[0])
        self.got: list[Notification] = []
        self._board = bus.core.sessions.presence.notifications

    async def __aenter__(self) -> Following:
        await self.host.__aenter__()
        self._task = asyncio.create_task(self._collect())
        await until(lambda: "followers=0" not in repr(self._board), "the host to follow")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await self.host.close()

    async def _collect(self) -> None:
        async for each in self.host.notifications():
            self.got.append(each)


async def test_a_plugin_reaches_a_host_outside_any_call(bus: Bus, plugin: Plugin) -> None:
    assert await plugin.notify("ann", "nobody follows yet") == 0
    async with Following(bus) as following:
        assert await plugin.notify("ann", "The timer has ended.", {"timer": 1}) == 1
        assert await asyncio.to_thread(plugin.notify_sync, "", "All is well.") == 1
        await until(lambda: len(following.got) == 2, "both to arrive")
    assert [(each.source, each.user, each.text, each.data, each.lost) for each in following.got] == [
        ("kitchen", "ann", "The timer has ended.", {"timer": 1}, 0),
        ("kitchen", "", "All is well.", None, 0),
    ]


async def test_a_host_that_reconnects_gets_what_it_missed(bus: Bus, plugin: Plugin) -> None:
    async with Following(bus) as following:
        await plugin.notify("ann", "one")
        await until(lambda: following.got, "the first to arrive")
        (peer,) = bus.core.sessions.presence.by_source[following.host.source].values()
        bus.core.sessions.presence.end(peer, "test", asyncio.get_running_loop().time())
        assert await plugin.notify("ann", "two") == 0
        await until(lambda: len(following.got) == 2, "the one that came while the host was away")
    assert [each.text for each in following.got] == ["one", "two"]


async def test_a_host_that_was_away_gets_all_that_the_bus_still_has_however_large(bus: Bus, plugin: Plugin) -> None:
    async with Following(bus) as following:
        await plugin.notify("ann", "first")
        await until(lambda: following.got, "the first to arrive")
        (peer,) = bus.core.sessions.presence.by_source[following.host.source].values()
        bus.core.sessions.presence.end(peer, "test", asyncio.get_running_loop().time())
        board = bus.core.sessions.presence.notifications
        for number in range(15):  # 3 MiB, while it is away
            board.publish("kitchen", "ann", str(number), f'"{"x" * 200_000}"')
        await until(lambda: len(following.got) == 16, "all of them")
    assert [each.text for each in following.got] == ["first", *map(str, range(15))]
    assert not any(each.lost for each in following.got)


async def test_what_the_bus_refuses_raises_in_the_plugin(plugin: Plugin) -> None:
    with pytest.raises(CallFailed, match="text is empty"):
        await plugin.notify("ann", "")


async def test_the_source_is_that_of_the_caller_also_within_a_call(bus: Bus, plugin: Plugin) -> None:
    @plugin.tool
    async def ring(ctx) -> Any:  # type: ignore[no-untyped-def]
        return (await ctx.call("toolbus:notify", {"text": "from within", "user": ctx.user_id})).output

    await plugin.ready()
    async with Following(bus) as following:
        assert (await bus.call("ring")).output["hosts"] == 1
        await until(lambda: following.got, "it to arrive")
    assert following.got[0].source == "kitchen"


async def test_a_blocking_host_follows_too(bus: Bus, plugin: Plugin) -> None:
    host = SyncHost(bus.grpc_addresses[0])
    feed = host.notifications()
    first = asyncio.ensure_future(asyncio.to_thread(next, feed))
    await until(lambda: "followers=1" in repr(bus.core.sessions.presence.notifications), "the host to follow")
    await plugin.notify("", "hello")
    assert (await within(first)).text == "hello"
    await asyncio.to_thread(feed.close)
    await asyncio.to_thread(host.close)


async def test_http_lists_the_newest_and_follows_them_from_a_number_on(bus: Bus, plugin: Plugin) -> None:
    for user, text in (("ann", "one"), ("bob", "two"), ("", "three")):
        await plugin.notify(user, text)
    async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as client:
        listed = (await client.get("/api/notifications", params={"user_id": "ann"})).json()
        assert [each["text"] for each in listed["notifications"]] == ["one", "three"]
        assert listed["newest"] == listed["notifications"][-1]["number"]
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(listed["notifications"][0]["number"])}
        async with client.stream("GET", "/api/notifications", headers=headers) as stream:
            events = _events(stream.aiter_lines())
            assert [(await within(anext(events)))["text"] for _ in range(2)] == ["two", "three"]
            posted = await client.post("/api/bus/notify", json={"text": "four", "data": [1]})
            assert posted.json()["output"]["hosts"] == 1
            fourth = await within(anext(events))
            assert (fourth["source"], fourth["text"], fourth["data"]) == ("http", "four", [1])


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def test_messages_of_a_n_e_k_o_plugin_reach_a_host_also_those_from_before_it_was_connected(bus: Bus) -> None:
    class Chatty(NekoPluginBase):
        plugin_id = "chatty"

        @lifecycle(id="startup")
        async def startup(self, **_: Any) -> None:
            self.push_message(visibility=["chat"], parts=[{"type": "text", "text": "I am here."}])

    async with Following(bus) as following:
        owner = Chatty()
        async with Plugin.from_object(owner, address=bus.grpc_addresses[0]):
            await until(lambda: len(following.got) == 1, "the first message")
            owner.push_message(content="And again.", ai_behavior="blind")
            await until(lambda: len(following.got) == 2, "the second message")
        assert [(each.source, each.user, each.text) for each in following.got] == [
            *(("plugin:chatty", "", "I am here."), ("plugin:chatty", "", "And again."))
        ]
        assert [each.wants for each in following.got] == ["reply", "nothing"]
        assert following.got[0].data == {"visibility": ["chat"], "ai_behavior": "respond", "wants": "reply"}


@pytest.mark.parametrize(
    ("behavior", "wants"), [("respond", "reply"), ("read", "context"), ("blind", "nothing"), (None, "reply")]
)
async def test_what_a_message_wants_its_priority_and_its_key_reach_hosts_over_http_too(
    bus: Bus, behavior: str | None, wants: str
) -> None:
    class Chatty(NekoPluginBase):
        plugin_id = "chatty"

    owner = Chatty()
    message = {"ai_behavior": behavior} if behavior else {}
    async with (
        httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as client,
        Following(bus) as following,
        Plugin.from_object(owner, address=bus.grpc_addresses[0]),
        client.stream("GET", "/api/notifications", headers={"Accept": "text/event-stream"}) as stream,
    ):
        owner.push_message(content="The tea is ready.", priority=7, coalesce_key="tea", **message)
        streamed = await within(anext(_events(stream.aiter_lines())))
        await until(lambda: len(following.got) == 1, "the message at the host")
        (listed,) = (await client.get("/api/notifications")).json()["notifications"]
    for shown in (streamed, listed):
        assert (shown["wants"], shown["data"]["priority"], shown["data"]["coalesce_key"]) == (wants, 7, "tea")
    assert following.got[0].wants == wants
    assert following.got[0].data == streamed["data"]


@pytest.mark.parametrize(
    "said",
    [
        {"text": "x", "data": {"password": "hunter2"}},
        {"text": '{"password": "hunter2"}'},
        {"text": "x", "data": {"long": "x" * LONG_BYTES, "password": "hunter2"}},  # searched beside the loop
    ],
    ids=["data", "text", "long"],
)
async def test_a_notification_of_an_untrusted_source_that_may_hold_a_secret_is_refused(said: dict[str, Any]) -> None:
    async with running_bus(guarded=["rogue"]) as bus, Plugin("rogue", address=bus.grpc_addresses[0]) as plugin:
        with pytest.raises(CallFailed, match="may hold a secret"):
            await plugin.notify("ann", said["text"], said.get("data"))


async def test_a_guarded_session_that_follows_gets_what_its_own_source_says_and_nothing_else() -> None:
    async with (
        running_bus(guarded=["rogue"]) as bus,
        Plugin("kitchen", address=bus.grpc_addresses[0]) as kitchen,
        Following(bus) as following,
        RawPeer(bus.grpc_addresses[0]) as rogue,
    ):
        await kitchen.notify("ann", "before")
        after = await until_number(following, 1)
        await kitchen.notify("ann", "meanwhile")
        await rogue.attach("rogue", subscribe=[wire.SUBSCRIPTION_NOTIFICATIONS], notifications_after=after)
        assert await kitchen.notify("ann", "for ann") == 1
        said = await rogue.call("toolbus:notify", {"text": "own", "user": "ann"})
        assert json.loads(said.output_json)["hosts"] == 2
        await until_number(following, 4)
        await until(lambda: bool(rogue.events), "its own notification")
        assert [(each.notification.source, each.notification.text) for each in rogue.events] == [("rogue", "own")]


async def until_number(following: Following, count: int) -> int:
    """Waits until a host has so many notifications; returns the number of the newest."""
    await until(lambda: len(following.got) >= count, f"{count} notifications")
    return following.got[-1].number
