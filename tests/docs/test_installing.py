"""Checks the install lines of the pages, the examples and the error messages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.pages import ROOT, TEXTS
from tests.support.waiting import HANG_SECONDS

_EXTRAS = re.compile(r"pip install '(?:toolbus|\.)\[([\w,-]+)\]'")
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))


def extras_of(text: str) -> set[str]:
    return {extra for listed in _EXTRAS.findall(text) for extra in listed.split(",")}


def test_every_extra_of_an_install_line_exists() -> None:
    existing = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    sources = [*(ROOT / "toolbus").rglob("*.py"), *EXAMPLES]
    texts = [*TEXTS.values(), *(file.read_text("utf-8") for file in sources)]
    named = set().union(*map(extras_of, texts))
    assert named <= set(existing)
    assert {"server", "keys", "semantic"} <= named


def test_an_extra_is_added_to_an_installed_checkout_without_an_index_that_has_toolbus() -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "toolbus[server]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.parent.name)
def test_an_example_installs_its_checkout_and_serves_no_folder_of_sources(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "pip install 'toolbus" not in text
    assert "pip install toolbus" not in text
    assert "--tools-dir examples" not in text


def test_each_dependency_has_a_version_that_the_tests_passed_with_within_its_bounds() -> None:
    """A clone works on the day on which a dependency changes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {
        canonicalize_name(name): version
        for name, found, version in (line.partition("==") for line in lines if not line.startswith("#"))
        if found
    }
    declared = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    requirements = [Requirement(each) for each in declared]
    outside = {
        str(each): pinned.get(canonicalize_name(each.name))
        for each in requirements
        if each.name != "toolbus"
        and not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0"), prereleases=True)
    }
    assert not outside, "run: make test-newest constraints"
    assert len(pinned) > 100
    assert all("/" not in line for line in lines if not line.startswith("#"))
