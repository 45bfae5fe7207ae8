"""A host on the SDK: ``python -m lab.overload.sdk_host ADDRESS FOLDER NAME``. It repeats what was refused, in time."""

from __future__ import annotations

import argparse
import functools
import sys

import uvloop

from lab.overload.load import OK, UNANSWERED
from lab.overload.pace import Pace, drive, options_of
from toolbus.sdk import Host


async def _ask(host: Host, options: argparse.Namespace, pace: Pace, number: int) -> None:
    arguments = {"place": "Reykjavik", "days": 1, "note": str(number)}
    result = await host.call(options.tool, arguments, timeout=options.patience)
    error = result.error
    if error is None:
        pace.ended(number, OK if not result.is_error else UNANSWERED)
        return
    whole = error.retry_safe and error.limit and error.message
    pace.ended(number, error.code.value, error.retry_after_seconds or sys.float_info.min if whole else 0.0)


async def run(options: argparse.Namespace) -> None:
    """Calls as scheduled, then writes down what came of it."""
    async with Host(options.address, source=options.name) as host:
        await drive(options, functools.partial(_ask, host, options))


def main() -> None:
    """Reads the command line and calls."""
    uvloop.run(run(options_of(__doc__).parse_args()))


if __name__ == "__main__":
    main()
