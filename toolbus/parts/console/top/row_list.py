"""Draws a table on a screen: the visible lines only, and of these only those that changed.

Every text is cleaned here, so no text of a peer changes the terminal; none is ever read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from toolbus.common.text import clean_line
from toolbus.parts.console.top.views import Column, View

GAP = 2  # blanks between columns
LEAST_ROOM = 8  # cells of the column that takes what the others leave, where no further column can go
SCROLLBAR = 1  # cells at the right, as `screen.tcss` sets it
_NOTHING = {"–", "-", "0"}  # cells that need no look

_Cells = tuple[tuple[str, str], ...]
_Place = tuple[Column, int]


class _Drawn(NamedTuple):
    cells: _Cells
    at_cursor: bool
    strip: Strip


def places(view: View, width: int) -> list[_Place]:
    """Returns the columns that fit into the width of a list, each with its own width."""
    width -= SCROLLBAR  # also where there is none, so that no column moves
    columns = list(view.columns)
    for word in ("", *view.least):
        columns = [column for column in columns if column.word != word]
        rest = width - 1 - sum(column.width for column in columns) - GAP * (len(columns) - 1)
        if rest >= view.narrowest:
            break
    rest = max(LEAST_ROOM, min(rest, view.widest or rest))
    return [(column, column.width or rest) for column in columns]


class ColumnHeads(Widget):
    """The headings of a table; a click sorts by a column."""

    DEFAULT_CSS = "ColumnHeads { height: 1; }"
    COMPONENT_CLASSES: ClassVar[set[str]] = {"heads--sorted"}

    def __init__(self) -> None:
        self._view: View | None = None  # None before the first table
        self._sort, self._reverse = "", False
        super().__init__()

    def show(self, view: View, sort: str, reverse: bool) -> None:
        """Draws the headings of a table, with a mark at the column that it is sorted by."""
        if (view, sort, reverse) != (self._view, self._sort, self._reverse):
            self._view, self._sort, self._reverse = view, sort, reverse
            self.refresh()

    def render_line(self, y: int) -> Strip:
        style, width = self.rich_style, self.size.width
        if self._view is None:
            return Strip.blank(width, style)
        chosen = self.get_component_rich_style("heads--sorted")
        segments = [Segment(" ", style)]
        for column, room in places(self._view, width):
            title = column.title
            if column.word == self._sort:
                title += "▲" if column.number == self._reverse else "▼"
            title = _fit(title, room, column.number)
            segments += [Segment(title, chosen if column.word == self._sort else style), Segment(" " * GAP, style)]
        return Strip(segments).adjust_cell_length(width, style)

    async def on_click(self, event: Click) -> None:
        """Sorts by the column that was clicked."""
        left = 1
        for column, room in places(self._view, self.size.width) if self._view is not None else ():
            if left <= event.x < left + room:
                await self.run_action(f"app.sort_by({column.word!r})")
            left += room + GAP


class RowList(ScrollView, can_focus=True):
    """The lines of a table, with a cursor that stays at its line wherever that moves.

    Attributes:
        lost: whether what is shown may be old: then it is drawn dimmed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("enter", "open", "Open"),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *("rows--cursor", "rows--ok", "rows--warning", "rows--bad", "rows--accent", "rows--muted", "rows--lost")
    }
    lost: reactive[bool] = reactive(False)

    class Opened(Message):
        """A line was opened."""

        def __init__(self, line: Any) -> None:
            self.line = line
            super().__init__()

    def __init__(self) -> None:
        self._view: View | None = None  # None before the first table
        self._lines: Sequence[Any] = ()
        self._cursor = 0  # the number of the line
        self._key: tuple[str, ...] | None = None  # of that line; None: the first one, whichever that is
        self._drawn: dict[int, _Drawn] = {}  # the lines that are on the screen, by their number
        self._places: list[_Place] = []
        self._styles: dict[str, Style] = {}  # of tones; empty: not asked for since the theme changed
        super().__init__()

    @property
    def line(self) -> Any:
        """The line at the cursor; None where there are no lines."""
        return self._lines[self._cursor] if self._lines else None

    @property
    def texts(self) -> list[list[str]]:
        """The cells of all lines, as they are drawn."""
        return [[text for text, _ in self._cells(number)] for number in range(len(self._lines))]

    def show(self, view: View, lines: Sequence[Any]) -> None:
        """Draws the lines of a table; where it is the same table as before, only those that changed."""
        if view is not self._view:
            self._view, self._key, self._cursor = view, None, 0
            self._lines = lines
            self.scroll_to(0, 0, animate=False)
            self._redraw()
            return
        grown = len(lines) != len(self._lines)
        self._lines = lines
        self._find_cursor()
        if grown:
            self._redraw()
            return
        top = self.scroll_offset.y
        before, self._drawn = self._drawn, {}
        changed = []
        for number in range(top, min(len(lines), top + self.size.height)):
            drawn = self._drawn[number] = self._line_at(number, before.get(number))
            if drawn is not before.get(number):
                changed.append(number - top)
        if changed:  # one region: each costs as much as ten lines
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] - changed[0] + 1))

    def redraw(self) -> None:
        """Draws everything anew, in the colours of the theme as it is now."""
        self._styles = {}
        self._redraw()

    def watch_lost(self) -> None:
        self.redraw()

    def _redraw(self) -> None:
        self._drawn = {}
        if self._view is not None:
            self._places = places(self._view, self.size.width)
        if self.virtual_size != (size := Size(self.size.width - SCROLLBAR, len(self._lines))):
            self.virtual_size = size
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        """Fits the columns into the new width."""
        self._redraw()

    def _find_cursor(self) -> None:
        same = (number for number, line in enumerate(self._lines) if line.key == self._key)
        self._cursor = 0 if self._key is None else next(same, self._cursor)
        if self._key is not None:
            self._move_to(self._cursor)

    def _move_to(self, number: int) -> None:
        self._cursor = max(0, min(number, len(self._lines) - 1))
        self._key = self._lines[self._cursor].key if self._cursor else None

    def action_move(self, by: int) -> None:
        before = self._cursor
        self._move_to(before + by)
        for number in (before, self._cursor):
            self._drawn.pop(number, None)
            self.refresh_line(number)
        height, top = self.size.height, self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False)

    def action_page(self, by: int) -> None:
        """Moves the cursor by what is visible."""
        self.action_move(by * max(1, self.size.height - 1))

    def action_open(self) -> None:
        """Opens the line at the cursor."""
        if self.line is not None:
            self.post_message(self.Opened(self.line))

    def on_click(self, event: Click) -> None:
        """Moves the cursor; a double click opens the line."""
        number = self.scroll_offset.y + event.y
        if number < len(self._lines):
            self.action_move(number - self._cursor)
            if event.chain > 1:
                self.action_open()

    def render_line(self, y: int) -> Strip:
        number, width = self.scroll_offset.y + y, self.size.width
        if number >= len(self._lines):
            empty = self._view.empty if self._view is not None and not self._lines and y == 0 else ""
            return Strip([Segment(f" {empty}", self._style("muted"))]).adjust_cell_length(width, self.rich_style)
        drawn = self._drawn.get(number)
        if drawn is None:
            drawn = self._drawn[number] = self._line_at(number, None)
        return drawn.strip

    def _line_at(self, number: int, before: _Drawn | None) -> _Drawn:
        """Draws a line, unless it was drawn just so before."""
        cells, at_cursor = self._cells(number), number == self._cursor
        if before is not None and (before.cells, before.at_cursor) == (cells, at_cursor):
            return before
        return _Drawn(cells, at_cursor, self._strip(cells, at_cursor))

    def _strip(self, cells: _Cells, at_cursor: bool) -> Strip:
        base = self._style("lost") if self.lost else self.rich_style
        over = self._style("cursor") if at_cursor else Style.null()
        blank = base + over
        segments = [Segment(" ", blank)]
        for (text, tone), (column, room) in zip(cells, self._places, strict=True):
            style = blank if self.lost or not tone else self._style(tone) + over
            segments += [Segment(_fit(text, room, column.number), style), Segment(" " * GAP, blank)]
        return Strip(segments).adjust_cell_length(self.size.width, blank)

    def _cells(self, number: int) -> _Cells:
        line = self._lines[number]
        cells = []
        for column, _ in self._places:
            text = clean_line(column.cell(line))
            cells.append((text, column.tone(line) or ("muted" if text in _NOTHING else "")))
        return tuple(cells)

    def _style(self, tone: str) -> Style:
        if tone not in self._styles:
            style = self.get_component_rich_style(f"rows--{tone}")
            if tone == "cursor":  # it lies over the colours of the cells
                style = Style(bgcolor=style.bgcolor, bold=True)
            self._styles[tone] = style
        return self._styles[tone]


def _fit(text: str, room: int, right: bool) -> str:
    """Returns a text in exactly so many cells; one that is cut ends with `…`."""
    length = cell_len(text)
    if length > room:
        return set_cell_size(text, room - 1) + "…"
    return " " * (room - length) + text if right else text + " " * (room - length)
