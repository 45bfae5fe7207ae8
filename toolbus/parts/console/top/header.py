"""Writes what stands above the table of a screen: the bus, its figures, the names of the tables, what is selected."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from toolbus.common.text import clean_line
from toolbus.parts.console.top import frame, units
from toolbus.parts.console.top.bus_state import BusState
from toolbus.parts.console.top.digest_reader import ConnectionLoss
from toolbus.parts.console.top.views import Selection, View

RATE_BARS = 24
RATE_BARS_LEAST = 12
_MUTED = "$foreground 60%"

_Parts = list[Content | tuple[str, str]]


class ViewTab(Static):
    """The name of a table, with its key; a click shows it."""

    def __init__(self, view: View) -> None:
        self.view = view
        super().__init__(id=f"tab-{view.name}")

    async def on_click(self) -> None:
        await self.run_action(f"app.view({self.view.name!r})")


def bus_line(state: BusState, address: str, now: float, loss: ConnectionLoss | None, *, is_paused: bool) -> Content:
    parts: _Parts = [
        (f" toolbus {clean_line(str(state.bus.get('version') or ''))} ", "bold $primary"),
        Content(f" {clean_line(address)}  "),
    ]
    if loss is not None:
        parts.append((f"no answer since {units.clock(loss.since)}, reconnecting", "bold $error"))
        parts.append((f"  {clean_line(loss.why)}", "$error"))
    elif not state.known:
        parts.append(("connecting", "$warning"))
    else:
        word, began = frame.state_word(state), state.bus.get("began")
        parts.append((word, "bold $success" if word == "serving" else "bold $warning"))
        parts.append((f"  up {units.duration(now - began)}" if began is not None else "", _MUTED))
        parts.append((f"  {units.clock(now)}", _MUTED))
    if is_paused:
        parts.append(("  PAUSED: p goes on", "bold $warning"))
    return Content.assemble(*parts)


def figures(state: BusState, width: int) -> Content:
    """Returns the counts of the whole bus, as many as fit: the first ones say most."""
    bus = state.bus
    failed = bus.get("total_failed")
    begin = Content.styled(f" {units.rate(bus.get('rate')):>6} calls/s ", "bold")
    parts: _Parts = [
        Content(f"  {frame.in_flight(state)}"),
        Content(f"  {units.count(bus.get('total'))} calls"),
        (f"  {units.count(failed)} errors", "$error" if failed else _MUTED),
    ]
    if state.lost:
        parts.append((f"  {units.count(state.lost)} calls lost (ended faster than read)", "$warning"))
    parts.append((f"  held {units.size(bus.get('held_bytes'))}", _MUTED))
    parts.append((f"  lag {units.duration(bus.get('loop_lag'))}", _MUTED))
    parts.append((f"  late {units.count(bus.get('late'))}", _MUTED))
    contents = [part if isinstance(part, Content) else Content.styled(*part) for part in parts]
    room = width - begin.cell_length - sum(each.cell_length for each in contents)
    while len(contents) > 1 and room < RATE_BARS_LEAST:
        room += contents.pop().cell_length
    bars = units.sparkline(state.rates, max(RATE_BARS_LEAST, min(RATE_BARS, room)))
    return Content.assemble(begin, Content.styled(bars, "$accent"), *contents)


def tab(state: BusState, view: View, *, is_shown: bool) -> Content:
    """Returns the name of a table with its key and how much it has."""
    counts = {"tools": len(state.tools), "sources": len(state.sources), "calls": len(state.running)}
    count = counts.get(view.name, sum(each.count for each in state.failures.values()))
    what = {"calls": " running", "errors": " seen"}.get(view.name, "")
    text = f" {view.title[0].lower()} {view.title} {units.count(count)}{what} "
    return Content.styled(text, "reverse bold" if is_shown else _MUTED)


def selected(selection: Selection) -> Content:
    """Returns which lines are shown, where not all are."""
    parts = [f"source {selection.source}"] if selection.source else []
    parts += [f"filter {selection.filter}"] if selection.filter else []
    return Content.styled("  " + ", ".join(map(clean_line, parts)), "$warning")
