"""Asks and shows what needs a window of its own: details, the keys, the name of what an act is done to."""

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

from toolbus.cli.top.acts import Act
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
    ("x", "cancel the call of the line, after typing the name of its tool"),
    ("p", "pause: the screen stays as it is"),
    ("l", "light or dark"),
    ("?", "this help"),
    ("q", "quit"),
)


class _Dialog(ModalScreen[Act]):
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


class ActDialog(_Dialog):
    """Asks for the name of what an act is done to; ends with the act once it was typed, and with None otherwise."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "Close")]

    def __init__(self, act: Act) -> None:
        self._act = act
        self._shown = clean_line(act.name)  # what can be seen, and so typed
        super().__init__()

    def compose(self) -> ComposeResult:
        """Makes the window."""
        verb = self._act.verb.lower()
        with Vertical(classes="dialog"):
            yield Static(Content(f"{self._act.verb} {self._shown}"), classes="heading")
            yield Static(Content(f"{self._act.warning} Type {self._shown} to {verb} it."))
            yield Input()
            yield Static(Content(f"Enter {verb}s, Esc closes"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Ends where the name is right."""
        event.stop()
        if event.value.strip() == self._shown:
            self.dismiss(self._act)
        else:
            self.query_one(".hint", Static).update(Content(f"that is not {self._shown}: nothing was done"))
