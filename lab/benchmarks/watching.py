"""Measures what it costs to be watched: counted instructions of a call, scrapes, and how true quantiles are."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time

from lab.benchmarks import core_frames
from lab.benchmarks.contest import Plan
from lab.benchmarks.core_frames import STATES
from lab.benchmarks.facts import Fact
from lab.stage import Stage
from toolbus.bus import Bus, Config
from toolbus.bus.metrics.call_counts import CallCounts, bucket_of
from toolbus.bus.metrics.exposition import OPENMETRICS, write
from toolbus.bus.operators.bus_metrics import BusMetrics

FRAMES = {128: 24, 1: 1_600}  # frames by their calls: as many as make the warm-up small beside them
CALLS = 1_000_000  # of which quantiles are compared
QUANTILES = (0.05, 0.25, 0.45, 0.55, 0.75, 0.9, 0.95, 0.99)
_VALGRIND = (
    *("valgrind", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=functools_reduce"),
    "--callgrind-out-file=/dev/null",
)


def instructions(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Counts the instructions of a call in the core, in frames of 128 and of 1, in each state."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is not installed: it counts the instructions")
    facts = []
    for size in FRAMES:
        base = _count(size, STATES[0])
        line = f"frames of {size}"
        title = "Instructions of a call in the core: calls, results, the message of results"
        facts.append(Fact("instructions", STATES[0], "instructions", None, (base,), title, line))
        for state in STATES[1:]:
            counted = _count(size, state)
            facts.append(Fact("instructions", state, "instructions", None, (counted,), title, line))
            more = 100.0 * (counted / base - 1.0)
            facts.append(Fact("instructions", f"{state}: more than off", "%", 3.0, (more,), title, line))
    return tuple(facts)


def _count(size: int, state: str) -> float:
    """Returns the instructions of one call: what a longer run has more than a short one."""
    few, many = (_collected(size, number, state) for number in (FRAMES[size] // 4, FRAMES[size]))
    return (many - few) / (FRAMES[size] - FRAMES[size] // 4) / size


def _collected(size: int, frames: int, state: str) -> int:
    command = [*_VALGRIND, sys.executable, "-m", core_frames.__name__, str(size), str(frames), state]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None or not int(found[1]):
        raise RuntimeError(f"valgrind counted nothing, perhaps since this Python has no symbols: {done.stderr[-500:]}")
    return int(found[1])


def scrapes(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures what a scrape takes of the bus's loop, with 1,000 series of tools and with 100,000 tools."""
    facts = []
    for line, tools, series, most in (
        ("1,000 tools, all with series", 1_000, 1_000, 15.0),
        ("100,000 tools", 100_000, 200, 20.0),
    ):
        bus = Bus(Config(grpc=("127.0.0.1:0",), http="off", metrics_tools=series))
        for number in range(tools):
            counts = bus.core.metrics.take("plugin", f"tool-with-a-name-{number}")
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


def quantile_error(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Compares quantiles of a million calls in frames of 1 to 128 with exact ones, in buckets."""
    title = f"Quantiles of {CALLS:,} calls in frames of 1 to 128 beside exact ones"
    facts = []
    for line in ("log-normal", "answered in order, ten times a second", "1 ms or 4 s"):
        rng, counts, exact, now = random.Random(5), CallCounts("p", "t"), list[float](), 1e5
        while len(exact) < CALLS:
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
            value = counts.quantile(q)
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
