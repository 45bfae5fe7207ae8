"""Approvals: a call waits until somebody allows exactly it, and runs once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.callers import CALLERS
from tests.parts.guards.test_guards import by_caller, by_council, by_mcp, by_nested_call, by_task
from tests.support.processes import toolbus
from tests.support.waiting import until, within
from toolbus import Bus, Host
from toolbus.bus.serve_settings import settle
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.scope import ToolScope
from toolbus.parts.guards import approvals
from toolbus.parts.guards.settings import ApprovalRule, GuardRule
from toolbus.protocol.questions import Answer, Question
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext, Inputs
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = (
    ApprovalRule(("mail", "login")),
    ApprovalRule(destructive=True, ask="either"),
    ApprovalRule(("shy",), ask="user"),
    ApprovalRule(("brief",), expire_seconds=0.001),
)
LONG = 300.0  # seconds: a call may wait half of that for its approval


class World:
    """A bus with approvals, and what its tools got."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.got: list[str] = []

        @bus.tool(council_eligible=True, timeout=LONG)  # type: ignore[untyped-decorator]
        def mail(body: str = "") -> str:
            self.got.append(body)
            return f"sent {body}"

        @bus.tool(timeout=LONG)  # type: ignore[untyped-decorator]
        async def relay(scope: ToolScope, text: str) -> str:
            return (await scope.call("mail", {"body": text})).text

        @bus.tool(destructive=True, timeout=LONG)  # type: ignore[untyped-decorator]
        async def wipe(scope: ToolScope, disk: str) -> str:
            if disk == "asks":
                answer = await scope.elicit("Really?", {"sure": {"type": "boolean"}})
                disk = f"{disk} {answer.content}"
            self.got.append(disk)
            return f"wiped {disk}"

        @bus.tool(timeout=LONG)  # type: ignore[untyped-decorator]
        def login(password: str) -> str:
            return "in"

        @bus.tool
        def shy() -> str:
            self.got.append("shy")
            return "ran"

        @bus.tool
        def brief() -> str:
            self.got.append("brief")
            return "ran"

    async def held(self, count: int = 1) -> list[dict[str, Any]]:
        waiting: list[dict[str, Any]] = []

        async def look() -> bool:
            waiting[:] = (await self.bus.call("toolbus:held_calls")).unwrap()
            return len(waiting) == count

        async with asyncio.timeout(30):
            while not await look():
                await asyncio.sleep(0.005)
        return waiting

    async def decide(self, id: str, *, allow: bool = True, reason: str = "") -> Result:
        return await self.bus.call("toolbus:decide_call", {"id": id, "allow": allow, "reason": reason})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[World]:
    async with running_bus(http="127.0.0.1:0", approvals=RULES, offered=("tasks",)) as bus:
        yield World(bus)


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: World) -> World:
    shared.got.clear()
    for each in (await shared.bus.call("toolbus:held_calls")).unwrap():
        await shared.decide(each["id"], allow=False)
    return shared


