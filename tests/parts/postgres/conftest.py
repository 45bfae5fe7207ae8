"""A Postgres server, a database in it, and two buses that share that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.postgres import Server, postgres
from toolbus.bus import Bus
from toolbus.testing import running_bus

__all__ = ["postgres"]


@pytest.fixture
def url(postgres: Server) -> str:
    """The URL of an empty database."""
    return postgres.schema()


@pytest.fixture
async def buses(url: str, tmp_path: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two buses of one database, each with a data directory of its own."""
    async with (
        running_bus(unix=True, storage=url, data_dir=tmp_path / "a") as first,
        running_bus(unix=True, storage=url, data_dir=tmp_path / "b") as second,
    ):
        yield first, second
