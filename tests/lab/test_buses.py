"""The run of several buses in a short form, and how it judges."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lab import changes, rolling
from lab.buses import Tally, judge, main
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError, Result

pytestmark = pytest.mark.lab


def test_a_restart_in_which_one_call_failed_names_the_kind_of_its_host() -> None:
    outcomes = rolling.Tally({("SDK", "ok"): 5, ("REST", "ok"): 2, ("REST", "no bus listens"): 1})
    assert [verdict.what for verdict in rolling.judge(outcomes) if not verdict.good] == ["failed calls, REST"]


def test_changes_that_hold_late_or_not_at_once_where_they_were_made_are_named() -> None:
    outcome = {"a rule": ([0.01, 0.02], 0), "a role": ([0.01, 1.5], 0), "a key": ([0.01], 1)}
    bad = [verdict.what for verdict in changes.judge(outcome) if not verdict.good]
    assert bad == ["a role holds at every other bus after (half, 99 of 100, longest)", bad[-1]]
    assert "a key that did not hold" in bad[-1]


def test_a_short_run_of_changes_has_all_kinds_hold_at_the_other_buses() -> None:
    outcome = asyncio.run(changes.play(2, print))
    verdicts = changes.judge(outcome, changes.GIVE_UP_SECONDS)  # a busy machine takes longer than a second
    assert all(verdict.good for verdict in verdicts)
    assert [len(seconds) for seconds, _ in outcome.values()] == [4, 4, 4, 6]


def failed(code: Code, stage: Stage) -> Result:
    return Result("1", is_error=True, error=CallError(code, "text", stage))


def test_a_short_run_in_which_buses_go_keeps_every_promise(tmp_path: Path) -> None:
    assert main(["--seconds", "12", "--every", "3", "--seed", "3", "--json", str(tmp_path / "run.json")]) == 0
    outcomes = json.loads((tmp_path / "run.json").read_text())["outcomes"]
    assert outcomes["read ok"] > 0
    assert outcomes["write ok"] > 0


@pytest.mark.parametrize(
    ("tool", "result", "runs", "broken"),
    [
        ("read", Result("1"), 0, ""),
        ("write", Result("1"), 1, ""),
        ("write", Result("1"), 2, "twice"),
        ("write", failed(Code.UNAVAILABLE, Stage.UNKNOWN), 1, ""),
        ("write", failed(Code.UNAVAILABLE, Stage.NOT_DISPATCHED), 1, "NOT_DISPATCHED"),
        ("read", failed(Code.UNAVAILABLE, Stage.UNKNOWN), 0, "read-only"),
    ],
)
def test_a_broken_promise_is_named(tool: str, result: Result, runs: int, broken: str) -> None:
    tally = Tally()
    tally.runs[7] = runs
    tally.add(tool, 7, result, 0.1)
    bad = [verdict.what for verdict in judge(tally) if not verdict.good]
    assert len(bad) == bool(broken)
    assert all(broken in what for what in bad)
