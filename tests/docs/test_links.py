"""Checks that every link of a page leads to a file and a heading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links

READMES = sorted(
    str(page.relative_to(ROOT))
    for folder in ("clients", "examples", "lab", "tests")
    for page in (ROOT / folder).rglob("README.md")
    if "node_modules" not in page.parts  # of packages of others
)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "tests/attackers.md", *READMES])
def test_every_relative_link_resolves(page: str) -> None:
    for link in links((ROOT / page).read_text("utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: the target of {link} does not exist"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{page}: {link} has no such heading"


def test_every_path_of_the_repository_that_a_page_names_exists() -> None:
    """Paths in backticks that begin with a folder of the repository."""
    import re

    from tests.docs.pages import TEXTS, code_spans

    folders = ("clients", "docs", "examples", "lab", "proto", "tests")
    pages = {**TEXTS, "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8")}
    for page, text in pages.items():
        for span in code_spans(text):
            if re.fullmatch(rf"({'|'.join(folders)})/[\w./-]+", span):
                assert Path(ROOT / span).exists(), f"{page}: {span} does not exist"
