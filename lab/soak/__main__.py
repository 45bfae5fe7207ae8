"""``python -m lab.soak``: a bus under steady load; its memory and latency over time, and a verdict."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live

from lab.benchmarks.children import terminated_like_interrupted
from lab.soak.page import live_line, page, show, to_json
from lab.soak.picture import svg
from lab.soak.sample import Record, Sample
from lab.soak.verdict import judge
from lab.soak.visits import BROKEN

PAGES = Path(__file__).resolve().parents[1] / "results"
PICTURE, FIGURES = "soak.svg", "soak-figures.md"
MINUTES, RATE = 30.0, 300.0
TOLD_EVERY = 15  # seconds, where the output is no terminal
EXAMPLES = """examples:
  python -m lab.soak                        half an hour
  python -m lab.soak --minutes 5            the shortest that is judged strictly
  python -m lab.soak --seconds 20 --rate 100 --svg soak.svg --json soak.json
  python -m lab.soak --seconds 20 --broken leak

exit codes: 0 steady, 1 something grew or was not as it should be, 2 wrong usage or the soak could not begin.
Ctrl-C ends it early, with the verdict of what was measured.
"""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.soak",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help=f"how long ({MINUTES:g})")
    length.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--rate", type=float, default=RATE, help=f"calls a second ({RATE:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the verdict there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw memory, latency and load there")
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE} and {FIGURES} to lab/results/")
    parser.add_argument("--pages", type=Path, default=PAGES, metavar="DIR", help="write them there instead")
    parser.add_argument("--folder", type=Path, help="where logs and the bus's data go; made, and kept")
    parser.add_argument("--broken", choices=BROKEN, default="", help="have visitors misbehave, which has to be noticed")
    parser.add_argument(
        "--bus-command", default="", metavar="COMMAND", help="what starts the bus, up to and with `serve`"
    )
    options = parser.parse_args()
    options.seconds = options.seconds or (options.minutes or MINUTES) * 60
    if not (options.seconds >= 1 and options.rate > 0):
        parser.error("a soak takes at least a second, and more than 0 calls a second")
    if options.folder and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} holds something already: name another --folder")
    return options


def main() -> int:
    """Soaks; returns the exit code."""
    options = _options()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="toolbus-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    record = _play(options, folder, console)
    if record is None:
        return 2
    findings = judge(record)
    command = _again(options)
    show(record, findings, console)
    if options.json:
        answer = to_json(record, findings) | {"command": command, "samples": [asdict(each) for each in record.samples]}
        options.json.write_text(json.dumps(answer, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(svg(record.samples, command))
    if options.write:
        options.pages.mkdir(exist_ok=True)
        (options.pages / PICTURE).write_text(svg(record.samples, command))
        (options.pages / FIGURES).write_text(page(record, findings, command, PICTURE))
        console.print(f"wrote {PICTURE} and {FIGURES} to {options.pages}", markup=False, highlight=False)
    good = all(finding.good for finding in findings)
    if good and not options.folder:
        shutil.rmtree(folder)
    else:
        console.print(f"logs in {folder}", markup=False, highlight=False, soft_wrap=True)
    return 0 if good else 1


def _play(options: argparse.Namespace, folder: Path, console: Console) -> Record | None:
    """Plays the soak that was asked for; None where it could not begin."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: this process starts others
    from lab.soak.run import SetUpFailed, Soak

    soak = Soak(folder, options.seconds, options.rate, options.broken, tuple(shlex.split(options.bus_command)))
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def tell(sample: Sample, record: Record) -> None:
        line = live_line(sample, record)
        if live is not None:
            live.update(line, refresh=True)
        elif len(record.samples) % TOLD_EVERY == 0:
            console.print(line, markup=False, highlight=False)

    with terminated_like_interrupted(), live or nullcontext():
        try:
            return soak.play(tell)
        except SetUpFailed as failure:
            console.print(f"{failure}; logs in {folder}", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print("stopped before there was anything to judge", markup=False, highlight=False)
    return None


def _again(options: argparse.Namespace) -> str:
    """Returns the command that repeats a soak."""
    length = (
        ["--minutes", f"{options.seconds / 60:g}"] if options.seconds >= 60 else ["--seconds", f"{options.seconds:g}"]
    )
    words = ["python", "-m", "lab.soak", *length]
    words += ["--rate", f"{options.rate:g}"] if options.rate != RATE else []
    words += ["--broken", options.broken] if options.broken else []
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
