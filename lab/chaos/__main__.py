"""``python -m lab.chaos``: one seeded run, its table, and exit code 1 where a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lab.chaos.cast import cast
from lab.chaos.schedule import ROUND_SECONDS, plan

if TYPE_CHECKING:
    from lab.chaos.run import Outcome, Run

# What can be broken on purpose, to see that it is noticed.
BROKEN = ("twice", "unwritten", "stranger", "kept", "unheard", "safe", "ghost", "leak")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat this schedule; drawn where it is not given")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long trouble and calm last together")
    parser.add_argument("--round", type=float, default=ROUND_SECONDS, help="seconds from one calm to the next")
    parser.add_argument("--few", action="store_true", help="a small cast")
    parser.add_argument(
        "--broken", choices=BROKEN, default="", help="have the cast misbehave in a way that has to be noticed"
    )
    parser.add_argument("--folder", type=Path, help="where ledgers and logs go; made, and kept")
    parser.add_argument("--keep", action="store_true", help="keep ledgers and logs of a good run too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here, too")
    return parser.parse_args()


def main() -> int:
    """Runs; returns the exit code."""
    options = _options()
    if options.folder and options.folder.exists() and any(options.folder.iterdir()):
        print(f"{options.folder} holds something already: name another --folder", file=sys.stderr)
        return 2
    options.seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    folder = (options.folder or Path(tempfile.mkdtemp(prefix=f"toolbus-chaos-{options.seed}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    command = _again(options)
    say(f"seed {options.seed}: repeat with `{command}`; ledgers and logs in {folder}")
    try:
        outcome = _play(options, folder, say)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"stopped; ledgers and logs up to here in {folder}")
        return 130
    if outcome is None:
        return 1
    from lab.chaos.report import show, to_json

    show(outcome, console)
    if options.json:
        options.json.write_text(json.dumps(to_json(outcome, seed=options.seed, command=command), indent=1) + "\n")
    if broken := len(outcome.broken):
        say(f"{broken} findings with seed {options.seed}: repeat with `{command}`; ledgers and logs in {folder}")
        return 1
    if not (options.keep or options.folder):
        shutil.rmtree(folder)
    return 0


def _again(options: argparse.Namespace) -> str:
    """Returns the command that repeats a run."""
    words = ["python", "-m", "lab.chaos", "--seed", str(options.seed), "--seconds", f"{options.seconds:g}"]
    words += ["--round", f"{options.round:g}"] if options.round != ROUND_SECONDS else []
    words += ["--few"] if options.few else []
    words += ["--broken", options.broken] if options.broken else []
    return shlex.join(words)


def _play(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Outcome | None:
    """Plays the run that was asked for; None where it could not begin."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: this process starts others all the time
    from lab.chaos.run import Run, SetUpFailed

    logging.basicConfig(filename=folder / "harness.log", level=logging.WARNING)
    parts = cast(options.few)
    run = Run(options.seed, plan(options.seed, options.seconds, parts, options.round), parts, folder, say)
    run.broken = options.broken
    try:
        return asyncio.run(_terminated_like_interrupted(run))
    except SetUpFailed as failure:
        say(f"{failure}; logs in {folder}")
        return None


async def _terminated_like_interrupted(run: Run) -> Outcome:
    """Plays a run, which SIGTERM ends as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None  # this is one
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run.play()


if __name__ == "__main__":
    sys.exit(main())
