"""Tables and texts in a terminal and outside of one."""

import io
import os
import pty
import subprocess
import sys

import pytest

from tests.support.processes import environment
from toolbus.cli import terminal


def _run_in_terminal(*words: str, **env: str) -> str:
    """Returns what a command prints to a terminal of its own."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in environment(env).items() if key != "NO_COLOR" or key in env}
    with subprocess.Popen(
        [sys.executable, "-m", "toolbus.cli", *words],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "120"},
    ):
        os.close(theirs)
        shown = b""
        try:
            while read := os.read(ours, 65536):
                shown += read
        except OSError:  # how Linux reports that the other end is closed
            pass
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_a_coloured_table_unless_no_color_is_set(bus: str) -> None:
    coloured = _run_in_terminal("list", "--bus", bus)
    assert "\x1b[32mlive" in coloured
    assert "get_weather" in coloured
    assert "\x1b[3" not in _run_in_terminal("list", "--bus", bus, NO_COLOR="1")


def test_control_characters_are_replaced() -> None:
    bad = "\N{REPLACEMENT CHARACTER}"
    assert terminal.clean("a\x1b[31mb\r\n  c\u202ed\udc80") == f"a{bad}[31mb c{bad}d{bad}"


def test_control_characters_in_a_row_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_row(["a\x1b[31m", "b\nc"], [8, 0])
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[31m    b c\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_prints_warnings_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal.print_table(("NAME", "DESCRIPTION"), [("a", "fine"), ("b", "(warning: odd) fine")], {1})
    fine, odd = shown.getvalue().splitlines()[-2:]
    assert "\x1b[33m" not in fine
    assert "\x1b[33m(warning: odd) fine" in odd
