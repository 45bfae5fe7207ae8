from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

from tests.parts.council.council_cases import BOB, model, ran, texts_of
from tests.parts.council.fake_tool_source import (
    USER,
    FakeToolSource,
    member,
    settings,
)
from tests.support.waiting import WAIT_SECONDS
from toolbus.extension import (
    Completion,
    Council,
    LanguageModel,
    Member,
    Question,
)
from toolbus.functions.scope import ToolScope
from toolbus.testing import running_bus

# -- over a bus ------------------------------------------------------------------------------------------------------


async def test_over_a_real_bus_tools_see_member_context_and_user_and_a_late_one_is_cancelled() -> None:
    cancelled = asyncio.Event()
    async with running_bus(unix=True) as bus:

        @bus.tool(description="Looks.", council_eligible=True, display_name="Look")  # type: ignore[untyped-decorator]
        async def look(scope: ToolScope, query: str = "nothing") -> dict[str, Any]:
            assert scope.context.member is not None
            shown = [f"{each.role}: {each.content}" for each in scope.context.messages]
            return {"who": scope.context.member["name"], "user": scope.context.user_id, "query": query, "told": shown}

        @bus.tool(description="Never ends.", council_eligible=True)  # type: ignore[untyped-decorator]
        async def stare() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise NotImplementedError

        @bus.tool(description="Not for councils.")  # type: ignore[untyped-decorator]
        def hidden() -> str:
            raise NotImplementedError

        council = Council(
            bus,
            settings(member("Ann", "look", "stare", "hidden"), timeout_seconds=0.05, least_timeout_seconds=0),
        )
        assert [each.name for each in await council.available()] == ["look", "stare"]
        deliberation = await ran(council, user_id="u1")
        await asyncio.wait_for(cancelled.wait(), WAIT_SECONDS)
    seen, late = deliberation.outcomes
    assert json.loads(seen.content) == {
        "who": "Ann",
        "user": "u1",
        "query": "nothing",
        "told": ["user: Who is at the door?"],
    }
    assert late.error == "Tool invocation 'stare' timed out"


async def test_over_a_real_bus_a_tool_that_needs_arguments_says_how_to_get_them() -> None:
    async with running_bus(unix=True) as bus:

        @bus.tool(description="Looks.", council_eligible=True)  # type: ignore[untyped-decorator]
        def look(query: str) -> str:
            raise NotImplementedError

        (outcome,) = (await ran(Council(bus, settings(BOB)))).failed
    assert "query" in outcome.error
    assert outcome.error.endswith("(a council calls tools without arguments, unless plan_arguments is on)")


async def test_over_a_real_bus_a_user_sees_and_runs_the_tools_that_it_may_call() -> None:
    async with running_bus(unix=True) as bus:

        @bus.tool(description="Looks.", council_eligible=True)  # type: ignore[untyped-decorator]
        def look() -> str:
            return "a wolf"

        bus.permit("tools", "look", ["u1"])
        council = Council(bus, settings(BOB))
        assert [each.name for each in await council.available("u1")] == ["look"]
        assert await council.available("u2") == []
        assert texts_of(await ran(council, user_id="u1")) == ["a wolf"]
        assert texts_of(await ran(council, user_id="u2")) == []


def test_a_plain_async_function_is_a_language_model() -> None:
    answers: LanguageModel = model
    asked: Awaitable[Completion | str] = answers(Question([USER]))
    assert isinstance(asked, Awaitable)
    asked.close()  # type: ignore[attr-defined]


def test_the_repr_of_a_council_shows_its_parts() -> None:
    council = Council(FakeToolSource(), settings(Member("a", "Ann")))
    assert repr(council).startswith("<Council sidecar members=1 prompt_tools=0 ")
