"""``toolbus permissions``, ``permit``, ``grant`` and ``revoke``: who may call what, and who may offer tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.call_command import administer
from toolbus.cli.help_text import manual

MANUAL = manual(
    ("toolbus permissions", "toolbus permissions --json"),
    """
    Where there is no rule, everyone may. A call has to pass the rules for its tool, its role and its source, as far as
    there are any; one that names no user passes no rule but that for everyone. Sources that may not offer tools are
    listed too.
    """,
    "0 done, 1 the bus said no, 2 wrong usage, 3 no bus there.",
)
PERMIT_MANUAL = manual(
    (
        "toolbus permit tools send_email --user u-17 --user u-18",
        "toolbus permit roles Lanlan --everyone",
        "toolbus permit sources mail --nobody",
        "toolbus permit tools send_email --no-rule",
    ),
    """
    Replaces the rule for one tool, for the tools of a role, or for those of a source. It is in force at once, for calls
    and listings, and across restarts where the bus has a data directory; it counts more than a rule in the bus's
    configuration. A rule for a name that nobody has yet waits for it; of a tool it is said on standard error.
    """,
    "0 done, 1 the bus said no (it could not write the rule down, say), 2 wrong usage, 3 no bus there.",
)
RIGHT_MANUAL = manual(
    ("toolbus revoke plugin:mail", "toolbus grant plugin:mail"),
    """
    Every source may offer tools unless the bus's configuration (silenced) or an operator says otherwise. Where the
    right is revoked, the source's tools are withdrawn at once and its plugins stay connected; where it is granted
    again, they offer their tools again. Both are in force across restarts where the bus has a data directory.
    """,
    "0 done, 1 the bus said no (it could not write it down, say), 2 wrong usage, 3 no bus there.",
)
EVERYONE = "*"  # in a rule


class RuleKind(StrEnum):
    """What a rule is for."""

    TOOLS = "tools"
    ROLES = "roles"
    SOURCES = "sources"


def permissions(bus: BusOption = None, as_json: JsonOption = False) -> None:
    """Show which users may call what."""
    tables = administer(bus, "permissions", {})
    if as_json:
        terminal.say_json(tables)
        return
    silenced = tables.pop("silenced")
    rows = [(kind, name, _who(users)) for kind, table in tables.items() for name, users in table.items()]
    rows += [("source", name, "(may not offer tools)") for name in silenced]
    terminal.table(("KIND", "NAME", "USERS"), rows)


def permit(
    kind: Annotated[RuleKind, typer.Argument(metavar="tools|roles|sources", help="What the rule is for.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool, role or source.")],
    bus: BusOption = None,
    user: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="This user may, and nobody else; may be repeated.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="Everyone may, also calls that name no user.")] = False,
    nobody: Annotated[bool, typer.Option("--nobody", help="Nobody may.")] = False,
    no_rule: Annotated[bool, typer.Option("--no-rule", help="Take the rule away.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which users may call a tool, or the tools of a role or source."""
    if [bool(user), everyone, nobody, no_rule].count(True) != 1:
        terminal.fail(
            "say who may, in one way: --user ID (may be repeated), --everyone, --nobody or --no-rule", terminal.USAGE
        )
    if "" in (user or ()):
        terminal.fail("--user is empty: give a user's id; --everyone lets calls pass that name none", terminal.USAGE)
    if not name:
        terminal.fail(f"NAME is empty: name one of the {kind}", terminal.USAGE)
    users = None if no_rule else [EVERYONE] if everyone else list(user or ())
    tables = administer(bus, "permit", {"kind": kind.value, "name": name, "users": users})
    note = tables.pop("note", "")
    if as_json:
        terminal.say_json(tables)
    else:
        print(terminal.clean(f"{kind} {name}: {'(no rule)' if users is None else _who(tables[kind][name])}"))
    if note:
        print(terminal.clean(f"toolbus: {note}"), file=sys.stderr)


def grant(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Whose tools, as `toolbus list` shows it.")],
    bus: BusOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a source offer tools again."""
    said = administer(bus, "grant", {"source": source})
    if as_json:
        terminal.say_json(said)
    else:
        print(terminal.clean(f"{source} may offer tools"))


def revoke(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Whose tools, as `toolbus list` shows it.")],
    bus: BusOption = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a source's tools and forbid it to offer any."""
    said = administer(bus, "revoke", {"source": source})
    if as_json:
        terminal.say_json(said)
    else:
        print(terminal.clean(f"{source} may not offer tools; {said['removed']} withdrawn"))
        if "note" in said:
            print(terminal.clean(f"toolbus: {said['note']}"), file=sys.stderr)


def _who(users: Sequence[str]) -> str:
    return "(everyone)" if EVERYONE in users else ", ".join(users) or "(nobody)"
