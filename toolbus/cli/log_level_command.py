"""Implements ``toolbus dev log-level``: shows the levels of the bus's log, and changes one for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    (
        "toolbus dev log-level",
        "toolbus dev log-level toolbus.calls debug --for 60",
        "toolbus dev log-level toolbus.calls back",
    ),
    """
    Only loggers of toolbus can be changed: toolbus, and those below it. A changed level goes back by itself, at the
    latest when the bus stops; `back` puts it back at once. The levels of `toolbus serve --log-level` stay.
    """,
    "0 done, 1 the bus refused (the logger or level is unknown, for example), 2 wrong usage, 3 no bus found.",
)
BACK = "back"


def log_level(
    logger: Annotated[str | None, typer.Argument(metavar="[LOGGER]", help="The logger, such as toolbus.calls.")] = None,
    level: Annotated[
        str | None, typer.Argument(metavar="[LEVEL]", help="debug, info, warning, error; or back, the level before.")
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    seconds: Annotated[float, typer.Option("--for", metavar="SECONDS", help="How long.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Show the levels of the bus's log, or change one for a while."""
    if logger is not None and level is None:
        terminal.fail("a logger needs a level: debug, info, warning, error or back", terminal.USAGE)
    request = {}
    if logger is not None and level is not None:
        request = {"logger": logger, "level": "" if level.lower() == BACK else level.lower(), "seconds": seconds}
    answer = call_bus_tool(BusTarget(bus, credential), "log_level", request)
    if as_json:
        terminal.print_json(answer)
    else:
        _print(answer, logger or "toolbus")


def _print(answer: Mapping[str, Any], top: str) -> None:
    """Prints a logger and those below it."""
    rows = []
    for logger, level in answer["levels"].items():
        if logger != top and not logger.startswith(f"{top}."):
            continue
        changed = answer["changed"].get(logger)
        back = f"{changed['before'] or 'as above it'} in {changed['seconds']:g} s" if changed else "-"
        rows.append((logger, level, back))
    terminal.print_table(("LOGGER", "LEVEL", "GOES BACK TO"), rows)
