"""Offers ten times the capacity in every part, and judges what was counted meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lab import commands
from lab.chart import svg
from lab.child import ChildFailed
from lab.stage import Stage, environment

if TYPE_CHECKING:
    from lab.judge import Verdict
    from lab.overload.run import Recording

PAGE, PICTURE = "overload-figures.md", "overload.svg"
SECONDS = 60.0
MIN_SECONDS = 2.0
READERS = {
    "slow-host": "a host that does not read its results",
    "slow-plugin": "a plugin that does not read its calls",
    "slow-watcher": "a watcher that does not read what changes",
}
EXAMPLES = """examples:
  python -m lab.overload                             every part, a minute of overload each
  python -m lab.overload --part plugin --seconds 5   one part, for a quick look
  python -m lab.overload --json outcome.json         what the table shows, for programs
  python -m lab.overload --write                     the page and the picture in lab/results/

exit codes: 0 every rule holds, 1 one is broken or a part could not be played, 2 wrong usage, 130 after Ctrl-C. What
depends on the machine's pace is a figure and fails nothing.
"""


def _options() -> argparse.Namespace:
    from lab.overload.parts import PARTS

    titles = {name: part.title for name, part in PARTS.items()} | READERS
    parts = "".join(f"  {name:14} {title}\n" for name, title in titles.items())
    parser = commands.parser_of("overload", __doc__, f"parts:\n{parts}\n{EXAMPLES}")
    parser.add_argument("--part", action="append", choices=tuple(titles), metavar="NAME", help="only this; repeatable")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of overload in each part ({SECONDS:g})")
    commands.add_results(parser, "the outcome", f"{PAGE} and {PICTURE}")
    options = parser.parse_args()
    if not options.seconds >= MIN_SECONDS:
        parser.error(f"argument --seconds: {options.seconds:g} is too short for an overload: at least {MIN_SECONDS:g}")
    options.titles = {name: titles[name] for name in options.part or titles}
    return options


async def _play(name: str, seconds: float) -> tuple[list[Verdict], Recording]:
    from lab.overload import judge, slow_reader
    from lab.overload.parts import PARTS
    from lab.overload.run import Plan, play

    with Stage(environment(experiments=True)) as stage:
        if name in READERS:
            third = max(slow_reader.MIN_SECONDS, seconds / slow_reader.THIRDS)
            beside = await slow_reader.play(name.removeprefix("slow-"), stage, third)
            return slow_reader.judge(beside), beside.seen
        seen = await play(PARTS[name], stage, Plan(seconds))
        return judge.judge(PARTS[name], seen), seen


def _play_all(
    options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Verdict]], dict[str, str], Recording | None]:
    verdicts: dict[str, list[Verdict]] = {}
    failures: dict[str, str] = {}
    drawn: Recording | None = None  # the first part that is a load
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name, title in options.titles.items():
            task = progress.add_task(f"{name}: {title}")
            try:
                verdicts[name], seen = asyncio.run(_play(name, options.seconds))
            except (ChildFailed, TimeoutError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
                console.print(f"{name} could not be played: {error}", highlight=False, markup=False)
            else:
                drawn = drawn or (None if name in READERS else seen)
                words = [verdict.word for verdict in verdicts[name]]
                counts = f"{words.count('good')} rules hold, {words.count('BROKEN')} are broken"
                console.print(f"{name}: {counts}", highlight=False)
            progress.remove_task(task)
    return verdicts, failures, drawn


def main() -> int:
    os.environ.update(environment(experiments=True))  # before grpc is imported
    options = _options()
    console = commands.console_of()
    verdicts, failures, drawn = _play_all(options, console)
    from lab.overload.report import chart, markdown
    from lab.report import verdict_table

    verdict_table("rules (with a bound) and figures under overload", verdicts).show(console)
    length = options.seconds if options.seconds != SECONDS else None
    command = commands.repeat_command("overload", {"--part": options.part, "--seconds": length})
    outcome = {part: [asdict(verdict) for verdict in its] for part, its in verdicts.items()}
    report = {"command": command, "seconds": options.seconds, "parts": outcome, "failures": failures}
    commands.write_json(options.json, report)
    if options.write:
        first = next((name for name in verdicts if name not in READERS), "")
        picture = chart(drawn, f"Latency of {options.titles[first]}", command) if drawn is not None else None
        pages = {PAGE: markdown(verdicts, options.titles, command, PICTURE if picture else "")}
        commands.write_pages(options.pages, pages | ({PICTURE: svg(picture)} if picture else {}), console)
    is_broken = any(not verdict.good for its in verdicts.values() for verdict in its)
    return 1 if is_broken or failures else 0


if __name__ == "__main__":
    commands.run(main)
