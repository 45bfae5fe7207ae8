"""``toolbus search``: ranking and modes."""

from collections.abc import Sequence

import pytest

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.processes import toolbus
from tests.support.served_bus import run_json


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


def failing(texts: Sequence[str]) -> None:
    raise ConnectionError


def test_search_notes_when_another_mode_was_used_and_says_what_a_mode_needs(bus: str) -> None:
    with bus_on_thread(embedder=failing, offered=("search",)) as broken, bus_on_thread(embedder=False) as words_only:
        ended = toolbus("search", "tomorrow", "--mode", "semantic", "--bus", broken.grpc_addresses[0])
        assert ended.returncode == 0
        assert "cannot rank by semantic, so it ranked by bm25" in ended.stderr
        ended = toolbus("search", "tomorrow", "--mode", "semantic", "--bus", words_only.grpc_addresses[0])
        assert ended.returncode == 1
        assert "pip install 'toolbus[semantic]'" in ended.stderr
    assert toolbus("search", "x", "--mode", "magic", "--bus", bus).returncode == 2
