"""Implements ``toolbus approvals``: shows the calls that wait for an operator, and allows or denies them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog
from toolbus.common.text import shorten

EPILOG = epilog(
    ("toolbus approvals", "toolbus approvals allow 3f2a91bc", 'toolbus approvals deny 3f2a91bc --reason "on Mondays"'),
    """
    Calls wait for an operator where [[approvals]] of the configuration says so. A call that is allowed runs once: the
    one that waits, or the next one of the same caller and user with the same arguments. WAITING is how many calls wait
    now; with 0 the caller has to make the call again.

    Keys need the scope administer = ["permit"].
    """,
    "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found.",
)
MAX_SHOWN = 60  # characters of arguments in a table


class ApprovalVerb(StrEnum):
    """What to do with a call that waits."""

    ALLOW = "allow"
    DENY = "deny"


def approvals(
    verb: Annotated[
        ApprovalVerb | None, typer.Argument(metavar="allow|deny", help="What to do (default: list what waits).")
    ] = None,
    id: Annotated[str | None, typer.Argument(metavar="ID", help="The call, as the list shows it.")] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why it is denied; the caller's model reads it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the calls that wait for an operator, and allow or deny one."""
    target = BusTarget(bus, credential)
    if reason and verb is not ApprovalVerb.DENY:
        terminal.fail("--reason goes with deny", terminal.USAGE)
    if verb is None:
        waiting = call_bus_tool(target, "held_calls", {})
        if as_json:
            terminal.print_json(waiting)
        elif waiting:
            heads = ("ID", "TOOL", "SOURCE", "CALLER", "USER", "AGE", "WAITING", "ARGUMENTS")
            terminal.print_table(heads, [_row(each) for each in waiting])
        else:
            terminal.print_note("no call waits for an approval")
        return
    if not id:
        terminal.fail(f"{verb} needs the ID of a call: `toolbus approvals` lists those that wait", terminal.USAGE)
    answer = call_bus_tool(target, "decide_call", {"id": id, "allow": verb is ApprovalVerb.ALLOW, "reason": reason})
    again = "" if verb is ApprovalVerb.DENY or answer["waiting"] else "; it runs when the caller makes it again"
    what = "allowed" if answer["allowed"] else "denied"
    terminal.print_outcome(f"{what} {answer['tool']} for {answer['caller']}{again}", answer, as_json)


def _row(call: Mapping[str, Any]) -> tuple[str, ...]:
    age = f"{max(time.time() - call['asked'], 0.0):.0f} s"
    names = (str(call[key] or "-") for key in ("id", "tool", "source", "caller", "user_id"))
    return (*names, age, str(call["waiting"]), shorten(call["arguments"], MAX_SHOWN))
