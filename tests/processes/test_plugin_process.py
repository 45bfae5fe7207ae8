"""One plugin as a process: how it ends, and which exit code its supervisor reads."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.waiting import HANG_SECONDS, until, within
from toolbus.processes.plugin_process import main
from toolbus.processes.program_starter import CANNOT_START
from toolbus.processes.supervisor import Command
from toolbus.testing import running_bus

RUNS_ITSELF = """
import asyncio
from toolbus import Plugin
plugin = Plugin("itself")
asyncio.run(plugin.close())  # as at the end of a `plugin.run()` outside of a `__main__` guard
"""
FUNCTIONS = """
from toolbus.sdk import llm_tool
@llm_tool
def hello() -> str:
    return "hello"
"""
CLASS = """
from toolbus.sdk import NekoPluginBase, llm_tool, neko_plugin
@neko_plugin
class Hello(NekoPluginBase):
    @llm_tool
    def hello(self) -> str:
        return "hello"
"""
MADE = """
from toolbus import Plugin
plugin = Plugin("hello")
@plugin.tool
def hello() -> str:
    return "hello"
"""


def written(folder: Path, text: str) -> str:
    file = folder / "hello.py"
    file.write_text(text)
    return str(file)


def test_a_plugin_that_its_file_has_run_already_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written(tmp_path, RUNS_ITSELF)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("x = 1", CANNOT_START, "holds no plugin"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from toolbus.errors import RequestError\nraise RequestError('no key')", CANNOT_START, "no key"),
    ],
)
def test_a_file_that_cannot_start_ends_with_a_code_and_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, shown: str
) -> None:
    assert main([written(tmp_path, text)]) == code
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "variable", "shown"),
    [
        (".", "", "from the working directory, {here}, unless PYTHONPATH names it (--env PYTHONPATH=…)"),
        (".", "{here}", "it was imported"),
        ("plugins", "", "it was imported"),
        (".", "", "put it beside the file"),
    ],
)
def test_a_plugin_imports_what_is_beside_its_file_and_nothing_of_the_working_directory(
    tmp_path: Path, place: str, variable: str, shown: str
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / place / "optional_of_author.py").write_text("")
    text = "import optional_of_author\nfrom toolbus.errors import RequestError\nraise RequestError('it was imported')"
    file = written(tmp_path / "plugins", text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), variable.format(here=tmp_path)))),
    }
    command = Command.of_file(Path(file), environment).arguments
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=HANG_SECONDS)
    assert ran.returncode == CANNOT_START
    assert shown.format(here=tmp_path) in ran.stderr


def test_without_a_path_it_shows_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "plugin_process PATH" in capsys.readouterr().err


@pytest.mark.parametrize("text", [FUNCTIONS, CLASS, MADE], ids=["functions", "class", "plugin"])
async def test_a_plugin_of_each_form_runs_until_an_operator_drains_it_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    async with running_bus() as bus:
        monkeypatch.setenv("TOOLBUS_ADDRESS", bus.grpc_addresses[0])
        running = asyncio.create_task(asyncio.to_thread(main, [written(tmp_path, text)]))
        await until(lambda: "hello" in {each.tool.name for each in bus.list()}, "the tool")
        assert (await bus.call("hello")).output == "hello"
        source = next(each.source for each in bus.list() if each.tool.name == "hello")
        assert (await bus.call("toolbus:drain", {"source": source})).error is None
        assert await within(running) == 0
    assert "an operator asked this peer to disconnect" in capsys.readouterr().err


async def test_plugins_of_the_working_directory_may_be_called_like_standard_modules(tmp_path: Path) -> None:
    (tmp_path / "calendar.py").write_text(MADE.replace("hello", "calendar"))
    (tmp_path / "json").mkdir()
    (tmp_path / "other.py").write_text(MADE.replace("hello", "other"))
    async with running_bus() as bus:
        environment = {**os.environ, "TOOLBUS_ADDRESS": bus.grpc_addresses[0]}
        programs = [Command.of_file(Path(name), environment).arguments for name in ("calendar.py", "other.py")]
        running = [
            await asyncio.create_subprocess_exec(*arguments, cwd=tmp_path, env=environment) for arguments in programs
        ]
        try:
            await until(lambda: {"calendar", "other"} <= {each.tool.name for each in bus.list()}, "both tools")
            assert (await bus.call("calendar")).output == "calendar"
        finally:
            for process in running:
                process.kill()
                await process.wait()
