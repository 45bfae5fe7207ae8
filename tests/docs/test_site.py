"""Builds the site of the documentation, strictly, and checks that it needs nothing from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.support.waiting import HANG_SECONDS

BROKEN_LINKS = ["missing.md", "#missing", "../missing.py"]
# Builds sites one after the other, each in a fork, since loading mkdocs takes longer than most of them.
_BUILD_ALL = """
import json, os, sys
from mkdocs.__main__ import cli
codes = []
for config, site in json.loads(sys.argv[1]):
    sys.stderr.flush()
    if not (pid := os.fork()):
        cli(["build", "--strict", "-f", config, "-d", site])
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


@dataclass(frozen=True)
class Built:
    """The site, and how its build and those of pages with a broken link ended."""

    site: Path
    code: int
    broken: dict[str, int]
    errors: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    sites = [(ROOT / "mkdocs.yml", tmp_path_factory.mktemp("site"))]
    for number, link in enumerate(BROKEN_LINKS):
        folder = tmp_path_factory.mktemp(f"broken{number}")
        sites.append((_page_with(link, folder), folder / "site"))
    words = json.dumps([[str(config), str(site)] for config, site in sites])
    ended = subprocess.run(
        [sys.executable, "-c", _BUILD_ALL, words],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    code, *broken = json.loads(ended.stdout.splitlines()[-1])
    return Built(sites[0][1], code, dict(zip(BROKEN_LINKS, broken, strict=True)), ended.stderr)


def _page_with(link: str, folder: Path) -> Path:
    """Writes a site of one page with a link; returns its configuration."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Page\n\n[link]({link})\n", "utf-8")
    for hook in ("site_links.py", "llms.py"):
        (docs / hook).write_text((DOCS / hook).read_text("utf-8"), "utf-8")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[0]
    (folder / "mkdocs.yml").write_text(settings, "utf-8")
    return folder / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(built: Built) -> Path:
    assert built.code == 0, built.errors
    return built.site


def test_the_site_has_every_page(site: Path) -> None:
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert {str(page.relative_to(site).with_suffix("")) for page in site.rglob("*.html")} == {*pages, "404"}


def test_llms_txt_has_every_page_once_with_its_first_sentence_and_each_link_exists(site: Path) -> None:
    """In the format of llmstxt.org: a heading, a quote, and lists of links below second headings."""
    head, quote, *sections = (site / "llms.txt").read_text("utf-8").split("\n\n")
    assert (head, quote[:2]) == ("# toolbus", "> ")
    rows = [line for section in sections if not section.startswith("## ") for line in section.strip().split("\n")]
    links = [re.fullmatch(r"- \[[^\]]+\]\(([\w/.-]+)\): (.+[.!?])", row) for row in rows]
    assert all(links), [row for row, link in zip(rows, links, strict=True) if link is None]
    pages = sorted(str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md"))
    assert sorted(link[1] for link in links if link) == [page for page in pages if page != "index.html"]
    assert all((site / page).is_file() for page in pages)


def test_no_page_of_the_site_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link[^>]*\shref=[\"']?([^\"'\s>]+)", text)
        assert loaded
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text("utf-8")), style


@pytest.mark.parametrize("link", BROKEN_LINKS)
def test_a_broken_link_fails_the_build(built: Built, link: str) -> None:
    assert built.broken[link] == 1, built.errors
