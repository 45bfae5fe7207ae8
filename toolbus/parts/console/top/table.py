"""Says what a table is: its columns, its lines, which of them are shown, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.parts.console.top.bus_state import BusState


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        word: what `--sort` calls it.
        cell: the text of a line.
        rank: what a line is sorted by; lines where it is None stand last.
        width: characters on the screen; 0: what the others leave.
        number: whether it stands at the right, and the highest first.
        tone: of a cell that should be seen: `ok`, `warning`, `bad`, `accent`; "" for all others.
    """

    title: str
    word: str
    cell: Callable[[Any], str]
    rank: Callable[[Any], Any]
    width: int
    number: bool = False
    tone: Callable[[Any], str] = lambda line: ""


@dataclass(frozen=True, slots=True)
class View:
    """One table.

    Attributes:
        lines: makes the lines of a state at a moment, in their natural order.
        texts: what a filter looks at.
        sort: the column by which it is sorted at first; "" for the natural order.
        empty: what stands there instead of a table without lines.
        least: words of the columns that a narrow screen leaves out, the first one first.
        narrowest: characters of the column that takes what the others leave: for less, another column goes.
        widest: characters of the column that takes what the others leave; 0: all of it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    lines: Callable[[BusState, float], list[Any]]
    texts: Callable[[Any], Iterable[str]]
    sort: str
    empty: str
    least: tuple[str, ...] = ()
    narrowest: int = 20
    widest: int = 0

    def column(self, word: str) -> Column | None:
        """Returns the column that a word of `--sort` names; None where this table has none."""
        return next((column for column in self.columns if column.word == word), None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines of a table are shown, and in which order.

    Attributes:
        sort: the word of a column; "" for the natural order of the table.
        reverse: whether the order is turned round.
        filter: words that a line must have, in any case of letters.
        source: only lines of this source; "" for all.
    """

    sort: str = ""
    reverse: bool = False
    filter: str = ""
    source: str = ""


def select(view: View, state: BusState, now: float, selection: Selection) -> list[Any]:
    """Returns the lines of a table that are selected, in their order."""
    lines = view.lines(state, now)
    if selection.source:
        lines = [line for line in lines if line.source == selection.source]
    if words := selection.filter.casefold().split():
        lines = [line for line in lines if _has(words, view.texts(line))]
    column = view.column(selection.sort or view.sort)
    if column is None:
        return lines[::-1] if selection.reverse else lines
    ranked = [(rank, line) for line in lines if (rank := column.rank(line)) is not None]
    ranked.sort(key=lambda pair: pair[0], reverse=column.number != selection.reverse)
    return [line for _, line in ranked] + [line for line in lines if column.rank(line) is None]


def _has(words: Sequence[str], texts: Iterable[str]) -> bool:
    text = "\n".join(texts).casefold()
    return all(word in text for word in words)
