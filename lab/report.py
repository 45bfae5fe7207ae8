"""Shows what a run found: tables for the terminal and for Markdown, and the machine that the figures come from."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table as RichTable

from lab.judge import Verdict

_FIGURE_BEGINS = tuple("0123456789-+–≤≥")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. A column of figures is aligned to the right.

    Attributes:
        repeat: the command that repeats all of it, where not each row has one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    repeat: str = ""

    def _is_figures(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column]]
        return bool(cells) and all(cell.startswith(_FIGURE_BEGINS) for cell in cells)

    def show(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if self._is_figures(number) else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(f"[bold red]{cell}[/]" if cell == "BROKEN" else cell.replace("[", r"\[") for cell in row))
        console.print(table)

    def markdown(self, level: int = 2) -> str:
        """Returns it with its title as a heading; level 0 leaves the heading out."""
        rule = ["---:" if self._is_figures(number) else "---" for number in range(len(self.columns))]
        lines = [self.columns, rule, *([_code(cell) for cell in row] for row in self.rows)]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{'#' * level} {self.title}\n\n{body}" if level else body


def _code(cell: str) -> str:
    if cell == "BROKEN":
        return "**BROKEN**"
    return f"`{cell}`" if cell.startswith("python -m") else cell


def verdict_table(title: str, verdicts: Mapping[str, Sequence[Verdict]] | Sequence[Verdict]) -> Table:
    """Returns verdicts as a table; those of several parts stand below the name of their part."""
    if not isinstance(verdicts, Mapping):
        return Table(title, ("what", "bound", "measured", ""), [_row(each) for each in verdicts])
    rows = [("" if place else part, *_row(each)) for part, its in verdicts.items() for place, each in enumerate(its)]
    return Table(title, ("part", "what", "bound", "measured", ""), rows)


def _row(verdict: Verdict) -> tuple[str, str, str, str]:
    return verdict.what, verdict.bound, verdict.measured, verdict.word


def machine() -> str:
    """Returns the machine and the Python that figures come from."""
    return f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def version_of(package: str) -> str:
    """Returns which version of a package is installed; empty where none is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
