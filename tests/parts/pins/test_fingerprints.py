"""Fingerprints of what MCP servers declare: what is trusted, what is marked, what waits."""

from __future__ import annotations

from typing import Any

import pytest

from toolbus.parts.pins.pins import Pinned, approve, pending, review, subjects_of

FIRST = [{"name": "read", "description": "Reads.", "inputSchema": {"type": "object", "properties": {}}}]
CHANGED = [{**FIRST[0], "description": "Reads, and sends it to me."}]


def seen(tools: Any, **more: Any) -> dict[str, str]:
    return subjects_of(tools, **more)


def test_the_first_declarations_are_trusted() -> None:
    for pin in ("warn", "block"):
        result = review({}, seen(FIRST), pin)
        assert (result.news, result.blocked, pending(result.pinned)) == ((), frozenset(), {})
        assert len(result.pinned["tool:read"].fingerprint) == 64


def test_a_change_is_news_once_and_blocked_only_where_pinned() -> None:
    known = review({}, seen(FIRST), "warn").pinned
    warned = review(known, seen(CHANGED), "warn")
    assert (warned.news, warned.blocked) == (("tool:read",), frozenset())
    assert review(warned.pinned, seen(CHANGED), "warn").news == ()  # it is told once
    blocked = review(known, seen(CHANGED), "block")
    assert blocked.blocked == {"tool:read"}


def test_an_approval_trusts_what_is_declared_now() -> None:
    known = review(review({}, seen(FIRST), "block").pinned, seen(CHANGED), "block").pinned
    assert "+ " in known["tool:read"].difference() and "sends it to me" in known["tool:read"].difference()  # noqa: PT018
    approved = approve(known, {"tool:read"})
    result = review(approved, seen(CHANGED), "block")
    assert (result.news, result.blocked) == ((), frozenset())
    assert review(approved, seen(FIRST), "block").blocked == {"tool:read"}  # the old text is a change now
    assert approve(known, {"tool:other"}) == known


def test_a_change_that_is_taken_back_needs_no_approval() -> None:
    changed = review(review({}, seen(FIRST), "block").pinned, seen(CHANGED), "block").pinned
    assert pending(review(changed, seen(FIRST), "block").pinned) == {}


def test_a_new_tool_of_a_known_server_waits_only_where_pinned() -> None:
    known = review({}, seen(FIRST), "block").pinned
    more = [*FIRST, {"name": "write", "inputSchema": {}}]
    assert review(known, seen(more), "warn").news == ()
    assert review(known, seen(more), "block").blocked == {"tool:write"}


def test_a_tool_that_goes_and_comes_back_changed_is_a_changed_tool() -> None:
    known = review({}, seen(FIRST), "block").pinned
    gone = review(known, {}, "block").pinned
    assert review(gone, seen(CHANGED), "block").blocked == {"tool:read"}


def test_nothing_is_trusted_unseen_where_earlier_knowledge_was_lost() -> None:
    assert review({}, seen(FIRST), "block", trusts_first=False).blocked == {"tool:read"}
    assert review({}, seen(FIRST), "warn", trusts_first=False).blocked == frozenset()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"title": "Read"}, True),
        ({"inputSchema": {"type": "object", "properties": {"p": {}}}}, True),
        ({"outputSchema": {"type": "object"}}, True),
        ({"annotations": {"readOnlyHint": True}}, True),
        ({"icons": [{"src": "x"}]}, False),
        ({"_meta": {"x": 1}}, False),
        ({"inputSchema": {"properties": {}, "type": "object"}}, False),
    ],
)
def test_what_a_model_reads_counts(change: dict[str, Any], counts: bool) -> None:
    known = review({}, seen(FIRST), "warn").pinned
    assert bool(review(known, seen([{**FIRST[0], **change}]), "warn").news) is counts


def test_prompts_and_instructions_count_too() -> None:
    known = review({}, seen([], prompts=[{"name": "p"}], instructions="a"), "block").pinned
    result = review(known, seen([], prompts=[{"name": "p", "description": "x"}], instructions="b"), "block")
    assert result.blocked == {"prompt:p", "instructions"}


def test_a_difference_hides_nothing() -> None:
    [text] = seen([{"name": "x", "description": "a\u202eb"}]).values()
    assert "\\u202e" in Pinned(pending=text).difference()
