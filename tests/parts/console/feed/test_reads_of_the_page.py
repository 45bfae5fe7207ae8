"""What the page of the console reads is not among the calls that it shows, and not counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts.console.feed.console_bus import console_bus
from toolbus.parts.console.room import PAGE

_ASKED = re.compile(r'\b(?:admin|useAnswer)\("(\w+)"|^  \["\w+", "(\w+)", "\w+", \w+\],$', re.MULTILINE)
# What the page does only when an operator presses a button: these are recorded.
ACTS = frozenset(
    (
        *("approve", "cancel_call", "decide_call", "drain", "grant", "key_revoke", "permit", "plugin_restart"),
        *("plugin_stop", "record_errors", "revoke"),
    )
)


def asked() -> set[str]:
    """Returns the names of the bus's tools that the page's modules call."""
    texts = (file.read_text("utf-8") for file in PAGE.rglob("*.mjs") if "vendor" not in file.parts)
    return {first or second for text in texts for first, second in _ASKED.findall(text)}


def test_the_tools_that_the_page_calls_are_found() -> None:
    names = asked()
    assert {"plugin_logs", "stats", "held_calls", "mounts"} <= names  # of both forms
    assert names >= ACTS - {"grant", "revoke"}  # which one expression chooses


@pytest.mark.parametrize("name", sorted(asked() - ACTS))
async def test_a_read_of_the_page_is_neither_recorded_nor_counted(name: str, tmp_path: Path) -> None:
    arguments = {"explain": {"tool": "add"}, "digest": {"since": -1}}
    async with console_bus(data_dir=tmp_path) as (bus, http):
        answer = await http.post(f"/api/bus/{name}", json=arguments.get(name, {}))
        assert answer.status_code == 200
        assert not answer.json()["is_error"], answer.text
        assert (await http.get("/api/calls")).json()["calls"] == []
        assert bus.records.ended == 0
        digest = (await http.post("/api/bus/digest", json={"since": -1})).json()["output"]
        assert (digest["total"], digest["tools"], digest["calls"]) == (0, [], [])
