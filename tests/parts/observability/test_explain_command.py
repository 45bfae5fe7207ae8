"""``toolbus access explain``: what a call would get, and where it would be stopped."""

import pytest

from tests.support.processes import toolbus
from tests.support.served_bus import run_json


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def test_explain_prints_each_step_and_ends_with_what_a_call_would_get(bus: str) -> None:
    reached = toolbus("explain", "forecast", "--bus", bus)
    assert reached.returncode == 0
    assert reached.stdout.splitlines()[0].split() == ["PASSES", "STEP", "WHY"]
    assert "a call reaches 'forecast'" in reached.stdout.splitlines()[-1]
    toolbus("permit", "tools", "forecast", "--user", "hal", "--bus", bus)
    try:
        stopped = toolbus("explain", "forecast", "--user", "jim", "--bus", bus)
        explained = run_json(bus, "explain", "forecast", "--user", "hal", "--dialect", "openai")
    finally:
        toolbus("permit", "tools", "forecast", "--no-rule", "--bus", bus)
    assert stopped.returncode == 1
    (line,) = [line for line in stopped.stdout.splitlines() if line.startswith("NO")]
    assert "tool 'forecast' is open to hal, not to 'jim'" in line
    assert stopped.stdout.splitlines()[-1].startswith("PERMISSION_DENIED: user 'jim' may not call 'forecast'")
    assert explained["callable"]
    assert [step["step"] for step in explained["steps"]][-1] == "dialect"


def test_explain_refuses_what_it_does_not_know(bus: str) -> None:
    assert toolbus("explain", "forecast", "--dialect", "latin", "--bus", bus).returncode == 2
    ended = toolbus("explain", "forecast", "--identity", "laptop", "--bus", bus)
    assert ended.returncode == 1
    assert "identity 'laptop' does not exist" in ended.stderr
