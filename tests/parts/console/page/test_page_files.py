"""Tests what the console's page is made of: files that a browser reads as they lie in the package."""

from __future__ import annotations

import io
import re
import subprocess
import zipfile
from pathlib import Path

from tests.parts.console.page.vendor import IMPORT, MODULES, PAGE, VENDOR, sha256
from tests.parts.mcp.official.suite import NODE, node_environment
from toolbus.parts.identity.authority import RENEW_BEFORE_DAYS

TESTS = Path(__file__).parent
MAX_ZIPPED = 150_000  # bytes that the page may add to the wheel
ROW = re.compile(r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
# What the page's Content-Security-Policy refuses, and what would make markup of strings.
FORBIDDEN = re.compile(
    r"\binnerHTML\b|\bouterHTML\b|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function\b|"
    r"createContextualFragment|DOMParser|srcdoc|style=\"|style='|javascript:|https?://(?!www\.w3\.org/)"
)


def _own_files() -> list[Path]:
    kinds = (".mjs", ".html", ".css", ".svg")
    return [file for file in sorted(PAGE.rglob("*")) if file.suffix in kinds and VENDOR not in file.parents]


def test_the_vendored_libraries_are_those_that_are_written_down() -> None:
    written = {
        file: (package, version, licence, digest)
        for file, package, version, licence, digest in ROW.findall((VENDOR / "VENDOR.md").read_text())
    }
    actual = {
        file: (module.package, module.version, module.licence, sha256((VENDOR / file).read_bytes()))
        for file, module in MODULES.items()
    }
    assert written == actual
    assert {file.name for file in VENDOR.glob("*.mjs")} == set(MODULES)


def test_every_import_of_the_page_leads_to_a_file_of_it() -> None:
    for file in PAGE.rglob("*.mjs"):
        for found in IMPORT.finditer(file.read_text()):
            target = (file.parent / found["name"]).resolve()
            assert found["name"].startswith("."), f"{file.name} imports {found['name']!r} by its name"
            assert target.is_file(), f"{file.name} imports {found['name']}, which does not exist"
            assert PAGE in target.parents, f"{file.name} imports {found['name']}, which is not part of the page"


def test_the_page_has_nothing_that_its_policy_forbids_and_makes_no_markup_of_strings() -> None:
    for file in _own_files():
        found = FORBIDDEN.search(file.read_text())
        assert found is None, f"{file.relative_to(PAGE)} has {found[0]!r}"
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=", html) == []


def test_the_page_adds_less_than_its_share_to_the_wheel() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in PAGE.rglob("*"):
            if file.is_file():
                wheel.write(file, file.relative_to(PAGE))
    assert len(archive.getvalue()) <= MAX_ZIPPED


def test_the_modules_do_what_their_own_tests_say() -> None:
    files = sorted(map(str, TESTS.glob("*.test.mjs")))
    assert files
    run = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", *files], capture_output=True, text=True, env=node_environment()
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_overview_knows_when_the_bus_renews_its_certificate() -> None:
    text = (PAGE / "findings.mjs").read_text("utf-8")
    assert f"const SERVER_DAYS = 14; // the bus renews its certificate {RENEW_BEFORE_DAYS:g} days before" in text
