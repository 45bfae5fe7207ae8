"""Registers the commands of ``toolbus``, and sets what applies to all of them.

Modules of commands import nothing heavy before a command runs, so that help and completion take as long as typer does.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Annotated

import typer

from toolbus.cli import (
    approve_command,
    audit_command,
    call_command,
    calls_command,
    catalog_commands,
    confirm_command,
    drain_command,
    explain_command,
    health_command,
    keys_command,
    log_level_command,
    logs_command,
    notification_commands,
    permission_commands,
    run_command,
    serve_command,
    tasks_command,
    terminal,
)
from toolbus.cli.grpc_switch import set_switch
from toolbus.cli.help_text import epilog
from toolbus.parts.conformance import command as conformance_command
from toolbus.parts.console import command as console_command
from toolbus.parts.console.top import command as top_command
from toolbus.parts.dropin import tools_commands
from toolbus.parts.mcp.commands import mcp_command, mount_command, mounts_command
from toolbus.parts.models.commands import export_command, search_command
from toolbus.parts.moving.check import command as check_command
from toolbus.parts.openapi import command as openapi_command

_HELP = "A tool bus for LLM applications: plugins offer tools, hosts call them."
_MANUAL = epilog(
    ("toolbus serve", "toolbus run weather.py", "toolbus list", "toolbus call get_weather city=Paris"),
    """
    `toolbus COMMAND --help` shows the options of a command, with examples. Commands find the bus by --bus, then
    TOOLBUS_ADDRESS, then the address in the credential (--credential, TOOLBUS_CREDENTIAL), then 127.0.0.1:48930.

    If GRPC_EXPERIMENTS is not set, it is set to the values that make calls fastest; TOOLBUS_GRPC_EXPERIMENTS=keep
    prevents that.
    """,
    "of every command: 0 done, 1 the tool or the bus refused, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)

app = typer.Typer(
    name="toolbus", help=_HELP, epilog=_MANUAL, no_args_is_help=True, rich_markup_mode="rich",
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

_UNREAD = {"ignore_unknown_options": True, "allow_extra_args": True}  # of a command that reads its words itself


def _print_version(requested: bool) -> None:
    if requested:
        from toolbus.common.version import VERSION

        terminal.print_lines(f"toolbus {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _mcp(context: typer.Context) -> None:
    """Connect an MCP client with the bus, over standard input and output."""
    mcp_command.main(context.args)


app.command(epilog=serve_command.EPILOG)(serve_command.serve)
app.command(epilog=run_command.EPILOG)(run_command.run)
app.command(epilog=openapi_command.EPILOG)(openapi_command.openapi)
app.command("list", epilog=catalog_commands.LIST_EPILOG)(catalog_commands.list_)
app.command(epilog=catalog_commands.WATCH_EPILOG)(catalog_commands.watch)
app.command(epilog=notification_commands.EPILOG)(notification_commands.notifications)
app.command(epilog=notification_commands.NOTIFY_EPILOG)(notification_commands.notify)
app.command(epilog=search_command.EPILOG)(search_command.search)
app.command(epilog=export_command.EPILOG)(export_command.export)
app.command(epilog=explain_command.EPILOG)(explain_command.explain)
app.command(epilog=check_command.EPILOG)(check_command.check)
app.command(epilog=conformance_command.EPILOG)(conformance_command.conformance)
app.command(epilog=call_command.EPILOG)(call_command.call)
app.command(epilog=tasks_command.EPILOG)(tasks_command.tasks)
app.command(epilog=calls_command.EPILOG)(calls_command.calls)
app.command(epilog=top_command.EPILOG)(top_command.top)
app.command(epilog=log_level_command.EPILOG)(log_level_command.log_level)
app.command(epilog=logs_command.EPILOG)(logs_command.logs)
app.command(epilog=console_command.EPILOG)(console_command.console)
app.command(epilog=health_command.EPILOG)(health_command.health)
app.command("mcp", add_help_option=False, context_settings=_UNREAD)(_mcp)
app.command(epilog=permission_commands.EPILOG)(permission_commands.permissions)
app.command(epilog=permission_commands.PERMIT_EPILOG)(permission_commands.permit)
app.command(epilog=permission_commands.OFFER_EPILOG)(permission_commands.grant)
app.command(epilog=permission_commands.OFFER_EPILOG)(permission_commands.revoke)
app.command(epilog=confirm_command.EPILOG)(confirm_command.confirm)
app.command(epilog=approve_command.EPILOG)(approve_command.approve)
app.command(epilog=drain_command.EPILOG)(drain_command.drain)
app.command(epilog=mount_command.EPILOG)(mount_command.mount)
app.command(epilog=mount_command.UNMOUNT_EPILOG)(mount_command.unmount)
keys_command.app.command(epilog=keys_command.SHOW_EPILOG)(keys_command.show)
keys_command.app.command(epilog=keys_command.EXPORT_EPILOG)(keys_command.export)
app.add_typer(audit_command.app, name="audit")
app.add_typer(keys_command.app, name="keys", epilog=keys_command.EPILOG)
app.add_typer(tools_commands.app, name="tools")
app.add_typer(mounts_command.app, name="mounts")


def _program(word: str) -> typer.Typer:
    """Returns the program with one command alone, or with all if there is none of this name.

    Typer reads the options of every command that it knows, which would take longer than most commands.
    """
    commands = [each for each in app.registered_commands if _name(each) == word]
    groups = [each for each in app.registered_groups if each.name == word]
    if not commands + groups:
        return app
    program = copy.copy(app)
    program.registered_commands, program.registered_groups = commands, groups
    return program


def _name(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None  # each is registered with its function
    return command.name or command.callback.__name__.replace("_", "-")


def main() -> None:
    """Runs the command line; the entry point of the script."""
    set_switch()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the commands print their own error texts
    terminal.prepare()
    try:
        try:
            _program(sys.argv[1] if len(sys.argv) > 1 else "")()
        finally:
            terminal.flush()
    except KeyboardInterrupt:
        sys.exit(terminal.INTERRUPTED)
    except terminal.OutputError as error:
        terminal.end_unwritten(error.error)
    except OSError as error:
        if error.errno not in terminal.UNWRITABLE:
            raise
        terminal.end_unwritten(error)
