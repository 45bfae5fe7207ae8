"""Implements ``toolbus top``: shows what a bus does, live on a terminal, or as frames of text or JSON."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.help_text import epilog
from toolbus.parts.console.top import frame
from toolbus.parts.console.top.bus_state import BusState
from toolbus.parts.console.top.digest_reader import BusLost, DigestReader, ReaderTimings
from toolbus.parts.console.top.views import Selection

if TYPE_CHECKING:
    from toolbus.sdk import Host

FIRST_SECONDS = 1.0  # until the first frame: calls per second need two digests


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """Which frames are printed.

    Attributes:
        count: how many; 0: until Ctrl-C.
        interval: seconds between two.
        rows: lines of each table of text.
    """

    address: str
    count: int
    interval: float
    selection: Selection
    rows: int
    as_json: bool
    timings: ReaderTimings = field(default_factory=ReaderTimings)


async def print_frames(host: Host, settings: FrameSettings) -> None:
    """Prints frames until there are enough.

    Raises:
        RequestError: the bus has no digests, or refuses them to this program.
    """
    loop = asyncio.get_running_loop()
    reader, state = DigestReader(host, settings.timings), BusState()
    due, printed = loop.time() + min(FIRST_SECONDS, settings.interval), 0
    lost = False
    while True:
        try:
            state.apply(await reader.read(max(0.0, min(settings.timings.wait, due - loop.time()))))
            lost = False
        except BusLost as error:
            if not lost:
                terminal.print_note(f"no bus at {settings.address}: {error}; waiting for it")
            lost = True
            continue
        if loop.time() < due:
            continue
        _print(state, settings, first=not printed)
        printed += 1
        if printed == settings.count:
            return
        due = max(due + settings.interval, loop.time())


def _print(state: BusState, settings: FrameSettings, *, first: bool) -> None:
    now = state.at
    if settings.as_json:
        shown = frame.json_frame(state, settings.address, now, settings.selection)
        terminal.print_json(shown, line=True)
        return
    if not first:
        terminal.print_lines("")
    for line in frame.heading(state, settings.address, now):
        terminal.print_lines(line)
    for headings, rows, more in frame.text_frame(state, now, settings.selection, settings.rows):
        terminal.print_lines("")
        terminal.print_table(headings, rows)
        if more:
            terminal.print_lines(more)
    sys.stdout.flush()


EPILOG = epilog(
    (
        "toolbus top",
        "toolbus top --sort p95 --source weather",
        "toolbus top -n 1 --sort errors",
        "toolbus top -n 1 --json",
        "toolbus top --json --interval 10 >> bus.jsonl",
    ),
    """
    Shows tools with their calls and durations, sources and their sessions, running calls and errors. On a terminal the
    screen is live and has keys, which ? lists; it needs Textual: pip install 'toolbus[top]'. When the bus restarts, the
    screen keeps what it showed, and goes on by itself.

    With -n or --plain, in a pipe, and where TERM is dumb, it prints frames of text; with --json one JSON object a
    frame, always with everything. Without -n that is one frame of text, or objects of JSON until Ctrl-C.

    Calls and errors are counted since the bus started; CALLS/S is that of the last 5 seconds; P50 and P95 are durations
    that half, and 95 of 100, calls did not exceed. What the bus does not say is –. Calls and errors are listed from the
    time on when the command began to read, after the newest 50. `toolbus calls --follow` prints each call as it ends.
    """,
    "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)
_MISSING = (
    "the live screen needs Textual, which is not installed: pip install 'toolbus[top]'. `toolbus top -n 1` prints a "
    "frame without it"
)


class ToolOrder(StrEnum):
    """What the tools can be sorted by."""

    RATE = "rate"
    CALLS = "calls"
    ERRORS = "errors"
    P50 = "p50"
    P95 = "p95"
    IN_FLIGHT = "in-flight"
    NAME = "name"


def top(
    bus: BusOption = None,
    credential: CredentialOption = None,
    frames: Annotated[
        int | None, typer.Option("-n", "--frames", min=1, metavar="N", help="Print this many frames and end.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600.0, metavar="SECONDS", help="Seconds between two frames.")
    ] = 2.0,
    sort: Annotated[
        ToolOrder, typer.Option(help="Sort the tools by this: the highest first, names from A.")
    ] = ToolOrder.RATE,
    filter_: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Only lines that have these words, in any case.")
    ] = "",
    source: Annotated[str, typer.Option(metavar="NAME", help="Only tools, calls and sessions of this source.")] = "",
    rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="At most this many lines of each table, in frames of text.")
    ] = 20,
    light: Annotated[bool, typer.Option("--light", help="Draw for a light terminal.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print text instead of the live screen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one object a frame.")] = False,
) -> None:
    """Show live what the bus does: tools, sources, running calls, errors."""
    selection = Selection(sort=sort.value, filter=filter_, source=source)
    target = BusTarget(bus, credential)
    if frames is None and not as_json and not plain and _can_draw():
        _show_screen(target, interval, selection, light)
        return
    count = frames if frames is not None else 0 if as_json else 1
    settings = FrameSettings(target.read()[0].text, count, interval, selection, rows, as_json)
    bus_client.with_host(target, lambda host: print_frames(host, settings))


def _can_draw() -> bool:
    """Tells whether this is a terminal that a screen can be drawn on; Textual draws on standard error."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return os.environ.get("TERM", "dumb") != "dumb" and all(stream.isatty() for stream in streams)


def _show_screen(target: BusTarget, interval: float, selection: Selection, light: bool) -> None:
    try:
        import textual  # noqa: F401  # extra `top`
    except ModuleNotFoundError:
        terminal.fail(_MISSING)
    address = target.read()[0].text
    bus_client.check_listening(target.read()[0])

    async def show(host: Host) -> int:
        from toolbus.parts.console.top.screen import show_screen

        return await show_screen(host, address, interval, selection, light=light)

    if code := bus_client.with_host(target, show):
        raise typer.Exit(code)
