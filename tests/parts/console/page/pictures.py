"""Takes the pictures of the console for the documentation: `python -m tests.parts.console.page.pictures [NAME…]`.

They are made from the demo world into docs/images/console, with a digest of everything that they show: the files of
the page and of the world. A test of the fast suite compares it, so that pictures of a page that has changed are found.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.looking import go, open_console, settled
from tests.parts.console.page.world import demo_world, empty_world, traffic
from tests.parts.console.top import screenshots
from tests.support.processes import ROOT

FOLDER = ROOT / "docs" / "images" / "console"
DIGEST = FOLDER / "pictures.json"
PAGE = ROOT / "toolbus" / "parts" / "console" / "page"
WORLD = ("world.py", "world_plugins.py", "pictures.py", "plugins/billing.py")
MAX_BYTES = 60_000
QUALITIES = (82, 70, 58, 46, 34, 26)  # the first that is small enough
SCHEMES = ("light", "dark")
SIZE = (1440, 900)
PHONE = (360, 740)


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture, light and dark.

    Attributes:
        name: of the files, without the scheme.
        route: what is opened.
        row: what stands in the row that is opened then; "" opens none.
    """

    name: str
    route: str
    row: str = ""
    phone: bool = False
    empty: bool = False


SHOTS = (
    Shot("overview", "overview"),
    Shot("sources", "sources", "billing"),
    Shot("tools", "tools?sort=calls", "plan_trip"),
    Shot("calls", "calls", "plan_trip"),
    Shot("errors", "errors", "render_invoice"),
    Shot("logs", "logs", "billing"),
    Shot("permissions", "permissions"),
    Shot("tasks", "tasks", "running"),
    Shot("council", "council", "Mira"),
    Shot("bus", "bus"),
    Shot("phone-overview", "overview", phone=True),
    Shot("phone-tools", "tools", phone=True),
    Shot("phone-call", "calls", "plan_trip", phone=True),
    Shot("empty", "tools", empty=True),
)
TOP = Shot("top", "")
STYLE_OF_TOP = "body {margin: 0; overflow: hidden} svg {display: block; width: 1200px; height: auto}"
# The first row with a text; null while there is none.
_ROW = "[...document.querySelectorAll('.row')].find(row => row.innerText.includes(%s))"
HISTORY_SECONDS = 20  # of traffic, for the curves


def sources() -> Iterator[Path]:
    """Yields the files that the pictures show, or that make them."""
    shown = (path for path in PAGE.rglob("*") if path.is_file() and path.suffix in (".css", ".html", ".mjs", ".svg"))
    yield from sorted(path for path in shown if path.parent.name != "vendor")
    yield from sorted((ROOT / "toolbus" / "parts" / "console" / "top").glob("*.*"))
    yield from (Path(__file__).parent / name for name in WORLD)


def digests() -> dict[str, str]:
    """Returns what each of these files holds, by its path."""
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sources()}


async def show(page: Page, shot: Shot) -> None:
    """Brings the open console to what a picture shows."""
    await page.size(*(PHONE if shot.phone else SIZE), phone=shot.phone)
    await go(page, shot.route)
    if shot.row:
        row = _ROW % json.dumps(shot.row)
        await page.until(f"!!{row}", f"a row with {shot.row!r} on {shot.route}")
        await page.run(f"{row}.click()")
        await settled(page)


async def take(page: Page) -> bytes:
    """Returns a picture that is small enough."""
    for quality in QUALITIES:
        picture = await page.picture(quality)
        if len(picture) <= MAX_BYTES:
            break
    return picture


async def main(chosen: Callable[[Shot], bool], folder: Path = FOLDER) -> None:
    """Takes the chosen pictures into a folder."""
    async with chromium_page() as page:
        if chosen(TOP):
            for scheme in SCHEMES:
                _write(folder / f"{TOP.name}-{scheme}.webp", await take_top(page, scheme), ())
        for empty in (False, True):
            shots = [shot for shot in SHOTS if shot.empty == empty and chosen(shot)]
            if not shots:
                continue
            async with AsyncExitStack() as stack:
                world = await stack.enter_async_context(empty_world() if empty else demo_world())
                await page.size(*SIZE)
                await open_console(page, world)
                if not empty:
                    await stack.enter_async_context(traffic(world))
                    await asyncio.sleep(HISTORY_SECONDS)
                for shot in shots:
                    await show(page, shot)
                    for scheme in SCHEMES:
                        await page.media(scheme=scheme)
                        await settled(page)
                        _write(folder / f"{shot.name}-{scheme}.webp", await take(page), page.complaints)


def _write(file: Path, picture: bytes, complaints: Sequence[str]) -> None:
    file.write_bytes(picture)
    sys.stdout.write("\n  ".join((f"{file} has {len(picture):,} bytes", *complaints)) + "\n")


async def take_top(page: Page, scheme: str) -> bytes:
    """Returns a picture of `toolbus top`, which it draws as SVG."""
    svg = await screenshots.draw("tools", light=scheme == "light")
    page_of_svg = f"<!doctype html><meta charset=utf-8><style>{STYLE_OF_TOP}</style>{svg}"
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(page_of_svg)
        file.flush()
        await page.open(f"file://{file.name}")
        box = await page.run("(box => [box.width, box.height])(document.querySelector('svg').getBoundingClientRect())")
        await page.size(*(math.ceil(each) for each in box))
    return await take(page)


if __name__ == "__main__":
    names = sys.argv[1:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(lambda shot: not names or shot.name in names))
    if not names:
        DIGEST.write_text(json.dumps(digests(), indent=2) + "\n", "utf-8")
