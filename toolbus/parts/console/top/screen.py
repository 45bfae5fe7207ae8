"""Shows a bus live on a terminal: its figures above, a table below, keys and mouse (Textual, extra `top`)."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widgets import Footer, Input, Static

from toolbus.cli import terminal
from toolbus.common.text import clean_chunk, clean_line
from toolbus.errors import RequestError
from toolbus.parts.console.top import details, header
from toolbus.parts.console.top.details import Fact
from toolbus.parts.console.top.digest_reader import DigestReader, LiveState, ReaderTimings
from toolbus.parts.console.top.header import ViewTab
from toolbus.parts.console.top.row_list import ColumnHeads, RowList
from toolbus.parts.console.top.views import SOURCES, TOOLS, VIEWS, CallLine, Selection, View, select
from toolbus.sdk import Host

Row: TypeAlias = Mapping[str, Any]


class Notice(NamedTuple):
    """What is said of an act that was tried."""

    title: str
    text: str
    severity: Literal["information", "warning", "error"] = "information"


@dataclass(frozen=True, slots=True)
class Act:
    """What an operator does to what a line shows.

    Attributes:
        verb: what it does, for a heading: `Drain`.
        name: of what it is done to, as the bus sent it; it is typed before.
        warning: what comes of it.
        failed: the title where nothing came of it.
        tool, arguments: what is called.
        told: what is said of the answer.
    """

    verb: str
    name: str
    warning: str
    failed: str
    tool: str
    arguments: Row
    told: Callable[[Row], Notice]

    async def carry_out(self, host: Host) -> Notice:
        """Does it; returns what came of it."""
        result = await host.call(self.tool, dict(self.arguments))
        if result.is_error:
            text = result.error.message if result.error is not None else result.text
            return Notice(self.failed, clean_line(text), "error")
        return self.told(result.output)


def drain_of(source: str) -> Act:
    name = clean_line(source)
    failed = f"{name} was not drained"

    def told(answer: Row) -> Notice:
        if not answer["sessions"]:
            return Notice(failed, "it has no session", "warning")
        return Notice(f"draining {name}", f"sessions: {answer['sessions']}")

    what = "Its sessions take no new calls, finish those in flight and close. The plugin does not come back by itself."
    return Act("Drain", source, what, failed, "toolbus:drain", {"source": source}, told)


def cancel_of(call: Row) -> Act:
    """Returns the cancelling of a call that runs."""
    name = clean_line(str(call.get("name", "")))

    def told(answer: Row) -> Notice:
        return Notice(f"the call of {name} is cancelled", f"caller: {clean_line(str(answer['caller']))}")

    warning = "Its caller gets the error CANCELLED at once. The tool may have done a part of its work."
    arguments = {"id": str(call.get("id", ""))}
    return Act("Cancel", name, warning, f"the call of {name} was not cancelled", "toolbus:cancel_call", arguments, told)


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


DARK = Theme(
    "toolbus-dark", primary="#7aa2f7", secondary="#9ece6a", accent="#7dcfff", warning="#e0af68", error="#f7768e",
    success="#9ece6a", foreground="#d5d9e6", background="#14161d", surface="#1a1d27", panel="#232735", dark=True,
)  # fmt: skip
LIGHT = Theme(
    "toolbus-light", primary="#2952a3", secondary="#3a6b1f", accent="#00607f", warning="#8a5300", error="#b3182d",
    success="#2f6b16", foreground="#1c2030", background="#fbfbfd", surface="#f1f2f6", panel="#e4e6ee", dark=False,
)  # fmt: skip
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class TopApp(App[int]):
    """The screen of one bus.

    Args:
        interval: seconds between two frames.
        clock: what ages are measured with between two digests.
    """

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "view('tools')", "Tools", show=False),  # its tab shows the key
        Binding("s", "view('sources')", "Sources", show=False),
        Binding("c", "view('calls')", "Calls", show=False),
        Binding("e", "view('errors')", "Errors", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("less_than_sign", "sort(-1)", "Sort", key_display="< >"),
        Binding("greater_than_sign", "sort(1)", "Sort", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("p", "pause", "Pause"),
        Binding("d", "drain", "Drain"),
        Binding("x", "cancel", "Cancel", show=False),
        Binding("l", "light", "Light or dark", show=False),
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("q", "exit(0)", "Quit"),
        Binding("ctrl+c", "exit(130)", "Quit", show=False, priority=True),
        Binding("escape", "no_filter", "No filter", show=False),
    ]

    def __init__(
        self,
        host: Host,
        address: str,
        interval: float,
        selection: Selection,
        *,
        light: bool = False,
        timings: ReaderTimings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = LIGHT.name if light else DARK.name
        self.title = f"toolbus top {clean_line(address)}"
        self._host = host
        self._address = address
        self._interval = interval
        self._live = LiveState(DigestReader(host, timings or ReaderTimings()), clock)
        self.state = self._live.bus
        self.error: RequestError | None = None  # what ended the screen; None: its user did
        self._view: View = TOOLS
        first = replace(selection, sort=selection.sort or TOOLS.sort)
        self._selections = {view.name: replace(selection, sort=view.sort) for view in VIEWS} | {TOOLS.name: first}
        self._written: dict[Static, Content] = {}  # what each line shows
        self._acting: asyncio.Task[None] | None = None  # the last act; None: there was none

    def compose(self) -> ComposeResult:
        yield Static(id="bus")
        yield Static(id="figures")
        with Horizontal(id="tabs"):
            for view in VIEWS:
                yield ViewTab(view)
            yield Static(id="selected")
        yield Input(placeholder="words that a line must have", id="filter")
        yield ColumnHeads()
        yield RowList()
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        self.query_one(RowList).focus()
        self.run_worker(self._read(), exit_on_error=True)
        self.set_interval(self._interval, self.draw)
        self.draw()

    async def _read(self) -> None:
        try:
            await self._live.follow(self.draw)
        except RequestError as error:
            self.error = error
            self.exit(terminal.REFUSED)

    # -- drawing --------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        view, selection, live = self._view, self._selections[self._view.name], self._live
        base = self.screen_stack[0]
        about_bus = header.bus_line(self.state, self._address, live.now, live.loss, is_paused=live.is_paused)
        self._write(base.query_one("#bus", Static), about_bus)
        self._write(base.query_one("#figures", Static), header.figures(self.state, self.size.width))
        for tab in base.query(ViewTab):
            self._write(tab, header.tab(self.state, tab.view, is_shown=tab.view is view))
        self._write(base.query_one("#selected", Static), header.selected(selection))
        base.query_one(ColumnHeads).show(view, selection.sort, selection.reverse)
        rows = base.query_one(RowList)
        rows.lost = live.loss is not None
        rows.show(view, select(view, self.state, live.now, selection))
        if isinstance(self.screen, FactsDialog):
            self.screen.update()

    def _write(self, place: Static, content: Content) -> None:
        """Shows a line of text; lays the screen out anew only where a line of another length moves its neighbours."""
        before = self._written.get(place)
        if before is None or not before.is_same(content):
            self._written[place] = content
            place.update(content, layout=before is None or len(before) != len(content))

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_view(self, name: str) -> None:
        self._view = next(view for view in VIEWS if view.name == name)
        self.query_one("#filter", Input).value = self._selections[name].filter
        self.draw()

    def _select(self, selection: Selection) -> None:
        self._selections[self._view.name] = selection
        self.draw()

    def action_sort(self, by: int) -> None:
        """Sorts by the column before or after the one that it is sorted by."""
        words = [column.word for column in self._view.columns]
        selection = self._selections[self._view.name]
        at = words.index(selection.sort) if selection.sort in words else -1 if by > 0 else 0
        self._select(replace(selection, sort=words[(at + by) % len(words)], reverse=False))

    def action_sort_by(self, word: str) -> None:
        """Sorts by a column; a second time reverses the order."""
        selection = self._selections[self._view.name]
        self._select(replace(selection, sort=word, reverse=word == selection.sort and not selection.reverse))

    def action_reverse(self) -> None:
        selection = self._selections[self._view.name]
        self._select(replace(selection, reverse=not selection.reverse))

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while it is typed."""
        if event.input.id == "filter":
            self._select(replace(self._selections[self._view.name], filter=event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Goes back to the table, filtered."""
        self._close_filter()

    def action_no_filter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._select(replace(self._selections[self._view.name], filter=""))
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.query_one(RowList).focus()

    def action_pause(self) -> None:
        self._live.pause()
        self.draw()

    def action_light(self) -> None:
        """Changes between light and dark."""
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
        self.call_after_refresh(self.query_one(RowList).redraw)

    def action_keys(self) -> None:
        self.push_screen(KeysDialog())

    def on_row_list_opened(self, message: RowList.Opened) -> None:
        """Shows everything that is known of a line."""
        line = message.line
        title, live = details.title_of(line), self._live
        self.push_screen(FactsDialog(title, lambda: details.facts_of(line, self.state, live.now)))

    def action_exit(self, code: int) -> None:
        self.exit(code)

    # -- acts ---------------------------------------------------------------------------------------------------------

    def action_drain(self) -> None:
        """Asks for the name of the line's source, and drains it."""
        line = self.query_one(RowList).line
        if self._view not in (SOURCES, TOOLS) or line is None:
            self.notify("d drains a source: choose one, with s", markup=False)
        else:
            self.push_screen(ActDialog(drain_of(line.source)), self._begin)

    def action_cancel(self) -> None:
        """Asks for the name of the tool of the line's call, and cancels the call."""
        line = self.query_one(RowList).line
        if isinstance(line, CallLine) and line.running:
            self.push_screen(ActDialog(cancel_of(line.call)), self._begin)
        else:
            self.notify("x cancels a call that runs: choose one, with c", markup=False)

    def _begin(self, act: Act | None) -> None:
        if act is not None:
            self._acting = asyncio.create_task(self._carry_out(act))

    async def _carry_out(self, act: Act) -> None:
        notice = await act.carry_out(self._host)
        self.notify(notice.text, title=notice.title, severity=notice.severity, markup=False)


async def show_screen(host: Host, address: str, interval: float, selection: Selection, *, light: bool) -> int:
    """Shows the screen until its user ends it; returns the exit code.

    Raises:
        RequestError: the bus has no digests, or refuses them to this program.
    """
    log = logging.getLogger("toolbus.sdk")
    before = log.level
    log.setLevel(logging.CRITICAL)  # the screen says itself that the bus is gone
    app = TopApp(host, address, interval, selection, light=light)
    loop = asyncio.get_running_loop()
    gc.freeze()  # what is loaded stays: to look through it again and again would be a fifth of the work
    for number in _ENDS:  # without this, the terminal would stay as the screen had made it
        loop.add_signal_handler(number, app.exit, 128 + number)
    try:
        code = await app.run_async()
    finally:
        for number in _ENDS:
            loop.remove_signal_handler(number)
        log.setLevel(before)
    if app.error is not None:
        raise app.error
    return code or terminal.DONE
