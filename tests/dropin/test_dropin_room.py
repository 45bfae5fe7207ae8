"""A bus in a program that offers a folder of drop-in tools: `Config.tools_dir`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.waiting import until
from toolbus import Bus, Config
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.wiring import ROOMS
from toolbus.errors import SetupError

PID = """
import os
register_tool(name="pid", execute=lambda args, env: os.getpid(), definition={"description": "-"})
"""


async def test_a_bus_in_a_program_offers_the_folder_that_its_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PID)
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", tools_dir=tmp_path)) as bus:
        await until(lambda: bus.registry.find("pid") is not None, "the tool of the folder")
        pid = (await bus.call("pid")).output
        assert alive(int(pid))
    assert not alive(int(pid))


async def test_a_bus_without_streams_refuses_a_folder(tmp_path: Path) -> None:
    rooms = [room for room in ROOMS if room is not StreamsRoom]
    with pytest.raises(SetupError, match="tools_dir needs StreamsRoom"):
        await Bus(Config(http="off", tools_dir=tmp_path), rooms=rooms).start()
