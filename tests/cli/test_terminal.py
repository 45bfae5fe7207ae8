"""Tables and texts in a terminal and outside of one."""

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.bus.audit.chains import write
from tests.support.processes import environment
from toolbus.bus.audit.audit import FOLDER
from toolbus.cli import terminal
from toolbus.common.text import clean_line


def _run_in_terminal(*words: str, **env: str) -> str:
    """Returns what a command prints to a terminal of its own."""
    ours, theirs = pty.openpty()
    variables = {key: value for key, value in environment(env).items() if key != "NO_COLOR" or key in env}
    with subprocess.Popen(
        [sys.executable, "-m", "toolbus.cli", *words],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**variables, "TERM": "xterm-256color", "COLUMNS": "120"},
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
    assert clean_line("a\x1b[31mb\r\n  c\u202ed\udc80") == f"a{bad}[31mb c{bad}d{bad}"


def test_an_error_text_can_neither_change_the_terminal_nor_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        terminal.fail("no\x1b]0;owned\x07\ntoolbus: all is well\r\x9b2J")
    bad = "\N{REPLACEMENT CHARACTER}"
    assert capsys.readouterr().err == f"toolbus: no{bad}]0;owned{bad}\n  toolbus: all is well\n  {bad}2J\n"


def test_chunks_keep_their_line_breaks_and_lose_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    for chunk in ("a\n", "b\x1b", "[2Jc"):
        terminal.print_chunk(chunk)
    assert capsys.readouterr().err == "a\nb\N{REPLACEMENT CHARACTER}[2Jc"


def test_json_is_the_same_and_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": "\x1b[2J\x9b2J\u202e é"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": "\x1b[2J\x9b2J\u202e é"}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_commands_print_through_the_terminal_only() -> None:
    folder = Path(terminal.__file__).parent
    printing = {
        file.name
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"print", "typer.echo", "sys.stdout.write"}
        and not ",".join(map(ast.unparse, node.args)).isupper()  # a constant cannot change the terminal
    }
    assert printing == {"terminal.py", "run_command.py"}


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ["audit", "verify"],
        ["audit"],
        ["audit", "--json"],
        ["tools", "bundled"],
        ["--help"],
        ["calls", "--help"],
        ["mcp", "--help"],
    ],
)
def test_output_that_cannot_be_written_is_one_line(words: list[str], unbuffered: str, tmp_path: Path) -> None:
    write(tmp_path / FOLDER, 3)
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "toolbus.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment({"PYTHONUNBUFFERED": unbuffered, "TOOLBUS_DATA_DIR": str(tmp_path)}),
        )
    assert ended.stderr == (
        "toolbus: the output cannot be written: No space left on device: choose another place for it\n"
    )
    assert ended.returncode == 1


def test_a_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m toolbus.cli tools bundled >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, env=environment({}))
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_character_that_the_output_does_not_have_is_escaped() -> None:
    code = (
        "from toolbus.cli import terminal; terminal.prepare();"
        "terminal.print_json({'a': 'Tōkyō'}, line=True); terminal.print_lines('Tōkyō')"
    )
    variables = environment({"PYTHONIOENCODING": "latin-1"})
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=variables)
    assert ended.stdout.splitlines() == [rb'{"a":"T\u014dky\u014d"}', rb"T\u014dky\u014d"], ended.stderr
