"""Implements ``toolbus mounts``: how the mounted MCP servers are; restarts and logs of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from toolbus.bus.access.identity import day_of
from toolbus.cli import terminal
from toolbus.cli.call_command import Steps, operator
from toolbus.cli.help_text import epilog
from toolbus.common.text import list_names, shorten

EPILOG = epilog(
    (
        "toolbus mounts",
        "toolbus mounts files",
        "toolbus mounts --json",
        "toolbus mounts restart files",
        "toolbus mounts logs files",
    ),
    """
    Without a name it shows all mounts, with a name the tools of one: their hints, whether a changed declaration waits
    for `toolbus access approve`, and what is left out and why. `toolbus mounts add` adds servers, `toolbus mounts
    remove` removes them.
    """,
    "0 done, 1 the bus refused (the mount is unknown, for example), 2 wrong usage, 3 no bus found.",
)
RESTART_EPILOG = LOGS_EPILOG = epilog(
    ("toolbus mounts restart files", "toolbus mounts logs files"),
    "A restart ends the calls in flight; a server that the bus had given up is started again.",
    "0 done, 1 the bus refused (the mount is unknown, for example), 2 wrong usage, 3 no bus found.",
)
_HINTS = ("read_only", "destructive", "idempotent", "open_world")
SHOWN_DIGITS = 12  # of a fingerprint in a table
SHOWN_CHARACTERS = 100  # of a description in a table

LOGINS_EPILOG = epilog(
    (
        "toolbus mounts logins",
        "toolbus mounts logins tracker --json",
        "toolbus mounts logins tracker --user ann --end",
        "toolbus mounts logins --account 'identity chat' --end",
    ),
    "Shows whose logins the bus has at mounts where each user has one, never a token. An ended login ends the server "
    "of that user; their next call asks again. Users end their own with the tool `toolbus:mount_login`.",
    "0 done, 1 the bus refused (nothing chooses what is ended, for example), 2 wrong usage, 3 no bus found.",
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The mount.")]


@operator
def show(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One mount, with its tools.")] = None,
) -> Steps:
    """Show all mounts, or one with its tools."""
    answer = yield "mounts", {"name": name or ""}

    def show_mounts() -> None:
        if name and answer["mounts"]:
            print_mount(answer["mounts"][0])
        elif name:
            terminal.fail(answer["refused"][name])
        else:
            _print_all(answer)

    yield show_mounts


@operator
def restart(name: NameArgument) -> Steps:
    """Restart a server."""
    yield "mount_restart", {"name": name}
    yield lambda: terminal.print_lines(f"mount {name} is being restarted")


@operator
def logs(name: NameArgument) -> Steps:
    """Print the newest lines that a server wrote to its standard error."""
    answer = yield "mount_logs", {"name": name}

    def show() -> None:
        for line in answer["lines"]:
            terminal.print_lines(line)

    yield show


@operator
def logins(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only those at this mount.")] = None,
    account: Annotated[str, typer.Option(metavar="ACCOUNT", help="Only those of this account.")] = "",
    user: Annotated[str, typer.Option(metavar="USER", help="Only those of this user.")] = "",
    end: Annotated[bool, typer.Option("--end", help="End those that are shown.")] = False,
) -> Steps:
    """Show the logins of users at mounts, or end them."""
    answer = yield "mount_logins", {"name": name or "", "account": account, "user": user, "end": end}

    def show() -> None:
        rows = [
            (each["mount"], each["account"], each["user"] or "-", day_of(each["since"]), ("no", "yes")[each["token"]])
            for each in answer["logins"]
        ]
        terminal.print_table(("MOUNT", "ACCOUNT", "USER", "SINCE", "TOKEN"), rows)
        if answer["ended"]:
            terminal.print_note(f"{len(rows)} logins were ended")

    yield show


def print_mount(mount: Mapping[str, Any]) -> None:
    """Prints one mount: its state, and a table of its tools."""
    era = f", {mount['era']} {mount['version']}" if mount["era"] else ""
    server = f" ({mount['server']})" if mount["server"] else ""
    terminal.print_lines(f"{mount['name']}: {mount['state']}{era}{server}")
    for label in ("reason", "fix", "last_error"):
        if mount[label]:
            terminal.print_lines(f"  {label.replace('_', ' ')}: {mount[label]}")
    if mount["pid"]:
        memory = f", {mount['memory_bytes'] / 2**20:.0f} MiB" if mount["memory_bytes"] else ""
        terminal.print_lines(f"  pid {mount['pid']}{memory}, restarts {mount['restarts']}")
    if mount["declared"]:
        print_tools(mount["declared"], mount["notices"])
    for left in mount["left"]:
        terminal.print_note(f"left out: {left['name']}: {left['reason']}")
    for warning in mount["warnings"]:
        terminal.print_note(warning)
    if mount["hidden"]:
        terminal.print_note(f"{mount['hidden']} tools are left out by allow and deny")
    if mount["changed"]:
        names = list_names(mount["changed"])
        how = f"`toolbus access approve {mount['name']}` shows how"
        terminal.print_note(f"changed since it was trusted: {names}: {how}")


def print_tools(tools: list[Mapping[str, Any]], notices: Mapping[str, list[str]]) -> None:
    """Prints a table of tools with hints and fingerprints."""
    rows, warned = [], []
    for number, tool in enumerate(tools):
        marks = ["CHANGED"] if tool["changed"] else []
        marks += notices.get(tool["name"], [])
        if marks:
            warned.append(number)
        about = "; ".join(marks) or shorten((tool["description"] or tool["title"]).partition("\n")[0], SHOWN_CHARACTERS)
        hints = " ".join(hint.replace("_", "-") for hint in _HINTS if tool["hints"].get(hint) is True)
        rows.append((tool["name"], hints or "-", tool["fingerprint"][:SHOWN_DIGITS] or "-", about))
    terminal.print_table(("TOOL", "HINTS", "FINGERPRINT", "DESCRIPTION"), rows, warned)


def _print_all(answer: Mapping[str, Any]) -> None:
    rows = []
    for mount in answer["mounts"]:
        about = "; ".join(part for part in (mount["reason"], mount["fix"]) if part)
        about = about or (f"changed: {list_names(mount['changed'])}" if mount["changed"] else mount["target"])
        memory = f"{mount['memory_bytes'] / 2**20:.0f} MiB" if mount["memory_bytes"] else "-"
        pid = str(mount["pid"] or "-")
        rows.append(
            (mount["name"], mount["state"], mount["era"] or "-", str(mount["tools"]), pid, memory,
             str(mount["restarts"]), about)
        )  # fmt: skip
    rows += [(name, "disabled", "-", "-", "-", "-", "-", "") for name in answer["disabled"]]
    rows += [(name, "refused", "-", "-", "-", "-", "-", why) for name, why in answer["refused"].items()]
    terminal.print_table(("MOUNT", "STATE", "ERA", "TOOLS", "PID", "MEMORY", "RESTARTS", "ABOUT"), rows)
    warnings = [f"{mount['name']}: {warning}" for mount in answer["mounts"] for warning in mount["warnings"]]
    for text in (*answer["errors"].values(), *answer["notices"], *warnings):
        terminal.print_note(text)
    if not rows:
        terminal.print_note("nothing is mounted: `toolbus mounts add NAME -- COMMAND` mounts an MCP server")
