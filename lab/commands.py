"""Parses what the command lines of all scenarios share, and ends each with its exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

RESULTS = Path(__file__).resolve().parent / "results"
INTERRUPTED = 130  # exit code after Ctrl-C

# gRPC reads it when it is imported; the processes that run a scenario start others all the time.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def parser_of(scenario: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """Returns the parser of ``python -m lab.<scenario>``."""
    return argparse.ArgumentParser(
        prog=f"python -m lab.{scenario}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_results(parser: argparse.ArgumentParser, json_shows: str, pages: str = "") -> None:
    """Adds the options for results.

    Args:
        json_shows: what `--json` writes.
        pages: what `--write` writes to `lab/results/`; empty: it writes no page.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write {json_shows} there")
    if pages:
        parser.add_argument("--write", action="store_true", help=f"write {pages} to lab/results/")
        parser.add_argument("--pages", type=Path, default=RESULTS, metavar="DIR", help="write them there instead")


def add_folder(parser: argparse.ArgumentParser, contents: str) -> None:
    """Adds the option for the files of a run."""
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"where {contents} go; made, and not removed")


def folder_of(options: argparse.Namespace, parser: argparse.ArgumentParser, prefix: str) -> Path:
    """Returns the folder of a run, which exists and is empty: that of the command line, or a temporary one."""
    folder: Path | None = options.folder
    if folder is not None and folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty: name another --folder")
    folder = (folder or Path(tempfile.mkdtemp(prefix=f"toolbus-{prefix}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def console_of(*, stderr: bool = False) -> Console:
    """Returns the console of a run; where it is not a terminal, it is wide enough for the tables."""
    return Console(stderr=stderr, width=None if sys.stdout.isatty() else 160)


def printer(console: Console) -> Callable[[str], None]:
    """Returns what prints a line as it is, without colours or line breaks."""

    def print_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return print_line


def repeat_command(scenario: str, options: Mapping[str, object], *arguments: str) -> str:
    """Returns the command that repeats a run.

    Args:
        options: by name, their values; those that are None, empty or False are left out, True is a flag, and a list
            repeats its option.
    """
    words = ["python", "-m", f"lab.{scenario}", *arguments]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif isinstance(value, list):
            words += [f"{name}={each}" for each in value]
        elif value not in (None, "", False):
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def write_json(file: Path | None, outcome: Any) -> None:
    """Writes an outcome, where a file is given."""
    if file is not None:
        file.write_text(json.dumps(outcome, indent=1) + "\n")


def write_pages(folder: Path, pages: Mapping[str, str], console: Console) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text)
    console.print(f"wrote {', '.join(pages)} to {folder}", markup=False, highlight=False)


def run(main: Callable[[], int]) -> None:
    """Runs a command and exits with its code; SIGTERM stops it as Ctrl-C does, so that both end its children."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
