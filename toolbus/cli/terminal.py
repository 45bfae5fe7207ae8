"""Prints what the commands print: results to standard output, everything else to standard error; and the exit codes.

In a terminal rich draws tables; elsewhere they are aligned text. Scripts use --json. The commands print through this
file only, because much of it comes from peers: no text may change the terminal or look like another line. JSON keeps
every character, those that could change a terminal as escapes of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

import typer

from toolbus.common.text import clean_chunk, clean_line, clean_lines, drop_colours, escape_unsafe, keep_colours

# Why a write may fail. The help is written by typer, whose errors reach `main` as they are.
UNWRITABLE = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE})

DONE = 0
REFUSED = 1  # the tool or the bus refused
USAGE = 2
NO_BUS = 3
INTERRUPTED = 130

_STYLES = {
    "live": "green",
    "serving": "green",
    "ok": "green",
    "completed": "green",
    "suspect": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "unconfirmed": "yellow",
    "offline": "red",
    "failed": "red",
    "not_serving": "red",
}


class OutputError(Exception):
    """Standard output cannot be written, because a disk is full for example; `main` ends the command with 1."""

    def __init__(self, error: OSError) -> None:
        self.error = error
        super().__init__(error)


def prepare() -> None:
    """Makes the standard streams take every text, if they are closed or their encoding has only some characters."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Writes what standard output still holds; raises OutputError where that fails."""
    with _writing():
        sys.stdout.flush()


def end_unwritten(error: OSError) -> NoReturn:
    """Ends the command whose output cannot be written: with a sentence, unless the reader has ended, and with 1."""
    discard_output()
    if not isinstance(error, BrokenPipeError):
        print_note(f"the output cannot be written: {error.strerror or error}: choose another place for it")
    sys.exit(REFUSED)


def discard_output() -> None:
    """Drops what standard output still holds, so that Python does not try to write it when it ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # who reads has ended: no error to print
        raise
    except OSError as error:
        raise OutputError(error) from error


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """Prints an error to standard error and ends with an exit code."""
    print_note(text)
    raise typer.Exit(code)


def print_note(text: str) -> None:
    """Prints an error or a remark of the command to standard error."""
    print_lines(f"toolbus: {text}", sys.stderr)


def print_lines(text: str, stream: TextIO | None = None) -> None:
    """Prints a text at once; its lines after the first are indented.

    Args:
        stream: None means standard output.
    """
    with _writing():
        print(clean_lines(text), file=stream or sys.stdout, flush=True)


def print_chunk(text: str) -> None:
    """Prints a part of a text to standard error at once; further parts continue its last line."""
    print(clean_chunk(text), end="", file=sys.stderr, flush=True)


def print_output(line: str, *, coloured: bool) -> None:
    """Prints a line of a plugin's output at once: with its colours or without, never with another escape sequence."""
    line = keep_colours(line)
    print(line if coloured else drop_colours(line), flush=True)


def print_json(value: Any, *, line: bool = False) -> None:
    """Prints a JSON document, or one line of JSON lines."""
    layout: dict[str, Any] = {"separators": (",", ":")} if line else {"indent": 2}
    every_character = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = escape_unsafe(json.dumps(value, ensure_ascii=not every_character, **layout))
    with _writing():
        print(text, flush=line)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    warned: Collection[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Prints rows under their headings; the last column takes the rest of the width.

    Args:
        warned: indexes of the rows whose last cell begins with a warning.
        stream: None means standard output.
    """
    stream = stream or sys.stdout
    cleaned = [[clean_line(cell) for cell in row] for row in rows]
    if stream.isatty():
        _draw(headings, cleaned, warned, stream)
        return
    lines = [list(headings), *cleaned]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    with _writing():
        for line in lines:
            print(_align(line, widths), file=stream)


def print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Prints a row of a table that continues, at once; a cell that is wider than its column moves the others."""
    with _writing():
        print(_align([clean_line(cell) for cell in cells], widths), flush=True)


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _draw(headings: Sequence[str], rows: Iterable[Sequence[str]], warned: Collection[int], stream: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawing = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        last = heading == headings[-1]
        drawing.add_column(Text(heading.lower()), overflow="ellipsis" if last else "fold", no_wrap=last)
    for number, row in enumerate(rows):
        cells = [Text(cell, style=_STYLES.get(cell.lower(), "")) for cell in row]
        if number in warned:
            cells[-1].stylize("yellow")
        drawing.add_row(*cells)
    Console(file=stream).print(drawing)  # honours NO_COLOR
