"""Measures the core among so many registered tools, in a process of its own: one sample of every operation.

Processor time, all of it: with what the garbage collector does meanwhile, and without what other processes do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

from lab.benchmarks.facts import Column
from lab.benchmarks.local_calls import Core
from lab.load import workload
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import compile_tool
from toolbus.bus.catalog.policy import Policy
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_pb2 as pb

FRAME = 64  # calls of one frame
LISTED = 1_000  # tools of one sample of lists, at least
SEED = 7
DICT = "find in a bare dict"

Sample: TypeAlias = dict[Column, float]
Given = TypeVar("Given")

_samples: list[Callable[[], Sample]] = []  # of this process, which has one


def build(count: int, operations: int) -> None:
    """Registers so many tools in this process.

    Args:
        operations: of one kind in one sample.
    """
    core, choose = Core(), random.Random(SEED)
    registry, plugin = core.registry, core.plugin
    names = [f"tool_{number}" for number in range(count)]
    registry.register(plugin, [compile_tool(_tool(name), Limits()) for name in names])
    view = CatalogView(registry, Policy())
    # The same keys and values as in the registry: what reading memory of this size costs by itself.
    entries = {name: registry.find(name) for name in names}

    def find(name: str) -> None:
        if (entry := registry.find(name)) is None or entry.current is None:
            raise RuntimeError("a tool was not found")

    def look_up(name: str) -> None:
        if (entry := entries.get(name)) is None or entry.current is None:
            raise RuntimeError("a tool was not found")

    def call(frame: list[pb.ToolCall]) -> None:
        now = time.monotonic()
        core.ask(frame, now)
        core.dispatcher.results(plugin, plugin.answers(), now)

    def register(number: int) -> None:
        registry.register(plugin, [compile_tool(_tool(f"new_{number}"), Limits())])

    def unregister(number: int) -> None:
        registry.unregister(f"new_{number}")

    def notify(number: int) -> None:
        register(number)
        view.since(registry.revision - 1)
        unregister(number)

    def list_all() -> float:
        times, spent = max(1, LISTED // count), 0.0
        for number in range(times):
            register(number)
            spent += _each(lambda _: view.listings(), (number,))
            unregister(number)
        return spent / times / count

    def measure() -> Sample:
        numbers = range(operations)
        wanted = [choose.choice(names) for _ in numbers]
        frames = [_calls(choose.choices(names, k=FRAME)) for _ in range(operations // FRAME + 1)]
        return {
            ("find", "µs"): _each(find, wanted),
            (DICT, "µs"): _each(look_up, wanted),
            ("call", "µs"): _each(call, frames) / FRAME,
            ("register", "µs"): _each(register, numbers),
            ("unregister", "µs"): _each(unregister, numbers),
            ("register, notify a watcher, unregister", "µs"): _each(notify, numbers),
            ("list after a change, each tool", "µs"): list_all(),
        }

    measure()  # what happens once does not show
    _samples.append(measure)


def sample() -> Sample:
    """Measures the µs of one operation of each kind once in this process."""
    return _samples[-1]()


def _each(do: Callable[[Given], object], given: Iterable[Given]) -> float:
    """Returns how many µs of processor time one of so many takes, on average."""
    things = list(given)
    began_at = time.process_time()
    for thing in things:
        do(thing)
    return (time.process_time() - began_at) * 1e6 / len(things)


def _tool(name: str) -> Tool:
    return Tool(name, workload.DESCRIPTION, workload.PARAMETERS_JSON)


def _calls(names: Iterable[str]) -> list[pb.ToolCall]:
    return [
        pb.ToolCall(call_id=str(slot), name=name, arguments_json=workload.arguments_json(slot))
        for slot, name in enumerate(names)
    ]
