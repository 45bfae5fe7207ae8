"""Prints what the commands print: results to standard output, everything else to standard error; and the exit codes.

On a terminal tables fit the window; elsewhere they are aligned text. Scripts use --json. Commands print through this
file only, because much of it comes from peers: no text may change the terminal or look like another line. JSON keeps
every character, those that could change a terminal as escapes of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO
from unicodedata import category, east_asian_width

from toolbus.common.text import clean_chunk, clean_line, clean_lines, drop_colours, escape_unsafe, keep_colours

# Why a write may fail. The help is written by typer, whose errors reach `main` as they are.
UNWRITABLE = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE})

DONE = 0
REFUSED = 1  # the tool or the bus refused
USAGE = 2
NO_BUS = 3
INTERRUPTED = 130

_GREEN, _YELLOW, _RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
_COLOURS = {
    **dict.fromkeys(("live", "serving", "ok", "completed"), _GREEN),
    **dict.fromkeys(("suspect", "waiting", "draining", "unconfirmed"), _YELLOW),
    **dict.fromkeys(("offline", "failed", "not_serving"), _RED),
}
_COLOURLESS = ("dumb", "unknown")  # terminals, by TERM
_WHOLE = frozenset(("NAME", "TOOL", "SOURCE", "STATE", "STATUS", "ON THE WIRE", "IDENTITY"))  # and the first column
_WHOLE |= {"ACT", "OUTCOME", "WHO", "TARGET"}  # of the audit
_FOLDED = frozenset(("WHY", "NOTICE", "ABOUT", "STATE"))  # as the last column: what to do stands at their end
_GAP = "  "  # between columns
_LEAST = 24  # columns of the window that are left to a long text before another column goes
_SHORTEST = 8  # that a text is worth showing in
_WINDOW = 80  # columns of a terminal that does not tell


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
def ending() -> Iterator[None]:
    """Prepares the standard streams for the program, and ends it where it is interrupted or cannot write."""
    prepare()
    try:
        try:
            yield
        finally:
            flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OutputError as error:
        end_unwritten(error.error)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        end_unwritten(error)


@contextmanager
def refusing(code: int = REFUSED) -> Iterator[None]:
    """Ends the command with a code where the block, or the function that it decorates, raises a SetupError."""
    from toolbus.errors import SetupError

    try:
        yield
    except SetupError as error:
        fail(str(error), code)


wrong_usage = partial(refusing, USAGE)


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
    import typer  # takes longer to import than `toolbus --version` should

    print_note(text)
    raise typer.Exit(code)


def ask(question: str) -> None:
    """Ends the command unless the person at the terminal agrees."""
    import typer

    if not sys.stdin.isatty():
        fail(f"{question} No person can answer here: add --yes", USAGE)
    if not typer.confirm(question):
        fail("nothing was changed")


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


def print_outcome(text: str, document: Any, as_json: bool, *, line: bool = False) -> None:
    """Prints what a command came to: its text, or with --json the document."""
    if as_json:
        print_json(document, line=line)
    else:
        print_lines(text)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], warned: Collection[int] = (), stream: TextIO | None = None
) -> None:
    """Prints rows under their headings; on a terminal, as `_draw` fits them into its window.

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
    """Prints a row of a table that continues, at once; a wide cell moves the others, and the window cuts the line."""
    line = _align([clean_line(cell) for cell in cells], widths)
    with _writing():
        print(_cut(line, _window(sys.stdout)) if sys.stdout.isatty() else line, flush=True)


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


# -- tables on a terminal ------------------------------------------------------------------------------------------


