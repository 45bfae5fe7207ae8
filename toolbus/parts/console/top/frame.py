"""Writes the state of a bus as one frame: as text for people, and as a JSON object for scripts.

The shape of the JSON object is documented (docs/reference/command-line.md) and only gets new fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from toolbus.parts.console.top import units
from toolbus.parts.console.top.bus_state import BusState, Row
from toolbus.parts.console.top.views import (
    CALLS,
    ERRORS,
    SOURCES,
    TOOLS,
    CallLine,
    FailureLine,
    Selection,
    View,
    select,
)

# Fields of the bus that the JSON object has, null where the bus did not say.
_OF_BUS = (
    *("at", "version", "bus_id", "instance", "began", "draining", "revision", "roles", "addresses"),
    *("total", "total_failed", "rate", "in_flight", "stuck", "held_bytes", "late", "loop_lag", "watchers"),
)
_NOT_IN_TEXT = {"last"}  # columns that need a terminal

Drawn: TypeAlias = tuple[Sequence[str], list[list[str]], str]
"""A table as text: headings, cells, and a note for below it, "" where no line is left out."""


def heading(state: BusState, address: str, now: float) -> tuple[str, ...]:
    """Returns the two lines above the tables."""
    bus = state.bus
    version, began = bus.get("version"), bus.get("began")
    uptime = units.duration(now - began) if began is not None else units.UNKNOWN
    first = (f"toolbus {version or units.UNKNOWN}", address, f"up {uptime}", state_word(state), units.clock(now))
    second = (
        f"{units.rate(bus.get('rate'))} calls/s",
        f"{units.count(bus.get('total'))} calls, {units.count(bus.get('total_failed'))} errors",
        in_flight(state),
        f"held {units.size(bus.get('held_bytes'))}",
        f"lag {units.duration(bus.get('loop_lag'))}",
        f"late {units.count(bus.get('late'))}",
    )
    lost = (f"{units.count(state.lost)} calls lost",) if state.lost else ()
    return "  ".join(first), "  ".join((*second, *lost))


def state_word(state: BusState) -> str:
    """Returns whether the bus takes calls."""
    if not state.known:
        return units.UNKNOWN
    return "draining" if state.bus.get("draining") else "serving"


def in_flight(state: BusState) -> str:
    """Returns how many calls run, and how many of them are stuck."""
    stuck = state.bus.get("stuck")
    return f"{units.count(state.bus.get('in_flight'))} in flight" + (f" ({stuck} stuck)" if stuck else "")


def text_frame(state: BusState, now: float, selection: Selection, limit: int) -> list[Drawn]:
    """Returns the tables of a frame.

    Args:
        selection: its order is that of the tools.
        limit: lines of each table.
    """
    narrowed = Selection(filter=selection.filter, source=selection.source)
    running = [line for line in select(CALLS, state, now, narrowed) if line.running]
    tables: list[tuple[View, list[Any]]] = [
        (TOOLS, select(TOOLS, state, now, selection)),
        (SOURCES, select(SOURCES, state, now, narrowed)),
        (CALLS, running),
        (ERRORS, select(ERRORS, state, now, narrowed)),
    ]
    return [_drawn(view, lines, limit) for view, lines in tables if lines or view is TOOLS]


def _drawn(view: View, lines: list[Any], limit: int) -> Drawn:
    columns = [each for each in view.columns if not (view is TOOLS and each.word in _NOT_IN_TEXT)]
    rows = [[column.cell(line) for column in columns] for line in lines[:limit]]
    more = f"{len(lines) - limit} more {view.name}: --rows shows more" if len(lines) > limit else ""
    return [column.title for column in columns], rows, more


def json_frame(state: BusState, address: str, now: float, selection: Selection) -> Row:
    """Returns the whole state as a JSON object: never only what changed."""
    narrowed = Selection(filter=selection.filter, source=selection.source)
    calls: list[CallLine] = select(CALLS, state, now, narrowed)
    failures: list[FailureLine] = select(ERRORS, state, now, narrowed)
    tools = [
        {
            "source": line.tool.source,
            "name": line.tool.name,
            "rate": None if line.rate is None else round(line.rate, 3),
            "calls": line.tool.calls,
            "failed": line.tool.failed,
            "p50": line.tool.p50,
            "p95": line.tool.p95,
            "in_flight": line.in_flight,
            "last_ended": line.tool.last_ended,
        }
        for line in select(TOOLS, state, now, selection)
    ]
    sources: list[Row] = [
        {"source": line.name, **line.entry, "sessions": [*line.sessions]}
        for line in select(SOURCES, state, now, narrowed)
    ]
    whole: dict[str, Any] = {"address": address, **{name: state.bus.get(name) for name in _OF_BUS}}
    return whole | {
        "ended": state.ended,
        "failed": state.failed,
        "lost": state.lost,
        "tools": tools,
        "sources": sources,
        "running": [line.call for line in calls if line.running],
        "calls": [line.call for line in calls if not line.running],
        "errors": [{"count": line.failure.count, "outcome": line.key[2], "newest": line.newest} for line in failures],
    }
