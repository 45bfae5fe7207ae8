"""The client on generated stubs alone does what the vectors ask of every client library."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.vectors.play_peer import Player, scenarios

ROOT = Path(__file__).resolve().parents[2]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player() -> AsyncIterator[Player]:
    """One player, and one process of the client for as long as scenarios succeed."""
    command = (sys.executable, str(ROOT / "clients" / "python" / "conformance.py"))
    async with Player(command, environment={"PYTHONPATH": str(ROOT)}) as one:
        yield one


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scenario", [pytest.param(each, id=each["scenario"]) for each in scenarios()])
async def test_the_python_client_plays_its_part(player: Player, scenario: dict[str, Any]) -> None:
    await player.play(scenario)
