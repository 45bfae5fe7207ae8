"""Asks and shows what needs a window of its own: details, the keys, the name of a source to drain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from toolbus.cli.top.details import Fact
from toolbus.text import clean_chunk, clean_line

KEYS = (
    ("t s c e", "tools, sources, calls, errors"),
    ("/", "filter: words that a line must have; Esc removes it"),
    ("< >", "sort by the column before, after; a click on a heading sorts too"),
    ("r", "reverse the order"),
    ("↑ ↓ k j PgUp PgDn Home End", "move"),
    ("Enter", "open the line: everything that is known of it, live"),
    ("d", "drain the source of the line, after typing its name"),
    ("p", "pause: the screen stays as it is"),
    ("l", "light or dark"),
    ("?", "this help"),
    ("q", "quit"),
)


class _Dialog(ModalScreen[str]):
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "app.pop_screen", "Close")]


class FactsDialog(_Dialog):
    """Shows facts, and brings them up to date.

    Args:
        facts: called anew for each frame.
    """

    def __init__(self, title: str, facts: Callable[[], Sequence[Fact]]) -> None:
        self._heading = title
        self._facts = facts
        super().__init__()

    def compose(self) -> ComposeResult:
        """Makes the window."""
        with Vertical(classes="dialog wide"):
            yield Static(Content(clean_line(self._heading)), classes="heading")
            with VerticalScroll():
                yield Static(self._content(), id="facts")
            yield Static(Content("Esc closes"), classes="hint")

    def update(self) -> None:
        """Shows what is known now."""
        self.query_one("#facts", Static).update(self._content())

    def _content(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in self._facts():
            table.add_row(Text(label), Text(clean_chunk(value)))
        return table


class KeysDialog(FactsDialog):
    """Shows the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("question_mark", "app.pop_screen", "Close")]

    def __init__(self) -> None:
        super().__init__("Keys", lambda: KEYS)


class DrainDialog(_Dialog):
    """Asks for the name of a source; ends with it once it was typed as it is, and with None otherwise."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "Close")]

    def __init__(self, source: str) -> None:
        self._source = source
        self._shown = clean_line(source)  # what can be seen, and so typed
        super().__init__()

    def compose(self) -> ComposeResult:
        """Makes the window."""
        with Vertical(classes="dialog"):
            yield Static(Content(f"Drain {self._shown}"), classes="heading")
            yield Static(
                Content(
                    "Its sessions take no new calls, finish those in flight and close. The plugin does not come back "
                    f"by itself. Type {self._shown} to drain it."
                )
            )
            yield Input()
            yield Static(Content("Enter drains, Esc closes"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Ends where the name is right."""
        event.stop()
        if event.value.strip() == self._shown:
            self.dismiss(self._source)
        else:
            self.query_one(".hint", Static).update(Content(f"that is not {self._shown}: nothing was drained"))
