"""Implements ``toolbus drain``: shuts down a source's sessions, or the whole bus, gracefully."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.call_command import administer
from toolbus.cli.help_text import manual

MANUAL = manual(
    ("toolbus drain weather", "toolbus drain"),
    """
    A drained session takes no new calls, finishes those it has and closes; a plugin that was drained does not come
    back by itself. Without a source the bus itself drains and then ends.
    """,
    "0 done, 1 the bus said no (no session of that source, say), 2 wrong usage, 3 no bus there.",
)


def drain(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Whose sessions (default: the whole bus).")
    ] = None,
    bus: BusOption = None,
    grace_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="How long calls in flight may take; only with SOURCE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have a source, or the whole bus, finish its calls and leave."""
    if source is not None and not source:
        terminal.fail("SOURCE is empty: name one, or leave it out to drain the whole bus", terminal.USAGE)
    if grace_seconds is not None and source is None:
        terminal.fail("--grace-seconds goes with SOURCE; a whole bus takes its own drain_seconds", terminal.USAGE)
    arguments: dict[str, Any] = {"source": source or ""}
    if grace_seconds is not None:
        arguments["grace_seconds"] = grace_seconds
    found = administer(bus, "drain", arguments)
    if as_json:
        terminal.say_json(found)
    elif source is None:
        print(f"draining the bus (sessions: {found['sessions']})")
    elif found["sessions"]:
        print(f"draining {source} (sessions: {found['sessions']})")
    if source is not None and not found["sessions"]:
        terminal.fail(f"no session of source {source!r} is attached: `toolbus list` shows the sources")
