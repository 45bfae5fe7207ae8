"""Extensions and councils of Spindle work here as they do there, without its eleven defects.

Every check goes over a real bus: extensions and hosts each on a stream of their own. `test_defect_N_…` are the numbered
differences of docs/moving/spindle.md. The parts have tests of their own beside.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.parts.council.fake_tool_source import USER, member, settings
from tests.parts.models.loop.scripted_model import ScriptedModel, call, says
from tests.support.waiting import WAIT_SECONDS, Stopwatch, within
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.extension import Council, CouncilStarted, Deliberation, InlineTools, Member, ToolOutcome
from toolbus.loop import ToolLoop, source_of
from toolbus.parts.council.council import ALL_FAILED, NOTHING
from toolbus.protocol.tool import KIB, Limits, Result
from toolbus.sdk import CallContext, ContextMessage, Extension, Host, ToolInvocation
from toolbus.testing import running_bus

LEGAL = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MESSAGES = (ContextMessage("system", "Rules"), ContextMessage("user", "Hi"))
ANN = Member("1b4e28ba-2fa1", "Ann", ("memory:search",), role="Archivist")
BEN = Member("1b4e28ba-9999", "Ben", ("memory:search",))  # whose id begins as Ann's does
NEVER = 1.0  # seconds, for what never ends; on a busy machine listing the tools takes a part of them

Handler = Callable[[ToolInvocation], Any]
Wire = tuple[Bus, Host]


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A bus, and a host attached to it; what was withdrawn is unknown at once, not after a grace period."""
    async with running_bus(unix=True, grace_seconds=0.0) as bus, Host(bus.grpc_addresses[0]) as host:
        yield bus, host


@asynccontextmanager
async def offering(
    wire: Wire, handler: Handler | None = None, *names: str, source: str = "memory", **fields: Any
) -> AsyncIterator[Extension]:
    """Runs an extension whose tools, `search` if nothing else is said, are answered by a handler."""
    extension = Extension(source, address=wire[0].grpc_addresses[0])
    for name in names or ("search",):
        extension.register_tool(name=name, **{"council_eligible": True, "inline_available": True, **fields})
    if handler is not None:
        extension.on_invocation(handler)
    async with extension:
        await within(extension.ready())
        yield extension


def council(wire: Wire, *members: Member, rng: Any = None, **fields: Any) -> Council:
    return Council(wire[1], settings(*members, least_timeout_seconds=0, **fields), rng=rng)


async def ran(of: Council) -> Deliberation:
    deliberation = await within(of.run([USER]))
    assert isinstance(deliberation, Deliberation)
    return deliberation


async def failure(wire: Wire) -> str:
    """Returns why the one tool of a council failed."""
    (outcome,) = (await ran(council(wire, ANN, timeout_seconds=NEVER))).failed
    assert isinstance(outcome, ToolOutcome)
    return outcome.error


def never(cancelled: asyncio.Event) -> Handler:
    """Returns a handler that does not end, and whose answer comes late when it is cancelled."""

    async def wait(_: ToolInvocation) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        return "late"

    return wait


# -- what is the same --------------------------------------------------------------------------------------------------


async def test_two_extensions_have_a_search_each_and_the_bare_name_is_the_first_ones(wire: Wire) -> None:
    host = wire[1]
    async with offering(wire, lambda _: "mine"), offering(wire, lambda _: "theirs", source="library") as library:
        names = ("memory:search", "library:search", "search")
        assert [(await within(host.call(name))).output for name in names] == ["mine", "theirs", "mine"]
        assert library.unregister_tool("unknown") is False
        assert library.unregister_tool("search") is True
        await within(library.ready())
        assert [each.name for each in await host.list(source="memory")] == ["memory:search"]
        gone = await within(host.call("library:search"))
        assert gone.error is not None
        assert gone.error.code is Code.NOT_FOUND


async def test_user_keys_are_taken_out_at_the_top_and_nowhere_else(wire: Wire) -> None:
    seen: list[ToolInvocation] = []
    written = {"userId": "eve", "__userId": "eve", "__user_id": "eve"}
    async with offering(wire, seen.append):
        context = CallContext(user_id="ann")
        await within(wire[1].call("memory:search", {**written, "user_id": "kept", "about": written}, context=context))
    args = {key: value for key, value in seen[0]["args"].items() if key != "__deadlineMs"}
    assert args == {"user_id": "kept", "about": written}
    assert seen[0].scope.context.user_id == "ann"


