"""The command line: ``python -m benchmarks [--only NAMES] [--quick] [--json FILE] [--write]``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import contest
from benchmarks.children import ChildFailed, Nursery, environment, terminated_like_interrupted
from benchmarks.fact import Fact
from benchmarks.report import Report

FACTS = ("start", "memory", "memory_http", "death", "cancel", "restart", "outage")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def _names(text: str) -> list[str]:
    known = (*contest.CONTESTANTS, *FACTS)
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is nothing to measure: choose from {', '.join(known)}")
    return chosen


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(int(number) for number in text.split(","))
    for level in levels:
        if not 1 <= level <= 4096:
            raise argparse.ArgumentTypeError(f"{level} calls in flight: a session takes 1 to 4096")
    return levels


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=_names, metavar="NAMES", help="contestants and facts, with commas between")
    parser.add_argument("--in-flight", type=_levels, default=(1, 16, 64, 512), metavar="N,…", help="calls in flight")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before a window")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which medians are taken")
    parser.add_argument("--repeats", type=int, default=10, help="samples of a fact, more or less")
    parser.add_argument("--quick", action="store_true", help="one round of one second and few samples")
    parser.add_argument("--no-experiments", action="store_true", help="leave GRPC_EXPERIMENTS alone")
    parser.add_argument(
        "--bus-command",
        default=os.environ.get("TOOLBUS_BENCH_COMMAND", ""),
        metavar="COMMAND",
        help="what starts the bus, up to and with `serve` (or TOOLBUS_BENCH_COMMAND)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    return parser


def _measure_facts(
    names: list[str], plan: contest.Plan, repeats: int, console: Console
) -> tuple[list[Fact], dict[str, str]]:
    # Imported here: they import grpc, which reads GRPC_EXPERIMENTS at that moment.
    from benchmarks import faults, footprint

    measured, failures = [], {}
    for name in names:
        measure = getattr(faults, name, None) or getattr(footprint, name)
        try:
            with Nursery(environment(plan.experiments)) as nursery:
                fact = measure(nursery, plan, repeats)
        except (ChildFailed, OSError, RuntimeError, TimeoutError) as error:
            failures[name] = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed: {error}", highlight=False, markup=False)
            continue
        measured.append(fact)
        console.print(f"{name}: median {fact.median:.1f} {fact.unit}, worst {fact.worst:.1f}", highlight=False)
    return measured, failures


def main() -> int:
    """Measures what was asked for. Returns 0, or 1 where something could not be measured."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    plan = contest.Plan(
        in_flight=options.in_flight,
        seconds=1.0 if options.quick else options.seconds,
        warm_up=0.3 if options.quick else options.warm_up,
        rounds=1 if options.quick else options.rounds,
        experiments=not options.no_experiments,
        bus_command=options.bus_command,
    )
    chosen = options.only or [*contest.CONTESTANTS, *FACTS]
    os.environ.update(environment(plan.experiments))
    with terminated_like_interrupted():
        contestants = [name for name in chosen if name in contest.CONTESTANTS]
        outcome = contest.run(contestants, plan, lambda line: console.print(line, highlight=False, markup=False))
        repeats = 3 if options.quick else options.repeats
        facts, failures = _measure_facts([name for name in chosen if name in FACTS], plan, repeats, console)
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    report = Report(plan, outcome, facts, {**outcome.failures, **failures}, command, repeats)
    report.show(console)
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if options.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(report.to_markdown())
        console.print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}", highlight=False)
    return 1 if report.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
