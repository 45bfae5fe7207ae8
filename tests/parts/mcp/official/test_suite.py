"""Tests what is read of the results of the conformance suite: missing checks must not look like success."""

from __future__ import annotations

import pytest

from tests.parts.mcp.official.conformance import LACKS, report, report_mounted
from tests.parts.mcp.official.suite import Outcome, scenario_of

PASSED = {"id": "a", "status": "SUCCESS"}
MISSING = {"id": "b", "status": "FAILURE", "errorMessage": "no tool", "details": {"untestable": True}}


def test_a_scenario_is_kept_only_if_something_was_checked_and_nothing_failed() -> None:
    assert scenario_of("x", [PASSED]).kept
    assert not scenario_of("x", [{"id": "a", "status": "INFO"}]).kept
    assert not scenario_of("x", [PASSED, {"id": "c", "status": "WARNING"}]).kept
    failed = scenario_of("x", [PASSED, MISSING])
    assert not failed.kept
    assert failed.failed[0].untestable


def test_a_scenario_that_did_not_run_and_too_few_checks_are_reported() -> None:
    outcome = Outcome("required", "2026-07-28", {"x": scenario_of("x", [PASSED])}, ["x", "y"])
    assert outcome.wrong == ["y"]
    assert not report(outcome, 0)
    outcome.expected = ["x"]
    assert report(outcome, 1)
    assert not report(outcome, 2)


def test_what_a_mounted_server_lacks_is_named_and_counts_where_the_server_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def outcome(status: str) -> Outcome:
        checks = [{"id": each, "status": status} for each in LACKS["modern", "2025-11-25"]]
        return Outcome("required", "2025-11-25", {"x": scenario_of("x", [PASSED, *checks])}, ["x"])

    assert report_mounted(outcome("FAILURE"), "modern")
    assert "tools-call-elicitation: not counted: " in capsys.readouterr().out
    assert not report_mounted(outcome("SUCCESS"), "modern")
    assert "remove it from LACKS" in capsys.readouterr().out
    assert not report_mounted(outcome("FAILURE"), "legacy")
