"""Plays one seeded run, prints its tables, and exits with 1 where a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
from pathlib import Path

from lab import buses, commands
from lab.chaos.cast import cast
from lab.chaos.report import show, to_json
from lab.chaos.run import Run
from lab.chaos.schedule import ROUND_SECONDS, plan
from lab.child import ChildFailed

# What can be broken on purpose, to see that it is noticed.
BROKEN = ("twice", "unwritten", "stranger", "kept", "unheard", "safe", "ghost", "leak")


def _options() -> tuple[argparse.Namespace, Path]:
    parser = commands.parser_of("chaos", __doc__)
    parser.add_argument("--seed", type=int, help="repeat this schedule; by default a new one is drawn")
    parser.add_argument("--seconds", type=float, default=600.0, help="length of trouble and calm together (600)")
    parser.add_argument("--round", type=float, default=ROUND_SECONDS, help="seconds from one calm to the next (60)")
    parser.add_argument("--few", action="store_true", help="a small cast")
    broken = "have the cast misbehave in a way that must be noticed"
    parser.add_argument("--broken", choices=BROKEN, default="", help=broken)
    commands.add_folder(parser, "ledgers and logs")
    commands.add_results(parser, "the outcome")
    options = parser.parse_args()
    options.seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    return options, commands.folder_of(options, parser, f"chaos-{options.seed}")


def main() -> int:
    if sys.argv[1:2] == ["buses"]:
        return buses.main(sys.argv[2:], chaos=True)
    options, folder = _options()
    console = commands.console_of()
    print_line = commands.printer(console)
    length = options.round if options.round != ROUND_SECONDS else None
    given = {"--seed": options.seed, "--seconds": options.seconds, "--round": length, "--few": options.few}
    command = commands.repeat_command("chaos", {**given, "--broken": options.broken})
    print_line(f"seed {options.seed}: repeat with `{command}`; ledgers and logs in {folder}")
    logging.basicConfig(filename=folder / "harness.log", level=logging.WARNING)
    parts = cast(options.few)
    run = Run(
        options.seed,
        plan(options.seed, options.seconds, parts, options.round),
        parts,
        folder,
        print_line,
        options.broken,
    )
    try:
        asyncio.run(run.play())
    except ChildFailed as failure:
        print_line(f"{failure}; logs in {folder}")
        return 1
    except KeyboardInterrupt:
        print_line(f"stopped; ledgers and logs up to here in {folder}")
        return commands.INTERRUPTED
    show(run, console)
    commands.write_json(options.json, to_json(run, seed=options.seed, command=command))
    if broken := len(run.findings):
        print_line(f"{broken} findings with seed {options.seed}: repeat with `{command}`; ledgers and logs in {folder}")
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    commands.run(main)
