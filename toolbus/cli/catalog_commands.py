"""Implements ``toolbus list``, ``watch``, ``plugins tools`` and ``notifications``: what the bus has, as it comes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import (
    BusOption,
    BusTarget,
    CredentialOption,
    JsonLinesOption,
    JsonOption,
    LevelOption,
    RoleOption,
    UserOption,
)
from toolbus.cli.help_text import epilog
from toolbus.common.text import clean_line

if TYPE_CHECKING:
    from toolbus.sdk import Host
    from toolbus.sdk.listing import CatalogChange, ListedTool, Listing

LIST_EPILOG = epilog(
    (
        "toolbus list",
        "toolbus list --role Lanlan --json",
        "toolbus list --all --source weather",
        "toolbus list --user u-17 --level 50",
        "toolbus list --refused",
    ),
    """
    With --user it lists the tools that can be called on behalf of that user, without --user those that need no user;
    `toolbus access show` shows the rules. A tool that needs an access level is listed if --level is high enough.

    A tool with a callback URL is offline while no server accepts a connection there. A warning before a description is
    for the operator, for example that a main server refuses the tool; the tool can still be called. Notices of the
    sources, for example about a file that could not be loaded, are printed to standard error. A waiting tool is for a
    role that the bus does not have: toolbus call toolbus:role_add role=NAME adds it.

    A tool that the bus refuses is not offered; the other tools of its plugin are. --refused lists those instead,
    each with what is wrong and how to fix it. The bus tries it again when its plugin declares it again, or a role, a
    permission or a limit changes.

    `toolbus top` shows how often the tools are called, how long that takes and how often it fails; `toolbus console`
    opens a page that shows them with their schemas, and tries them.
    """,
    "0 done (also if no tool is offered), 1 the bus refused (an unknown role, for example), 2 wrong usage, "
    "3 no bus found.",
)
WATCH_EPILOG = epilog(
    ("toolbus watch", "toolbus watch --json"),
    """
    Prints all tools first, then each change: + added, ~ changed, - removed. It continues when the bus is restarted, and
    prints all tools again; Ctrl-C ends it.
    """,
    "1 the bus refused, 2 wrong usage, 3 no bus found at the start, 130 after Ctrl-C.",
)
NOTIFICATIONS_EPILOG = epilog(
    ("toolbus plugins notifications", "toolbus plugins notifications --json"),
    """
    Prints the messages of plugins to users outside calls, as hosts get them, from now on. It continues when the bus is
    restarted; Ctrl-C ends it.
    """,
    "1 the bus refused, 2 wrong usage, 3 no bus found at the start, 130 after Ctrl-C.",
)
TOOLS_EPILOG = epilog(
    (
        "toolbus plugins tools",
        "toolbus call toolbus:stats",
        "toolbus plugins tools bundled",
        "toolbus plugins tools add this_host",
    ),
    "",
    "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found.",
)
_BUS_SOURCE = "toolbus"


def list_(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Only these tools (default: all).")
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    role: RoleOption = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only tools of this source (default: all sources).")
    ] = None,
    user: UserOption = None,
    level: LevelOption = None,
    everything: Annotated[bool, typer.Option("--all", help="List offline, waiting and unconfirmed tools too.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="List the tools that the bus refused instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the tools that the bus offers."""
    conditions = {"role": role, "names": names or (), "source": source or "", "include_offline": everything}
    target = BusTarget(bus, credential)
    listing = bus_client.listing(target, user, level, include_refused=True, **conditions)
    if refused:
        _print_refused(listing, as_json)
    else:
        _print(listing, as_json)


def tools(bus: BusTarget, as_json: bool) -> None:
    """List the bus's own tools, which `list` leaves out."""
    _print(bus_client.listing(bus, None, None, source=_BUS_SOURCE), as_json)


def watch(bus: BusOption = None, credential: CredentialOption = None, as_json: JsonLinesOption = False) -> None:
    """Print each tool as it is added, changed or removed."""
    bus_client.with_host(BusTarget(bus, credential), lambda host: _watch(host, as_json))


