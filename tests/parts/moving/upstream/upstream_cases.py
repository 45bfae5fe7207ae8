from __future__ import annotations

import pytest

from tests.parts.moving.upstream.main_server import MainServer

FOREIGN = {"name": "t", "description": "theirs", "source": "somebody", "callback_url": "http://127.0.0.1:1/x"}


def logged(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(1 for record in caplog.records if words in record.getMessage())


async def quiet(server: MainServer) -> None:
    """Waits out three looks after which nothing was changed."""
    before = len(server.requests)
    await server.until_asked("list", 3)
    changes = [verb for verb, _ in server.requests[before:] if verb != "list"]
    assert not changes, changes
