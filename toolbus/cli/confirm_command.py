"""Implements ``toolbus access confirm``: trusts the plugin of restored tools that are unconfirmed."""

from __future__ import annotations

from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog
from toolbus.common.text import clean_line

EPILOG = epilog(
    ("toolbus list --all", "toolbus access confirm weather"),
    """
    A tool with a callback URL that was registered before the bus restarted is unconfirmed while another program than
    its plugin may listen there. It is offered again as soon as its plugin registers. This command trusts the program
    that listens there now: check first that it is the plugin.
    """,
    "0 done, 1 the source has no unconfirmed tool, or the bus refused, 2 wrong usage, 3 no bus found.",
)


def confirm(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Confirm the tools of this source.")],
    bus: BusOption = None,
    credential: CredentialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Offer a source's unconfirmed tools again, and trust the programs at their callback URLs."""
    result = call_bus_tool(BusTarget(bus, credential), "confirm", {"source": source})
    if as_json:
        terminal.print_json(result)
    elif result["confirmed"]:
        terminal.print_lines(f"confirmed {', '.join(clean_line(name) for name in result['confirmed'])}")
    if not result["confirmed"]:
        terminal.fail(
            f"source {source!r} has no unconfirmed tool without a secret: `toolbus list --all` shows the state of each "
            "tool"
        )
