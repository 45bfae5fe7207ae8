"""Tasks as the extension has them."""

from __future__ import annotations

from toolbus.parts.mcp.messages.tasks import write_task


def test_a_task_is_a_flat_object_with_moments_and_whole_milliseconds() -> None:
    task = write_task("t.x", "working", created=1_000_000_000.1234, updated=1_000_000_060, ttl_ms=86_400_000)
    assert task == {
        "taskId": "t.x",
        "status": "working",
        "createdAt": "2001-09-09T01:46:40.123Z",
        "lastUpdatedAt": "2001-09-09T01:47:40.000Z",
        "ttlMs": 86_400_000,
        "pollIntervalMs": 500,
    }


def test_a_task_was_not_updated_before_it_was_created() -> None:
    task = write_task("t", "failed", created=5.0, updated=0.0, ttl_ms=1, message="why")
    assert task["createdAt"] == task["lastUpdatedAt"]
    assert task["statusMessage"] == "why"
