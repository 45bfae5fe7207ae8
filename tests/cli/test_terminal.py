"""Tables and texts in a terminal and outside of one."""

import ast
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import typer

import toolbus
from tests.parts.audit.chains import write
from tests.support.processes import environment
from toolbus.cli import terminal
from toolbus.common.text import clean_line
from toolbus.parts.audit import audit_command
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.parts.observability import calls_command


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


_KEPT = ("NAME", "TOOL", "SOURCE", "STATE", "STATUS", "ACT", "OUTCOME", "WHO", "TARGET")
WIDTHS = (80, 100, 120, 200)


def _tables() -> list[tuple[str, ...]]:
    """Returns the headings of every table that a command prints, as its file has them."""
    found = set()
    for file in Path(toolbus.__file__).parent.rglob("*.py"):
        if file == Path(terminal.__file__) or "print_table(" not in (text := file.read_text("utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Tuple) and len(node.elts) > 1:
                words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                if len(words) == len(node.elts) and all(isinstance(each, str) and each.isupper() for each in words):
                    found.add(tuple(map(str, words)))
    return sorted(found)


TABLES = [
    *_tables(),
    tuple(head for head, _ in audit_command._COLUMNS),
    tuple(head for head, _ in calls_command._COLUMNS),
    tuple(head for head, _ in calls_command._COLUMNS + calls_command._CONTENTS),
]


def _drawn(width: int, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], **env: str) -> list[str]:
    """Returns the lines that a terminal of a width gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    with (
        mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "", **env}),
        open(theirs, "w", encoding="utf-8", closefd=True) as stream,
    ):
        terminal.print_table(headings, rows, stream=stream)
        stream.flush()
        shown = b""
        while not shown.endswith(b"\n") or select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 65536)
    os.close(ours)
    return shown.decode().replace("\r\n", "\n").splitlines()


def test_every_table_of_the_command_line_is_among_those_that_are_tested() -> None:
    assert len(TABLES) >= 20
    assert ("NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN FLIGHT", "DESCRIPTION") in TABLES
    assert ("MOUNT", "STATE", "ERA", "TOOLS", "PID", "MEMORY", "RESTARTS", "ABOUT") in TABLES


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("headings", TABLES, ids="-".join)
def test_a_table_on_a_terminal_keeps_names_states_and_sources(headings: tuple[str, ...], width: int) -> None:
    text = "It converts an amount of money from one currency into another. " * 4
    samples = dict.fromkeys(headings, "some") | {headings[-1]: text}
    samples |= {head: "convert_currency" for head in ("NAME", "TOOL") if head in samples}
    samples |= {head: "suspect" for head in ("STATE", "STATUS") if head in samples} | {"SOURCE": "plugin:money"}
    rows = [tuple(f"{samples[head]}{number}" for head in headings) for number in range(3)]
    lines = _drawn(width, headings, rows)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(headings[0].lower())
    for number, row in enumerate(rows):
        kept = [cell for head, cell in zip(headings, row, strict=True) if head in _KEPT]
        (line,) = [line for line in lines if line.startswith(f"{row[0][:8]}") and f"{number}" in line]
        assert all(cell in line for cell in kept)


def test_a_long_description_takes_what_is_left_and_ends_with_an_ellipsis() -> None:
    headings = ("NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN FLIGHT", "DESCRIPTION")
    rows = [
        ("get_weather", "live", "weather", "", "1", "0", "Says the weather. " * 20),
        ("b", "offline", "x", "", "1", "0", "B"),
    ]
    for width in WIDTHS:
        lines = _drawn(width, headings, rows)
        assert len(lines[2]) == width
        assert lines[2].startswith("get_weather  live     weather")
        assert lines[2].endswith("…")
        assert lines[3].split()[:3] == ["b", "offline", "x"]
    narrow = _drawn(60, headings, rows)
    assert "description" in narrow[0]
    assert narrow[-1] == "(not shown in 60 columns: roles, sessions, in flight)"
    assert "not shown" not in _drawn(120, headings, rows)[-1]


def test_names_that_are_wider_than_the_window_stay_whole() -> None:
    name = "server.with_a_long_name." * 4
    lines = _drawn(80, ("NAME", "STATE", "SOURCE", "DESCRIPTION"), [(name, "live", "server", "about it")])
    assert lines[2] == f"{name}  live   server"


def test_what_to_do_is_folded_and_not_cut() -> None:
    why = "its plugin is offline: start it with `toolbus run weather.py`, or read why: `toolbus logs weather`"
    lines = _drawn(80, ("PASSES", "STEP", "WHY"), [("NO", "connected", why)])
    assert " ".join(" ".join(line.split()) for line in lines[2:]) == f"NO connected {why}"
    assert lines[3].startswith(" " * 10)


def test_wide_characters_are_counted_as_a_terminal_does() -> None:
    lines = _drawn(80, ("NAME", "DESCRIPTION"), [("天气", "查询天气" * 20), ("ab", "x")])
    assert lines[2].startswith("天气  查询")
    assert lines[3] == "ab    x"
    assert sum(2 if each > "\u2e80" else 1 for each in lines[2]) <= 80


def test_the_variable_columns_wins_over_the_window() -> None:
    lines = _drawn(200, ("NAME", "DESCRIPTION"), [("a", "b" * 300)], COLUMNS="90")
    assert len(lines[2]) == 90


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


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_a_table_that_continues_is_one_line_of_the_window(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("COLUMNS", str(width))
    for text in ("short", "天气" * 200, "why " * 100):
        terminal.print_row(("2026-11-29 19:09:58", "refuse", text), (19, 9, 0))
    first, *others = shown.getvalue().splitlines()
    assert first == "2026-11-29 19:09:58  refuse     short"
    assert all(line.startswith("2026-11-29 19:09:58  refuse     ") and line.endswith("…") for line in others)
    assert [len(line) for line in others[1:]] == [width]


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
