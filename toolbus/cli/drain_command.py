"""Implements ``toolbus plugins drain``: shuts down a source's sessions, or the whole bus, gracefully."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    ("toolbus plugins drain weather", "toolbus plugins drain"),
    """
    A drained session takes no new calls, finishes those in flight and closes. A plugin that was drained does not
    reconnect by itself. Without a source the bus itself is drained, and then ends.
    """,
    "0 done, 1 the bus refused (the source has no session, for example), 2 wrong usage, 3 no bus found.",
)


def drain(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Drain the sessions of this source (default: the whole bus).")
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="How long calls in flight may take, in seconds; only with SOURCE (default: set by the bus)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shut down a source, or the whole bus, gracefully: calls in flight are finished."""
    if source is not None and not source:
        terminal.fail("SOURCE is empty: name a source, or leave it out to drain the whole bus", terminal.USAGE)
    if grace_seconds is not None and source is None:
        terminal.fail("--grace-seconds needs SOURCE: the whole bus uses its setting drain_seconds", terminal.USAGE)
    arguments: dict[str, Any] = {"source": source or ""}
    if grace_seconds is not None:
        arguments["grace_seconds"] = grace_seconds
    result = call_bus_tool(BusTarget(bus, credential), "drain", arguments)
    if as_json:
        terminal.print_json(result)
    elif source is None:
        terminal.print_lines(f"draining the bus (sessions: {result['sessions']})")
    elif result["sessions"]:
        terminal.print_lines(f"draining {source} (sessions: {result['sessions']})")
    if source is not None and not result["sessions"]:
        terminal.fail(f"no session of source {source!r} is attached: `toolbus list` shows the sources")
