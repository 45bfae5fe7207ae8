"""Tests ``toolbus buses``, and other commands with an address of several buses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import Running, toolbus
from tests.support.served_bus import address_of, start_bus


def test_the_buses_of_an_address_are_listed_and_one_that_is_away_is_an_error(
    bus_and_plugin: tuple[str, Running], unused_address: str, tmp_path: Path
) -> None:
    with_plugin = bus_and_plugin[0]
    with start_bus(tmp_path, "--http", "off", "--grpc", "127.0.0.1:0") as other:
        empty = address_of(other)
        ended = toolbus("buses", "--bus", f"{empty},{with_plugin}", "--json")
        assert ended.returncode == 0, ended.stderr
        rows = {row["address"]: row for row in json.loads(ended.stdout)["buses"]}
        assert list(rows) == [empty, with_plugin]
        assert {row["state"] for row in rows.values()} == {"live"}
        assert rows[empty]["only_here"] == []
        assert "get_weather" in rows[with_plugin]["only_here"]
        assert rows[with_plugin]["tools"] > rows[empty]["tools"]
        assert all(row["version"] and row["sessions"] >= 1 and row["round_trip_ms"] > 0 for row in rows.values())

        shown = toolbus("buses", TOOLBUS_ADDRESS=f"{unused_address},{with_plugin}")
        assert shown.returncode == 1
        headings, away, live = shown.stdout.splitlines()
        names = ["bus", "state", "version", "round trip", "sessions", "tools", "settings", "only here"]
        assert headings.split() == " ".join(names).upper().split()
        assert away.split()[:2] == [unused_address, "away"]
        assert shown.stderr.startswith(f"toolbus: no bus answered at {unused_address} within 5 s (")
        assert shown.stderr.count("\n") == 1
        assert live.split()[:2] == [with_plugin, "live"]

        # Other commands use the first bus that answers.
        called = toolbus("call", "get_weather", "city=Rome", "--bus", f"{unused_address},{with_plugin}")
        assert (called.returncode, json.loads(called.stdout)["city"]) == (0, "Rome")
        listed = toolbus("tools", "--json", "--bus", f"{unused_address},{with_plugin}")
        assert listed.returncode == 0, listed.stderr


def test_an_address_that_cannot_be_read_is_wrong_usage() -> None:
    ended = toolbus("buses", "--bus", "127.0.0.1:1,b")
    assert (ended.returncode, "'127.0.0.1:1,b'" in ended.stderr) == (2, True)
