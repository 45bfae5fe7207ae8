"""What the commands print: results to standard output, everything else to standard error, and the exit codes.

In a terminal tables are drawn by rich; elsewhere they are aligned text, for people who pipe. Whoever wants to parse
asks for JSON. Words of plugins are shown without control characters: a description must not repaint a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn, TextIO

import typer

DONE = 0
REFUSED = 1  # the tool or the bus said no
USAGE = 2
NO_BUS = 3
INTERRUPTED = 130

_STYLES = {
    "live": "green",
    "serving": "green",
    "ok": "green",
    "completed": "green",
    "suspect": "yellow",
    "draining": "yellow",
    "offline": "red",
    "failed": "red",
    "not_serving": "red",
}


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """Says why on standard error and ends with an exit code."""
    print(f"toolbus: {text}", file=sys.stderr)
    raise typer.Exit(code)


def say_json(value: Any, *, line: bool = False) -> None:
    """Prints a JSON document, or one line of JSON lines."""
    layout: dict[str, Any] = {"separators": (",", ":")} if line else {"indent": 2}
    print(utf8(json.dumps(value, ensure_ascii=False, **layout)), flush=line)


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    warned: Collection[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Prints rows under their heads; the last column takes what room is left.

    Args:
        warned: the numbers of the rows whose last cell begins with a warning.
        stream: where to; None means standard output.
    """
    stream = stream or sys.stdout
    shown = [[clean(cell) for cell in row] for row in rows]
    if stream.isatty():
        _drawn(heads, shown, warned, stream)
        return
    lines = [list(heads), *shown]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        print(_aligned(line, widths), file=stream)


def row(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Prints a row of a table that goes on, at once; what is wider than its column moves the others."""
    print(_aligned([clean(cell) for cell in cells], widths), flush=True)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _drawn(heads: Sequence[str], rows: Iterable[Sequence[str]], warned: Collection[int], stream: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        last = head == heads[-1]
        drawn.add_column(Text(head.lower()), overflow="ellipsis" if last else "fold", no_wrap=last)
    for number, row in enumerate(rows):
        cells = [Text(cell, style=_STYLES.get(cell.lower(), "")) for cell in row]
        if number in warned:
            cells[-1].stylize("yellow")
        drawn.add_row(*cells)
    Console(file=stream).print(drawn)  # honours NO_COLOR


def clean(text: str) -> str:
    """Returns a text as one line without control characters."""
    line = " ".join(text.split())
    return utf8("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line))


def utf8(text: str) -> str:
    """Returns a text that standard output can encode: a lone surrogate would end the command with a traceback."""
    return text.encode("utf-8", "replace").decode()
