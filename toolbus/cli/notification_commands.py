"""Implements ``toolbus plugins notifications`` and ``notify``: messages of plugins to users, outside calls."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonLinesOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog
from toolbus.common.text import clean_line

if TYPE_CHECKING:
    from toolbus.sdk import Host

EPILOG = epilog(
    ("toolbus plugins notifications", "toolbus plugins notifications --json"),
    """
    Prints the messages of plugins to users outside calls, as hosts get them, from now on. It continues when the bus is
    restarted; Ctrl-C ends it.
    """,
    "1 the bus refused, 2 wrong usage, 3 no bus found at the start, 130 after Ctrl-C.",
)
NOTIFY_EPILOG = epilog(
    (
        "toolbus plugins notify 'the bus restarts at six'",
        """toolbus plugins notify --user u-17 --data '{"id": 4}' 'order 4 has arrived'""",
    ),
    """
    Sends a notification as a plugin does with `Plugin.notify`, and prints how many hosts it was sent to.
    """,
    "0 done (also if no host follows), 1 the bus refused, 2 wrong usage, 3 no bus found.",
)


def notifications(bus: BusOption = None, credential: CredentialOption = None, as_json: JsonLinesOption = False) -> None:
    """Print each notification as it comes."""
    bus_client.with_host(BusTarget(bus, credential), lambda host: _follow(host, as_json))


async def _follow(host: Host, as_json: bool) -> None:
    async for each in host.notifications():
        if as_json:
            terminal.print_json(asdict(each), line=True)
            continue
        if each.lost:
            terminal.print_lines(f"({each.lost} lost)")
        clock = datetime.fromtimestamp(each.time_seconds).strftime("%H:%M:%S")
        data = "" if each.data is None else f" {json.dumps(each.data, ensure_ascii=False)}"
        user = each.user or "everyone"
        terminal.print_lines(f"{clock} {each.source} to {clean_line(user)}: {clean_line(each.text + data)}")


def notify(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the user should read.")],
    bus: BusOption = None,
    credential: CredentialOption = None,
    user: Annotated[str, typer.Option(metavar="ID", help="Whom it is for (default: everyone).")] = "",
    data: Annotated[str, typer.Option(metavar="JSON", help="Data for programs (default: none).")] = "",
    as_json: JsonOption = False,
) -> None:
    """Send a message to a user, through the hosts that show notifications."""
    try:
        value = json.loads(data) if data else None
    except ValueError as error:
        terminal.fail(f"--data is not JSON: {error}", terminal.USAGE)
    answer = call_bus_tool(BusTarget(bus, credential), "notify", {"text": text, "user": user, "data": value})
    if as_json:
        terminal.print_json(answer)
    else:
        terminal.print_lines(f"sent to {answer['hosts']} hosts" if answer["hosts"] != 1 else "sent to 1 host")
