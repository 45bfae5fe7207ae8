"""Implements ``toolbus buses``: which of the buses of an address answer, and what each of them has."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import SOURCE, BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.help_text import epilog
from toolbus.parts.buses.addresses import every

BUSES_EPILOG = epilog(
    ("toolbus buses --bus bus-0:48931,bus-1:48931", "toolbus buses --bus dns:mtls:toolbus.internal:48931 --json"),
    """
    Asks each bus of a list, or of a name in DNS. The last column names tools that only this bus has: their plugin
    attaches to one of the buses, or is not connected to the others now. Buses that share their settings say how old
    these are there: up to 10 s, and more if the database is away.
    """,
    "0 all answer, 1 one is away, or refuses, 2 wrong usage.",
)
ANSWER_SECONDS = 5.0
MAX_SHOWN = 3  # tools in the last column


@dataclass(slots=True)
class BusRow:
    """What one bus answered.

    Attributes:
        state: ``live``, ``draining`` or ``away``.
        round_trip_ms: of a call; below 0 without an answer.
        sessions: None: the key may not see them, or it is away.
        only_here: tools that no other of the buses has.
        settings_age: how many seconds ago it read the settings that it shares; None: it shares none.
        reason: why it is away; "" if it is not.
    """

    address: str
    state: str = "away"
    version: str = ""
    round_trip_ms: float = -1.0
    sessions: int | None = None
    tools: int = 0
    only_here: list[str] | None = None
    settings_age: float | None = None
    reason: str = ""


def buses(bus: BusOption = None, credential: CredentialOption = None, as_json: JsonOption = False) -> None:
    """Show all buses that an address names: who answers, version, round trip, sessions, tools only there."""
    from toolbus.sdk.connection_settings import address_text, find_credential

    target = BusTarget(bus, credential)
    with terminal.wrong_usage():
        addresses = every(address_text(target.address or "", find_credential(target.credential)))
        rows = asyncio.run(_ask_all(addresses, find_credential(target.credential)))
    if as_json:
        terminal.print_json({"buses": [asdict(row) for row in rows]})
    else:
        _show(rows)
    if any(row.state == "away" for row in rows):
        raise typer.Exit(1)


async def _ask_all(addresses: list[str], credential: Any) -> list[BusRow]:
    rows = {address: BusRow(address) for address in addresses}
    log = logging.getLogger("toolbus.sdk")
    log.setLevel(logging.CRITICAL)  # the reason of each bus is below the table
    try:
        answers = await asyncio.gather(*(_ask(row, credential) for row in rows.values()))
    finally:
        log.setLevel(logging.NOTSET)
    names = [frozenset(answer) for answer in answers]
    for row, own in zip(rows.values(), names, strict=True):
        others = frozenset[str]().union(*(each for each in names if each is not own))
        row.only_here = sorted(own - others) if len(rows) > 1 and row.state != "away" else []
    return list(rows.values())


async def _ask(row: BusRow, credential: Any) -> list[str]:
    """Fills in what a bus answers; returns the names of its tools."""
    from toolbus.errors import ToolBusError
    from toolbus.sdk import Host

    host = Host(row.address, source=SOURCE, credential=credential)
    try:
        async with host, asyncio.timeout(ANSWER_SECONDS):
            await host.ready()
            began = time.perf_counter()
            answer = await host.call("toolbus:digest", timeout=ANSWER_SECONDS)  # of the console, which a bus may lack
            row.round_trip_ms = round((time.perf_counter() - began) * 1000, 2)
            digest = {} if answer.is_error else answer.output
            listing = await host.list(timeout=ANSWER_SECONDS)
    except TimeoutError:
        row.reason = str(host.unanswered(ANSWER_SECONDS))
    except ToolBusError as error:
        row.reason = str(error)
    else:
        row.state = "draining" if digest.get("draining") else "live"
        row.version = str(digest.get("version", ""))
        row.sessions = len(digest["sessions"]) if "sessions" in digest else None
        row.settings_age = digest.get("bus", digest).get("settings_age")
        row.tools = len(listing)
        return [each.name for each in listing]
    return []


def _show(rows: list[BusRow]) -> None:
    cells = []
    for row in rows:
        only = row.only_here or []
        shown = ", ".join(only[:MAX_SHOWN]) + (f" and {len(only) - MAX_SHOWN} more" if len(only) > MAX_SHOWN else "")
        trip = f"{row.round_trip_ms:.1f} ms" if row.round_trip_ms >= 0 else "-"
        sessions = "-" if row.sessions is None else str(row.sessions)
        age = "own" if row.settings_age is None else f"{row.settings_age:.0f} s old"
        counts = (str(row.tools), age) if row.state != "away" else ("-", "-")
        cells.append((row.address, row.state, row.version or "-", trip, sessions, *counts, shown))
    headings = ("BUS", "STATE", "VERSION", "ROUND TRIP", "SESSIONS", "TOOLS", "SETTINGS", "ONLY HERE")
    terminal.print_table(headings, cells)
    for row in rows:
        if row.reason:
            terminal.print_note(row.reason if row.address in row.reason else f"{row.address}: {row.reason}")