def _draw(headings: Sequence[str], rows: Sequence[Sequence[str]], warned: Collection[int], stream: TextIO) -> None:
    """Draws a table for the window: what names a row is whole, other columns shrink or go, the last takes the rest."""
    window = _window(stream)
    widths, hidden = _fit(headings, rows, window)
    last = len(headings) - 1
    coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in _COLOURLESS
    lines = [_laid_out([heading.lower() for heading in headings], widths, {})]
    lines.append("─" * min(sum(widths.values()) + len(_GAP) * (len(widths) - 1), window))
    for number, row in enumerate(rows):
        styles = {column: _COLOURS[cell.lower()] for column, cell in enumerate(row) if cell.lower() in _COLOURS}
        if number in warned:
            styles[len(row) - 1] = _YELLOW
        folded = _fold(row[last], widths[last]) if headings[last] in _FOLDED and last in widths else [row[last]]
        for place, text in enumerate(folded):
            cells = [*row[:last], text] if place == 0 else ["" for _ in row[:last]] + [text]
            lines.append(_laid_out(cells, widths, styles if coloured else {}))
    if hidden:
        lines.append(f"(not shown in {window} columns: {', '.join(headings[column].lower() for column in hidden)})")
    with _writing():
        print("\n".join(lines), file=stream)


def _window(stream: TextIO) -> int:
    """Returns how many columns the window has: COLUMNS if it is set, as for all programs."""
    with suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", "0"))) > 0:
            return columns
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or _WINDOW
    return _WINDOW


def _fit(headings: Sequence[str], rows: Sequence[Sequence[str]], window: int) -> tuple[dict[int, int], list[int]]:
    """Returns the widths of the columns that are shown, and the columns for which the window is too narrow.

    Columns that do not name a row shrink first; then those go that say the same in each row, then from the right.
    """
    last = len(headings) - 1
    whole = {0, *(column for column, heading in enumerate(headings) if heading in _WHOLE)}
    if headings[last] in _FOLDED:
        whole.discard(last)
    natural = {
        column: max(_cells(heading), *(_cells(row[column]) for row in rows)) if rows else _cells(heading)
        for column, heading in enumerate(headings)
    }
    widths = dict(natural)
    others = [column for column in widths if column not in whole and column != last]
    wanted = natural[last] if last in whole else min(natural[last], _LEAST)

    def rest() -> int:
        return window - sum(width + len(_GAP) for column, width in widths.items() if column != last)

    for column in others:
        if rest() < wanted:
            widths[column] = max(min(widths[column], _LEAST), widths[column] - (wanted - rest()))
    going = sorted(others, key=lambda each: (len({row[each] for row in rows}) > 1, natural[each] > _LEAST, -each))
    hidden = []
    while going and rest() < wanted:
        hidden.append(going.pop(0))
        del widths[hidden[-1]]
    if last not in whole:
        widths[last] = min(natural[last], max(rest(), _LEAST if headings[last] in _FOLDED else 0))
        if not widths[last] or (widths[last] < natural[last] and widths[last] < _SHORTEST):
            del widths[last]
            hidden.append(last)
    return widths, sorted(hidden)


def _laid_out(cells: Sequence[str], widths: dict[int, int], styles: dict[int, str]) -> str:
    shown = []
    for column, width in widths.items():
        text = _cut(cells[column], width)
        style = styles.get(column)
        shown.append((f"{style}{text}\x1b[0m" if style and text else text) + " " * (width - _cells(text)))
    return _GAP.join(shown).rstrip()


def _cells(text: str) -> int:
    """Returns how many columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if category(each) in ("Mn", "Me", "Cf") else 2 if east_asian_width(each) in "WF" else 1 for each in text
    )


def _cut(text: str, width: int) -> str:
    if _cells(text) <= width:
        return text
    while _cells(text) >= width:
        text = text[: len(text) - max(1, (_cells(text) - width) // 2)]
    return f"{text}…"


def _fold(text: str, width: int) -> list[str]:
    """Returns a text as lines of a width, broken between words where that is possible."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and _cells(lines[-1]) + 1 + _cells(word) > width:
            lines.append("")
        elif lines[-1]:
            word = f" {word}"
        for character in word:
            if _cells(lines[-1]) + _cells(character) > width:
                lines.append("")
            lines[-1] += character
    return lines
