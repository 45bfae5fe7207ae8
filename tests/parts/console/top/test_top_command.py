"""The command as a process: on a terminal, in a pipe, without Textual."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.parts.console.top.on_terminal import OnTerminal
from tests.support.processes import environment, toolbus
from tests.support.waiting import HANG_SECONDS, until_sync


def test_the_screen_is_live_on_a_terminal_and_leaves_that_as_it_was(bus: str) -> None:
    toolbus("call", "refuse", "--bus", bus)
    with OnTerminal("--bus", bus) as top:
        until_sync(lambda: "serving" in top.text, "the first frame")
        top.press("e")
        until_sync(lambda: "refuse" in top.text, "the errors")
        top.process.terminate()
        assert top.code() == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in top.text  # the terminal is as it was before


def test_without_textual_the_screen_says_what_to_install(bus: str, tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError('textual')\n")
    path = f"{tmp_path}{os.pathsep}{environment({})['PYTHONPATH']}"
    with OnTerminal("--bus", bus, PYTHONPATH=path) as top:
        assert top.code() == 1
        assert "pip install 'toolbus[top]'" in " ".join(top.text.split())


def test_a_pipe_gets_one_frame_and_scripts_get_json(bus: str) -> None:
    shown = toolbus("top", "--bus", bus)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "calls/s" in shown.stdout.splitlines()[1]
    frame = json.loads(toolbus("top", "-n", "1", "--json", "--bus", bus).stdout)
    assert "weather" in [each["source"] for each in frame["sources"]]


def test_without_a_bus_the_exit_code_is_3(unused_address: str) -> None:
    assert toolbus("top", "-n", "1", "--bus", unused_address).returncode == 3
    assert toolbus("top", "--sort", "color", "--bus", unused_address).returncode == 2


def test_frames_and_other_commands_do_not_load_textual() -> None:
    script = "import sys, toolbus.cli.command_line, toolbus.parts.console.top.command; print('textual' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert ended.stdout == "False\n"
