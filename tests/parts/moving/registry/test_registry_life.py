from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, BlockedTool, with_tools
from tests.support.waiting import within
from toolbus.errors import Code
from toolbus.parts.moving.registry.tool_registry import MAX_NESTED
from toolbus.sdk import ToolScope
from toolbus.tools import ToolDefinition, ToolRegistry

# -- life ------------------------------------------------------------------------------------------------------------


async def test_cancelling_the_caller_cancels_the_handler() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    call = asyncio.create_task(registry.call("waits", {}))
    while not held.begun:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(call)
    while not held.cancelled:
        await asyncio.sleep(0)
    assert registry.records()[0].code is Code.CANCELLED


async def test_a_caller_can_cancel_the_wait_for_a_handler_that_hangs() -> None:
    registry = ToolRegistry()
    called, go = asyncio.Event(), asyncio.Event()

    @registry.tool("hangs", "d", ANYTHING)
    async def hangs() -> str:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                called.set()
        return "too late"

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(registry.call("hangs", {}), 0.05)
    await within(called.wait())
    assert await registry.call("nobody", {}) == "there is no tool 'nobody'; there are: hangs"
    go.set()


async def test_a_handler_that_cancels_itself_is_an_error_text() -> None:
    registry = ToolRegistry()

    @registry.tool("cancels", "d", ANYTHING)
    async def cancels() -> str:
        raise asyncio.CancelledError

    assert "cancelled" in await registry.call("cancels", {})


async def test_a_timeout_that_a_tool_declares_ends_its_calls() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING, timeout=0.05)(held)
    assert (await within(registry.call("waits", {}))).startswith("no result from tool 'waits' within 0.05 s")
    while not held.cancelled:
        await asyncio.sleep(0)


async def test_a_tool_without_a_timeout_may_run_for_a_day() -> None:
    registry, left = ToolRegistry(), []

    @registry.tool("asks", "d", ANYTHING)
    async def asks(scope: ToolScope) -> str:
        left.append(scope.time_left())
        return ""

    for nested in (False, True):
        await registry.call("asks", {}, nested=nested)
        assert 86_390 < left.pop() <= 86_400


async def test_thousands_of_calls_run_at_once_and_none_is_refused() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    calls = [asyncio.create_task(registry.call("waits", {})) for _ in range(2_000)]
    while held.begun < 2_000:
        await asyncio.sleep(0)
    held.release()
    assert set(await within(asyncio.gather(*calls))) == {"released"}


async def test_call_records_are_listed_newest_first() -> None:
    registry = with_tools("one", "two")
    await registry.call("one", {}, "ann")
    await registry.call("two", {})
    await registry.call("nobody", {})
    assert [(each.name, each.user_id, each.outcome) for each in registry.records()] == [
        ("nobody", "", "NOT_FOUND"),
        ("two", "", "OK"),
        ("one", "ann", "OK"),
    ]


# -- tools that call tools -------------------------------------------------------------------------------------------


async def test_a_tool_can_call_a_tool() -> None:
    registry = with_tools("inner")

    @registry.tool("outer", "d", ANYTHING)
    async def outer() -> str:
        return "outer " + await registry.call("inner", {}, nested=True)

    assert await registry.call("outer", {}) == "outer inner"


async def test_tools_that_call_each_other_without_end_are_stopped() -> None:
    registry, level = ToolRegistry(), []

    @registry.tool("again", "d", ANYTHING)
    async def again() -> str:
        level.append(1)
        return await registry.call("again", {}, nested=True)

    assert f"tools called tools {MAX_NESTED} deep" in await within(registry.call("again", {}))
    assert len(level) == MAX_NESTED


async def test_cancelling_the_outer_call_cancels_the_inner_one() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("inner", "d", ANYTHING)(held)

    @registry.tool("outer", "d", ANYTHING)
    async def outer() -> str:
        return await registry.call("inner", {}, nested=True)

    call = asyncio.create_task(registry.call("outer", {}))
    while not held.begun:
        await asyncio.sleep(0)
    call.cancel()
    while not held.cancelled:
        await asyncio.sleep(0)
    assert call.cancelled()


async def test_call_result_returns_the_result_as_a_record() -> None:
    registry = ToolRegistry()
    registry.tool("gives", "d", ANYTHING)(lambda: {"n": 1})
    (listed,) = await _tools(registry)
    result = await registry.call_result("gives", schema_hash=listed.schema_hash)
    assert json.loads(result.output_json) == {"n": 1}
    registry.tool("gives", "changed", ANYTHING)(lambda: {"n": 2})
    stale = await registry.call_result("gives", schema_hash=listed.schema_hash)
    assert stale.error is not None
    assert stale.error.code is Code.CATALOG_STALE


async def _tools(registry: ToolRegistry) -> Any:
    return (await registry.as_source().tools())[1]


async def test_a_bare_decorator_reads_name_description_and_parameters_from_the_function() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def get_weather(city: str, days: int = 1, ctx: Any = None) -> str:
        """Tells the weather.

        Args:
            city: its name.
        """
        return f"{city}: {'sunny ' * days}{ctx}"

    @registry.tool("hot", allow_repeat=True)
    def is_hot(when: datetime.date) -> bool:
        """Tells whether it is hot."""
        return when.month == 7

    @registry.tool(description="Anything.")
    def anything(text):  # type: ignore[no-untyped-def]
        return text

    weather, hot, anything_ = registry.list_tools()
    assert (weather.name, weather.description, hot.name, hot.allow_repeat) == (
        "get_weather",
        "Tells the weather.",
        "hot",
        True,
    )
    assert weather.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name."},
            "days": {"type": "integer", "default": 1},
        },
        "required": ["city"],
    }
    assert (hot.description, anything_.description) == ("Tells whether it is hot.", "Anything.")
    assert await registry.call("get_weather", '{"city": "Oslo", "days": 2.0}', ctx="now") == "Oslo: sunny sunny now"
    assert await registry.call("hot", {"when": "2024-07-01"}) == "true"
    assert await registry.call("anything", {"text": "x"}) == "x"
    assert await get_weather("Rome") == "Rome: sunny None"


async def test_arguments_arrive_as_the_hints_say_also_beside_the_callers_context() -> None:
    registry = ToolRegistry()

    def later(when: datetime.date, share: int, ctx: object) -> str:
        return f"{when.year} {share} {ctx}"

    registry.register_tool(ToolDefinition("later", handler=later))
    assert await registry.call("later", '{"when": "2024-07-01", "share": 3.0}', ctx="here") == "2024 3 here"
