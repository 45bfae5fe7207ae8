"""Measures a call without a process in between: the registry beside its function, the dispatcher, and tasks."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact, Line, Measured, compared, measured, microseconds
from lab.load import workload
from lab.stage import Stage
from toolbus import Bus, Host, errors
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.catalog.slots import Slots
from toolbus.bus.local import LocalCaller
from toolbus.bus.tasks import TaskManager
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.testing import running_bus
from toolbus.tool import Limits, Tool
from toolbus.tools import ToolRegistry
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

CALLS = 200  # of one sample
FRAME = 64  # calls that the dispatcher takes at once
FRAMES = 10  # of one sample
TASKS = 500
USER = "alice"
PARAMETERS = json.loads(workload.PARAMETERS_JSON)
TOOL = Tool(workload.TOOL_NAME, workload.DESCRIPTION, workload.PARAMETERS_JSON)
ARGUMENTS = {"place": "Reykjavik", "days": 3}
FUNCTION = "the function itself"

Ask: TypeAlias = Callable[[int], Awaitable[Any]]
Way: TypeAlias = Callable[[], AbstractAsyncContextManager[Ask]]


# -- one call, awaited -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _function() -> AsyncIterator[Ask]:
    async def ask(number: int) -> object:
        return await workload.forecast(**ARGUMENTS)  # type: ignore[arg-type]  # one dict of a text and a number

    yield ask


@asynccontextmanager
async def _registry(tasks: TaskManager | None = None, user: str = "") -> AsyncIterator[Ask]:
    registry = ToolRegistry(tasks)
    registry.tool(TOOL.name, TOOL.description, PARAMETERS)(workload.forecast)

    async def ask(number: int) -> str:
        return await registry.call(TOOL.name, ARGUMENTS, user)

    yield ask


@asynccontextmanager
async def offered(tools: Sequence[Tool], over_grpc: bool) -> AsyncIterator[Bus | Host]:
    """Yields a bus of this process with tools that answer at once, or a host on it over gRPC."""
    async with running_bus() as bus:
        for tool in tools:
            bus.add_tool(ToolSpec(tool, workload.forecast, HandlerKind.ASYNC))
        if not over_grpc:
            yield bus
            return
        async with Host(bus.grpc_addresses[0]) as host:
            yield host


@asynccontextmanager
async def _bus(over_grpc: bool) -> AsyncIterator[Ask]:
    async with offered([TOOL], over_grpc) as caller:

        async def ask(number: int) -> str:
            return (await caller.call(TOOL.name, ARGUMENTS)).output_json

        yield ask


WAYS: dict[str, Way] = {
    FUNCTION: _function,
    "ToolRegistry.call": _registry,
    "ToolRegistry.call, for a user": functools.partial(_registry, user=USER),
    "ToolRegistry.call, with a task manager": lambda: _registry(TaskManager()),
    "Bus.call": lambda: _bus(over_grpc=False),
    "Host.call over gRPC, the bus in this process": lambda: _bus(over_grpc=True),
}


def calls(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Calls one async function in every way, one call after another."""
    lines: dict[str, Line] = {name: functools.partial(_called, way, repeats) for name, way in WAYS.items()}
    facts = measured("calls", "A call of an async function", lines, plan.rounds)
    return compared(facts, FUNCTION, "times the function itself")


async def _called(way: Way, repeats: int) -> Measured:
    async with way() as ask:
        output = await ask(0)
        if "celsius" not in str(output):
            raise RuntimeError(f"a call failed: {output}")
        await microseconds(ask, CALLS)
        return {("a call", "µs"): [await microseconds(ask, CALLS) for _ in range(repeats)]}


# -- the dispatcher alone --------------------------------------------------------------------------------------------


class Plugin:
    """Takes calls and holds them until they are answered."""

    kind = "peer"
    source = "bench"
    instance = ""
    shares = False
    awaits_roles = False
    remote = True
    persisted = False
    takes_calls = True
    session_state = wire.SESSION_STATE_LIVE
    max_item_bytes = 1 << 40
    max_in_flight = workload.MAX_IN_FLIGHT

    def __init__(self) -> None:
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0

    def send(self, calls: Sequence[Any], now: float) -> None:
        """Does nothing: the calls are pending already."""

    def cancel(self, call: Any, reason: str) -> bool:
        return False

    def stage(self, call: Any) -> errors.Stage:
        return errors.Stage.DISPATCHED

    def answers(self) -> list[pb.ToolResult]:
        """Returns a result for each pending call."""
        return [pb.ToolResult(call_id=number, output_json=workload.OUTPUT_JSON) for number in self.pending]


