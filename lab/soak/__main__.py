"""Keeps a bus under steady load, shows its memory and latency over time, and judges whether it was steady."""

from __future__ import annotations

import argparse
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live

from lab import commands
from lab.chart import svg
from lab.child import ChildFailed
from lab.soak.page import chart, live_line, page, show, to_json
from lab.soak.run import Soak
from lab.soak.sample import Record, Sample
from lab.soak.verdict import judge
from lab.soak.visits import BROKEN

PICTURE, FIGURES = "soak.svg", "soak-figures.md"
MINUTES, RATE = 30.0, 300.0
SHOWN_EVERY = 15  # samples, where the output is not a terminal
EXAMPLES = """examples:
  python -m lab.soak                        half an hour
  python -m lab.soak --minutes 5            the shortest that is judged strictly
  python -m lab.soak --seconds 20 --rate 100 --svg soak.svg --json soak.json
  python -m lab.soak --seconds 20 --broken leak

exit codes: 0 steady, 1 something grew or was wrong, 2 wrong usage or the soak could not begin. Ctrl-C ends it early,
with the verdict of what was measured. Latency is a figure, which other work of the machine changes, and fails nothing.
"""


def _options() -> tuple[argparse.Namespace, Path]:
    parser = commands.parser_of("soak", __doc__, EXAMPLES)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help=f"how long ({MINUTES:g})")
    length.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--rate", type=float, default=RATE, help=f"calls a second ({RATE:g})")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw memory, latency and load there")
    commands.add_results(parser, "every sample and the verdict", f"{PICTURE} and {FIGURES}")
    commands.add_folder(parser, "logs and the bus's data")
    parser.add_argument("--broken", choices=BROKEN, default="", help="have visitors misbehave, which must be noticed")
    options = parser.parse_args()
    options.seconds = options.seconds or (options.minutes or MINUTES) * 60
    if not (options.seconds >= 1 and options.rate > 0):
        parser.error("a soak takes at least a second, and more than 0 calls a second")
    return options, commands.folder_of(options, parser, "soak")


def main() -> int:
    options, folder = _options()
    console = commands.console_of()
    record = _play(options, folder, console)
    if record is None:
        return 2
    verdicts = judge(record)
    command = _repeat_command(options)
    show(record, verdicts, console)
    picture = svg(chart(record.samples, command))
    outcome = to_json(record, verdicts) | {"command": command, "samples": [asdict(each) for each in record.samples]}
    commands.write_json(options.json, outcome)
    if options.svg:
        options.svg.write_text(picture)
    if options.write:
        pages = {PICTURE: picture, FIGURES: page(record, verdicts, command, PICTURE)}
        commands.write_pages(options.pages, pages, console)
    good = all(verdict.good for verdict in verdicts)
    if good and not options.folder:
        shutil.rmtree(folder)
    else:
        commands.printer(console)(f"logs in {folder}")
    return 0 if good else 1


def _play(options: argparse.Namespace, folder: Path, console: Console) -> Record | None:
    """Plays a soak; None where it could not begin."""
    soak = Soak(folder, options.seconds, options.rate, options.broken)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    print_line = commands.printer(console)

    def show_sample(sample: Sample, record: Record) -> None:
        line = live_line(sample, record)
        if live is not None:
            live.update(line, refresh=True)
        elif len(record.samples) % SHOWN_EVERY == 0:
            print_line(line)

    with live or nullcontext():
        try:
            return soak.play(show_sample)
        except ChildFailed as failure:
            print_line(f"{failure}; logs in {folder}")
        except KeyboardInterrupt:
            print_line("stopped before there was anything to judge")
    return None


def _repeat_command(options: argparse.Namespace) -> str:
    is_long = options.seconds >= 60
    length = {"--minutes": options.seconds / 60} if is_long else {"--seconds": options.seconds}
    rate = options.rate if options.rate != RATE else None
    return commands.repeat_command("soak", {**length, "--rate": rate, "--broken": options.broken})


if __name__ == "__main__":
    commands.run(main)
