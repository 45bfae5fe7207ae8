"""The program that has each kind of peer do its worst: how it judges, and a short run of each kind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.hostile.__main__ import KINDS, Outcome
from lab.stage import ROOT

pytestmark = pytest.mark.lab

GOOD = Outcome("page", 60.0, 30_000, 0, {}, 2.0, 3.0, 0.9, 10.0, 1.0, 0.0, 12.0, "bus.log")


def test_a_good_outcome_breaks_no_bound() -> None:
    assert all(verdict.good for verdict in GOOD.verdicts())


@pytest.mark.parametrize(
    "spoilt", [{"failed": 1}, {"during_ms": 6.1}, {"grown_mb": 101.0}, {"disk_mb": 5.1}, {"held_ms": 50.1}], ids=str
)
def test_each_bound_is_shown_to_break(spoilt: dict[str, Any]) -> None:
    assert sum(not verdict.good for verdict in dataclasses.replace(GOOD, **spoilt).verdicts()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_run_of_each_kind_fails_no_call_of_the_honest_host(kind: str, tmp_path: Path) -> None:
    words = ("--seconds", "2", "--json", str(tmp_path / "hostile.json"), "--folder", str(tmp_path / "run"))
    run = subprocess.run([sys.executable, "-m", "lab.hostile", *words, kind], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr  # times depend on the machine
    (outcome,) = json.loads((tmp_path / "hostile.json").read_text())
    assert not outcome["errors"]
    assert outcome["calls"] > 0