class Core:
    """A dispatcher with one tool, its plugin and a caller; nothing waits for results, and nothing times calls."""

    def __init__(self, *, permissions: AccessRules | None = None, contents: bool = False) -> None:
        self.plugin = Plugin()
        self.registry = registry = Registry()
        registry.register(self.plugin, compile_tools([TOOL], Limits()))
        self.dispatcher = Dispatcher(
            registry, Policy(permissions=permissions), CallRecords(contents=contents), Limits(), arm=_never
        )
        self.caller = LocalCaller("bench-host", self.dispatcher)

    def ask(self, messages: Sequence[pb.ToolCall], now: float) -> None:
        """Has the dispatcher take calls.

        Raises:
            RuntimeError: it refused some.
        """
        self.dispatcher.calls(self.caller, messages, now)
        if len(self.plugin.pending) != len(messages):
            raise RuntimeError(f"the dispatcher took {len(self.plugin.pending)} of {len(messages)} calls")


def _never(when: float) -> None:
    """Arms nothing."""


def _messages(count: int, user: str = "", background_after: float = 0.0) -> list[pb.ToolCall]:
    context = pb.CallContext(user_id=user) if user else None
    return [
        pb.ToolCall(
            call_id=str(slot),
            name=TOOL.name,
            arguments_json=workload.arguments_json(slot),
            context=context,
            background_after_seconds=background_after,
        )
        for slot in range(count)
    ]


def dispatch(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Has a dispatcher take and answer calls, without any stream."""
    only = AccessRules.read({"tools": {TOOL.name: [USER]}})
    cores: dict[str, tuple[Callable[[], Core], str]] = {
        "no user": (Core, ""),
        "a user in the context": (Core, USER),
        "tool open to certain users": (functools.partial(Core, permissions=only), USER),
        "contents recorded": (functools.partial(Core, contents=True), ""),
        "certain users, contents recorded": (functools.partial(Core, permissions=only, contents=True), USER),
    }
    lines: dict[str, Line] = {
        name: functools.partial(_dispatched, make, user, repeats) for name, (make, user) in cores.items()
    }
    facts = measured("dispatch", f"The dispatcher alone, {FRAME} calls a frame", lines, plan.rounds)
    return compared(facts, "no user", "times a call without a user")


async def _dispatched(make: Callable[[], Core], user: str, repeats: int) -> Measured:
    core, messages = make(), _messages(FRAME, user)

    async def frame(number: int) -> None:
        now = time.monotonic()
        core.ask(messages, now)
        core.dispatcher.results(core.plugin, core.plugin.answers(), now)

    await microseconds(frame, FRAMES)
    return {("a call", "µs"): [await microseconds(frame, FRAMES) / FRAME for _ in range(repeats)]}


# -- tasks -----------------------------------------------------------------------------------------------------------


def tasks(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Has calls that take too long become tasks, and end as tasks."""
    lines: dict[str, Line] = {
        "in memory": functools.partial(_adopted, False, repeats),
        "persisted, too": functools.partial(_adopted, True, repeats),
    }
    return measured("tasks", f"{TASKS} calls become tasks", lines, plan.rounds)


async def _adopted(in_file: bool, repeats: int) -> Measured:
    becoming, ending = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            path = Path(folder, f"tasks-{number}.db") if in_file else None
            manager = TaskManager(path=path, running=TASKS, running_per_owner=TASKS)
            core = Core()
            core.dispatcher.deadlines.background = manager
            core.ask(_messages(TASKS, USER, background_after=1.0), 0.0)
            becoming.append(_each(functools.partial(core.dispatcher.deadlines.sweep, 2.0)))
            if len(manager.list_tasks(USER)) != TASKS:
                raise RuntimeError(f"{len(manager.list_tasks(USER))} of {TASKS} calls became tasks")
            answers = core.plugin.answers()
            ending.append(_each(functools.partial(core.dispatcher.results, core.plugin, answers, 3.0)))
            manager.close()
    return {("becoming one", "µs"): becoming, ("ending as one", "µs"): ending}


def _each(do: Callable[[], object]) -> float:
    """Returns how long one of all tasks takes, in microseconds."""
    began_at = time.perf_counter()
    do()
    return (time.perf_counter() - began_at) * 1e6 / TASKS
