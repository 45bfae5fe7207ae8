"""Implements ``toolbus replay``: plays recorded calls against another build, and shows what is different."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.help_text import epilog
from toolbus.errors import InvalidRequest
from toolbus.parts.recordings.comparison import (
    CHANGED,
    EQUAL,
    FAILED,
    SKIPPED,
    RecordingLine,
    ReplayResult,
    ToolReport,
    Volatile,
    judged,
    read_recording,
)
from toolbus.parts.recordings.recording import described

if TYPE_CHECKING:
    from toolbus.sdk import Host
    from toolbus.sdk.listing import ListedTool

EPILOG = epilog(
    (
        "toolbus replay calls.jsonl weather.py",
        "toolbus replay calls.jsonl weather.py --ignore updated_at --ignore 'output.items.*.id'",
        "toolbus replay calls.jsonl --bus 127.0.0.1:48930 --slower 1.5",
    ),
    """
    Plays the calls of a file that `toolbus record` has written, one after the other and in their order. With PATH, a
    plugin's file or folder, they are played in this process, on a bus of their own; without, on the bus of --bus.
    A call is equal, changed (its differences are printed), or failed: it ended with another error than then, with one
    where there was none, or without one. RATIO is how many times as long the calls of a tool take now. Only calls of
    tools that are offered are played. Left out are calls of tools that are marked destructive, unless --destructive
    says so, and those whose arguments a recording does not keep.

    --ignore names fields that may differ: a word is a field of that name anywhere; with dots it is a path, in which *
    is one name or index and ** any number of them. Paths begin with output, content or error.
    """,
    "0 all that was played is equal, 1 something changed, failed or is slower than --slower, or nothing was played, "
    "2 wrong usage, 3 no bus found.",
)
LINES_SHOWN = 5  # differences of one call on a terminal
CALLS_SHOWN = 5  # calls of one tool whose differences are printed


def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `toolbus record` has written.")],
    paths: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="Plugins: files or folders.")] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="A field that may differ; may be repeated.")
    ] = None,
    slower: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="RATIO", help="Fail where a tool takes so many times as long, and 20 ms more."),
    ] = None,
    destructive: Annotated[bool, typer.Option("--destructive", help="Play destructive tools too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Play recorded calls against another build of a plugin."""
    source = context.get_parameter_source("bus")
    if paths and source is not None and source.name == "COMMANDLINE":  # not TOOLBUS_ADDRESS, which other commands need
        terminal.fail("PATH runs plugins on a bus of their own: leave out --bus, or PATH", terminal.USAGE)
    try:
        calls = read_recording(file)
    except InvalidRequest as error:
        terminal.fail(str(error), terminal.USAGE)
    except OSError as error:
        terminal.fail(f"{file} cannot be read: {error.strerror}", terminal.USAGE)
    volatile = Volatile(ignore or ())
    if paths:
        with terminal.wrong_usage():
            reports = asyncio.run(_on_own_bus(paths, calls, volatile, destructive))
    else:
        target = BusTarget(bus, credential)
        reports = bus_client.with_host(target, lambda host: _play(host, calls, volatile, destructive))
    ratio = slower or float("inf")
    played = sum(len(each.played) - each.count(SKIPPED) for each in reports)
    wrong = any(each.count(CHANGED) or each.count(FAILED) or each.is_slower(ratio) for each in reports)
    if as_json:
        terminal.print_json({"equal": bool(played) and not wrong, "tools": [each.described(ratio) for each in reports]})
    else:
        _print(reports, ratio)
    if wrong or not played:
        raise typer.Exit(terminal.REFUSED)


async def _on_own_bus(
    paths: Sequence[Path], calls: Sequence[RecordingLine], volatile: Volatile, destructive: bool
) -> list[ToolReport]:
    from toolbus.testing import running_bus

    first, *others = paths
    async with running_bus(first, *others) as host:
        return await _play(host, calls, volatile, destructive)


async def _play(host: Host, calls: Sequence[RecordingLine], volatile: Volatile, destructive: bool) -> list[ToolReport]:
    listed = {each.name: each for each in await host.list()}
    reports: dict[tuple[str, str], ToolReport] = {}
    for call in calls:
        tool = listed.get(call.tool)
        report = reports.setdefault(
            (call.tool, call.schema), ToolReport(call.tool, call.schema, tool.schema_hash if tool is not None else "")
        )
        why = _why_skipped(call, tool, destructive)
        if why:
            report.played.append(ReplayResult(call, SKIPPED, [why]))
            continue
        began = time.perf_counter()
        result = await host.call(call.tool, call.arguments, context=bus_client.call_context(call.user_id or None))
        seconds = time.perf_counter() - began
        report.played.append(judged(call, await asyncio.to_thread(described, result), seconds, volatile))
    return list(reports.values())


def _why_skipped(call: RecordingLine, tool: ListedTool | None, destructive: bool) -> str:
    if tool is None:
        return "no such tool is offered"
    if tool.tool.annotations.destructive and not destructive:
        return "it is marked destructive: --destructive plays it"
    return call.unplayable


def _print(reports: Sequence[ToolReport], slower: float) -> None:
    rows = []
    for each in reports:
        counts = [str(each.count(outcome)) for outcome in (EQUAL, CHANGED, FAILED, SKIPPED)]
        ratio = "-" if each.ratio is None else f"{each.ratio:.1f}{' slower' * each.is_slower(slower)}"
        schema = "gone" if not each.schema_now else "same" if each.schema_now == each.schema else "changed"
        rows.append((each.tool, *counts, ratio, schema))
    terminal.print_table(("TOOL", "EQUAL", "CHANGED", "FAILED", "SKIPPED", "RATIO", "SCHEMA"), rows)
    for report in reports:
        different = [each for each in report.played if each.outcome in (CHANGED, FAILED)]
        for call in different[:CALLS_SHOWN]:
            more = [f"and {len(call.notes) - LINES_SHOWN} more"] if len(call.notes) > LINES_SHOWN else []
            lines = [f"{report.tool}, line {call.call.line}: {call.outcome}", *call.notes[:LINES_SHOWN], *more]
            terminal.print_lines("\n".join(lines))
        if len(different) > CALLS_SHOWN:
            terminal.print_lines(f"{report.tool}: {len(different) - CALLS_SHOWN} further calls; --json has all")
        for why in dict.fromkeys(note for each in report.played if each.outcome == SKIPPED for note in each.notes):
            count = sum(why in each.notes for each in report.played)
            terminal.print_note(f"{report.tool}: {count} calls left out: {why}")
