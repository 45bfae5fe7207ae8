"""``toolbus calls``: how the newest calls ended, and each further one as it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption
from toolbus.cli.call_command import administer, show
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.sdk import Host

MANUAL = manual(
    (
        "toolbus calls",
        "toolbus calls --limit 10 --source weather --json",
        "toolbus calls --follow --user u-17",
        "toolbus calls --outcome TOOL --contents",
    ),
    """
    Newest first, of the last 1,000. ROUND is the round of a model's turn that asked for the call, from 1, and the
    call's place in it, from 0. IN and OUT are the characters of arguments and output.

    With --follow the newest come first, oldest of them on top, and then each call as it ends, until Ctrl-C; it goes on
    across restarts of the bus.

    Arguments and outputs are kept by a bus that was started with `toolbus serve --record-contents` only, without what
    looks like a secret; the table cuts them to 60 characters, --json shows what is kept, up to 4,096.
    """,
    "0 done, 1 the bus said no, 2 wrong usage, 3 no bus there, 130 after Ctrl-C.",
)

FOLLOW_SECONDS = 30.0  # how long one question waits for news
_READER = "toolbus:calls"  # its own calls are not recorded
MAX_SHOWN = 60  # characters of arguments or output in a table
# Heads, with the width that a column has while nobody knows what is still to come.
_COLUMNS = (
    ("OUTCOME", 17), ("MS", 8), ("SOURCE", 12), ("CALLER", 12), ("USER", 8), ("ROUND", 5), ("IN", 5), ("OUT", 5),
    ("CALL", 10), ("NAME", 16),
)  # fmt: skip
_CONTENTS = (("ARGUMENTS", MAX_SHOWN), ("OUTPUT", 0))


def calls(
    bus: BusOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many; with --follow, to begin with.")] = 50,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls of this source's tools.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls of this tool.")] = None,
    caller: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls by this source.")] = None,
    user: Annotated[str | None, typer.Option(metavar="ID", help="Only calls on behalf of this user.")] = None,
    outcome: Annotated[
        str | None, typer.Option(metavar="OK|CODE", help="Only calls that ended so: OK, TOOL, UNAVAILABLE …")
    ] = None,
    contents: Annotated[bool, typer.Option("--contents", help="Show arguments and outputs, where kept.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on, and show each call as it ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with --follow, JSON lines.")
    ] = False,
) -> None:
    """Show the newest calls and how they ended."""
    wanted: dict[str, Any] = {"limit": limit, "source": source or "", "name": name or "", "caller": caller or ""}
    wanted |= {"user_id": user or "", "outcome": _outcome(outcome)}
    if follow:
        columns = _COLUMNS + _CONTENTS if contents else _COLUMNS
        if not as_json:
            terminal.row([head for head, _ in columns], [width for _, width in columns])
        bus_client.with_host(bus, lambda host: _follow(host, wanted, lambda each: _say(each, contents, as_json)))
        return
    found = administer(bus, "calls", wanted)
    if as_json:
        terminal.say_json([_record(each, contents) for each in found])
        return
    heads = [head for head, _ in (_COLUMNS + _CONTENTS if contents else _COLUMNS)]
    terminal.table(heads, [_row(each, contents) for each in found])
    if contents and found and not any("arguments" in each for each in found):
        print("toolbus: this bus keeps no contents: start it with `toolbus serve --record-contents`", file=sys.stderr)


def _outcome(word: str | None) -> str:
    if not word:
        return ""
    from toolbus.errors import Code

    known = ["OK", *(code.name for code in Code if code)]
    if word.upper() not in known:
        terminal.fail(f"--outcome is {word!r}, it must be one of {', '.join(known)}", terminal.USAGE)
    return word.upper()


async def _follow(host: Host, wanted: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
    found = (await _asked(host, wanted))[::-1]
    since = 0
    while True:
        for record in found:
            since = record["number"]
            say(record)
        found = await _asked(host, {**wanted, "since": since, "wait_seconds": FOLLOW_SECONDS})


async def _asked(host: Host, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Asks until there is an answer: a bus that is away for a while is waited for, like in `watch`."""
    from toolbus.errors import Code

    while True:
        result = await host.call(_READER, arguments, timeout=FOLLOW_SECONDS + bus_client.ANSWER_SECONDS)
        if result.error is None:
            found: list[dict[str, Any]] = result.output
            return found
        if result.error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            show(result, as_json=False)


def _say(record: Mapping[str, Any], contents: bool, as_json: bool) -> None:
    if as_json:
        terminal.say_json(_record(record, contents), line=True)
    else:
        columns = _COLUMNS + _CONTENTS if contents else _COLUMNS
        terminal.row(_row(record, contents), [width for _, width in columns])


def _record(record: Mapping[str, Any], contents: bool) -> dict[str, Any]:
    """Returns a record as JSON shows it: arguments and output only where they were asked for."""
    return {key: value for key, value in record.items() if contents or key not in ("arguments", "output")}


def _row(record: Mapping[str, Any], contents: bool) -> tuple[str, ...]:
    """Returns a record as cells; `-` is what nobody said."""
    place = f"{record['round']}.{record['order']}" if record["round"] or record["order"] else "-"
    cells = (
        *(str(record["outcome"]).lower(), f"{record['seconds'] * 1000:.1f}"),
        *(str(record[key]) or "-" for key in ("source", "caller", "user_id")),
        *(place, str(record["arguments_size"]), str(record["output_size"]), str(record["call_id"]), record["name"]),
    )
    if not contents:
        return cells
    return (*cells, *(_cut(str(record.get(key, "-"))) for key in ("arguments", "output")))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
