"""Digests as values: bounded whatever the bus holds, and what says nothing new."""

from __future__ import annotations

from typing import Any

import orjson

from toolbus.bus.calls.call_records import CallRecord
from toolbus.errors import Code
from toolbus.parts.console.feed import MAX_BYTES, KnownRows, describe_call, encode, is_quiet

LISTS = ("tools", "calls", "running", "sessions", "sources", "closed", "gone")


def digest(**values: Any) -> dict[str, Any]:
    return {"number": 1, "at": 0.0, "ended": 0, "draining": False, **{name: [] for name in LISTS}, **values}


def test_a_digest_has_at_most_a_megabyte_and_loses_what_there_is_most_of() -> None:
    sources = [{"source": "s" * 128, "refused": 0, "n": each} for each in range(20_000)]
    sessions = [{"session": "a", "source": "b"}]
    body = encode(digest(sources=sources, sessions=sessions))
    assert len(body) <= MAX_BYTES
    read = orjson.loads(body)
    assert read["sessions"] == sessions
    assert 1_000 < len(read["sources"]) < 20_000
    assert read["sources"] == sources[: len(read["sources"])]


def test_rows_come_when_they_are_new_or_changed_and_go_once() -> None:
    known = KnownRows()
    assert known.update({"a": {"n": 1}, "b": {"n": 1}}) == ([{"n": 1}, {"n": 1}], [])
    assert known.update({"a": {"n": 1}, "b": {"n": 2}}) == ([{"n": 2}], [])
    assert known.update({"b": {"n": 2}}) == ([], ["a"])
    assert known.update({"b": {"n": 2}}) == ([], [])
    assert known.all == [{"n": 2}]


def test_a_digest_is_quiet_unless_something_happened() -> None:
    before = digest()
    assert is_quiet(before, digest(number=2, at=1.0))
    running = [{"id": "1", "stage": "dispatched", "started": 1.0}]
    for news in (
        {"ended": 1},
        {"draining": True},
        {"sessions": [{"session": "a"}]},
        {"gone": ["a"]},
        {"running": running},
    ):
        assert not is_quiet(before, digest(**news)), news
    assert is_quiet(digest(running=running), digest(running=running))
    assert not is_quiet(digest(running=running), digest(running=[{**running[0], "stage": "accepted"}]))
    assert not is_quiet(digest(ended=1), before)  # that the rate is zero again is news


def test_a_call_in_a_digest_has_no_contents() -> None:
    record = CallRecord("c", "t", "s", "h", 1.0, 2.0, Code.TOOL, 7, arguments="{}", output="secret")
    row = describe_call(record, 0.0)
    assert (row["number"], row["outcome"]) == (7, "TOOL")
    assert "secret" not in str(row)