WAYS: dict[str, Callable[[Any, str], Awaitable[str]]] = {
    **{name: by_caller(name) for name in CALLERS},
    "mcp": by_mcp,
    "task": by_task,
    "nested": by_nested_call,
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_in_waits_for_an_operator_and_runs_once(world: World, way: str) -> None:
    calling = asyncio.ensure_future(WAYS[way](world, f"by {way}"))
    (held,) = await world.held()
    assert (held["tool"], held["waiting"], json.loads(held["arguments"])) == ("mail", 1, {"body": f"by {way}"})
    assert world.got == []
    assert (await world.decide(held["id"])).unwrap()["allowed"] is True
    assert f"sent by {way}" in await within(calling)
    assert world.got == [f"by {way}"]
    again = await world.decide(held["id"])
    assert again.error is not None
    assert "waits for an approval" in again.error.message


async def test_a_council_waits_too(world: World) -> None:
    calling = asyncio.create_task(by_council(world, ""))  # type: ignore[arg-type]
    (held,) = await world.held()
    await world.decide(held["id"], allow=False, reason="no councils")
    assert "an operator denied this call of 'mail': no councils; it was not run" in await within(calling)
    assert world.got == []


def error_of(result: Result) -> tuple[Code, Stage, bool, str]:
    assert result.error is not None
    return result.error.code, result.error.stage, result.error.retry_safe, result.error.reason


async def test_an_approval_that_comes_late_is_for_the_same_call_made_again_and_for_no_other(world: World) -> None:
    ann = CallContext(user_id="ann")
    late = await world.bus.call("mail", {"body": "b"}, context=ann, timeout=0.2)
    assert error_of(late) == (Code.PERMISSION_DENIED, Stage.NOT_DISPATCHED, True, "needs_approval")
    (held,) = await world.held()
    assert f"`toolbus approvals allow {held['id']}`" in str(late.error)
    assert (held["waiting"], held["user_id"]) == (0, "ann")
    await world.decide(held["id"])
    async with Host(world.bus.grpc_addresses[0], source="other") as host:
        others = [
            await world.bus.call("mail", {"body": "b"}, context=CallContext(user_id="bob"), timeout=0.2),
            await world.bus.call("mail", {"body": "c"}, context=ann, timeout=0.2),
            await host.call("mail", {"body": "b"}, context=ann, timeout=0.5),
        ]
    assert [error_of(each)[3] for each in others] == ["needs_approval"] * 3
    assert world.got == []
    assert (await world.bus.call("mail", {"body": "b"}, context=ann)).output == "sent b"
    assert error_of(await world.bus.call("mail", {"body": "b"}, context=ann, timeout=0.2))[3] == "needs_approval"
    assert world.got == ["b"]


async def test_of_equal_calls_that_wait_one_approval_runs_one(world: World) -> None:
    calls = [asyncio.create_task(world.bus.call("mail", {"body": "same"})) for _ in range(3)]
    await until_waiting(world, 3)
    (held,) = await world.held()
    await world.decide(held["id"])
    await until(lambda: world.got == ["same"], "one run")
    await until_waiting(world, 2)
    (held,) = await world.held()
    await world.decide(held["id"], allow=False)
    results = await within(asyncio.gather(*calls))
    assert sorted(str(each.error is None) for each in results) == ["False", "False", "True"]
    assert world.got == ["same"]


async def until_waiting(world: World, count: int) -> None:
    async with asyncio.timeout(30):
        while [each["waiting"] for each in await world.held()] != [count]:
            await asyncio.sleep(0.005)


async def test_a_caller_that_gives_up_runs_nothing_later(world: World) -> None:
    calling = asyncio.create_task(world.bus.call("mail", {"body": "gone"}))
    (held,) = await world.held()
    calling.cancel()
    await until_waiting(world, 0)
    await world.decide(held["id"])
    await asyncio.sleep(0)
    assert world.got == []


async def test_a_declaration_that_changed_needs_an_approval_of_its_own(world: World) -> None:
    for text in ("One.", "Two."):

        @world.bus.tool(name="changing", description=text, destructive=True)  # type: ignore[untyped-decorator]
        def changing(n: int) -> int:
            world.got.append("changing")
            return n

        late = await world.bus.call("changing", {"n": 1}, timeout=0.2)
        assert error_of(late)[3] == "needs_approval"
        if text == "One.":
            (held,) = await world.held()
            await world.decide(held["id"])
    assert world.got == []


# -- the caller's user -----------------------------------------------------------------------------------------------


async def test_the_user_is_asked_where_the_caller_can(world: World) -> None:
    asked: list[str] = []

    async def answer(question: Question) -> Answer:
        asked.append(question.message)
        return Answer("accept" if "c:" in question.message else "decline", {"sure": True} if question.schema else {})

    async with Host(world.bus.grpc_addresses[0]) as host:
        ran = await host.call("wipe", {"disk": "c:"}, on_input=answer)
        declined = await host.call("wipe", {"disk": "d:"}, on_input=answer)
    assert (ran.output, world.got) == ("wiped c:", ["c:"])
    assert asked == ["Allow wipe to run? disk = c:", "Allow wipe to run? disk = d:"]
    assert error_of(declined) == (Code.PERMISSION_DENIED, Stage.NOT_DISPATCHED, False, "approval_denied")


async def test_a_tool_that_asks_is_allowed_once_for_both_parts_of_its_call(world: World) -> None:
    asked: list[str] = []

    async def answer(question: Question) -> Answer:
        asked.append(question.message)
        return Answer("accept", {"sure": True} if "Really" in question.message else {})

    async with Host(world.bus.grpc_addresses[0]) as host:
        ran = await host.call("wipe", {"disk": "asks"}, on_input=answer)
    assert ran.error is None, ran.error
    assert asked == ["Allow wipe to run? disk = asks", "Really?"]
    assert world.got == ["asks {'sure': True}"]


async def test_an_answer_is_used_once_and_for_its_call_only(world: World) -> None:
    forms = ("elicitation.form",)
    async with Host(world.bus.grpc_addresses[0]) as host:

        async def call(disk: str, state: str) -> Result:
            inputs = Inputs(forms, {"approval": {"action": "accept"}}, state) if state else Inputs(forms)
            return await host.call("wipe", {"disk": disk}, inputs=inputs, timeout=1.0)

        state = (await call("x", "")).request_state
        assert state.startswith("approval.")
        assert "was given for another one" in str((await call("y", state)).error)
        assert "used already" in str((await call("x", state)).error)
        assert error_of(await call("x", "approval.made-up"))[0] == Code.PERMISSION_DENIED
        assert "need the approval of an operator" in str((await call("x", "of the tool")).error)
        state = (await call("x", "")).request_state
        assert (await call("x", state)).output == "wiped x"
        assert "used already" in str((await call("x", state)).error)
    assert world.got == ["x"]


async def test_a_rule_for_users_refuses_callers_that_cannot_ask(world: World) -> None:
    result = await world.bus.call("shy")
    assert error_of(result)[3] == "needs_approval"
    assert "cannot ask: accept elicitation.form" in str(result.error)
    assert world.got == []


# -- limits, words, settings -----------------------------------------------------------------------------------------


async def test_what_waits_is_bounded_and_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING_PER_CALLER", 2)
    for number in range(2):
        await world.bus.call("mail", {"body": f"n{number}"}, timeout=0.05)
    full = await world.bus.call("mail", {"body": "one more"}, timeout=5)
    assert error_of(full) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True, "needs_approval")
    for each in await world.held(2):
        await world.decide(each["id"], allow=False)
    await world.bus.call("brief", timeout=0.05)
    await world.held(0)
    assert world.got == []


