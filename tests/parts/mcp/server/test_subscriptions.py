"""Listeners are told when what they see of a list changes, and of no other change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.parts.mcp.server.asking import Channel, Json, McpBench, Mounted, mcp_bench
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.access.identity import LOCAL
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages.eras import META_SUBSCRIPTION
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server import subscriptions
from toolbus.parts.mcp.server.subscriptions import COALESCE_SECONDS
from toolbus.parts.mcp.settings import Profile
from toolbus.v1 import tool_pb2 as pb

ALL = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}


@contextlib.asynccontextmanager
async def listening(bench: McpBench, notifications: Json, profile: Profile | None = None) -> AsyncIterator[Channel]:
    channel = Channel()
    asking = bench.ask("subscriptions/listen", {"notifications": notifications}, channel=channel, profile=profile)
    task = asyncio.create_task(asking)
    try:
        await channel.wait("notifications/subscriptions/acknowledged")
        yield channel
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def tool(bench: McpBench, name: str, source: str = "shop", **more: Any) -> None:
    bench.offer(name, lambda call: pb.ToolResult(), source, **more)


async def settled(bench: McpBench) -> None:
    """Waits until whatever changed has been told."""
    await asyncio.sleep(COALESCE_SECONDS)
    async with asyncio.timeout(WAIT_SECONDS):
        while bench.server.subscriptions._timer is not None:
            await asyncio.sleep(0.001)


async def test_the_acknowledgement_is_first_and_says_what_is_told() -> None:
    async with mcp_bench() as bench, listening(bench, {**ALL, "promptsListChanged": False, "odd": True}) as channel:
        first = channel.messages[0]
        assert first["method"] == "notifications/subscriptions/acknowledged"
        honored = {"toolsListChanged": True, "resourcesListChanged": True}
        assert first["params"] == {"notifications": honored, "_meta": {META_SUBSCRIPTION: bench.id}}


async def test_a_new_tool_is_told_once_and_soon_to_those_who_asked() -> None:
    async with mcp_bench() as bench, listening(bench, ALL) as channel, listening(bench, {}) as other:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for name in ("a", "b", "c"):
            tool(bench, name)
        (told,) = await channel.wait("notifications/tools/list_changed")
        assert META_SUBSCRIPTION in told["_meta"]
        await settled(bench)
        assert len(channel.messages) == 2
        assert len(other.messages) == 1
        assert loop.time() - began < 30  # 20 ms on a machine that is not busy


async def test_a_listener_is_not_told_of_what_it_does_not_see() -> None:
    hidden = Profile("narrow", sources=("shop",))
    async with mcp_bench() as bench, listening(bench, ALL, hidden) as narrow, listening(bench, ALL) as wide:
        tool(bench, "secret", "vault")
        features_of(bench.bus.core).add(Mounted("vault", prompts=["p"], resources=["x://a"]))
        for kind in ("tools", "prompts", "resources"):
            await wide.wait(f"notifications/{kind}/list_changed")
        assert len(narrow.messages) == 1
        tool(bench, "shown", "shop")
        await narrow.wait("notifications/tools/list_changed")


async def test_a_change_that_is_taken_back_at_once_is_not_told() -> None:
    async with mcp_bench() as bench:
        tool(bench, "a")
        async with listening(bench, ALL) as channel:
            tool(bench, "b", "other")
            bench.bus.registry.clear("other")
            bench.bus.core.signals.catalog_changed()
            await settled(bench)
            assert len(channel.messages) == 1
            tool(bench, "a", description="another")
            await channel.wait("notifications/tools/list_changed")


async def test_another_output_schema_is_told() -> None:
    """Official clients refuse results that do not fit the schema which they listed last."""
    async with mcp_bench() as bench:
        tool(bench, "a", output_schema_json='{"type": "object", "required": ["celsius"]}')
        async with listening(bench, ALL) as channel:
            tool(bench, "a", output_schema_json='{"type": "object", "required": ["kelvin"]}')
            await channel.wait("notifications/tools/list_changed")


async def test_prompts_and_resources_that_a_mount_declares_now_are_told() -> None:
    async with mcp_bench() as bench:
        mounted = Mounted("m", prompts=["p"], templates=["x://{a}"])
        features_of(bench.bus.core).add(mounted)
        async with listening(bench, ALL) as channel:
            features_of(bench.bus.core).changed("prompts")
            await settled(bench)
            assert len(channel.messages) == 1
            mounted.prompt_names.append("q")
            features_of(bench.bus.core).changed("prompts")
            await channel.wait("notifications/prompts/list_changed")
            mounted.uri_templates.append("x://{b}")
            features_of(bench.bus.core).changed("resources")
            await channel.wait("notifications/resources/list_changed")
            assert len(channel.messages) == 3


async def test_updates_of_a_resource_are_asked_for_once_and_told_to_all() -> None:
    async with mcp_bench() as bench:
        mounted = Mounted("m", resources=["x://a", "x://b"])
        features_of(bench.bus.core).add(mounted)
        session, standing = bench.session(), Channel()
        session.stand(standing, bench.server.subscriptions.follow)
        await bench.ask("resources/subscribe", {"uri": "x://a"}, session=session)
        await bench.ask("resources/subscribe", {"uri": "x://a"}, session=session)
        async with listening(bench, {"resourceSubscriptions": ["x://a", "y://none"]}) as channel:
            assert channel.messages[0]["params"]["notifications"] == {"resourceSubscriptions": ["x://a"]}
            (report,) = mounted.listeners["x://a"]
            report("x://a")
            assert standing.of("notifications/resources/updated") == [{"uri": "x://a"}]
            (told,) = channel.of("notifications/resources/updated")
            assert (told["uri"], told["_meta"]) == ("x://a", channel.messages[0]["params"]["_meta"])
        await bench.ask("resources/unsubscribe", {"uri": "x://a"}, session=session)
        await bench.ask("resources/unsubscribe", {"uri": "x://a"}, session=session)
        assert mounted.listeners == {"x://a": []}
        with pytest.raises(RpcError) as raised:
            await bench.ask("resources/subscribe", {"uri": "y://none"}, session=session)
        assert raised.value.code == McpCode.RESOURCE_NOT_FOUND


async def test_a_mount_that_comes_anew_is_asked_again_for_updates() -> None:
    async with mcp_bench() as bench:
        features_of(bench.bus.core).add(Mounted("m", resources=["x://a"]))
        async with listening(bench, {"resourceSubscriptions": ["x://a"]}) as channel:
            again = Mounted("m", resources=["x://a"])
            features_of(bench.bus.core).add(again)
            again.listeners["x://a"][0]("x://a")
            assert len(channel.of("notifications/resources/updated")) == 1


async def test_a_session_that_ends_ends_its_subscriptions() -> None:
    async with mcp_bench() as bench:
        mounted = Mounted("m", resources=["x://a"])
        features_of(bench.bus.core).add(mounted)
        session, standing = bench.session(), Channel()
        session.stand(standing, bench.server.subscriptions.follow)
        await bench.ask("resources/subscribe", {"uri": "x://a"}, session=session)
        bench.server.sessions.end(session)
        assert mounted.listeners == {"x://a": []}
        tool(bench, "a")
        await settled(bench)
        assert standing.messages == []


async def test_a_legacy_session_is_told_on_its_standing_stream() -> None:
    async with mcp_bench() as bench:
        session, standing = bench.session(), Channel()
        session.stand(standing, bench.server.subscriptions.follow)
        tool(bench, "a")
        assert await standing.wait("notifications/tools/list_changed") == [{}]


async def test_listeners_end_with_the_bus() -> None:
    async with mcp_bench() as bench:
        channel = Channel()
        ask = bench.ask("subscriptions/listen", {"notifications": ALL}, channel=channel)
        task = asyncio.create_task(ask)
        await channel.wait("notifications/subscriptions/acknowledged")
    assert META_SUBSCRIPTION in (await task)["_meta"]


async def test_there_are_only_so_many_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MAX_LISTENERS", 1)
    async with mcp_bench() as bench:
        async with listening(bench, ALL):
            with pytest.raises(RpcError, match="mcp_listeners"):
                await bench.ask("subscriptions/listen", {"notifications": ALL})
        async with listening(bench, ALL):
            pass  # there is room again


@pytest.mark.parametrize("params", [{}, {"notifications": []}, {"notifications": {"resourceSubscriptions": "x"}}])
async def test_what_is_no_list_of_notifications_is_refused(params: Json) -> None:
    async with mcp_bench() as bench:
        with pytest.raises(RpcError) as raised:
            await bench.ask("subscriptions/listen", params)
        assert raised.value.code == McpCode.INVALID_PARAMS


async def test_listening_needs_a_stream() -> None:
    async with mcp_bench() as bench:
        channel = Channel(takes_messages=False)
        with pytest.raises(RpcError, match="event-stream"):
            await bench.ask("subscriptions/listen", {"notifications": ALL}, channel=channel)


async def test_a_bus_whose_clients_listen_to_nothing_builds_no_lists() -> None:
    async with mcp_bench() as bench:
        tool(bench, "a")
        assert bench.server.subscriptions._timer is None
        assert bench.server.features.listed("resources", bench.profile, LOCAL) == {}


async def test_a_session_gets_what_plugins_say_to_its_user() -> None:
    async with mcp_bench() as bench:
        board = bench.bus.core.sessions.presence.notifications
        anyone, ann, quiet = bench.session(), bench.session(), bench.session()
        ann.profile = dataclasses.replace(ann.profile, user="ann")
        quiet.set_level("warning")
        channels = [Channel() for _ in range(3)]
        for session, channel in zip((anyone, ann, quiet), channels, strict=True):
            session.stand(channel, bench.server.subscriptions.follow)
        board.publish("tea", "", "ready", '{"wants": "reply", "cups": 2}')
        board.publish("tea", "bob", "yours", "")
        said = [[each["data"]["text"] for each in channel.of("notifications/message")] for channel in channels]
        assert said == [["ready", "yours"], ["ready"], []]
        first = channels[1].of("notifications/message")[0]
        assert (first["level"], first["logger"]) == ("notice", "tea")
        assert first["data"] == {
            "text": "ready",
            "user_id": "",
            "wants": "reply",
            "data": {"wants": "reply", "cups": 2},
            "number": board.newest - 1,
        }
        for session in (anyone, ann):
            session.end_standing()
        assert board.publish("tea", "", "gone", "") == 1
