"""``toolbus search``: ranking and modes."""

import pytest

from tests.cli.served_bus import run_json
from tests.support.processes import toolbus


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def test_search_finds_tools_by_what_they_do(bus: str) -> None:
    lines = toolbus("search", "weather in a city", "--top-k", "1", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["SCORE", "NAME", "DESCRIPTION"]
    assert len(lines) == 2
    assert lines[1].split(maxsplit=2)[1:] == ["get.weather", "Tells the weather of a city."]
    found = run_json(bus, "search", "tomorrow", "--mode", "keyword")
    assert [each["name"] for each in found["results"]] == ["forecast"]


def test_search_notes_when_another_mode_was_used(bus: str) -> None:
    ended = toolbus("search", "tomorrow", "--mode", "semantic", "--bus", bus)
    assert ended.returncode == 0
    assert "cannot rank by semantic, so it ranked by bm25" in ended.stderr
    assert toolbus("search", "x", "--mode", "magic", "--bus", bus).returncode == 2
