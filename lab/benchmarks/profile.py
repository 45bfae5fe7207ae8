"""Samples where the middle process spends its time: ``python -m lab.benchmarks.profile [CONTESTANT] [--in-flight N]``.

The middle runs under a sampler of its own main thread (a timer of CPU time, a stack at each tick), which slows it far
less than a tracing profiler and does not favour long functions over many short ones. It prints the lines and the
functions with the most samples. Time in C code counts for the line that called it.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import runpy
import shlex
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

from lab.benchmarks import contest, contestants
from lab.commands import terminated_like_interrupted
from lab.load.windows import Window

INTERVAL_SECONDS = 0.001
START_SECONDS = 1.0  # CPU time before the first sample, so that imports do not show
SHOWN = 30
CONTESTANTS = {
    name: (contestants.BUS | contestants.GATEWAY)[name]
    for name in ("relay", "toolbus", "callback", "rest_callback", "rest_grpc")
}


class Sampler:
    """Counts where the main thread is at each tick of its CPU time."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()  # where the thread was
        self.functions: Counter[str] = Counter()  # every function on its stack, once a sample

    def start(self, to: Path) -> None:
        """Samples until the process ends, then writes the counts."""
        atexit.register(self._write, to)
        signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, START_SECONDS, INTERVAL_SECONDS)

    def _tick(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self.lines[f"{_file(frame)}:{frame.f_lineno} {frame.f_code.co_name}"] += 1
        seen = set()
        while frame is not None:
            seen.add(f"{_file(frame)} {frame.f_code.co_qualname}")
            frame = frame.f_back
        self.functions.update(seen)

    def _write(self, to: Path) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines, functions = self.lines.most_common(SHOWN), self.functions.most_common(SHOWN)
        to.write_text(json.dumps([lines, functions, self.lines.total()]))


def _file(frame: FrameType) -> str:
    return "/".join(Path(frame.f_code.co_filename).parts[-2:])


def _sampled(to: Path, module: str, arguments: list[str]) -> None:
    """Runs a module as a program, sampled. Without a handler of its own, SIGTERM ends it as Ctrl-C does."""
    with terminated_like_interrupted():
        Sampler().start(to)
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except KeyboardInterrupt:
            sys.exit(0)


def profile(middle: str, plan: contest.Plan) -> tuple[list[Window], str]:
    """Runs one contestant with its middle sampled and returns its windows and the counts as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts.json")
        sample = ("benchmarks.profile", "--sample", str(counts))
        contestant = CONTESTANTS[middle]
        if middle == "relay":
            sampled = contestants.module(*sample, "lab.benchmarks.relay")
            contestant = dataclasses.replace(contestant, middle=sampled)
        bus = shlex.join([sys.executable, "-m", f"lab.{sample[0]}", *sample[1:], "toolbus.cli", "serve"])
        windows, cannot = contest.run_once(contestant, dataclasses.replace(plan, bus_command=bus))
        if cannot:
            raise SystemExit("\n".join(cannot.values()))
        return windows, counts.read_text()


def main() -> None:
    """Profiles, or is the profiled process."""
    if sys.argv[1:2] == ["--sample"]:
        _sampled(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.profile", description=__doc__)
    parser.add_argument("middle", nargs="?", choices=tuple(CONTESTANTS), default="toolbus")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    plan = contest.Plan(in_flight=(options.in_flight,), seconds=options.seconds)
    windows, counts = profile(options.middle, plan)
    lines, functions, total = json.loads(counts)
    print(f"{windows[0].calls_per_second:,.0f} calls/s while sampled, {windows[0].middle_cpu_us:.1f} µs CPU a call")
    for title, rows in (("lines, by own time", lines), ("functions, with what they call", functions)):
        print(f"\n{title}")
        for where, count in rows:
            print(f"  {count / total:6.1%}  {where}")


if __name__ == "__main__":
    main()
