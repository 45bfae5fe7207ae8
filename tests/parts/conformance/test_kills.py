"""The program that kills bus and plugin finds calls that ran twice, and outcomes that do not agree with what ran."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.parts.conformance.clients import ROOT
from tests.parts.conformance.kills import AGAIN_SECONDS, Tally, play
from tests.parts.conformance.matrix import PROGRAMS


def outcome(stage: str = "", *, output: Any = None, retry_safe: bool = False) -> dict[str, Any]:
    return {"failed": bool(stage), "stage": stage, "retry_safe": retry_safe, "output": output}


@pytest.mark.parametrize(
    ("seen", "ran", "fault"),
    [
        (outcome(output="7"), 1, ""),
        (outcome("UNKNOWN"), 0, ""),
        (outcome("UNKNOWN"), 1, ""),
        (outcome("NOT_DISPATCHED", retry_safe=True), 0, ""),
        (outcome(output="7"), 2, "call 7 ran 2 times"),
        (outcome("UNKNOWN"), 2, "call 7 ran 2 times"),
        (outcome(output="7"), 0, "call 7 succeeded with '7', and did not run"),
        (outcome(output="8"), 1, "call 7 succeeded with '8', and ran"),
        (outcome("NOT_DISPATCHED"), 1, "call 7 ran, and failed at NOT_DISPATCHED, retry_safe False"),
        (outcome("DISPATCHED", retry_safe=True), 1, "call 7 ran, and failed at DISPATCHED, retry_safe True"),
        (None, 1, "call 7 ran, and the host never made it"),
    ],
)
def test_an_outcome_has_to_agree_with_what_ran(seen: dict[str, Any] | None, ran: int, fault: str) -> None:
    tally = Tally({7: seen} if seen else {}, Counter({7: ran} if ran else {}))
    assert tally.faults() == ([fault] if fault else [])


def test_a_kill_after_which_calls_take_too_long_to_succeed_is_named() -> None:
    tally = Tally(again={"bus": [0.2], "plugin": [AGAIN_SECONDS + 1]})
    assert tally.late() == ["2.50 s until a call succeeded after the plugin was killed"]


@pytest.mark.thorough
async def test_no_call_of_the_sdk_runs_twice_when_bus_and_plugin_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    tally = await play(PROGRAMS["python"], 2)
    assert tally.faults() == []
    assert {what: len(times) for what, times in tally.again.items()} == {"bus": 2, "plugin": 2}
    assert any(not seen["failed"] for seen in tally.outcomes.values())
