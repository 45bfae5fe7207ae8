"""Measures the bus beside the limit of its own stack and beside rivals, in suites of contestants and facts."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys

from rich.console import Console

from lab import commands
from lab.benchmarks import contest
from lab.benchmarks.facts import Fact
from lab.benchmarks.report import Report
from lab.benchmarks.suite import DEFAULT, SUITES, Suite
from lab.load.windows import MAX_BYTES, MAX_IN_FLIGHT
from lab.stage import environment


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
            raise argparse.ArgumentTypeError(f"{size} bytes of arguments: use 0 for small ones, or 100 to {MAX_BYTES}")
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser_of("benchmarks", __doc__)
    suites = f"what to measure: {', '.join(SUITES)} (default: {DEFAULT})"
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), default=DEFAULT, metavar="SUITE", help=suites)
    parser.add_argument("--only", metavar="NAMES", help="contestants and facts, with commas between")
    parser.add_argument("--in-flight", type=_levels, metavar="N,…", help="calls in flight")
    parser.add_argument("--sizes", type=_sizes, metavar="BYTES,…", help="bytes of arguments; 0: about 30")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window (default: 3)")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before a window (default: 0.5)")
    rounds = "rounds, each with fresh processes, of which medians are taken (default: 3)"
    parser.add_argument("--rounds", type=int, default=3, help=rounds)
    parser.add_argument("--repeats", type=int, default=10, help="samples of a fact, more or less (default: 10)")
    before = "a checkout with a .venv whose bus is compared as `rest_before` (suite mcp)"
    parser.add_argument("--before", default="", metavar="FOLDER", help=before)
    base = "a commit whose exports are compared (suite exports)"
    parser.add_argument("--base", default="", metavar="REV", help=base)
    commands.add_results(parser, "every sample", "the suite's page")
    return parser


def _options() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    options.suite = suite = SUITES[options.suite]
    known = (*suite.contestants, *suite.facts)
    names = known if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    for name in names:
        if name not in known:
            unknown = f"the suite {suite.name!r} does not measure {name!r}"
            parser.error(f"argument --only: {unknown}: choose from {', '.join(known)}")
    options.only = list(names)
    return options


def _command(arguments: list[str]) -> str:
    """Returns the command that repeats a run: its arguments without those that say where results go."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pages")
    parser.add_argument("--json")
    return shlex.join(["python", "-m", "lab.benchmarks", *parser.parse_known_args(arguments)[1]])


def _measure_facts(
    suite: Suite, names: list[str], plan: contest.Plan, repeats: int, console: Console
) -> tuple[list[Fact], dict[str, str]]:
    measured: list[Fact] = []
    failures: dict[str, str] = {}
    for name in names:
        # Imported here: some import grpc, which reads GRPC_EXPERIMENTS at that moment.
        measure = getattr(importlib.import_module(f"lab.benchmarks.{suite.facts[name]}"), name)
        try:
            with plan.stage() as stage:
                facts = measure(stage, plan, repeats)
        except Exception as error:  # of any kind: the others are measured all the same
            failures[name] = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed: {error}", highlight=False, markup=False)
            continue
        for fact in (facts,) if isinstance(facts, Fact) else facts:
            measured.append(fact)
            line = f"{fact.label}: median {fact.median:.1f} {fact.unit}, worst {fact.worst:.1f}"
            console.print(line, highlight=False)
    return measured, failures


def main() -> int:
    options = _options()
    suite: Suite = options.suite
    console = commands.console_of()
    plan = contest.Plan(
        in_flight=options.in_flight or suite.in_flight,
        sizes=options.sizes or suite.sizes,
        seconds=options.seconds,
        warm_up=options.warm_up,
        rounds=options.rounds,
        before=options.before,
        base=options.base,
    )
    os.environ.update(environment(experiments=True))
    contestants = [suite.contestants[name] for name in options.only if name in suite.contestants]
    outcome = contest.run(contestants, plan, commands.printer(console))
    names = [name for name in options.only if name in suite.facts]
    facts, failures = _measure_facts(suite, names, plan, options.repeats, console)
    failures = {**outcome.failures, **failures}
    report = Report(suite, plan, outcome, facts, failures, _command(sys.argv[1:]), options.repeats)
    report.show(console)
    commands.write_json(options.json, report.to_json())
    if options.write:
        commands.write_pages(options.pages, {suite.file: report.to_markdown()}, console)
    return 1 if report.failures else 0


if __name__ == "__main__":
    commands.run(main)
