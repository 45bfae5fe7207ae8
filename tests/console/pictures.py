"""Takes the pictures of the console that the documentation shows: `python -m tests.console.pictures [NAME…]`.

They are made from the demo world into docs/images/console, with a digest of everything that they show: the files of
the page and of the world. A test of the fast suite compares it, so that pictures of a page that has changed are found.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.browser.chromium import Page, chromium_page
from tests.console.looking import open_console, settled
from tests.console.world import World, demo_world, empty_world
from tests.support.processes import ROOT

FOLDER = ROOT / "docs" / "images" / "console"
DIGEST = FOLDER / "pictures.json"
PAGE = ROOT / "toolbus" / "bus" / "console" / "page"
WORLD = ("world.py", "world_plugins.py", "pictures.py", "plugins/billing.py")
MAX_BYTES = 60_000
QUALITIES = (82, 70, 58, 46, 34)  # the first that is small enough
SCHEMES = ("light", "dark")
SIZE = (1440, 900)
PHONE = (360, 740)


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture, light and dark.

    Attributes:
        name: of the files, without the scheme.
        route: what is opened.
        keys: what is pressed then, one after the other.
        wait: a condition in the page that holds once it is complete.
    """

    name: str
    route: str
    keys: tuple[str, ...] = ()
    wait: str = "true"
    phone: bool = False
    empty: bool = False


_ROWS = "document.querySelectorAll('.row').length > 0"
SHOTS = (
    Shot("sources", "sources", ("j", "Enter"), _ROWS),
    Shot("tools", "tools/travel/plan_trip", (), _ROWS),
    Shot("calls", "calls?q=plan_trip", ("j", "Enter"), _ROWS),
    Shot("errors", "errors", ("j", "Enter"), _ROWS),
    Shot("logs", "logs", ("j", "Enter"), _ROWS),
    Shot("permissions", "permissions"),
    Shot("tasks", "tasks", ("j", "Enter"), _ROWS),
    Shot("council", "council", ("j", "Enter"), _ROWS),
    Shot("bus", "bus"),
    Shot("phone-tools", "tools", (), _ROWS, phone=True),
    Shot("phone-call", "calls?q=plan_trip", ("j", "Enter"), _ROWS, phone=True),
)


def sources() -> Iterator[Path]:
    """Yields the files that the pictures show, or that make them."""
    shown = (path for path in PAGE.rglob("*") if path.is_file() and path.suffix in (".css", ".html", ".mjs", ".svg"))
    yield from sorted(path for path in shown if path.parent.name != "vendor")
    yield from sorted((ROOT / "toolbus" / "cli" / "top").glob("*.py"))
    yield from (Path(__file__).parent / name for name in WORLD)


def digests() -> dict[str, str]:
    """Returns what each of these files holds, by its path."""
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sources()}


async def take(page: Page, world: World, shot: Shot, scheme: str) -> bytes:
    """Returns a picture that is small enough."""
    await page.size(*(PHONE if shot.phone else SIZE), phone=shot.phone)
    await page.media(scheme=scheme)
    await open_console(page, world, shot.route)
    await page.until(shot.wait, f"the page of {shot.name}")
    for key in shot.keys:
        await page.press(key)
        await settled(page)
    for quality in QUALITIES:
        picture = await page.picture(quality)
        if len(picture) <= MAX_BYTES:
            break
    return picture


async def main(chosen: Callable[[Shot], bool], folder: Path = FOLDER, schemes: tuple[str, ...] = SCHEMES) -> None:
    """Takes the chosen pictures into a folder."""
    async with chromium_page() as page:
        for empty in (False, True):
            shots = [shot for shot in SHOTS if shot.empty == empty and chosen(shot)]
            if not shots:
                continue
            async with empty_world() if empty else demo_world() as world:
                for shot, scheme in itertools.product(shots, schemes):
                    picture = await take(page, world, shot, scheme)
                    _write(folder / f"{shot.name}-{scheme}.webp", picture, page.complaints)


def _write(file: Path, picture: bytes, complaints: Sequence[str]) -> None:
    file.write_bytes(picture)
    sys.stdout.write("\n  ".join((f"{file} has {len(picture):,} bytes", *complaints)) + "\n")


if __name__ == "__main__":
    names = sys.argv[1:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(lambda shot: not names or shot.name in names))
    if not names:
        DIGEST.write_text(json.dumps(digests(), indent=2) + "\n", "utf-8")
