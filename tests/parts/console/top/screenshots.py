"""Draws `toolbus top` as SVG, in both themes: the pictures of the documentation.

`python -m tests.parts.console.top.screenshots FOLDER` writes them all. The same world gives the same picture, byte for
byte.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from textual.pilot import Pilot

from tests.parts.console.top import world
from tests.parts.console.top.digests import DigestHost
from toolbus.parts.console.top.digest_reader import ReaderTimings
from toolbus.parts.console.top.screen import TopApp
from toolbus.parts.console.top.views import Selection
from toolbus.sdk import Host

SIZE = (120, 30)
ALL = Selection()
PICTURES: dict[str, tuple[str, ...]] = {
    "tools": (),
    "sources": ("s",),
    "calls": ("c",),
    "errors": ("e",),
    "call": ("c", "down", "enter"),
}
"""Names of the pictures, and the keys that lead there."""

STILL = ReaderTimings(wait=3_600.0, late=3_600.0, pause=0.0)


@asynccontextmanager
async def screen(
    digests: Sequence[dict[str, Any]], *, light: bool = False, size: tuple[int, int] = SIZE, selection: Selection = ALL
) -> AsyncIterator[tuple[TopApp, Pilot[int], DigestHost]]:
    """Shows a bus without a terminal; nothing is drawn by the clock."""
    host = DigestHost(*digests)
    app = TopApp(
        *(cast(Host, host), "127.0.0.1:48930", 3_600.0, selection),
        light=light,
        timings=STILL,
        clock=lambda: 0.0,
    )
    cast(Any, app).NOTIFICATION_TIMEOUT = 3_600.0  # its 5 s may have passed before a busy machine draws one
    async with app.run_test(size=size, notifications=True) as pilot:
        await read(app, pilot, digests[-1]["number"] if digests else -1)
        yield app, pilot, host


async def read(app: TopApp, pilot: Pilot[int], number: int) -> None:
    """Waits until the screen has read a digest, and draws it."""
    while app.state.number < number:
        await pilot.pause()
    app.draw()
    await pilot.pause()


async def draw(name: str, *, light: bool) -> str:
    """Returns one of `PICTURES` as SVG."""
    zone = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        async with screen(world.digests(), light=light) as (app, pilot, _):
            await pilot.press(*PICTURES[name])
            await pilot.pause()
            return app.export_screenshot(title="toolbus top")
    finally:
        os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
        time.tzset()


async def write_all(folder: Path) -> None:
    """Writes `top-NAME-THEME.svg` for each picture."""
    for name in PICTURES:
        for light in (False, True):
            (folder / f"top-{name}-{'light' if light else 'dark'}.svg").write_text(
                await draw(name, light=light), "utf-8"
            )


if __name__ == "__main__":
    asyncio.run(write_all(Path(sys.argv[1])))