async def test_arguments_cannot_pose_as_the_context_of_the_host(wire: Wire) -> None:
    seen: list[ToolInvocation] = []
    posed = {
        "context": "posed",
        "__deadlineMs": 1,
        "councilMember": {"name": "Eve"},
        "contextMessages": [],
        "q": "x",
    }
    async with offering(wire, seen.append):
        context = CallContext(member=ANN.described(), messages=MESSAGES)
        await within(wire[1].call("memory:search", posed, context=context))
        await within(wire[1].call("memory:search", posed))
    inside, outside = seen
    assert (inside["args"]["context"], inside["args"]["q"]) == ("Rules\n\nuser: Hi", "x")
    assert dict(inside["councilMember"]) == ANN.described()
    assert inside["contextMessages"] == [{"role": "system", "content": "Rules"}, {"role": "user", "content": "Hi"}]
    assert min(each["args"]["__deadlineMs"] for each in seen) > 1
    assert (outside["councilMember"], outside["contextMessages"], outside["args"].get("context")) == (None, None, None)


async def test_the_deadline_is_passed_on_and_later_results_are_dropped(wire: Wire) -> None:
    seen: list[ToolInvocation] = []
    cancelled = asyncio.Event()
    async with offering(wire, seen.append) as extension:
        before = time.time()
        await within(wire[1].call("memory:search", timeout=20))
        assert (before + 20) * 1000 - 50 <= seen[0]["args"]["__deadlineMs"] <= (time.time() + 20) * 1000 + 50
        extension.on_invocation(never(cancelled))
        assert await failure(wire) == "Tool invocation 'search' timed out"
        await within(cancelled.wait())
    assert [record.outcome for record in wire[0].records] == ["DEADLINE_EXCEEDED", "OK"]


KILLED = """
import os, sys
from toolbus.sdk import Extension
extension = Extension("memory", address=sys.argv[1])
extension.register_tool(name="search", council_eligible=True)
extension.on_invocation(lambda call: os._exit(9))
extension.run()
"""


async def test_a_killed_extension_ends_its_call_within_a_second_and_its_tools_are_withdrawn(wire: Wire) -> None:
    bus, host = wire
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, bus.grpc_addresses[0])
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            async for change in host.watch():
                if change.added:
                    break
        stopwatch = Stopwatch()
        (outcome,) = (await ran(council(wire, ANN))).outcomes
        assert stopwatch.seconds() < 1
        assert outcome.error == "Extension worker stopped"
        assert [each.name for each in await host.list()] == []
    finally:
        assert await within(process.wait()) == 9


async def test_without_the_right_the_stream_stays_and_the_tools_come_when_it_is_granted() -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    async with running_bus(silenced=("memory",)) as bus, Host(bus.grpc_addresses[0]) as host:
        extension = Extension("memory", address=bus.grpc_addresses[0])
        extension.register_tool(name="search", handler=lambda: "here")

        @extension.on_permission_denied
        async def denied(permission: str, operation: str) -> None:
            heard.put_nowait((permission, operation))

        @extension.on_permission_changed
        async def changed(permission: str, granted: bool, _: object) -> None:
            heard.put_nowait((permission, granted))

        async with extension:
            assert await within(heard.get()) == ("tools", "registerTool")
            assert [each.name for each in await host.list()] == []
            sessions = set(bus.core.sessions.presence.sessions)
            bus.grant("memory")
            assert await within(heard.get()) == ("tools", True)
            await within(extension.ready())
            assert (await within(host.call("memory:search"))).output == "here"
            assert set(bus.core.sessions.presence.sessions) == sessions


async def test_null_is_an_empty_text_an_exception_its_message_and_no_handler_the_known_one(wire: Wire) -> None:
    def answer(invocation: ToolInvocation) -> Any:
        if "fault" in invocation["args"]:
            raise ValueError(invocation["args"]["fault"])
        return invocation["args"].get("answer")

    async def results(**arguments: Any) -> Any:
        result = await within(wire[1].call("memory:search", arguments))
        return result.output if result.error is None else result.error.message

    async with offering(wire, answer):
        assert [await results(), await results(answer="a"), await results(answer={"b": [1]})] == ["", "a", '{"b":[1]}']
        assert [await results(fault="no ink"), await results(fault="")] == ["no ink", "Tool invocation failed"]
    async with offering(wire, source="silent"):
        result = await within(wire[1].call("silent:search"))
        assert result.error is not None
        assert result.error.message == "No TOOL_INVOCATION handler registered"


