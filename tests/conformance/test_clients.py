"""The clients in Python keep the rules of the protocol; `make conformance` plays all of them, and the mutants."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

from tests.conformance.mutants import ROOT
from toolbus.conformance.suite import Choice, Verdict, run

CLIENTS = {
    "clients/python": (sys.executable, str(ROOT / "clients" / "python" / "conformance.py")),
}
QUICK = ("OPEN", "FRAME", "CALL", "NEST", "BYE")


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS)
async def test_a_client_keeps_the_rules(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    outcome = await run(command, Choice(rules=QUICK), patience=3)
    wrong = [f"{each.rule.id}: {each.why}" for each in outcome.judged if each.verdict is Verdict.BROKEN]
    assert outcome.starts
    assert not wrong
