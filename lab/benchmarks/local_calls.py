"""Measures the dispatcher alone, without any stream; and offers tools of this process to other benchmarks."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact, Line, Measured, compared, measured, microseconds
from lab.load import workload
from lab.stage import Stage
from tests.support.core_model import PeerDouble
from toolbus import Bus, Host
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import compile_tool
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.protocol.tool import Limits, Tool
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

FRAME = 64  # calls that the dispatcher takes at once
FRAMES = 10  # of one sample
USER = "alice"
TOOL = Tool(workload.TOOL_NAME, workload.DESCRIPTION, workload.PARAMETERS_JSON)


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


class Plugin(PeerDouble):
    """A handler whose calls are pending until it is asked for results."""

    def __init__(self) -> None:
        super().__init__("bench", shares=False, max_in_flight=workload.MAX_IN_FLIGHT)

    def send(self, calls: Sequence[Any], now: float) -> None:
        """Does nothing: the calls are pending already."""

    def answers(self) -> list[pb.ToolResult]:
        return [pb.ToolResult(call_id=number, output_json=workload.OUTPUT_JSON) for number in self.pending]


class Core:
    """A dispatcher with one tool, its plugin and a caller; nothing waits for results, and nothing times calls."""

    def __init__(self, *, permissions: AccessRules | None = None, contents: bool = False) -> None:
        self.plugin = Plugin()
        self.registry = registry = Registry()
        registry.register(self.plugin, [compile_tool(TOOL, Limits())])
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


def _messages(user: str) -> list[pb.ToolCall]:
    context = pb.CallContext(user_id=user) if user else None
    return [
        pb.ToolCall(
            call_id=str(slot),
            name=TOOL.name,
            arguments_json=workload.arguments_json(slot),
            context=context,
        )
        for slot in range(FRAME)
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
    core, messages = make(), _messages(user)

    async def frame(number: int) -> None:
        now = time.monotonic()
        core.ask(messages, now)
        core.dispatcher.results(core.plugin, core.plugin.answers(), now)

    await microseconds(frame, FRAMES)
    return {("a call", "µs"): [await microseconds(frame, FRAMES) / FRAME for _ in range(repeats)]}
