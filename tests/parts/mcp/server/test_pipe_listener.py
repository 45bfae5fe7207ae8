"""The socket for `toolbus mcp`: what else is at its path stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.others_files import OTHERS, somebody_elses
from toolbus.parts.mcp.server.pipe_listener import PipeListener


async def serve(*ends: Any) -> None: ...


@pytest.mark.parametrize("kind", OTHERS)
async def test_nothing_of_others_makes_room_for_the_socket(tmp_path: Path, kind: str) -> None:
    listener = PipeListener(tmp_path, serve)
    with somebody_elses(kind, listener.path) as untouched:
        with pytest.raises(OSError, match="move it away"):
            await listener.open()
        await listener.close()
        assert untouched()


async def test_a_socket_that_replaced_it_stays(tmp_path: Path) -> None:
    listener = PipeListener(tmp_path, serve)
    await listener.open()
    listener.path.rename(tmp_path / "moved")  # so that its number is not given to the next
    with somebody_elses("socket", listener.path) as untouched:
        await listener.close()
        assert untouched()
