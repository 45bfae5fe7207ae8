"""Measures a closed loop: so many calls in flight for so long, one cell after another, each printed as a line of JSON.

Knows no bus: rivals' hosts, which run in environments without toolbus, use it too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import psutil

from lab.load import workload

MAX_IN_FLIGHT = workload.MAX_IN_FLIGHT
MAX_BYTES = 1_000_000  # of one call's arguments: what NATS and the bus take by default, with a little to spare
MAX_BYTES_IN_FLIGHT = 64_000_000  # what the bus holds for one source, and what a small machine holds several times
MIN_CALLS = 8  # of a window, which goes on until it has them


@dataclass(frozen=True, slots=True)
class Cell:
    """So many calls in flight with arguments of such a size.

    Attributes:
        size: bytes of arguments; 0 means about 30, as small as they come.
    """

    in_flight: int
    size: int = 0

    def __str__(self) -> str:
        return f"{self.in_flight}x{self.size}"

    @property
    def title(self) -> str:
        return f"{self.in_flight} in flight" + (f", {size_title(self.size)}" if self.size else "")

    def is_within(self, other: Cell) -> bool:
        """Whether the other needs at least as much in every way, so that who fails here will fail there."""
        return self.in_flight <= other.in_flight and self.size <= other.size


def cells(in_flight: Iterable[int], sizes: Iterable[int]) -> tuple[Cell, ...]:
    """Returns the cells of a run, small arguments first, without those that would fill the memory."""
    levels = tuple(in_flight)
    every = (Cell(level, size) for size in sizes for level in levels)
    return tuple(cell for cell in every if cell.in_flight * cell.size <= MAX_BYTES_IN_FLIGHT)


def size_title(size: int) -> str:
    """Names a size of arguments for a person."""
    if not size:
        return "small"
    for unit, name in ((1_000_000, "MB"), (1_000, "kB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def read_cells(text: str) -> list[Cell]:
    """Reads cells that ``str`` wrote, with commas between."""
    return [Cell(*map(int, each.split("x"))) for each in text.split(",")]


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line of every load generator."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address")
    parser.add_argument("--middle-pid", type=int, default=0, help="whose CPU time is charged; 0: this process's")
    parser.add_argument("--plugin-pid", type=int, default=0, help="whose CPU time is measured too; 0: no process's")
    parser.add_argument("--cells", type=read_cells, default=[Cell(1), Cell(16), Cell(64), Cell(512)])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    return parser


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of one contestant in one cell, from one run; CPU times are those of each call."""

    in_flight: int
    calls_per_second: float
    p50_us: float
    p99_us: float
    middle_cpu_us: float  # of the middle process
    size: int = 0  # bytes of arguments, as in `Cell`
    host_cpu_us: float = 0.0  # of the process that calls
    plugin_cpu_us: float = 0.0  # of the plugin's process; 0 where it is not known

    @property
    def cell(self) -> Cell:
        return Cell(self.in_flight, self.size)

    def print(self) -> None:
        """Hands the figures to the process that reads our standard output."""
        print(json.dumps(asdict(self)), flush=True)


Ask = Callable[[int], Awaitable[None]]
"""Makes one call, given the number of its task, and returns when it is answered."""
Prepare = Callable[[Sequence[str]], Ask]
"""Prepares calls with these arguments, one text for each task."""
Body = TypeVar("Body")


def preparing(write: Callable[[Sequence[str]], Sequence[Body]], ask: Callable[[Body], Awaitable[None]]) -> Prepare:
    """Returns what writes the bodies of all tasks beforehand, each of which is then sent again and again."""

    def prepare(texts: Sequence[str]) -> Ask:
        bodies = write(texts)
        return lambda slot: ask(bodies[slot])

    return prepare


def arguments(cell: Cell) -> list[str]:
    """Returns the arguments of each call in flight."""
    return [workload.arguments_json(slot, cell.size) for slot in range(cell.in_flight)]


