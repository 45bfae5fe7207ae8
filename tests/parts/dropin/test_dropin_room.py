"""A bus in a program that offers a folder of drop-in tools: `Config.tools_dir`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.waiting import until
from toolbus import Bus, Config
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.wiring import all_rooms
from toolbus.errors import SetupError
from toolbus.parts.dropin.room import LINES_PER_SECOND, DropinOutput, DropinRoom
from toolbus.processes.supervisor import PluginReport, ReportKind

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
        (row,) = (await bus.call("toolbus:plugin_logs")).output["plugins"]
        assert (row["source"], row["plugin"], row["state"], row["pid"]) == ("toolbus.dropin", "dropin", "running", pid)
        assert (await bus.call("toolbus:plugin_restart", {"plugin": "dropin"})).output["restarted"]
        room = bus.core.rooms.find(DropinRoom)
        assert room is not None
        output = room.output
        assert output is not None
        await until(lambda: output.plugins()[0]["restarts"] == 1, "the new process")
        assert not alive(int(pid))
        assert output.plugins()[0]["last_exit"].endswith("as an operator asked")
    assert not alive(int(pid))


async def test_a_bus_without_streams_refuses_a_folder(tmp_path: Path) -> None:
    rooms = [room for room in all_rooms() if room is not StreamsRoom]
    with pytest.raises(SetupError, match="tools_dir needs StreamsRoom"):
        await Bus(Config(http="off", tools_dir=tmp_path), rooms=rooms).start()


async def test_a_group_that_prints_without_end_fills_neither_the_log_nor_the_memory_of_the_bus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers: list[Callable[[], None]] = []
    output = DropinOutput(lambda seconds, tell: timers.append(tell))
    with caplog.at_level(logging.INFO, "toolbus.dropin"):
        output.take(PluginReport("loud#1", ReportKind.STARTED, "started (pid 7)", pid=7))
        for number in range(20_000):
            output.take(PluginReport("loud#1", ReportKind.OUTPUT, f"{number}\x1b[2J", "stdout"))
        output.take(PluginReport("quiet#1", ReportKind.OUTPUT, "a word", "stdout"))
        output.take(PluginReport("quiet#1", ReportKind.OUTPUT, "long " * 10_000, "stdout"))
        output.take(PluginReport("loud#2", ReportKind.STARTED, "started (pid 8)", pid=8))
        timers[0]()
    texts = [record.getMessage() for record in caplog.records]
    assert LINES_PER_SECOND < len(texts) < 5_000  # however many seconds a busy machine takes for this
    assert "quiet#1: a word" in texts
    assert max(map(len, texts)) < 600  # 30 lines of any length would fill a disk
    assert texts[-1].startswith("loud: and ")
    assert texts[-1].endswith("more lines: `toolbus logs loud` shows them")
    (row, _) = output.plugins()
    assert (row["plugin"], row["state"], row["pid"]) == ("loud", "running", 8)
    answer = await output.read("loud", 2_000, -1, 0.0)
    assert answer["lines"][-2]["text"] == "19999"


async def test_processes_of_tools_import_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, tools = tmp_path / "here", tmp_path / "tools"
    for each in (here, tools):
        each.mkdir()
    for name in ("json", "faulthandler", "resource"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(1)\n")
    (tools / "a.py").write_text(PID)
    monkeypatch.chdir(here)
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", tools_dir=tools)) as bus:
        await until(lambda: bus.registry.find("pid") is not None, "the tool of the folder")
    assert not (tmp_path / "imported").exists()
