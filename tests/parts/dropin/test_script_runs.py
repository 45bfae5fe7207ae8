"""Scripts over tools: their calls are nested calls, bounded, and the answer says what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus import Bus, Plugin
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.dropin import run_script
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSet, spec_of
from toolbus.parts.dropin.script_runs import MAX_CALLS, MAX_SCRIPT, ScriptRun
from toolbus.parts.dropin.tool_folder import ToolFolder
from toolbus.parts.guards.settings import GuardRule
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext
from toolbus.testing import running_bus

pytest.importorskip("quickjs")
pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = (GuardRule("check", "refuse", ("secret",), budget_ms=60_000),)


def offer(bus: Bus) -> None:
    @bus.tool
    def add(a: int, b: int = 1) -> int:
        return a + b

    @bus.tool
    def who(scope: ToolScope) -> str:
        return scope.context.user_id

    @bus.tool
    def fails(text: str) -> None:
        raise ValueError(text)

    @bus.tool
    async def hang() -> str:
        await asyncio.Event().wait()
        raise NotImplementedError

    @bus.tool
    def secret() -> str:
        return "secret"

    @bus.tool
    def check() -> dict[str, str]:
        return {"verdict": "refuse", "reason": "not for scripts"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bus() -> AsyncIterator[Bus]:
    tools = ToolSet()
    tools.add(spec_of(run_script))
    async with running_bus(guards=RULES) as bus:
        offer(bus)
        async with Plugin("scripts", address=bus.grpc_addresses[0], tools=tools) as plugin:
            await plugin.ready()
            yield bus


async def run(bus: Bus, script: str, user: str = "ann", **values: Any) -> Result:
    arguments = {"script": script, "input": values}
    return await within(bus.call("run_script", arguments, context=CallContext(user_id=user)))


async def test_a_script_loops_filters_and_returns_one_value(bus: Bus) -> None:
    result = await run(
        bus,
        """
        const sums = await Promise.all(input.numbers.map((a) => call("add", {a, b: 10})));
        console.log("added", sums.length);
        return sums.filter((sum) => sum > 11);
        """,
        numbers=[1, 2, 3],
    )
    assert result.output == {"result": [12, 13], "ran": {"add": 3}, "log": ["added 3"]}


async def test_its_calls_are_nested_calls_of_the_same_user_and_pass_the_guards(bus: Bus) -> None:
    result = await run(bus, "return [await call('who'), await call('secret').catch((e) => e.code + ' ' + e.message)]")
    assert result.output["result"][0] == "ann"
    assert "PERMISSION_DENIED guard 'check' refused 'secret': not for scripts" in result.output["result"][1]
    (outer,) = bus.records.newest(RecordFilter(name="run_script"), 1)
    (inner,) = bus.records.newest(RecordFilter(name="who"), 1)
    assert (inner.parent, inner.user_id, inner.caller) == (outer.id, "ann", "scripts")


async def test_a_user_reaches_no_tool_that_it_may_not_call(bus: Bus) -> None:
    bus.permit("tools", "add", ["bob"])
    try:
        refused = await run(bus, "return await call('add', {a: 1})")
        assert "may not call 'add'" in refused.text
        assert (await run(bus, "return await call('add', {a: 1})", "bob")).output["result"] == 2
    finally:
        bus.permit("tools", "add", None)


async def test_a_script_that_fails_in_the_middle_says_what_ran_and_what_may_be_repeated(bus: Bus) -> None:
    result = await run(
        bus,
        """
        await call("add", {a: 1});
        await call("fails", {text: "a reason"}).catch(() => 0);
        await call("no_such_tool").catch(() => 0);
        call("hang");
        await call("add", {a: 2});
        throw new Error("enough");
        """,
    )
    assert result.error is not None
    assert "enough" in result.error.message
    assert "Before that succeeded: add 2 times; do not repeat them" in result.error.message
    ran, failed, unfinished = (result.output[part] for part in ("ran", "failed", "unfinished"))
    assert ran == {"add": 2}
    assert [(each["name"], each["may_be_repeated"]) for each in failed] == [("fails", False), ("no_such_tool", False)]
    assert "TOOL, accepted: " in failed[0]["state"]
    assert "NOT_FOUND, not_dispatched" in failed[1]["state"]
    assert [each["name"] for each in unfinished] == ["hang"]
    await until(lambda: bus.dispatcher.in_flight.active == 0, "the end of the call that was left")


class Scope:
    """A call whose time a test ends; `hang` never ends by itself."""

    def __init__(self) -> None:
        self.hangs = asyncio.Event()

    def time_left(self) -> float:
        return 3_600.0

    async def call(self, name: str, arguments: str, *, timeout: float) -> Result:
        if name == "hang":
            self.hangs.set()
            await asyncio.Event().wait()
        return Result("1", arguments)


async def test_a_script_that_is_cut_says_what_ran() -> None:
    scope = Scope()
    script = ScriptRun(scope)  # type: ignore[arg-type]  # the part of a scope that it uses
    running = asyncio.create_task(script.run("await call('add', {a: 1}); await call('hang')", {}))
    await within(scope.hangs.wait())
    script.cut("the script was cut")
    reply = await within(running)
    assert reply.error.startswith(
        "the script was cut. Before that succeeded: add 1 times; do not repeat them; hang must"
    )
    unfinished = {"name": "hang", "may_be_repeated": False, "state": "unfinished: it may have run"}
    assert reply.output == {"result": None, "ran": {"add": 1}, "unfinished": [unfinished]}


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("return (", "SyntaxError"),
        ("while (true) {}", "computed for more than"),
        ("const all = []; while (true) all.push('x'.repeat(1 << 20) + all.length)", "of memory"),
        ("return std.open", "std"),
        ("return await import('os')", "os"),
        ("for (let i = 0; i <= 200; i += 1) await call('add', {a: i})", f"at most {MAX_CALLS} calls"),
        ("x" * (MAX_SCRIPT + 1), "write less"),
    ],
)
async def test_what_a_script_may_not_do_ends_it_with_a_reason(bus: Bus, script: str, problem: str) -> None:
    result = await run(bus, script)
    assert result.error is not None
    assert problem in result.error.message


async def test_a_cancelled_script_ends_its_calls(bus: Bus) -> None:
    task = asyncio.create_task(run(bus, "await call('hang')"))
    await until(lambda: bus.dispatcher.in_flight.active == 2, "the inner call")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: bus.dispatcher.in_flight.active == 0, "the end of both calls")


async def test_a_drop_in_file_of_one_line_offers_it_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "scripts.py").write_text("from toolbus.dropin import run_script\n")
    async with running_bus() as bus:
        offer(bus)
        tools = ToolFolder(tmp_path / "tools", await bus.dropin_address(), lambda report: None)
        running = asyncio.create_task(tools.run())
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while "run_script" not in {each.tool.name for each in bus.list()}:
                    await asyncio.sleep(0.02)
            (offered,) = [each.tool for each in bus.list() if each.tool.name == "run_script"]
            assert offered.annotations.destructive is True
            assert (await run(bus, "return await call('add', {a: 1})")).output == {"result": 2, "ran": {"add": 1}}
            assert "administers the bus" in (await run(bus, "return await call('toolbus:drain', {})")).text
        finally:
            tools.stop()
            await within(running)