async def _watch(host: Host, as_json: bool) -> None:
    async for change in host.watch():
        if as_json:
            terminal.print_json(_change(change), line=True)
            continue
        for sign, listed in [*(("+", each) for each in change.added), *(("~", each) for each in change.changed)]:
            terminal.print_lines(f"{sign} {clean_line(listed.name)} {listed.state} {listed.source}")
        for removed in change.removed:
            terminal.print_lines(f"- {clean_line(removed.name)} gone {removed.source}")


def notifications(bus: BusOption = None, credential: CredentialOption = None, as_json: JsonLinesOption = False) -> None:
    """Print each notification as it comes."""
    bus_client.with_host(BusTarget(bus, credential), lambda host: _follow_notifications(host, as_json))


async def _follow_notifications(host: Host, as_json: bool) -> None:
    async for each in host.notifications():
        if as_json:
            terminal.print_json(asdict(each), line=True)
            continue
        if each.lost:
            terminal.print_lines(f"({each.lost} lost)")
        clock = datetime.fromtimestamp(each.time_seconds).strftime("%H:%M:%S")
        data = "" if each.data is None else f" {json.dumps(each.data, ensure_ascii=False)}"
        user = each.user or "everyone"
        terminal.print_lines(f"{clock} {each.source} to {clean_line(user)}: {clean_line(each.text + data)}")


def _change(change: CatalogChange) -> dict[str, Any]:
    return {
        "revision": change.revision,
        "full": change.full,
        "added": [as_record(each) for each in change.added],
        "changed": [as_record(each) for each in change.changed],
        "removed": [{"name": each.name, "source": each.source} for each in change.removed],
    }


def _print(listing: Listing, as_json: bool) -> None:
    if as_json:
        notices = [{"source": source, "text": text} for source, text in listing.notices]
        terminal.print_json(
            {"revision": listing.revision, "tools": [as_record(each) for each in listing], "notices": notices}
        )
        return
    heads = ("NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN FLIGHT", "DESCRIPTION")
    warned = {number for number, each in enumerate(listing) if each.warnings}
    terminal.print_table(heads, [_row(each) for each in listing], warned)
    if listing.notices:
        sys.stdout.flush()
        terminal.print_table(("SOURCE", "NOTICE"), listing.notices, stream=sys.stderr)
    if count := listing.refused_total:
        sys.stdout.flush()
        terminal.print_note(
            f"{count} {'tool is' if count == 1 else 'tools are'} refused: toolbus list --refused says why"
        )


def _print_refused(listing: Listing, as_json: bool) -> None:
    if as_json:
        terminal.print_json({"refused": [asdict(each) for each in listing.refused], "total": listing.refused_total})
        return
    rows = [(each.name, each.source, each.role or "", each.error) for each in listing.refused]
    terminal.print_table(("NAME", "SOURCE", "ROLE", "WHY"), rows)
    if (more := listing.refused_total - len(rows)) > 0:
        sys.stdout.flush()
        terminal.print_note(f"{more} more are refused: name a source or tools to see them")


def _row(listed: ListedTool) -> tuple[str, ...]:
    in_flight = f"{listed.in_flight} + {listed.stuck} stuck" if listed.stuck else str(listed.in_flight)
    error = [f"({listed.last_error})"] if listed.last_error else []
    about = " ".join([*(f"(warning: {each})" for each in listed.warnings), *error, listed.tool.description])
    return (
        *(listed.name, listed.state, listed.source, ",".join(listed.roles)),
        *(str(listed.sessions), in_flight, about),
    )


def as_record(listed: ListedTool) -> dict[str, Any]:
    """Returns an entry of the catalog for JSON: its state, then the declaration of its tool."""
    record = asdict(listed)
    tool = record.pop("tool")
    del tool["schema_hash"]
    tool["parameters"] = json.loads(tool.pop("parameters_json"))
    output_schema, metadata = tool.pop("output_schema_json"), tool.pop("metadata_json")
    tool["output_schema"] = json.loads(output_schema) if output_schema else None
    tool["metadata"] = json.loads(metadata) if metadata else None
    del tool["role"]  # the declared one; `roles` has those that offer it
    return {"name": listed.name, **record, **tool}
