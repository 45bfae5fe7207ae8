"""Prints frames, one after the other, for pipes, scripts and terminals that cannot draw."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolbus.cli import terminal
from toolbus.parts.console.top import frame
from toolbus.parts.console.top.bus_state import BusState
from toolbus.parts.console.top.digest_reader import BusLost, DigestReader, ReaderTimings
from toolbus.parts.console.top.table import Selection

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
