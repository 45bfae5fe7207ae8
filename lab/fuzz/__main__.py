"""Searches toolbus for inputs that break a promise: coverage leads (libFuzzer through atheris), oracles judge.

Examples:
  python -m lab.fuzz                                     every target, 10 minutes in all
  python -m lab.fuzz --seconds 3600 frames               one target for an hour
  python -m lab.fuzz --runs 10000 --corpus corpus        so many inputs each; new inputs stay there
  python -m lab.fuzz frames --replay FILE                run one input again, without atheris
  python -m lab.fuzz --list                              the targets and what must hold
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lab import commands
from lab.fuzz.search import Outcome, search
from lab.fuzz.target import NAMES, load
from lab.report import Table

SECONDS = 600.0
NO_ATHERIS = "atheris is not installed: it has wheels for Linux on x86-64 and Python 3.11 to 3.13 only"


def _options() -> argparse.Namespace:
    parser = commands.parser_of("fuzz", __doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(NAMES)}; all where none is given")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--seconds", type=float, default=SECONDS, help="for all targets together (default: 600)")
    bound.add_argument("--runs", type=int, default=0, metavar="N", help="inputs of each target, instead of a time")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="inputs that reached something new; made, and not removed"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where findings go; a temporary one where not given")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run this one input of the one TARGET, and end")
    parser.add_argument("--list", action="store_true", help="show the targets, and end")
    parser.add_argument("--json", action="store_true", help="write the outcome as JSON to standard output")
    options = parser.parse_args()
    for name in options.targets:
        try:
            load(name)
        except (KeyError, ImportError, AttributeError) as problem:
            parser.error(f"unknown target {name!r} ({problem}): choose from {', '.join(NAMES)}")
    if options.replay and len(options.targets) != 1:
        parser.error("--replay needs the one target that the input is for")
    if options.seconds <= 0 or options.runs < 0:
        parser.error("--seconds and --runs must be more than 0")
    options.targets = options.targets or list(NAMES)
    return options


def main() -> int:
    options = _options()
    console = commands.console_of(stderr=options.json)
    if options.list:
        rows = [(name, load(name).about) for name in options.targets]
        Table("targets", ("target", "what must hold"), rows).show(console)
        return 0
    if options.replay:
        return _replay(options.targets[0], options.replay, console)
    if importlib.util.find_spec("atheris") is None:
        console.print(f"{NO_ATHERIS}; --replay works without", markup=False)
        return 2
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="toolbus-fuzz-"))).resolve()
    try:
        outcomes = [_search(name, folder, options, commands.printer(console)) for name in options.targets]
    except KeyboardInterrupt:
        console.print(f"stopped; findings up to here in {folder}", markup=False)
        return commands.INTERRUPTED
    shutil.rmtree(folder / "corpus", ignore_errors=True)  # those that have a place of their own stay
    if options.json:
        print(json.dumps([{**asdict(outcome), "log": ""} for outcome in outcomes], indent=1))
    if any(outcome.why for outcome in outcomes):
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


def _search(name: str, folder: Path, options: argparse.Namespace, print_line: Callable[[str], None]) -> Outcome:
    seconds = 0.0 if options.runs else options.seconds / len(options.targets)
    outcome = search(name, folder, seconds=seconds, runs=options.runs, corpus=options.corpus)
    verdict = "a finding" if outcome.why else "no finding"
    rate = outcome.runs / outcome.seconds
    print_line(f"{name:<14} {outcome.runs:>9,} runs  {rate:>7,.0f}/s  {outcome.units:>5} new inputs  {verdict}")
    if outcome.why:
        log = folder / f"{name}.log"
        log.write_text(outcome.log, encoding="utf-8")
        print_line(f"  {outcome.why}\n  log: {log}")
    if outcome.repeat:
        print_line(f"  repeat with: {outcome.repeat}")
    return outcome


def _replay(name: str, file: Path, console: Console) -> int:
    try:
        data = file.read_bytes()
    except OSError as problem:
        console.print(f"{file} cannot be read: {problem.strerror}", markup=False)
        return 2
    try:
        load(name).run(data)
    except BaseException as problem:  # the validator's panics are not Exceptions
        if isinstance(problem, KeyboardInterrupt):
            raise
        traceback.print_exc()
        return 1
    console.print(f"{name}: {file} breaks nothing", markup=False)
    return 0


if __name__ == "__main__":
    commands.run(main)
