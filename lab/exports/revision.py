"""Runs the measurements with the exports of another commit: its `toolbus` under today's questions and accounts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
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
