"""Reads the files of deploy/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import choose, find_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "toolbus.service"
SETTINGS = DEPLOY / "toolbus.toml"


def own_copy(file: Path, folder: Path) -> Path:
    """Returns a copy that belongs to this user: a checkout may be another's, and a bus refuses such settings."""
    return Path(shutil.copy(file, folder))


def unit(path: Path) -> dict[str, list[str]]:
    """Returns the values of each setting of a unit of systemd; the names of its sections do not matter here."""
    settings: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            settings.setdefault(name, []).append(value)
    return settings


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile with their arguments."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in lines.splitlines() if line)
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def argument(instruction: str) -> list[str]:
    """Returns the words of the last instruction of a name, from its JSON form."""
    last = [rest for name, rest in instructions() if name == instruction][-1]
    words: list[str] = json.loads(last[last.index("[") :])
    return words


def manifests(name: str) -> list[dict[str, Any]]:
    """Returns the objects of a file for Kubernetes."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8")))


def manifest(name: str, kind: str) -> dict[str, Any]:
    """Returns the one object of a kind in a file for Kubernetes."""
    (found,) = (each for each in manifests(name) if each["kind"] == kind)
    return found


def check_command(words: list[str]) -> None:
    """Checks that `toolbus` accepts the words that come after its name."""
    assert find_command(words[0]) is not None, f"toolbus has no command {words[0]!r}"
    command, rest = choose(words)
    command.make_context(words[0], rest, resilient_parsing=hasattr(command, "get_command"))