async def test_operators_see_and_decide_by_commands(world: World) -> None:
    address = world.bus.grpc_addresses[0]
    calling = asyncio.create_task(world.bus.call("login", {"password": "abc"}))
    (held,) = await world.held()
    assert "abc" not in held["arguments"]
    listed = await asyncio.to_thread(toolbus, "approvals", "--bus", address)
    assert listed.returncode == 0, listed.stderr
    assert held["id"] in listed.stdout
    allowed = await asyncio.to_thread(toolbus, "approvals", "allow", held["id"], "--bus", address)
    assert "allowed login" in allowed.stdout
    assert (await within(calling)).error is None
    gone = await asyncio.to_thread(toolbus, "approvals", "deny", held["id"], "--reason", "no", "--bus", address)
    assert (gone.returncode, "waits for an approval" in gone.stderr) == (1, True)
    assert (await asyncio.to_thread(toolbus, "approvals", "allow", "--bus", address)).returncode == 2
    explained = (await world.bus.call("toolbus:explain", {"tool": "mail"})).text
    assert "needs the approval of an operator" in explained


async def test_guards_look_first_and_people_see_what_runs() -> None:
    rules = (GuardRule("screen", "refuse", ("mail",), budget_ms=60_000),)
    async with running_bus(guards=rules, approvals=(ApprovalRule(("mail",)),)) as bus:
        world = World(bus)

        @bus.tool(read_only=True)  # type: ignore[untyped-decorator]
        def screen(arguments: dict[str, Any]) -> dict[str, Any]:
            return {"verdict": "replace", "arguments": {"body": "clean"}}

        calling = asyncio.create_task(bus.call("mail", {"body": "dirty"}))
        (held,) = await world.held()
        assert json.loads(held["arguments"]) == {"body": "clean"}
        await world.decide(held["id"])
        assert (await within(calling)).output == "sent clean"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[approvals]]\n", "names neither tools, sources nor roles"),
        ('[[approvals]]\ntools = ["x"]\nask = "nobody"\n', "ask"),
        ('[[approvals]]\ntools = ["x"]\nexpire_seconds = 0\n', "expire_seconds"),
        ('[[approvals]]\ntool = ["x"]\n', "tool"),
        ("[[approvals]]\ndestructive = 1\n", "destructive"),
    ],
)
async def test_a_wrong_rule_is_refused_with_its_place(text: str, fault: str, tmp_path: Any) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(SetupError, match=fault):
        settle({}, {}, file)
