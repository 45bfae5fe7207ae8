"""Does what the pages about packages and backups say."""

from __future__ import annotations

import importlib
import runpy
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.errors import ToolBusError
from toolbus.processes.plugin_program import PluginProgram
from toolbus.testing import running_bus


async def test_the_package_of_the_page_is_a_plugin_that_runs_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {block.text.split("\n")[0].removeprefix("# "): block.text for block in blocks("docs/start/packaging.md")}
    for name in ("weather_tools/__init__.py", "weather_tools/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name], "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert PluginProgram.of_module("weather_tools").words[-2:] == ("-m", "weather_tools")
    async with running_bus(importlib.import_module("weather_tools").plugin) as host:
        assert (await host.call("get_weather", {"city": "Oslo"})).output == "It is sunny in Oslo."
    assert tomllib.loads(files["pyproject.toml"])["project"]["dependencies"] == ["toolbus"]


async def test_a_backup_of_a_running_bus_is_one_that_starts_with_what_it_had(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks("docs/start/upgrade.md") if block.file == "backup.py")
    (script := tmp_path / "backup.py").write_text(shown.text, "utf-8")
    data, copy = tmp_path / "data", tmp_path / "copy"
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=data)) as bus:
        bus.add_role("support")
        bus.revoke("weather")
        (data / "mcp.json").write_text('{"mcpServers": {}}')
        runpy.run_path(str(script))["back_up"](data, copy)
        bus.add_role("late")
    assert (copy / "mcp.json").read_text() == '{"mcpServers": {}}'
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=copy)) as restored:
        restored.list("support")
        with pytest.raises(ToolBusError, match="late"):  # it came after the copy
            restored.list("late")