def read_json(texts: Sequence[str]) -> list[object]:
    """Returns arguments as values, for clients that write JSON themselves."""
    return [*map(json.loads, texts)]


def mcp_url(address: str) -> str:
    """Returns the URL of an MCP server, which may be given by that of its bus."""
    return address if "/mcp" in address else f"{address}/mcp"


def processor_seconds(process: psutil.Process) -> float:
    """Returns how many seconds a process has computed, itself and the kernel for it."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Clock:
    """Measures one window: warm-up, then the calls that end before its end.

    Args:
        middle_pid: the process whose CPU time is charged to the calls; 0 is this one.
    """

    def __init__(self, cell: Cell, options: argparse.Namespace, middle_pid: int) -> None:
        self._cell = cell
        self._nanoseconds = int(options.seconds * 1e9)
        plugin = options.plugin_pid
        self._processes = {
            "middle_cpu_us": psutil.Process(middle_pid or None),
            "host_cpu_us": psutil.Process(),
            **({"plugin_cpu_us": psutil.Process(plugin)} if plugin else {}),
        }
        self.latencies: list[int] = []  # nanoseconds, of the window only
        self._cpu: dict[str, float] = {}  # CPU seconds of the processes when the window began
        self._window: Window | None = None  # None until the first call has ended after the window
        self.begins_at = time.perf_counter_ns() + int(options.warm_up * 1e9)
        self.ends_at = self.begins_at + self._nanoseconds
        self._began_at = 0  # 0 during the warm-up

    def begin(self, now: int) -> None:
        """Ends the warm-up: earlier latencies do not count. A contestant that answers late gets a whole window, too."""
        self.latencies.clear()
        self._cpu = self._spent()
        self._began_at = now
        self.ends_at = now + self._nanoseconds
        self.begins_at = self.ends_at * 2  # never again

    def close(self, now: int) -> Window:
        """Returns the figures; ``now`` is when the last call of the window ended."""
        spent = self._spent()
        if not self.latencies or not self._began_at:
            raise RuntimeError("no call ended in the window: make it longer (--seconds)")
        ordered = sorted(self.latencies)
        count = len(ordered)
        return Window(
            in_flight=self._cell.in_flight,
            size=self._cell.size,
            calls_per_second=count / ((now - self._began_at) / 1e9),
            p50_us=workload.quantile(ordered, 0.5) / 1e3,
            p99_us=workload.quantile(ordered, 0.99) / 1e3,
            **{name: (seconds - self._cpu[name]) / count * 1e6 for name, seconds in spent.items()},
        )

    @property
    def is_over(self) -> bool:
        """Whether the window has ended, as far as `ended` knows."""
        return self._window is not None

    @property
    def window(self) -> Window:
        assert self._window is not None
        return self._window

    def ended(self, began_at: int, now: int, calls: int = 1) -> None:
        """Notes calls that began and ended together; the first that end after the window close it."""
        self.latencies += [now - began_at] * calls
        if now >= self.begins_at:
            self.begin(now)
        elif now >= self.ends_at and len(self.latencies) >= MIN_CALLS and self._window is None:
            self._window = self.close(now)

    def _spent(self) -> dict[str, float]:
        return {name: processor_seconds(process) for name, process in self._processes.items()}


async def keep_calling(ask: Ask, clock: Clock, in_flight: int) -> Window:
    """Runs one window: as many tasks as calls in flight, each calling again as soon as it is answered."""

    async def call_again(slot: int) -> None:
        while not clock.is_over:
            began_at = time.perf_counter_ns()
            await ask(slot)
            clock.ended(began_at, time.perf_counter_ns())

    await asyncio.gather(*(call_again(slot) for slot in range(in_flight)))
    return clock.window


async def run_cells(prepare: Prepare, options: argparse.Namespace, middle_pid: int) -> None:
    """Runs a window for each cell of a load generator's command line and prints its figures."""
    for cell in options.cells:
        ask = prepare(arguments(cell))
        (await keep_calling(ask, Clock(cell, options, middle_pid), cell.in_flight)).print()
