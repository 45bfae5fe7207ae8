"""The command line: ``python -m lab.benchmarks [SUITE] [--only NAMES] [--quick] [--json FILE] [--write]``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from lab.benchmarks import contest
from lab.benchmarks.cells import MAX_BYTES, MAX_IN_FLIGHT
from lab.benchmarks.children import Nursery, environment, terminated_like_interrupted
from lab.benchmarks.fact import Fact
from lab.benchmarks.figures import charts
from lab.benchmarks.plot import svg
from lab.benchmarks.report import Report
from lab.benchmarks.suite import DEFAULT, SUITES, Suite

PAGES = Path(__file__).resolve().parents[1] / "results"


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(int(number) for number in text.split(","))
    for level in levels:
        if not 1 <= level <= MAX_IN_FLIGHT:
            raise argparse.ArgumentTypeError(f"{level} calls in flight: a session takes 1 to {MAX_IN_FLIGHT}")
    return levels


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(number) for number in text.split(","))
    for size in sizes:
        if size and not 100 <= size <= MAX_BYTES:
            raise argparse.ArgumentTypeError(f"{size} bytes of arguments: say 0 for small ones, or 100 to {MAX_BYTES}")
    return sizes


def _options() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    options.suite = suite = SUITES[options.suite]
    known = (*suite.contestants, *suite.facts)
    names = known if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    for name in names:
        if name not in known:
            of = f"the suite {suite.name!r} has nothing named {name!r} to measure"
            parser.error(f"argument --only: {of}: choose from {', '.join(known)}")
    options.only = list(names)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks", description=__doc__)
    chosen = f"what to measure: {', '.join(SUITES)} (default: {DEFAULT})"
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), default=DEFAULT, metavar="SUITE", help=chosen)
    parser.add_argument("--only", metavar="NAMES", help="contestants and facts, with commas between")
    parser.add_argument("--in-flight", type=_levels, metavar="N,…", help="calls in flight")
    parser.add_argument("--sizes", type=_sizes, metavar="BYTES,…", help="bytes of arguments; 0: about 30")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before a window")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds, each with all made anew, of which medians are taken"
    )
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
    parser.add_argument("--write", action="store_true", help="write the suite's page and its charts to lab/results/")
    parser.add_argument("--pages", type=Path, default=PAGES, metavar="DIR", help="write them there instead")
    return parser


def _said(arguments: list[str]) -> list[str]:
    """Returns the arguments without those that only say where results go."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pages")
    parser.add_argument("--json")
    return parser.parse_known_args(arguments)[1]


def _measure_facts(
    suite: Suite, names: list[str], plan: contest.Plan, repeats: int, console: Console
) -> tuple[list[Fact], dict[str, str]]:
    measured: list[Fact] = []
    failures: dict[str, str] = {}
    for name in names:
        # Imported here: some import grpc, which reads GRPC_EXPERIMENTS at that moment.
        measure = getattr(importlib.import_module(f"lab.benchmarks.{suite.facts[name]}"), name)
        try:
            with Nursery(environment(plan.experiments)) as nursery:
                found = measure(nursery, plan, repeats)
        except Exception as error:  # of whatever kind: the others are measured all the same
            failures[name] = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed: {error}", highlight=False, markup=False)
            continue
        for fact in (found,) if isinstance(found, Fact) else found:
            measured.append(fact)
            console.print(
                f"{fact.label}: median {fact.median:.1f} {fact.unit}, worst {fact.worst:.1f}", highlight=False
            )
    return measured, failures


def main() -> int:
    """Measures what was asked for. Returns 0, or 1 where something could not be measured."""
    options = _options()
    suite: Suite = options.suite
    console = Console(width=None if sys.stdout.isatty() else 160)
    plan = contest.Plan(
        in_flight=options.in_flight or suite.in_flight,
        sizes=options.sizes or suite.sizes,
        seconds=1.0 if options.quick else options.seconds,
        warm_up=0.3 if options.quick else options.warm_up,
        rounds=1 if options.quick else options.rounds,
        experiments=not options.no_experiments,
        bus_command=options.bus_command,
    )
    os.environ.update(environment(plan.experiments))
    with terminated_like_interrupted():
        contestants = [suite.contestants[name] for name in options.only if name in suite.contestants]
        outcome = contest.run(contestants, plan, lambda line: console.print(line, highlight=False, markup=False))
        repeats = 3 if options.quick else options.repeats
        named = [name for name in options.only if name in suite.facts]
        facts, failures = _measure_facts(suite, named, plan, repeats, console)
    command = shlex.join(["python", "-m", "lab.benchmarks", *_said(sys.argv[1:])])
    report = Report(suite, plan, outcome, facts, {**outcome.failures, **failures}, command, repeats)
    report.show(console)
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if options.write:
        pages: Path = options.pages
        pages.mkdir(exist_ok=True)
        drawn = charts(report)
        for name, chart in drawn.items():
            (pages / f"{name}.svg").write_text(svg(chart))
        pictures = {f"{name}.svg": chart.title for name, chart in drawn.items()}
        (pages / suite.page).write_text(report.to_markdown(pictures))
        console.print(f"wrote {', '.join((suite.page, *pictures))} to {pages}", highlight=False)
    return 1 if report.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