async def test_dice_failures_retries_and_the_block(wire: Wire) -> None:
    called_for: list[str] = []
    broken = {"Bo"}

    def answer(invocation: ToolInvocation) -> str:
        name = invocation["councilMember"]["name"]
        called_for.append(name)
        if name in broken:
            raise ValueError("no ink")
        return f"{name} speaks"

    search = "memory:search"
    events: list[Any] = []
    async with offering(wire, answer):
        nobody = council(wire, member("Ann", search, chance=0), member("Bob"))
        assert await within(nobody.run([USER], on_event=events.append)) is None
        assert (called_for, events) == ([], [])

        seed = 7
        rolls = random.Random(seed)
        expected = [f"M{n}" for n in range(8) if rolls.random() * 100 < 50]
        half = [member(f"M{n}", search, chance=50) for n in range(8)]
        await ran(council(wire, *half, rng=random.Random(seed)))
        assert called_for == expected
        assert 0 < len(expected) < 8

        called_for.clear()
        three = council(wire, member("Al", search), member("Bo", search), member("Cy", search))
        first = await ran(three)
        assert [each.success for each in first.outcomes] == [True, False, True]
        assert ("Al speaks" in first.block, "Bo" in first.block, "no ink" in first.block) == (True, False, False)
        broken.clear()
        called_for.clear()
        second = await within(three.retry(first, [USER], on_event=events.append))
        assert (called_for, events[0]) == (["Bo"], CouncilStarted(first.run_id, "", 1))
        assert [each.content for each in second.outcomes] == ["Al speaks", "Bo speaks", "Cy speaks"]
        assert "Bo speaks" in second.block


async def test_where_no_tool_runs_the_block_says_so_and_where_all_fail_it_says_that(wire: Wire) -> None:
    async with offering(wire):
        assert (await ran(council(wire, member("Ann", "ext:gone")))).block == NOTHING
        assert (await ran(council(wire, ANN, BEN))).block == ALL_FAILED


async def test_exported_names_are_legal_and_lead_back_to_their_tools(wire: Wire) -> None:
    tools = ("a__b", "a.b", "a_b", "x" * 64)
    async with offering(wire, lambda call: call.tool_name, *tools, source="6ba7b810-9dad-11d1:80b4"):
        inline = InlineTools(source_of(wire[1]), [member("Ann", *tools)])
        names = [each.name for each in (await inline.export()).tools]
        results = [await called(inline, name) for name in names]
    assert len(set(names)) == 2 * len(tools)
    assert all(LEGAL.fullmatch(name) for name in names)
    assert [result.output for result in results] == [*tools, *tools]


# -- the eleven defects -----------------------------------------------------------------------------------------------


async def called(inline: InlineTools, name: str) -> Result:
    result = await within(inline.call(name, "{}", context=None, schema_hash="", timeout=5))
    assert isinstance(result, Result)
    return result


async def turn(wire: Wire, *calls: dict[str, Any], members: tuple[Member, ...] = (ANN,), **fields: Any) -> list[str]:
    """Has a main model make calls and then talk. Returns what it read as their results."""
    model = ScriptedModel(says("", *calls), says("So be it."))
    loop = ToolLoop(InlineTools(source_of(wire[1]), members), model.endpoint, **fields)
    assert (await within(loop.run("?"))).text == "So be it."
    return list(model.results(1))


async def test_defect_1_a_tool_that_fails_or_takes_too_long_does_not_end_the_turn_of_the_main_model(wire: Wire) -> None:
    def fail(_: ToolInvocation) -> str:
        raise ValueError("no ink")

    cancelled = asyncio.Event()
    async with offering(wire, fail), offering(wire, never(cancelled), source="slow", timeout=NEVER):
        failed, late = await turn(wire, call("memory_search"), call("slow_search"))
        await within(cancelled.wait())
    assert "no ink" in failed
    assert f"{NEVER:g} s" in late


async def test_defect_2_inline_tools_are_callable_beside_those_of_members(wire: Wire) -> None:
    def answer(invocation: ToolInvocation) -> str:
        return str((invocation["councilMember"] or {"name": "nobody"})["name"])

    async with offering(wire, answer):
        assert await turn(wire, call("1b4e28ba_memory_search"), call("memory_search")) == ["Ann", "nobody"]


async def test_defect_3_a_name_with_two_underscores_stays_whole(wire: Wire) -> None:
    async with offering(wire, lambda call: call.tool_name, "find__all"):
        assert await turn(wire, call("memory_find__all")) == ["find__all"]


