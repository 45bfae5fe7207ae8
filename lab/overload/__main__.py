"""``python -m lab.overload``: ten times the capacity in every part, a table, exit code 1 where a bound broke."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lab.benchmarks.children import ChildFailed, environment, terminated_like_interrupted
from lab.benchmarks.plot import svg

if TYPE_CHECKING:
    from lab.overload.judge import Verdict
    from lab.overload.stage import Seen

PAGES = Path(__file__).resolve().parents[1] / "results"
PAGE, PICTURE = "overload-figures.md", "overload.svg"
SECONDS = 60.0
LEAST_SECONDS = 2.0
READERS = {
    "slow-host": "a host that does not read its results",
    "slow-plugin": "a plugin that does not read its calls",
    "slow-watcher": "a watcher that does not read what changes",
}
EXAMPLES = """examples:
  python -m lab.overload                             every part, a minute of overload each
  python -m lab.overload --part plugin --seconds 5   one part, for a quick look
  python -m lab.overload --json outcome.json         what the table shows, for programs
  python -m lab.overload --write                     lab/results/overload-figures.md and lab/results/overload.svg

exit codes: 0 every bound was kept, 1 one was broken or a part could not be played, 2 wrong usage, 130 after Ctrl-C.
"""


def _options() -> argparse.Namespace:
    from lab.overload.parts import PARTS

    titles = {name: part.title for name, part in PARTS.items()} | READERS
    parser = argparse.ArgumentParser(
        prog="python -m lab.overload",
        description=__doc__,
        epilog="parts:\n" + "".join(f"  {name:14} {title}\n" for name, title in titles.items()) + "\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=tuple(titles), metavar="NAME", help="only this; repeatable")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of overload in each part ({SECONDS:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome there, too")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE} to lab/results/")
    parser.add_argument("--pages", type=Path, default=PAGES, metavar="DIR", help="write them there instead")
    options = parser.parse_args()
    if not options.seconds >= LEAST_SECONDS:
        parser.error(
            f"argument --seconds: {options.seconds:g} is too short to see anything: at least {LEAST_SECONDS:g}"
        )
    options.titles = {name: titles[name] for name in options.part or titles}
    return options


async def _play(name: str, seconds: float) -> tuple[list[Verdict], Seen]:
    from lab.overload import judge, slow_reader
    from lab.overload.parts import PARTS, Plan, play
    from lab.overload.stage import Scene
    from toolbus.processes.lifeline import Lifeline

    with Lifeline() as lifeline, Scene(lifeline) as stage:
        if name in READERS:
            third = max(slow_reader.LEAST_SECONDS, seconds / slow_reader.THIRDS)
            beside = await slow_reader.play(name.removeprefix("slow-"), stage, third)
            return slow_reader.judge(beside), beside.seen
        seen = await play(PARTS[name], stage, Plan(seconds))
        return judge.judge(PARTS[name], seen), seen


def _play_all(
    options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Verdict]], dict[str, str], Seen | None]:
    verdicts: dict[str, list[Verdict]] = {}
    failures: dict[str, str] = {}
    pictured: Seen | None = None  # the first part that is a load
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name, title in options.titles.items():
            task = progress.add_task(f"{name}: {title}")
            try:
                verdicts[name], seen = asyncio.run(_play(name, options.seconds))
            except (ChildFailed, TimeoutError) as problem:
                failures[name] = f"{type(problem).__name__}: {problem}"
                console.print(f"{name} could not be played: {problem}", highlight=False, markup=False)
            else:
                pictured = pictured or (None if name in READERS else seen)
                broken = sum(not verdict.kept for verdict in verdicts[name])
                kept = sum(verdict.word == "kept" for verdict in verdicts[name])
                console.print(f"{name}: {kept} kept, {broken} broken", highlight=False)
            progress.remove_task(task)
    return verdicts, failures, pictured


def main() -> int:
    """Plays what was asked for; returns the exit code."""
    os.environ.update(environment(True))  # before grpc is imported
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # this process starts others all the time
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 160)
    with terminated_like_interrupted():
        verdicts, failures, pictured = _play_all(options, console)
    from lab.overload.report import chart, markdown, table, to_json

    console.print(table(verdicts, options.titles))
    words = ["python", "-m", "lab.overload", *(f"--part={name}" for name in options.part or ())]
    command = shlex.join([*words, *([f"--seconds={options.seconds:g}"] if options.seconds != SECONDS else [])])
    if options.json:
        said = to_json(verdicts, failures, command=command, seconds=options.seconds)
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    if options.write:
        first = next((name for name in verdicts if name not in READERS), "")
        drawn = chart(pictured, f"Latency of {options.titles[first]}", command) if pictured is not None else None
        if drawn is not None:
            (options.pages / PICTURE).write_text(svg(drawn))
        page = markdown(verdicts, options.titles, command, PICTURE if drawn is not None else "")
        (options.pages / PAGE).write_text(page)
    broken = any(not verdict.kept for its in verdicts.values() for verdict in its)
    return 1 if broken or failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
