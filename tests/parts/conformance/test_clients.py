"""The clients in Python keep the rules that are quickly played; `make conformance` plays all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.parts.conformance.clients import CLIENTS, ROOT, wrong_of
from tests.parts.conformance.forked_client import fork_client
from toolbus.parts.conformance.suite import Choice, run

QUICK = ("OPEN-6", "FRAME-3", "CALL-7", "NEST-3")


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS)
async def test_a_client_keeps_the_rules(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_client)
    assert wrong_of(await run(command, Choice(rules=QUICK), patience=3)) == []
