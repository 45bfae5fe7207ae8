"""``toolbus list``, ``watch`` and ``tools``: what the bus offers, now and as it changes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, JsonLinesOption, JsonOption, LevelOption, UserOption
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.sdk import Host
    from toolbus.sdk.listing import CatalogChange, ListedTool

LIST_MANUAL = manual(
    (
        "toolbus list",
        "toolbus list --role Lanlan --json",
        "toolbus list --all --source weather",
        "toolbus list --user u-17 --level 50",
    ),
    """
    With --user it lists what can be called on behalf of that user, without it what can be called for nobody in
    particular: `toolbus permissions` shows the rules. Tools that ask for an access level are listed with
    a --level that is high enough.

    A tool with a callback URL is offline while nobody accepts a connection there. A warning before a description is for
    the operator (a main server refuses the tool, say); the tool can be called all the same. What a source itself wants
    an operator to know (a file that could not be loaded, how its tools are sandboxed) follows on standard error.
    """,
    "0 done (also where nothing is offered), 1 the bus said no (an unknown role, say), 2 wrong usage, 3 no bus there.",
)
WATCH_MANUAL = manual(
    ("toolbus watch", "toolbus watch --json"),
    """
    First everything that is offered, then what changes: + added, ~ changed, - gone. It goes on across restarts of the
    bus, with everything again; Ctrl-C ends it.
    """,
    "1 the bus said no, 2 wrong usage, 3 no bus there at the start, 130 after Ctrl-C.",
)
TOOLS_MANUAL = manual(
    ("toolbus tools", "toolbus call toolbus:stats", "toolbus tools bundled", "toolbus tools add this_host"),
    "",
    "0 done, 1 the bus said no, 2 wrong usage, 3 no bus there.",
)
_BUS_SOURCE = "toolbus"


def list_(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Only these tools.")] = None,
    bus: BusOption = None,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Only tools of this role.")] = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only tools of this source.")] = None,
    user: UserOption = None,
    level: LevelOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also tools whose plugin is offline.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the tools that the bus offers."""
    conditions = {"role": role, "names": names or (), "source": source or "", "include_offline": everything}
    _list(bus, as_json, user, level, **conditions)


def tools(bus: BusOption = None, as_json: JsonOption = False) -> None:
    """List the bus's own tools, which `list` leaves out."""
    _list(bus, as_json, None, None, source=_BUS_SOURCE)


def watch(bus: BusOption = None, as_json: JsonLinesOption = False) -> None:
    """Show tools as they come, change and go."""
    bus_client.with_host(bus, lambda host: _watch(host, as_json))


async def _watch(host: Host, as_json: bool) -> None:
    async for change in host.watch():
        if as_json:
            terminal.say_json(_change(change), line=True)
            continue
        for sign, listed in [*(("+", each) for each in change.added), *(("~", each) for each in change.changed)]:
            print(sign, terminal.clean(listed.name), listed.state, listed.source, flush=True)
        for gone in change.removed:
            print("-", terminal.clean(gone.name), "gone", gone.source, flush=True)


def _change(change: CatalogChange) -> dict[str, Any]:
    return {
        "revision": change.revision,
        "full": change.full,
        "added": [as_record(each) for each in change.added],
        "changed": [as_record(each) for each in change.changed],
        "removed": [{"name": each.name, "source": each.source} for each in change.removed],
    }


def _list(bus: str | None, as_json: bool, user: str | None, level: int | None, **conditions: Any) -> None:
    listing = bus_client.listing(bus, user, level, **conditions)
    if as_json:
        notices = [{"source": source, "text": text} for source, text in listing.notices]
        terminal.say_json(
            {"revision": listing.revision, "tools": [as_record(each) for each in listing], "notices": notices}
        )
        return
    heads = ("NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN FLIGHT", "DESCRIPTION")
    warned = {number for number, each in enumerate(listing) if each.warnings}
    terminal.table(heads, [_row(each) for each in listing], warned)
    if listing.notices:
        sys.stdout.flush()
        terminal.table(("SOURCE", "NOTICE"), listing.notices, stream=sys.stderr)


def _row(listed: ListedTool) -> tuple[str, ...]:
    in_flight = f"{listed.in_flight} + {listed.stuck} stuck" if listed.stuck else str(listed.in_flight)
    lost = [f"({listed.last_error})"] if listed.last_error else []
    about = " ".join([*(f"(warning: {each})" for each in listed.warnings), *lost, listed.tool.description])
    return (
        *(listed.name, listed.state, listed.source, ",".join(listed.roles)),
        *(str(listed.sessions), in_flight, about),
    )


def as_record(listed: ListedTool) -> dict[str, Any]:
    """Returns a line of the catalog as JSON shows it: what the tool's author said, below the state."""
    record = asdict(listed)
    tool = record.pop("tool")
    del tool["schema_hash"]
    tool["parameters"] = json.loads(tool.pop("parameters_json"))
    metadata = tool.pop("metadata_json")
    tool["metadata"] = json.loads(metadata) if metadata else None
    del tool["role"]  # the one it was declared for; `roles` says which have it
    return {"name": listed.name, **record, **tool}
