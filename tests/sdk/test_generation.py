"""Tests of lent models: who may ask, what bounds a request, how several hosts share, and across a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.errors import CallFailed, Code, SetupError
from toolbus.sdk import Extension, Generation, GenerationRequest, Host, Plugin, ToolScope
from toolbus.testing import running_bus

TOOL = "host:generate"


async def echo(request: GenerationRequest) -> Generation:
    text = " ".join(each["content"] for each in request.messages)
    return Generation(f"{request.mode} {request.max_tokens} {text}", model="echo", usage={"input": 3})


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(generation=("story", "ext*")) as bus:
        yield bus


@pytest_asyncio.fixture
async def host(bus: Bus) -> AsyncIterator[Host]:
    async with Host(bus.grpc_addresses[0]) as host:
        await host.lend(echo, max_tokens=100)
        assert bus.core.catalog.registry.offered_by("host")
        yield host


@pytest_asyncio.fixture
async def story(bus: Bus, host: Host) -> AsyncIterator[Plugin]:
    async with Plugin("story", address=bus.grpc_addresses[0]) as plugin:
        yield plugin


async def test_a_plugin_asks_the_model_of_a_host(story: Plugin) -> None:
    answer = await story.generate("Name the ship.", max_tokens=20)
    assert answer == Generation("quiet 20 Name the ship.", model="echo", usage={"input": 3})
    two = [{"role": "system", "content": "You"}, {"role": "user", "content": "me"}]
    assert (await story.generate(two, mode="raw")).text == "raw 100 You me"


async def test_an_extension_asks_quietly_or_raw(bus: Bus, host: Host) -> None:
    async with Extension("ext.lore", address=bus.grpc_addresses[0]) as extension:
        assert await extension.quiet("hi") == "quiet 100 hi"
        assert await extension.raw("hi", max_tokens=1) == "raw 1 hi"


async def test_the_permission_comes_and_goes_at_once(bus: Bus, host: Host) -> None:
    async with Plugin("other", address=bus.grpc_addresses[0]) as plugin:
        with pytest.raises(CallFailed, match="toolbus access grant other generation") as refused:
            await plugin.generate("hi")
        assert refused.value.error.code is Code.PERMISSION_DENIED
        await bus.call("toolbus:grant", {"source": "other", "permission": "generation"})
        assert (await plugin.generate("hi")).text == "quiet 100 hi"
        await until(lambda: plugin.permissions.has("generation"), "the plugin to learn it")
        assert plugin.permissions.has("tools")
        await bus.call("toolbus:revoke", {"source": "other", "permission": "generation"})
        with pytest.raises(CallFailed):
            await plugin.generate("hi")


async def test_no_listing_shows_the_model_but_to_an_administrator_who_asks(bus: Bus, host: Host) -> None:
    assert TOOL not in [each.name for each in await host.list(include_offline=True)]
    assert TOOL not in [each.name for each in await host.list(names=[TOOL])]
    assert [each.name for each in await host.list(source="host")] == [TOOL]
    answer = await bus.call("toolbus:search_tools", {"query": "asks the host's language model"})
    assert answer.output["results"] == []
    async for change in host.watch():
        assert TOOL not in [each.name for each in change.added]
        break


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 101}, "100"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": "hi"}], "n": 2}, "n"),
    ],
)
async def test_a_request_beyond_the_bounds_is_refused(
    bus: Bus, host: Host, arguments: dict[str, object], text: str
) -> None:
    await bus.call("toolbus:grant", {"source": "local", "permission": "generation"})
    result = await bus.call(TOOL, arguments)
    assert result.error is not None
    assert result.error.code is Code.INVALID_ARGUMENTS
    assert text in result.error.message


async def test_a_request_within_a_request_is_refused(bus: Bus) -> None:
    async def asks_again(request: GenerationRequest) -> str:
        inner = await request.scope.call(TOOL, {"messages": [{"role": "user", "content": "and you?"}]})
        assert inner.error is not None
        return f"{inner.error.code.name} {inner.error.limit}"

    for source in ("host", "story"):
        await bus.call("toolbus:grant", {"source": source, "permission": "generation"})
    async with Host(bus.grpc_addresses[0]) as host:
        await host.lend(asks_again)
        async with Plugin("story", address=bus.grpc_addresses[0]) as story:
            answer = await story.generate("hi", timeout=20)
    assert answer.text == "PERMISSION_DENIED ('generation_depth', 1.0)"


async def test_a_tool_asks_as_part_of_its_call(bus: Bus, story: Plugin) -> None:
    @story.tool
    async def tell(scope: ToolScope) -> str:
        return (await story.generate("hi", scope=scope)).text

    await story.ready()
    assert (await bus.call("tell")).output == "quiet 100 hi"


async def test_what_the_model_raises_is_the_error_of_that_request(bus: Bus) -> None:
    async def fails(request: GenerationRequest) -> str:
        raise RuntimeError("the model is away")

    async with Host(bus.grpc_addresses[0]) as host, Plugin("story", address=bus.grpc_addresses[0]) as story:
        await host.lend(fails)
        with pytest.raises(CallFailed, match="the model is away"):
            await story.generate("hi", timeout=20)


async def test_a_host_lends_one_model_within_bounds_and_until_it_is_closed(bus: Bus, host: Host) -> None:
    with pytest.raises(SetupError, match="lends its model already"):
        await host.lend(echo)
    for bounds in ({"max_tokens": 0}, {"timeout": 301.0}):
        async with Host(bus.grpc_addresses[0]) as another:
            with pytest.raises(SetupError, match="is "):
                await another.lend(echo, **bounds)
    await host.close()
    await until(lambda: not bus.core.catalog.registry.offered_by("host"), "the model to be withdrawn")


async def test_the_permission_survives_a_restart(tmp_path: Path) -> None:
    for granted in (False, True):
        async with running_bus(data_dir=tmp_path) as bus:
            assert bus.policy.may_generate("late") is granted
            await bus.call("toolbus:grant", {"source": "late", "permission": "generation"})
            shown = await bus.call("toolbus:permissions")
            assert shown.output["generation"] == {"late": True}


async def test_no_callback_url_gets_what_plugins_ask_a_model() -> None:
    async with (
        running_bus(http="127.0.0.1:0") as bus,
        httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as web,
    ):
        for source in ("rogue", "host"):
            body = {"name": TOOL, "description": "", "source": source, "callback_url": "http://127.0.0.1:9/x"}
            answer = await web.post("/api/tools/register", json=body)
            assert answer.status_code == 403
            assert "is reserved for hosts that lend their model" in answer.json()["detail"]
        assert bus.core.catalog.registry.find(TOOL) is None
