"""Guards: every way in passes them; they refuse, change, hang, die and drain, and the outcome says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.callers import CALLERS
from tests.parts.council.council_cases import ran, texts_of
from tests.parts.council.fake_tool_source import member, settings
from tests.parts.mcp.server.http_client import HttpClient
from tests.support.waiting import until, within
from toolbus import Bus, Host, Plugin
from toolbus.bus.calls.call_records import CallRecord, RecordFilter
from toolbus.bus.serve_settings import settle
from toolbus.errors import Code, SetupError, Stage
from toolbus.extension import Council
from toolbus.functions.scope import ToolScope
from toolbus.parts.guards.room import GuardsRoom
from toolbus.parts.guards.settings import GuardRule
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 60_000.0  # milliseconds: a budget that no busy machine uses up
RULES = (
    GuardRule("screen", "refuse", ("mail",), when="both", budget_ms=LONG),
    GuardRule("slow", "refuse", ("closed",), when="before", budget_ms=1),
    GuardRule("slow", "allow", ("open",), when="both", budget_ms=1),
    GuardRule("die", "refuse", ("fragile",), when="both", budget_ms=LONG),
    GuardRule("screen", "allow", sources=("bank",), when="both", budget_ms=LONG),
    GuardRule("nonsense", "refuse", ("odd",), budget_ms=LONG),
    GuardRule("missing", "allow", ("lone",), budget_ms=LONG),
)


class World:
    """A bus with guards, and what its tools got."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.got: list[str] = []  # what the guarded tools got
        self.seen: list[dict[str, Any]] = []  # what the guard saw
        self.go_on = asyncio.Event()

        @bus.tool
        async def screen(
            when: str, tool: str, user_id: str, arguments: dict[str, Any], output: Any = None, error: Any = None
        ) -> dict[str, Any]:
            """Looks for words in what is sent."""
            self.seen.append({"when": when, "tool": tool, "user": user_id, "output": output, "error": error})
            body = str(arguments.get("body", "refuse before"))  # a council gives no arguments
            if body == f"refuse {when}":
                return {"verdict": "refuse", "reason": f"no {when}"}
            if body == f"replace {when}":
                return {"verdict": "replace", "arguments": {"body": "other"}, "output": "redacted"}
            if body == "break the schema":
                return {"verdict": "replace", "arguments": {"body": ["not a text"]}}
            if body == "wait in guard":
                self.got.append("guard waits")
                await self.go_on.wait()
            if body == "ask the mailer":  # a call of a guard is not guarded
                inner = (await bus.call("mail", {"body": "inner"})).text
                return {"verdict": "refuse", "reason": inner}
            return {"verdict": "allow"}

        @bus.tool(council_eligible=True)  # type: ignore[untyped-decorator]
        async def mail(scope: ToolScope, body: str = "") -> str:
            self.got.append(body)
            scope.progress(1, total=2, message=f"secret {body}")
            if body == "fail":
                raise ValueError("the secret of the tool")
            return f"sent {body}"

        @bus.tool
        async def relay(scope: ToolScope, text: str) -> str:
            return (await scope.call("mail", {"body": text})).text

        @bus.tool
        async def slow(arguments: dict[str, Any]) -> dict[str, str]:
            await asyncio.Event().wait()
            raise NotImplementedError

        @bus.tool
        def nonsense() -> str:
            return "fine with me"

        def plain(name: str) -> None:
            @bus.tool(name=name)  # type: ignore[untyped-decorator]
            def tool(body: str = "") -> str:
                self.got.append(f"{name} {body}")
                return f"{name} ran"

        for name in ("closed", "open", "fragile", "odd", "lone", "free"):
            plain(name)

    def verdicts(self) -> dict[tuple[str, str, str], int]:
        (room,) = [room for room in self.bus.core.rooms if isinstance(room, GuardsRoom)]
        counter, _ = room.counters()
        return {(labels["guard"], labels["when"], labels["verdict"]): number for labels, number in counter[2]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world() -> AsyncIterator[World]:
    async with running_bus(http="127.0.0.1:0", guards=RULES, offered=("tasks",)) as bus:
        yield World(bus)


# -- ways in × guards ------------------------------------------------------------------------------------------------

Way = Callable[[World, str], Awaitable[str]]


def by_caller(name: str) -> Way:
    async def way(world: World, body: str) -> str:
        async with CALLERS[name](world.bus) as caller:
            return (await caller.call("mail", {"body": body})).text

    return way


async def by_mcp(world: World, body: str) -> str:
    result = (await HttpClient(world.bus).call("mail", {"body": body})).result
    return " ".join(block["text"] for block in result["content"])


async def by_task(world: World, body: str) -> str:
    async with Host(world.bus.grpc_addresses[0], source="tasks") as host:
        await host.ready()
        begun = await host.call("mail", {"body": body}, background_after=0.000_001)
        if not isinstance(begun.output, dict):
            return begun.text  # it ended before it became a task
        ended = (await host.call("toolbus:await_task", {"task_id": begun.output["task_id"]})).unwrap()
        return str(ended.get("result") or ended.get("error"))


async def by_nested_call(world: World, body: str) -> str:
    return (await world.bus.call("relay", {"text": body})).text


async def by_council(world: World, body: str) -> str:
    council = Council(world.bus, settings(member("Ann", "mail"), timeout_seconds=60))
    return texts_of(await ran(council))[0]


WAYS: dict[str, Way] = {
    **{name: by_caller(name) for name in CALLERS},
    "mcp": by_mcp,
    "task": by_task,
    "nested": by_nested_call,
}
CASES = {  # what is sent → what the tool gets, and what the caller sees
    "plain": (["plain"], "sent plain"),
    "refuse before": ([], "guard 'screen' refused 'mail': no before; the tool was not run"),
    "replace before": (["other"], "sent other"),
    "refuse after": (["refuse after"], "no after; the tool has run, and its result is withheld"),
    "replace after": (["replace after"], "redacted"),
}


@pytest.mark.parametrize("body", CASES)
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_in_passes_the_guards(world: World, way: str, body: str) -> None:
    world.got.clear()
    got, seen = CASES[body]
    text = await within(WAYS[way](world, body))
    assert seen in text
    assert world.got == got
    assert "sent refuse" not in text


async def test_a_council_passes_the_guards(world: World) -> None:
    world.got.clear()
    assert "no before" in await within(by_council(world, ""))
    assert world.got == []


# -- what a verdict does ---------------------------------------------------------------------------------------------


async def call(world: World, name: str, body: str = "", **more: Any) -> Result:
    return await within(world.bus.call(name, {"body": body}, **more))


def error_of(result: Result) -> tuple[Code, Stage, bool]:
    assert result.error is not None
    assert result.error.reason == "guard"
    return result.error.code, result.error.stage, result.error.retry_safe


async def test_a_refusal_says_how_far_the_call_had_got(world: World) -> None:
    before, after = await call(world, "mail", "refuse before"), await call(world, "mail", "refuse after")
    assert error_of(before) == (Code.PERMISSION_DENIED, Stage.NOT_DISPATCHED, False)
    assert error_of(after) == (Code.PERMISSION_DENIED, Stage.ACCEPTED, False)


async def test_replaced_arguments_that_break_the_schema_are_refused(world: World) -> None:
    world.got.clear()
    result = await call(world, "mail", "break the schema")
    assert "it replaced the arguments by some that are invalid" in result.text
    assert error_of(result) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    assert world.got == []


async def test_a_guard_sees_user_failure_and_output_and_progress_without_its_text_passes(world: World) -> None:
    world.seen.clear()
    progress: list[Any] = []
    context = CallContext(user_id="ann")
    result = await call(world, "mail", "fail", context=context, on_progress=progress.append)
    assert "the secret of the tool" in result.text  # the guard let it pass
    before, after = world.seen
    assert (before["when"], before["tool"], before["user"]) == ("before", "mail", "ann")
    assert after["error"]["code"] == "ERROR_CODE_TOOL"
    assert "the secret" in after["error"]["message"]
    assert [(each.progress, each.message) for each in progress] == [(1, "")]


async def test_calls_of_a_guard_are_not_guarded(world: World) -> None:
    world.got.clear()
    assert "sent inner" in (await call(world, "mail", "ask the mailer")).text
    assert world.got == ["inner"]


async def test_a_rule_may_close_the_guard_to_users_and_it_still_decides(world: World) -> None:
    world.bus.permit("tools", "screen", [])
    try:
        denied = await within(world.bus.call("screen", context=CallContext(user_id="ann")))
        assert denied.error is not None
        assert (await call(world, "mail", "plain", context=CallContext(user_id="ann"))).output == "sent plain"
    finally:
        world.bus.permit("tools", "screen", None)


async def test_a_cancelled_call_ends_its_guard_and_does_not_run(world: World) -> None:
    world.got.clear()
    held = asyncio.create_task(world.bus.call("mail", {"body": "wait in guard"}))
    await until(lambda: world.got, "the guard to begin")
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert (await call(world, "mail", "plain")).output == "sent plain"
    assert world.got == ["guard waits", "plain"]
    assert "held=0" in repr(world.bus.dispatcher.seams.interceptors[0])


# -- guards that do not decide ---------------------------------------------------------------------------------------


async def test_a_hanging_guard_refuses_or_lets_pass_as_its_rule_says(world: World) -> None:
    world.got.clear()
    closed = await call(world, "closed")
    assert error_of(closed) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    assert "guard 'slow' of 'closed' did not decide: DEADLINE_EXCEEDED" in closed.text
    assert (await call(world, "open")).output == "open ran"
    assert world.got == ["open "]


async def test_an_answer_that_is_no_verdict_and_a_guard_that_is_not_there_decide_nothing(world: World) -> None:
    odd = await call(world, "odd")
    assert 'it must answer {"verdict": "allow"}' in odd.text
    assert error_of(odd)[0] is Code.UNAVAILABLE
    assert (await call(world, "lone")).output == "lone ran"


async def test_a_guard_that_dies_or_drains_says_so_and_one_that_comes_back_decides(world: World) -> None:
    world.got.clear()
    begun, fate = asyncio.Event(), asyncio.Event()
    plugin = Plugin("frail", address=world.bus.grpc_addresses[0])

    @plugin.tool
    async def die(when: str, arguments: dict[str, Any]) -> dict[str, str]:
        """Waits for its fate."""
        begun.set()
        if arguments.get("body") == "hang":
            await fate.wait()
        return {"verdict": "allow"}

    await within(plugin.start())
    await within(plugin.ready())
    assert (await call(world, "fragile")).output == "fragile ran"
    begun.clear()
    held = asyncio.create_task(call(world, "fragile", "hang"))
    await within(begun.wait())
    presence = world.bus.core.sessions.presence
    (peer,) = [each for each in presence.sessions.values() if each.source == "frail"]
    presence.end(peer, "killed by the test", time.monotonic())
    lost = await within(held)
    assert "did not decide: UNAVAILABLE" in lost.text
    assert "killed by the test" in lost.text
    assert error_of(lost) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    fate.set()
    await until(lambda: world.bus.registry.find_all("die"), "the guard to come back")
    assert (await call(world, "fragile")).output == "fragile ran"
    await within(plugin.close())
    gone = await call(world, "fragile")
    assert "did not decide: " in gone.text
    assert world.got == ["fragile ", "fragile "]


# -- what operators see ----------------------------------------------------------------------------------------------


def newest(world: World) -> list[CallRecord]:
    return world.bus.records.newest(RecordFilter(), 50)


async def test_verdicts_stand_in_records_metrics_and_explanations(world: World) -> None:
    await call(world, "mail", "replace before")
    await call(world, "open")
    records = {record.name: record for record in reversed(newest(world)) if record.caller == "local"}
    assert records["mail"].notes == ("screen replaced the arguments", "screen after: allow")
    assert records["open"].notes == ("slow before: failed, allow", "slow after: failed, allow")
    assert records["mail"].described(0.0)["notes"] == list(records["mail"].notes)
    looks = [record for record in newest(world) if record.name == "screen"]
    assert looks[0].parent == records["mail"].id
    verdicts = world.verdicts()
    assert verdicts["slow", "before", "failed_allow"] >= 1
    assert verdicts["screen", "before", "replace"] >= 1
    explained = (await within(world.bus.call("toolbus:explain", {"tool": "mail"}))).unwrap()
    steps = {step["step"]: step["why"] for step in explained["steps"]}
    assert steps["guards before"] == "'screen' (60000 ms, else refuse)"
    assert "guards after" in steps


async def test_tools_without_a_rule_and_operators_tools_pass_no_guard(world: World) -> None:
    (guards,) = world.bus.dispatcher.seams.interceptors
    assert (await call(world, "free")).output == "free ran"
    assert all(rule.tools != ("free",) for rule in RULES)
    everything = GuardRule("gone", "refuse", ("*",))
    async with running_bus(guards=(everything,)) as bus:

        @bus.tool
        def add(a: int) -> int:
            return a

        assert (await within(bus.call("toolbus:stats"))).error is None
        assert (
            "did not decide: UNAVAILABLE: tool 'gone' is not registered"
            in (await within(bus.call("add", {"a": 1}))).text
        )
    assert guards is world.bus.dispatcher.seams.interceptors[0]


async def test_a_bus_without_guards_has_no_interceptor() -> None:
    async with running_bus() as bus:
        assert bus.dispatcher.seams.interceptors == ()


async def test_a_draining_bus_ends_guarded_calls_that_it_has_begun() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with running_bus(guards=(GuardRule("pause", "refuse", ("add",), when="both", budget_ms=LONG),)) as bus:

        @bus.tool
        async def pause(when: str) -> dict[str, str]:
            if when == "before":
                begun.set()
                await go_on.wait()
            return {"verdict": "allow"}

        @bus.tool
        def add(a: int) -> int:
            return a + 1

        held = asyncio.create_task(bus.call("add", {"a": 1}))
        await within(begun.wait())
        draining = asyncio.create_task(bus.drain(60))
        await until(lambda: bus.dispatcher.draining)
        go_on.set()
        assert (await within(held)).output == 2
        await within(draining)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('guard = "g"\ntools = ["*"]', "on_failure is ''"),
        ('guard = "g"\non_failure = "open"\ntools = ["*"]', "must be refuse or allow"),
        ('guard = "g"\non_failure = "allow"', "sees no call"),
        ('on_failure = "allow"\ntools = ["*"]', "guard is missing"),
        ('guard = "g"\non_failure = "allow"\ntools = ["*"]\nwhen = "later"', "one of before, after, both"),
        ('guard = "g"\non_failure = "allow"\ntools = ["*"]\nbudget_ms = 0', "a number from 1 to 60000"),
        ('guard = "g"\non_failure = "allow"\ntool = ["*"]', "unknown key"),
    ],
)
async def test_a_rule_that_says_too_little_is_refused_with_its_place(tmp_path: Any, text: str, problem: str) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text(f"[[guards]]\n{text}\n")
    with pytest.raises(SetupError) as refused:
        settle({}, {}, file)
    assert problem in str(refused.value)
    assert "guards" in str(refused.value)
