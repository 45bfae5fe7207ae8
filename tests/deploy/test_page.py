"""The page about deployment: its commands are those of toolbus, and what they name is there."""

from __future__ import annotations

import shlex

import pytest

from tests.deploy.files import ROOT, check_command
from tests.docs.pages import blocks

_LINES = [
    line[2:]
    for page in ("docs/start/deployment.md", "docs/start/several-services.md")
    for block in blocks(page)
    if block.kind == "console"
    for line in block.text.splitlines()
]


def _words(line: str) -> list[str]:
    """Returns the words of a command; those of a shell's script instead, where it runs one."""
    words = shlex.split(line)
    return shlex.split(words[words.index("-c", words.index("sh")) + 1]) if "sh" in words else words


@pytest.mark.parametrize("line", _LINES)
def test_every_file_of_the_repository_that_a_command_names_is_there(line: str) -> None:
    named = [word for word in _words(line) if word.startswith("deploy/")]
    assert not [word for word in named if not (ROOT / word).is_file()]


@pytest.mark.parametrize("line", [line for line in _LINES if "toolbus keys " in line])
def test_every_command_of_toolbus_in_another_command_parses(line: str) -> None:
    words = _words(line)
    end = next((at for at, word in enumerate(words) if word in (">&2", "&&")), len(words))
    check_command(words[words.index("keys") : end])


def test_the_page_shows_each_way() -> None:
    programs = {line.split()[0] for line in _LINES}
    assert {"systemctl", "docker", "kubectl"} <= programs