async def test_defect_4_names_of_members_tools_fit_providers_too(wire: Wire) -> None:
    async with offering(wire, lambda _: "", "x" * 64, source="s" * 36):
        export = await InlineTools(source_of(wire[1]), [member("Ann", "x" * 64)]).export()
    assert [bool(LEGAL.fullmatch(each.name)) for each in export.tools] == [True, True]


async def test_defect_5_a_call_of_an_unknown_tool_is_answered_too(wire: Wire) -> None:
    async with offering(wire, lambda _: "found"):
        found, invented = await turn(wire, call("memory_search"), call("1b4e28ba_gone"))
    assert (found, "there is no tool '1b4e28ba_gone'" in invented) == ("found", True)


async def test_defect_6_a_result_has_a_bound_for_the_council_and_another_for_everybody() -> None:
    bounded = running_bus(limits=Limits(result_bytes=2 * KIB))
    async with bounded as bus, Host(bus.grpc_addresses[0]) as host:
        small = bus, host
        async with offering(small, lambda call: "x" * (1500 if call.council_member else 5000)):
            (outcome,) = (await ran(council(small, ANN, result_bytes=KIB))).outcomes
            (read,) = await turn(small, call("memory_search"))
    assert (len(outcome.content), outcome.content[-11:]) == (KIB, "[truncated]")
    assert "more than the limit result_bytes = 2048: have the tool return less" in read


async def test_defect_7_members_whose_ids_begin_alike_each_have_their_function(wire: Wire) -> None:
    async with offering(wire, lambda call: call["councilMember"]["name"]):
        inline = InlineTools(source_of(wire[1]), [ANN, BEN])
        export = await inline.export()
        of_members = {name: target.member for name, target in export.targets.items() if target.member is not None}
        results = [(await called(inline, name)).output for name in of_members]
    assert list(of_members.values()) == [ANN, BEN]
    assert results == ["Ann", "Ben"]


async def test_defect_8_revoking_withdraws_tools_and_refuses_calls_at_once(wire: Wire) -> None:
    bus, host = wire
    async with offering(wire, lambda _: "here"):
        bus.revoke("memory")
        refused = await within(host.call("memory:search"))
        assert refused.error is not None
        assert refused.error.code is Code.PERMISSION_DENIED
        assert refused.error.stage is Stage.NOT_DISPATCHED
        assert [each.name for each in await host.list()] == []


async def test_defect_9_whose_call_it_is_stands_beside_the_arguments_whatever_they_hold_at_any_depth(
    wire: Wire,
) -> None:
    seen: list[ToolInvocation] = []
    async with offering(wire, seen.append):
        posed = {"userId": "eve", "filter": {"userId": "eve", "list": [{"__user_id": "eve"}]}}
        await within(wire[1].call("memory:search", posed, context=CallContext(user_id="ann")))
        await within(wire[1].call("memory:search", posed))
    assert [each.scope.context.user_id for each in seen] == ["ann", ""]
    assert ["userId" in each["args"] for each in seen] == [False, False]


async def test_defect_10_a_call_that_takes_too_long_is_cancelled_at_the_extension(wire: Wire) -> None:
    cancelled = asyncio.Event()
    async with offering(wire, never(cancelled)):
        assert await failure(wire) == "Tool invocation 'search' timed out"
        await within(cancelled.wait())


async def test_defect_11_a_registration_is_answered_and_a_retry_is_of_one_members_tool(wire: Wire) -> None:
    called_for: list[str] = []

    def answer(invocation: ToolInvocation) -> str:
        called_for.append(invocation["councilMember"]["name"])
        if len(called_for) == 2:
            raise ValueError("no ink")
        return "found"

    async with offering(wire, answer) as extension:
        both = council(wire, ANN, BEN)
        first = await ran(both)
        await within(both.retry(first, [USER], [("1b4e28ba-9999", "memory:search")]))
        assert called_for == ["Ann", "Ben", "Ben"]
        extension.register_tool(name="bad", parameters={"type": "nonsense"})
        await within(extension.ready())
        assert [(each.name, "nonsense" in each.error) for each in extension.refused] == [("bad", True)]
        assert [each.name for each in await wire[1].list()] == ["memory:search"]


def test_every_numbered_difference_of_the_page_has_its_test_here() -> None:
    defects = {int(number) for number in re.findall(r"test_defect_(\d+)_", " ".join(globals()))}
    assert defects == set(range(1, 12))
