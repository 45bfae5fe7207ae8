"""Implements ``toolbus access approve``: shows the changes in the tools of a source, and trusts them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog
from toolbus.common.text import list_names

APPROVE_EPILOG = epilog(
    ("toolbus access approve files", "toolbus access approve files read_file", "toolbus access approve weather --yes"),
    """
    A source is trusted as it is when it is first seen. What it changes later is offered and marked (pin = "warn"), or
    waits for this command (pin = "block"), which prints the difference and asks. Only the shown
    changes are approved, not those that come meanwhile. Mounts have `--pin` of `toolbus mounts add`; plugins are pinned
    by [pins] of the configuration.
    """,
    "0 approved, or nothing waits, 1 declined, or the bus refused, 2 wrong usage, 3 no bus found.",
)


def approve(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A plugin's source, or a mount.")],
    tool: Annotated[str | None, typer.Argument(metavar="[TOOL]", help="One tool (default: all changes).")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bus: BusOption = None,
    credential: CredentialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the changes in the tools of a source, and trust them."""
    target = BusTarget(bus, credential)
    changes = call_bus_tool(target, "approvals", {"source": source})["changes"]
    pending = [each for each in changes if not tool or tool in (each["subject"], each["tool"])]
    if not pending:
        terminal.print_note(f"nothing of {tool or f'source {source}'} waits for an approval")
        if as_json:
            terminal.print_json({"source": source, "approved": [], "waiting": []})
        return
    for change in pending:
        terminal.print_lines(f"{change['subject']}\n{change['difference']}", sys.stderr if as_json else None)
    if not yes:
        terminal.ask(f"Trust {list_names(each['subject'] for each in pending)} of source {source} as declared now?")
    expected = [change["fingerprint"] for change in pending]
    result = call_bus_tool(target, "approve", {"source": source, "tool": tool or "", "expected": expected})
    terminal.print_outcome(f"approved: {list_names(result['approved'])}", result, as_json)
