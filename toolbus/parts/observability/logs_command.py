"""Implements ``toolbus logs``, the output of plugins on whatever machine they run, and ``toolbus dev log-level``."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.call_command import Steps, call_bus_tool, operator, show
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.protocol.tool import Result
    from toolbus.sdk import Host

EPILOG = epilog(
    (
        "toolbus logs",
        "toolbus logs weather",
        "toolbus logs weather -f -n 20",
        "toolbus logs weather --source run.desk.4711-3f9a2c --json",
    ),
    """
    Without a name it shows everything that has output: plugins of `toolbus run` on any machine whose bus this is, the
    drop-in tools of the bus (source toolbus.dropin) and its mounts (toolbus.mounts). Where several plugins have the
    name, --source says which one; of one that runs and others that ended, the one that runs is shown.

    The supervisor of a plugin stores its output in memory, 1 MiB each (`toolbus run --tail-bytes`). Lines that were
    overwritten before they could be printed are counted on standard error; with --json in a line {"lost":NUMBER}. What
    plugins colour stays coloured in a terminal; all other escape sequences and control characters are dropped.

    With --follow it continues until Ctrl-C, also when the plugin, its supervisor or the bus is restarted.
    """,
    "0 done, 1 unknown plugin, or the bus refused, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)
TOOL = "toolbus:plugin_logs"
FOLLOW_SECONDS = 30.0  # how long one request waits for further lines
RETRY_SECONDS = 1.0  # before a request that failed is made again
BATCH_LINES = 500
_COLUMNS = ("PLUGIN", "STATE", "PID", "RESTARTS", "SINCE", "LINES", "SOURCE", "LAST EXIT")


def logs(
    plugin: Annotated[str | None, typer.Argument(metavar="[PLUGIN]", help="Whose output; none: a table.")] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Where it runs, as in the table.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=2000, help="Print at most this many of the newest lines.")
    ] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue, and print each line as it comes.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document for the table, JSON lines for output.")
    ] = False,
) -> None:
    """Show the output of plugins, on whatever machine they run."""
    target = BusTarget(bus, credential)
    if plugin is None:
        if follow:
            terminal.fail("--follow needs a plugin: `toolbus logs` lists them", terminal.USAGE)
        print_plugins(call_bus_tool(target, "plugin_logs", {"source": source or ""}), as_json)
        return
    request = {"plugin": plugin, "source": source or "", "lines": lines}
    if follow:
        bus_client.with_host(target, lambda host: follow_output(host, request, as_json))
    else:
        _print_lines(call_bus_tool(target, "plugin_logs", request), as_json)


async def follow_output(
    host: Host, request: Mapping[str, Any], as_json: bool, *, retry_seconds: float = RETRY_SECONDS
) -> None:
    """Prints lines as they come, from wherever the plugin runs at the moment.

    A terminal that Ctrl-S stopped stops the prints too. The session of the host stays, the supervisor stores what comes
    meanwhile, and its answer counts what it has overwritten.
    """
    result = await host.call(TOOL, request, timeout=bus_client.REPLY_SECONDS)
    if failure_of(result):
        show(result, as_json=False, of_bus=True)
    answer, problem = result.output, ""
    while True:
        _print_lines(answer, as_json)
        place, position = answer["source"], answer["next"]
        more = {"lines": BATCH_LINES, "wait_seconds": FOLLOW_SECONDS}
        while failure := failure_of(result := await _read(host, request, **more, source=place, since=position)):
            # The plugin's supervisor, or the bus, does not answer: try again until it, or its replacement, does.
            if failure != problem:
                problem = failure
                terminal.print_note(f"{failure} (trying again)")
            await asyncio.sleep(retry_seconds)
            now = await _read(host, request, lines=0)
            if not failure_of(now) and now.output["source"] != place:
                place, position = now.output["source"], 0
        answer, problem = result.output, ""


async def _read(host: Host, request: Mapping[str, Any], **more: Any) -> Result:
    return await host.call(TOOL, {**request, **more}, timeout=FOLLOW_SECONDS + bus_client.REPLY_SECONDS)


def failure_of(result: Result) -> str:
    """Returns why a request failed; "" where it did not."""
    if result.error is not None:
        return result.error.message
    return str(result.output) if result.is_error else ""


def _print_lines(answer: Mapping[str, Any], as_json: bool) -> None:
    if answer.get("lost"):
        if as_json:
            terminal.print_json({"lost": answer["lost"]}, line=True)
        else:
            terminal.print_note(f"{answer['lost']} lines were overwritten before they could be printed")
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in answer["lines"]:
        if as_json:
            terminal.print_json(line, line=True)
        else:
            terminal.print_output(_event(line), coloured=coloured)


def _event(line: Mapping[str, Any]) -> str:
    """Returns a line of output as it stands, and an event with a mark."""
    text = str(line.get("text", ""))
    return text if line.get("stream") in ("stdout", "stderr") else f"* {text}"


def print_plugins(answer: Mapping[str, Any], as_json: bool) -> None:
    """Prints the table of plugins, and the sources that did not answer."""
    if as_json:
        terminal.print_json(answer)
        return
    rows = [_row(row) for row in answer["plugins"]]
    terminal.print_table(_COLUMNS, rows)
    for source, why in answer["errors"].items():
        terminal.print_note(f"no answer from {source}: {why}")
    if not rows:
        terminal.print_note(
            "no plugin has output here: `toolbus run` and `toolbus serve --tools-dir` store that of theirs"
        )


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    since = float(row.get("since") or 0.0)
    return (
        str(row.get("plugin", "")),
        str(row.get("state") or "-"),
        str(row.get("pid") or "-"),
        str(row.get("restarts", "-")),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else "-",
        str(row.get("lines", "-")),
        str(row.get("source", "")),
        str(row.get("last_exit") or "-"),
    )


# -- the log of the bus --------------------------------------------------------------------------------------------

LOG_LEVEL_EPILOG = epilog(
    (
        "toolbus dev log-level",
        "toolbus dev log-level toolbus.calls debug --for 60",
        "toolbus dev log-level toolbus.calls back",
    ),
    """
    Only loggers of toolbus can be changed: toolbus, and those below it. A changed level goes back by itself, at the
    latest when the bus stops; `back` puts it back at once. The levels of `toolbus serve --log-level` stay.
    """,
    "0 done, 1 the bus refused (the logger or level is unknown, for example), 2 wrong usage, 3 no bus found.",
)
_BACK = "back"


@operator
def log_level(
    logger: Annotated[str | None, typer.Argument(metavar="[LOGGER]", help="The logger, such as toolbus.calls.")] = None,
    level: Annotated[
        str | None, typer.Argument(metavar="[LEVEL]", help="debug, info, warning, error; or back, the level before.")
    ] = None,
    *,
    seconds: Annotated[float, typer.Option("--for", metavar="SECONDS", help="How long.")] = 600.0,
) -> Steps:
    """Show the levels of the bus's log, or change one for a while."""
    if logger is not None and level is None:
        terminal.fail("a logger needs a level: debug, info, warning, error or back", terminal.USAGE)
    request: dict[str, Any] = {}
    if logger is not None and level is not None:
        request = {"logger": logger, "level": "" if level.lower() == _BACK else level.lower(), "seconds": seconds}
    answer = yield "log_level", request
    top = logger or "toolbus"

    def show() -> None:
        rows = []
        for name, shown in answer["levels"].items():
            if name == top or name.startswith(f"{top}."):
                changed = answer["changed"].get(name)
                back = f"{changed['before'] or 'as above it'} in {changed['seconds']:g} s" if changed else "-"
                rows.append((name, shown, back))
        terminal.print_table(("LOGGER", "LEVEL", "GOES BACK TO"), rows)

    yield show
