"""Implements ``toolbus calls``: prints how the newest calls ended, follows further ones, cancels one that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.call_command import call_bus_tool, show
from toolbus.cli.help_text import epilog
from toolbus.common.text import list_names, shorten

if TYPE_CHECKING:
    from toolbus.sdk import Host

EPILOG = epilog(
    (
        "toolbus calls",
        "toolbus calls --limit 10 --source weather --json",
        "toolbus calls --follow --user u-17",
        "toolbus calls --outcome TOOL --contents",
        "toolbus calls --slow --limit 10",
        "toolbus calls cancel 102832457529680",
    ),
    """
    The bus keeps records of the last 1,000 calls; the newest is printed first. ROUND is the round of a model's turn,
    from 1, and the position of the call in it, from 0. IN and OUT are the lengths of arguments and output in
    characters. After NAME stands what the bus repaired in the arguments.

    With --follow the newest calls are printed in the order in which they ended, and then each further call as it ends,
    until Ctrl-C. It continues when the bus is restarted. Calls that ended faster than they could be printed are a line
    with their number, on standard error; with --json a line {"lost":NUMBER}. It counts them whatever the filters say.

    cancel ends a running call of any caller, which gets the error CANCELLED. ID is the bus's own, as
    `toolbus top`, `toolbus console` and the log show it. Keys need the scope administer = ["drain"] for it.

    `toolbus top` shows which calls run now, and how each tool does; `toolbus console` shows the calls that a call made.

    Arguments and outputs are recorded only by a bus that was started with `toolbus serve --record-contents`, without
    what looks like a secret. The table shortens them to 60 characters, --json prints up to 4,096.
    """,
    "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)

FOLLOW_SECONDS = 30.0  # how long one request waits for further calls
FOLLOW_LIMIT = 50  # calls of one answer: with the longest contents it stays below the 4 MiB of a result
_CALLS_TOOL = "toolbus:calls"  # its own calls are not recorded
MAX_REPAIRS_SHOWN = 3  # in a table
MAX_SHOWN = 60  # characters of arguments or output in a table
# Headings, with the width of each column with --follow, which cannot know the rows that follow.
_COLUMNS = (
    ("OUTCOME", 17), ("MS", 8), ("SOURCE", 12), ("CALLER", 12), ("USER", 8), ("ROUND", 5), ("IN", 5), ("OUT", 5),
    ("CALL", 10), ("NAME", 16),
)  # fmt: skip
_SLOW_KEYS = ("source", "caller", "call_id", "tool")
_CONTENTS = (("ARGUMENTS", MAX_SHOWN), ("OUTPUT", 0))


class CallVerb(StrEnum):
    """What to do with one call."""

    CANCEL = "cancel"


def calls(
    verb: Annotated[
        CallVerb | None, typer.Argument(metavar="cancel", help="What to do (default: list calls that ended).")
    ] = None,
    call_id: Annotated[str | None, typer.Argument(metavar="ID", help="The bus's own id of the call.")] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Print at most this many calls; with --follow, to begin with.")
    ] = 50,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls of tools of this source.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls of this tool.")] = None,
    caller: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls by this source.")] = None,
    user: Annotated[str | None, typer.Option(metavar="ID", help="Only calls on behalf of this user.")] = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            metavar="OK|CODE", help="Only calls with this outcome: OK, or an error code such as TOOL or UNAVAILABLE."
        ),
    ] = None,
    contents: Annotated[bool, typer.Option("--contents", help="Print recorded arguments and outputs too.")] = False,
    slow: Annotated[
        bool, typer.Option("--slow", help="Print the slowest calls of the last hour instead, slowest first.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue, and print each call as it ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with --follow, JSON lines.")
    ] = False,
) -> None:
    """Show the newest calls and how they ended, or cancel one that runs."""
    target = BusTarget(bus, credential)
    narrows = follow or any((source, name, caller, user, outcome, contents))
    if verb is not None:
        if narrows or slow:
            terminal.fail("cancel goes with --json only: the ID says which call", terminal.USAGE)
        if not call_id:
            terminal.fail("cancel needs the ID of a call that runs: `toolbus top` shows them", terminal.USAGE)
        _cancel(target, call_id, as_json)
        return
    if slow:
        if narrows:
            terminal.fail("--slow goes with --limit and --json only", terminal.USAGE)
        _print_slow(call_bus_tool(target, "slow_calls", {"limit": limit}), as_json)
        return
    filters: dict[str, Any] = {"limit": limit, "source": source or "", "name": name or "", "caller": caller or ""}
    filters |= {"user_id": user or "", "outcome": _outcome(outcome)}
    columns = _COLUMNS + _CONTENTS if contents else _COLUMNS
    heads = [head for head, _ in columns]
    if follow:
        if not as_json:
            terminal.print_row(heads, [width for _, width in columns])
        bus_client.with_host(target, lambda host: _follow(host, filters, columns, contents, as_json))
        return
    records = call_bus_tool(target, "calls", filters)
    if as_json:
        terminal.print_json([_record(each, contents) for each in records])
        return
    terminal.print_table(heads, [_row(each, contents) for each in records])
    if contents and records and not any("arguments" in each for each in records):
        terminal.print_note("this bus does not record contents: start it with `toolbus serve --record-contents`")


def _cancel(bus: BusTarget, call_id: str, as_json: bool) -> None:
    answer = call_bus_tool(bus, "cancel_call", {"id": call_id})
    terminal.print_outcome(f"cancelled call {call_id} of {answer['caller']} to {answer['name']}", answer, as_json)


def _print_slow(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json(answer)
        return
    rows = [
        (f"{call['seconds']:.2f}", str(call["outcome"]).lower(), *(str(call.get(key, "-")) for key in _SLOW_KEYS))
        for call in answer["calls"]
    ]
    terminal.print_table(("SECONDS", "OUTCOME", "SOURCE", "CALLER", "CALL", "TOOL"), rows)
    if not answer["slow_seconds"]:
        terminal.print_note("this bus notes no slow calls: set slow_seconds in its configuration")
    elif not rows:
        terminal.print_note(f"no call of the last hour took longer than {answer['slow_seconds']:g} s")


def _outcome(word: str | None) -> str:
    if not word:
        return ""
    from toolbus.errors import Code
    from toolbus.protocol.questions import INPUT_REQUIRED_OUTCOME

    outcomes = ["OK", INPUT_REQUIRED_OUTCOME, *(code.name for code in Code if code)]
    if word.upper() not in outcomes:
        terminal.fail(f"--outcome is {word!r}, it must be one of {', '.join(outcomes)}", terminal.USAGE)
    return word.upper()


async def _follow(
    host: Host, filters: Mapping[str, Any], columns: Sequence[tuple[str, int]], contents: bool, as_json: bool
) -> None:
    answer = await _request(host, filters)
    answer["calls"].reverse()
    while True:
        if lost := answer["lost"]:
            if as_json:
                terminal.print_json({"lost": lost}, line=True)
            else:
                terminal.print_note(f"{lost} calls lost: they ended faster than they could be printed")
        for record in answer["calls"]:
            if as_json:
                terminal.print_json(_record(record, contents), line=True)
            else:
                terminal.print_row(_row(record, contents), [width for _, width in columns])
        request = {"since": answer["next"], "wait_seconds": FOLLOW_SECONDS, "limit": FOLLOW_LIMIT}
        answer = await _request(host, {**filters, **request})


async def _request(host: Host, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a request until it succeeds: waits for a bus that is restarted, like `watch`."""
    from toolbus.errors import Code

    while True:
        timeout = FOLLOW_SECONDS + bus_client.REPLY_SECONDS
        result = await host.call(_CALLS_TOOL, {**arguments, "follow": True}, timeout=timeout)
        if result.error is None:
            answer: dict[str, Any] = result.output
            return answer
        if result.error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            show(result, as_json=False, of_bus=True)


