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
from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.policy import Policy
from toolbus.tool import Limits, Tool
from toolbus.v1 import tool_pb2 as pb

FRAME = 64  # calls of one frame
LISTED = 1_000  # tools of one sample of lists, at least
SEED = 7
DICT = "find in a bare dict"

Sample: TypeAlias = dict[Column, float]
Given = TypeVar("Given")

_worlds: list[World] = []  # of this process, which has one


def build(count: int, operations: int) -> None:
    """Registers so many tools in this process."""
    _worlds.append(World(count, operations))


def sample() -> Sample:
    """Measures every operation once in this process."""
    return _worlds[-1].sample()


class World:
    """A core with so many tools.

    Args:
        operations: of one kind in one sample.
    """

    def __init__(self, count: int, operations: int) -> None:
        self._core, self._choose = Core(), random.Random(SEED)
        self._operations = operations
        self._names = [f"tool_{number}" for number in range(count)]
        self._registry = self._core.registry
        self._registry.register(
            self._core.plugin, compile_tools([_tool(name) for name in self._names], Limits(tools=count))
        )
        self._view = CatalogView(self._registry, Policy())
        # The same keys and values as in the registry: what reading memory of this size costs by itself.
        self._dict = {name: self._registry.find(name) for name in self._names}
        self.sample()  # what happens once does not show

    def sample(self) -> Sample:
        """Returns the µs of one operation of each kind."""
        numbers = range(self._operations)
        wanted = [self._choose.choice(self._names) for _ in numbers]
        frames = [_calls(self._choose.choices(self._names, k=FRAME)) for _ in range(self._operations // FRAME + 1)]
        return {
            ("find", "µs"): _each(self._find, wanted),
            (DICT, "µs"): _each(self._look_up, wanted),
            ("call", "µs"): _each(self._call, frames) / FRAME,
            ("register", "µs"): _each(self._register, numbers),
            ("unregister", "µs"): _each(self._unregister, numbers),
            ("register, notify a watcher, unregister", "µs"): _each(self._notify, numbers),
            ("list after a change, each tool", "µs"): self._list(),
        }

    def _find(self, name: str) -> None:
        entry = self._registry.find(name)
        if entry is None or entry.current is None:
            raise RuntimeError("a tool was not found")

    def _look_up(self, name: str) -> None:
        entry = self._dict.get(name)
        if entry is None or entry.current is None:
            raise RuntimeError("a tool was not found")

    def _call(self, frame: list[pb.ToolCall]) -> None:
        now = time.monotonic()
        self._core.ask(frame, now)
        self._core.dispatcher.results(self._core.plugin, self._core.plugin.answers(), now)

    def _register(self, number: int) -> None:
        self._registry.register(self._core.plugin, compile_tools([_tool(f"new_{number}")], Limits()))

    def _unregister(self, number: int) -> None:
        self._registry.unregister(f"new_{number}")

    def _notify(self, number: int) -> None:
        self._register(number)
        self._view.since(self._registry.revision - 1)
        self._unregister(number)

    def _list(self) -> float:
        times, spent = max(1, LISTED // len(self._names)), 0.0
        for number in range(times):
            self._register(number)
            spent += _each(lambda _: self._view.listings(), (number,))
            self._unregister(number)
        return spent / times / len(self._names)


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
