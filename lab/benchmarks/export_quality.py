"""Measures whether exports say enough for a model to call tools, beside those of another commit (`--base REV`)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.stage import ROOT, Stage

_QUALITY = {  # figure → its column, and its unit
    "answered": ("questions answered", "of 100"),
    "lost": ("keywords not on the wire", ""),
    "in words": ("of them in words", ""),
    "reported": ("reported as lost", ""),
    "unreported": ("neither", ""),
    "refused": ("tools that a provider may refuse", ""),
    "left out": ("tools left out", ""),
}
_TIMES = {"first": "first", "again": "repeated"}


@contextlib.contextmanager
def _versions(plan: Plan) -> Iterator[Mapping[str, Path]]:
    """Yields the folders to compare, by what they are called in the columns."""
    with contextlib.ExitStack() as stack:
        base = {f"at {plan.base}": stack.enter_context(sources(plan.base))} if plan.base else {}
        yield {**base, "now": stack.enter_context(sources(""))}


def export_quality(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Asks the questions, and accounts for every keyword; the figures are the same each time."""
    with _versions(plan) as versions:
        figures = {version: measure(folder, "quality") for version, folder in versions.items()}
    title = "What a model can read of 91 tools"
    return tuple(
        Fact("export_quality", f"{column}, {version}", unit, None, (figures[version][name][figure],), title, name)
        for name in figures["now"]
        for figure, (column, unit) in _QUALITY.items()
        for version in versions
    )


def export_times(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Exports a thousand tools; versions take turns, in processes of their own, and each ratio is that of one turn."""
    turns: list[dict[str, dict[str, dict[str, Any]]]] = []
    with _versions(plan) as versions:
        for number in range(plan.rounds):
            order = [*versions][:: -1 if number % 2 else 1]
            turns.append({version: measure(versions[version], "times") for version in order})
    facts: list[Fact] = []
    title = "Processor time of an export of 1,000 tools"
    for name in turns[0]["now"]:
        for figure, column in _TIMES.items():
            samples = {version: tuple(turn[version][name][figure] for turn in turns) for version in versions}
            for version, measured in samples.items():
                facts.append(Fact("export_times", f"{column}, {version}", "ms", None, measured, title, name))
            if plan.base:
                before = samples[f"at {plan.base}"]
                ratios = tuple(now / then for now, then in zip(samples["now"], before, strict=True))
                facts.append(Fact("export_times", f"{column}, now / then", "×", None, ratios, title, name))
    return tuple(facts)


# -- the exports of another commit: its `toolbus` under today's questions and accounts --------------------------------


@contextlib.contextmanager
def sources(revision: str) -> Iterator[Path]:
    """Yields a folder with the `toolbus` of a commit; empty: this checkout.

    Raises:
        RuntimeError: git knows no such commit.
    """
    if not revision:
        yield ROOT
        return
    command = ["git", "archive", "--format=tar", revision, "toolbus"]
    archived = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        why = archived.stderr.decode().strip()
        raise RuntimeError(f"git has no toolbus of {revision!r}: {why}. Name a commit of this repository with --base")
    with tempfile.TemporaryDirectory(prefix="toolbus-base-") as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            archive.extractall(folder, filter="data")
        for each in ("lab", "tests"):
            (folder / each).symlink_to(ROOT / each)
        yield folder


def measure(folder: Path, what: str) -> dict[str, dict[str, Any]]:
    """Returns the figures of the `toolbus` in a folder, measured in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "lab.exports.measure", what]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed in {folder}: {done.stderr.strip()[-500:]}")
    figures: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return figures
