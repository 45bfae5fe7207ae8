"""Implements the commands of operators that call one tool of the bus and show its answer.

Each is a function of its own arguments and options (those after ``*``); `operator` adds --bus, --credential and --json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.call_command import Steps, operator
from toolbus.cli.help_text import epilog
from toolbus.common.text import clean_line

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source, as in `toolbus list`.")]


# -- who may call and offer tools ----------------------------------------------------------------------------------

PERMISSIONS_EPILOG = epilog(
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
_MEANING = {"tools": "offer tools", "generation": "use the models that hosts lend"}

PermissionArgument = Annotated[
    str, typer.Argument(metavar="tools|generation", help="Which permission (default: tools, to offer tools).")
]


class RuleKind(StrEnum):
    """What a rule applies to."""

    TOOLS = "tools"
    ROLES = "roles"
    SOURCES = "sources"


@operator
def permissions() -> Steps:
    """Show which users may call what."""
    answer = yield "permissions", {}

    def show() -> None:
        tables = dict(answer)
        silenced, generation = tables.pop("silenced"), tables.pop("generation")
        rows = [(kind, name, _who(users)) for kind, table in tables.items() for name, users in table.items()]
        rows += [("source", name, "(may not offer tools)") for name in silenced]
        lent = {True: "(may use lent models)", False: "(may not use lent models)"}
        rows += [("source", name, lent[may]) for name, may in generation.items()]
        terminal.print_table(("KIND", "NAME", "USERS"), rows)

    yield show


@operator
def permit(
    kind: Annotated[RuleKind, typer.Argument(metavar="tools|roles|sources", help="What the rule applies to.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tool, role or source.")],
    *,
    user: Annotated[list[str] | None, typer.Option(metavar="ID", help="Allow this user only; may be repeated.")] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="Allow everyone, and calls without a user.")] = False,
    nobody: Annotated[bool, typer.Option("--nobody", help="Allow no user.")] = False,
    no_rule: Annotated[bool, typer.Option("--no-rule", help="Remove the rule.")] = False,
) -> Steps:
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
    tables = yield "permit", {"kind": kind.value, "name": name, "users": users}
    note = tables.pop("note", "")
    rule = "(no rule)" if users is None else _who(tables[kind][name])
    yield lambda: terminal.print_lines(f"{kind} {name}: {rule}")
    if note:
        terminal.print_note(note)


def _who(users: Sequence[str]) -> str:
    return "(everyone)" if EVERYONE in users else ", ".join(users) or "(nobody)"


@operator
def grant(source: SourceArgument, permission: PermissionArgument = "tools") -> Steps:
    """Allow a source to offer tools again, or to use the models that hosts lend."""
    yield "grant", {"source": source, "permission": permission}
    yield lambda: terminal.print_lines(f"{source} may {_MEANING.get(permission, permission)}")


@operator
def revoke(source: SourceArgument, permission: PermissionArgument = "tools") -> Steps:
    """Withdraw a source's tools and forbid it to offer any, or forbid it to use the models that hosts lend."""
    answer = yield "revoke", {"source": source, "permission": permission}

    def show() -> None:
        withdrawn = f"; {answer['removed']} withdrawn" if permission == "tools" else ""
        terminal.print_lines(f"{source} may not {_MEANING.get(permission, permission)}{withdrawn}")
        if "note" in answer:
            terminal.print_note(answer["note"])

    yield show


# -- who is trusted ------------------------------------------------------------------------------------------------

CONFIRM_EPILOG = epilog(
    ("toolbus list --all", "toolbus access confirm weather"),
    """
    A tool with a callback URL that was registered before the bus restarted is unconfirmed while another program than
    its plugin may listen there. It is offered again as soon as its plugin registers. This command trusts the program
    that listens there now: check first that it is the plugin.
    """,
    "0 done, 1 the source has no unconfirmed tool, or the bus refused, 2 wrong usage, 3 no bus found.",
)


@operator
def confirm(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Confirm the tools of this source.")],
) -> Steps:
    """Offer a source's unconfirmed tools again, and trust the programs at their callback URLs."""
    answer = yield "confirm", {"source": source}
    names = ", ".join(clean_line(name) for name in answer["confirmed"])
    yield lambda: terminal.print_lines(f"confirmed {names}") if names else None
    if not names:
        terminal.fail(
            f"source {source!r} has no unconfirmed tool without a secret: `toolbus list --all` shows the state of each "
            "tool"
        )


# -- sources and their users ---------------------------------------------------------------------------------------

DRAIN_EPILOG = epilog(
    ("toolbus plugins drain weather", "toolbus plugins drain"),
    """
    A drained session takes no new calls, finishes those in flight and closes. A plugin that was drained does not
    reconnect by itself. Without a source the bus itself is drained, and then ends.
    """,
    "0 done, 1 the bus refused (the source has no session, for example), 2 wrong usage, 3 no bus found.",
)
NOTIFY_EPILOG = epilog(
    (
        "toolbus plugins notify 'the bus restarts at six'",
        """toolbus plugins notify --user u-17 --data '{"id": 4}' 'order 4 has arrived'""",
    ),
    """
    Sends a notification as a plugin does with `Plugin.notify`, and prints how many hosts it was sent to.
    """,
    "0 done (also if no host follows), 1 the bus refused, 2 wrong usage, 3 no bus found.",
)


@operator
def drain(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Drain the sessions of this source (default: the whole bus).")
    ] = None,
    *,
    grace_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="How long calls in flight may take, in seconds; only with SOURCE (default: set by the bus)."
        ),
    ] = None,
) -> Steps:
    """Shut down a source, or the whole bus, gracefully: calls in flight are finished."""
    if source is not None and not source:
        terminal.fail("SOURCE is empty: name a source, or leave it out to drain the whole bus", terminal.USAGE)
    if grace_seconds is not None and source is None:
        terminal.fail("--grace-seconds needs SOURCE: the whole bus uses its setting drain_seconds", terminal.USAGE)
    grace = {} if grace_seconds is None else {"grace_seconds": grace_seconds}
    sessions = (yield "drain", {"source": source or "", **grace})["sessions"]
    what = "the bus" if source is None else source
    yield lambda: terminal.print_lines(f"draining {what} (sessions: {sessions})") if sessions or not source else None
    if source is not None and not sessions:
        terminal.fail(f"no session of source {source!r} is attached: `toolbus list` shows the sources")


@operator
def notify(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the user should read.")],
    *,
    user: Annotated[str, typer.Option(metavar="ID", help="Whom it is for (default: everyone).")] = "",
    data: Annotated[str, typer.Option(metavar="JSON", help="Data for programs (default: none).")] = "",
) -> Steps:
    """Send a message to a user, through the hosts that show notifications."""
    try:
        value = json.loads(data) if data else None
    except ValueError as error:
        terminal.fail(f"--data is not JSON: {error}", terminal.USAGE)
    hosts = (yield "notify", {"text": text, "user": user, "data": value})["hosts"]
    yield lambda: terminal.print_lines(f"sent to {hosts} hosts" if hosts != 1 else "sent to 1 host")
