"""Implements ``toolbus access show``, ``permit``, ``grant``, ``revoke``: who may call tools, and who may offer them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    ("toolbus access show", "toolbus access show --json"),
    """
    Without a rule, everyone may call a tool. A call has to pass the rule for its tool, the rule for its role and the
    rule for its source, as far as these exist. A call without a user passes only a rule for everyone. Sources that may
    not offer tools are listed too.
    """,
    "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found.",
)
PERMIT_EPILOG = epilog(
    (
        "toolbus access permit tools send_email --user u-17 --user u-18",
        "toolbus access permit roles Lanlan --everyone",
        "toolbus access permit sources mail --nobody",
        "toolbus access permit tools send_email --no-rule",
    ),
    """
    Replaces the rule for one tool, for the tools of a role, or for those of a source. It applies at once, to calls and
    listings. A bus with a data directory keeps it over restarts, and it overrides a rule of the bus's configuration. A
    rule for an unknown name applies as soon as that name is registered; for a tool, a note is printed to standard
    error.
    """,
    "0 done, 1 the bus refused (it could not save the rule, for example), 2 wrong usage, 3 no bus found.",
)
GRANT_EPILOG = REVOKE_EPILOG = epilog(
    (
        "toolbus access revoke plugin:mail",
        "toolbus access grant plugin:mail",
        "toolbus access grant plugin:story generation",
    ),
    """
    Every source may offer tools unless the bus's configuration (silenced) or an operator forbids it. After `revoke` the
    source's tools are withdrawn at once, and its plugins stay connected; after `grant` they offer their tools again. A
    bus with a data directory keeps both over restarts.
    """,
    "0 done, 1 the bus refused (it could not save the change, for example), 2 wrong usage, 3 no bus found.",
)
EVERYONE = "*"  # in the list of users of a rule


class RuleKind(StrEnum):
    """What a rule applies to."""

    TOOLS = "tools"
    ROLES = "roles"
    SOURCES = "sources"


_MEANING = {"tools": "offer tools", "generation": "use the models that hosts lend"}

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source, as in `toolbus list`.")]
PermissionArgument = Annotated[
    str, typer.Argument(metavar="tools|generation", help="Which permission (default: tools, to offer tools).")
]


def permissions(bus: BusOption = None, credential: CredentialOption = None, as_json: JsonOption = False) -> None:
    """Show which users may call what."""
    tables = call_bus_tool(BusTarget(bus, credential), "permissions", {})
    if as_json:
        terminal.print_json(tables)
        return
    silenced, generation = tables.pop("silenced"), tables.pop("generation")
    rows = [(kind, name, _who(users)) for kind, table in tables.items() for name, users in table.items()]
    rows += [("source", name, "(may not offer tools)") for name in silenced]
    rows += [("source", name, f"({'may' if may else 'may not'} use lent models)") for name, may in generation.items()]
    terminal.print_table(("KIND", "NAME", "USERS"), rows)


def permit(
    kind: Annotated[RuleKind, typer.Argument(metavar="tools|roles|sources", help="What the rule applies to.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tool, role or source.")],
    bus: BusOption = None,
    credential: CredentialOption = None,
    user: Annotated[list[str] | None, typer.Option(metavar="ID", help="Allow this user only; may be repeated.")] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="Allow everyone, and calls without a user.")] = False,
    nobody: Annotated[bool, typer.Option("--nobody", help="Allow no user.")] = False,
    no_rule: Annotated[bool, typer.Option("--no-rule", help="Remove the rule.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set which users may call a tool, or the tools of a role or source."""
    if [bool(user), everyone, nobody, no_rule].count(True) != 1:
        terminal.fail(
            "use exactly one of --user ID (may be repeated), --everyone, --nobody and --no-rule", terminal.USAGE
        )
    if "" in (user or ()):
        terminal.fail(
            "--user is empty: give the id of a user; calls without a user are allowed by --everyone", terminal.USAGE
        )
    if not name:
        terminal.fail(f"NAME is empty: name one of the {kind}", terminal.USAGE)
    users = None if no_rule else [EVERYONE] if everyone else list(user or ())
    tables = call_bus_tool(BusTarget(bus, credential), "permit", {"kind": kind.value, "name": name, "users": users})
    note = tables.pop("note", "")
    if as_json:
        terminal.print_json(tables)
    else:
        terminal.print_lines(f"{kind} {name}: {'(no rule)' if users is None else _who(tables[kind][name])}")
    if note:
        terminal.print_note(note)


def grant(
    source: SourceArgument,
    permission: PermissionArgument = "tools",
    bus: BusOption = None,
    credential: CredentialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Allow a source to offer tools again, or to use the models that hosts lend."""
    result = call_bus_tool(BusTarget(bus, credential), "grant", {"source": source, "permission": permission})
    if as_json:
        terminal.print_json(result)
    else:
        terminal.print_lines(f"{source} may {_MEANING.get(permission, permission)}")


def revoke(
    source: SourceArgument,
    permission: PermissionArgument = "tools",
    bus: BusOption = None,
    credential: CredentialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a source's tools and forbid it to offer any, or forbid it to use the models that hosts lend."""
    result = call_bus_tool(BusTarget(bus, credential), "revoke", {"source": source, "permission": permission})
    if as_json:
        terminal.print_json(result)
    else:
        withdrawn = f"; {result['removed']} withdrawn" if permission == "tools" else ""
        terminal.print_lines(f"{source} may not {_MEANING.get(permission, permission)}{withdrawn}")
        if "note" in result:
            terminal.print_note(result["note"])


def _who(users: Sequence[str]) -> str:
    return "(everyone)" if EVERYONE in users else ", ".join(users) or "(nobody)"