def _record(record: Mapping[str, Any], contents: bool) -> dict[str, Any]:
    """Returns a record for JSON; arguments and output only with --contents."""
    return {key: value for key, value in record.items() if contents or key not in ("arguments", "output")}


def _name(record: Mapping[str, Any]) -> str:
    """Returns the name of the tool, and what was repaired in its arguments; defaults are nothing to correct."""
    repairs = [
        f"{each['path']}: {each['from']} to {each['to']}"
        for each in record.get("repairs", ())
        if each["from"] != "absent"
    ]
    name = str(record["name"])
    return f"{name} (repaired {list_names(repairs, MAX_REPAIRS_SHOWN)})" if repairs else name


def _row(record: Mapping[str, Any], contents: bool) -> tuple[str, ...]:
    """Returns a record as cells; `-` for an unknown value."""
    place = f"{record['round']}.{record['order']}" if record["round"] or record["order"] else "-"
    cells = (
        *(str(record["outcome"]).lower(), f"{record['seconds'] * 1000:.1f}"),
        *(str(record[key]) or "-" for key in ("source", "caller", "user_id")),
        *(place, str(record["arguments_size"]), str(record["output_size"]), str(record["call_id"]), _name(record)),
    )
    if not contents:
        return cells
    return (*cells, *(shorten(str(record.get(key, "-")), MAX_SHOWN) for key in ("arguments", "output")))
