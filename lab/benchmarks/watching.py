"""Measures what it costs to be watched: instructions of a call, scrapes, watchers; and how true quantiles are."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from lab.benchmarks import core_frames
from lab.benchmarks.busy_bus import busy_bus, spent
from lab.benchmarks.contest import Plan
from lab.benchmarks.core_frames import CASES, SAMPLED, STATES
from lab.benchmarks.facts import Fact, Line, Measured, compared, measured_here
from lab.stage import LOOPBACK, Stage
from toolbus.bus import Bus, Config
from toolbus.bus.metrics.call_counts import CallCounts, bucket_of
from toolbus.parts.console.feed import MAX_WATCHERS as WATCHERS
from toolbus.parts.observability.exposition import OPENMETRICS, write
from toolbus.parts.observability.metrics_room import BusMetrics

UNWATCHED = "no watchers"
COUNTED = 4_000  # calls of each case
CALLS = 1_000_000  # of which quantiles are compared
QUANTILES = (0.05, 0.25, 0.45, 0.55, 0.75, 0.9, 0.95, 0.99)
_VALGRIND = (
    *("valgrind", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=functools_reduce"),
    "--dump-after=math_frexp",  # which no part of the bus calls
)


def instructions(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Counts the instructions of a call in the core, in frames of 128 and of 1, in each state."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is not installed: it counts the instructions")
    counted = dict(zip(CASES, _counted(), strict=True))
    facts = []
    for (size, state), each in counted.items():
        line, base = f"frames of {size}", counted[size, STATES[0]]
        title = "Instructions of a call in the core: calls, results, the message of results"
        facts.append(Fact("instructions", state, "instructions", None, (each,), title, line))
        if state != STATES[0]:
            more = 100.0 * (each / base - 1.0)
            facts.append(Fact("instructions", f"{state}: more than off", "%", 3.0, (more,), title, line))
        if state == STATES[2]:
            more = 100.0 * (each / counted[size, STATES[1]] - 1.0)
            facts.append(Fact("instructions", f"{state}: more than metrics", "%", 0.5, (more,), title, line))
    return tuple(facts)


def _counted() -> list[float]:
    """Returns the instructions of one call, of each of `CASES`, with as many sampled ones as are expected."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_VALGRIND, f"--callgrind-out-file={folder}/out", sys.executable, "-m", core_frames.__name__]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run([*command, str(COUNTED)], env=environment, capture_output=True, text=True, check=False)
        parts = [Path(folder, f"out.{number}") for number in range(1, 2 * len(CASES) + 1)]
        if done.returncode or not all(part.exists() for part in parts):
            raise RuntimeError(f"valgrind counted nothing, perhaps since Python has no symbols: {done.stderr[-500:]}")
        totals = [int(re.findall(r"^(?:totals|summary): (\d+)", part.read_text(), re.MULTILINE)[-1]) for part in parts]
    found: list[float] = []
    for line, total in zip(done.stdout.splitlines(), totals[1::2], strict=True):
        calls, sampled = json.loads(line)
        each = total / calls
        if sampled:  # what the sampled ones add to calls of the case before, had as many been drawn as are expected
            each = found[-1] + (each - found[-1]) * SAMPLED * calls / sampled
        found.append(each)
    return found


def scrapes(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures what a scrape takes of the bus's loop, with 1,000 series of tools and with 100,000 tools."""
    facts = []
    for line, tools, series, most in (
        ("1,000 tools, all with series", 1_000, 1_000, 15.0),
        ("100,000 tools", 100_000, 200, 20.0),
    ):
        bus = Bus(Config(grpc=("127.0.0.1:0",), http="off", metrics_tools=series))
        for number in range(tools):
            counts = bus.core.calls.metrics.take("plugin", f"tool-with-a-name-{number}")
            counts.add_run([0.001 * number, 0.5, 0.9], 1.0 + 0.01 * number)
            counts.add(8, 1.0, 0.5)
        metrics, samples, size = BusMetrics(bus.core, lambda: 0), [], 0
        for _ in range(max(5, repeats)):
            began = time.thread_time()
            size = len(write(metrics.families(), OPENMETRICS))
            samples.append((time.thread_time() - began) * 1e3)
        title = "A scrape: processor time of the loop, and bytes"
        facts.append(Fact("scrapes", "processor time", "ms", most, tuple(samples), title, line))
        facts.append(Fact("scrapes", "size", "kB", 1_000.0, (size / 1e3,), title, line))
    return tuple(facts)


def quantile_error(stage: Stage, plan: Plan, repeats: int, calls: int = CALLS) -> tuple[Fact, ...]:
    """Compares quantiles of many calls in frames of 1 to 128 with exact ones, in buckets."""
    title = f"Quantiles of {calls:,} calls in frames of 1 to 128 beside exact ones"
    facts = []
    for line in ("log-normal", "answered in order, ten times a second", "1 ms or 4 s"):
        rng, counts, exact, now = random.Random(5), CallCounts("p", "t"), list[float](), 1e5
        while len(exact) < calls:
            now += rng.expovariate(10.0)
            starts = _starts(line, now, rng)
            if len(starts) == 1:
                counts.add_one(starts[0], now)
            else:
                counts.add_run(starts, now)
            exact += [now - started for started in starts]
        exact.sort()
        errors = []
        for q in QUANTILES:
            (value,) = counts.quantiles(q)
            assert value is not None  # calls were counted
            errors.append(float(abs(bucket_of(value) - bucket_of(exact[int(q * len(exact))]))))
        facts.append(Fact("quantile_error", "largest error", "buckets", 1.0, (max(errors),), title, line))
    return tuple(facts)


def _starts(kind: str, now: float, rng: random.Random) -> list[float]:
    size = rng.randint(1, 128)
    if kind == "log-normal":
        return [now - rng.lognormvariate(-4.0, 1.5) for _ in range(size)]
    if kind == "1 ms or 4 s":
        return [now - rng.choice((0.001, 4.0)) for _ in range(size)]
    return sorted(now - rng.uniform(0.0005, 0.1) for _ in range(size))


def console_watchers(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Compares the bus's processor time for a call without watchers of its console and with as many as it takes."""
    facts = uvloop.run(_console_watchers(stage, repeats))
    return compared(facts, UNWATCHED, "times that without watchers")


async def _console_watchers(stage: Stage, rounds: int) -> tuple[Fact, ...]:
    async with busy_bus(stage, http=LOOPBACK) as bus:

        async def watched() -> Measured:
            with Stage(stage.environment, stage.lifeline) as own:
                watchers = own.module("load.console_watchers", f"http://{bus.http_address}", str(WATCHERS))
                await asyncio.to_thread(watchers.line)
                taken = await spent(bus)
                if watchers.has_ended:
                    raise RuntimeError(f"the watchers have ended. {watchers.error_text()}")
                return taken

        lines: dict[str, Line] = {UNWATCHED: functools.partial(spent, bus), f"{WATCHERS} watchers": watched}
        return await measured_here("console_watchers", "A bus whose console is watched", lines, rounds)
