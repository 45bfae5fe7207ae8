"""The pictures of the console in the documentation: all there, small, shown, and of the page as it is."""

from __future__ import annotations

import json
import re

import pytest

from tests.parts.console.page import pictures
from tests.support.processes import ROOT

NAMES = [f"{shot.name}-{scheme}" for shot in (*pictures.SHOTS, pictures.TOP) for scheme in pictures.SCHEMES]


def test_the_pictures_are_of_the_page_as_it_is() -> None:
    """Fails when a file that the pictures show has changed since: `make console-pictures` takes them again."""
    taken = json.loads(pictures.DIGEST.read_text("utf-8"))
    now = pictures.digests()
    changed = sorted(path for path in taken.keys() | now.keys() if taken.get(path) != now.get(path))
    assert not changed, f"run make console-pictures and look at what it took: {', '.join(changed)} changed"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_there_and_small(name: str) -> None:
    assert 0 < (pictures.FOLDER / f"{name}.webp").stat().st_size <= pictures.MAX_BYTES


def test_every_picture_is_shown_and_no_other_is_there() -> None:
    page = (ROOT / "docs" / "start" / "console.md").read_text("utf-8")
    shown = re.findall(r"images/console/([a-z-]+)\.webp", page)
    assert sorted(set(shown)) == sorted(NAMES) == sorted(file.stem for file in pictures.FOLDER.glob("*.webp"))
