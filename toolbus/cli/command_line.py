"""The commands put together, and what holds for all of them.

Modules of commands import nothing heavy before a command runs, so that help and completion cost what typer costs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from toolbus.cli import (
    call_command,
    calls_command,
    catalog_commands,
    drain_command,
    export_command,
    health_command,
    permission_commands,
    run_command,
    search_command,
    serve_command,
    tasks_command,
    terminal,
    tools_commands,
)
from toolbus.cli.help_text import manual

# An unsupported switch of grpcio that halves a round trip (197 → 110 µs).
_EXPERIMENTS = "-event_engine_client,-event_engine_listener"

_HELP = "A tool bus for LLM applications: plugins offer tools, hosts call them."
_MANUAL = manual(
    ("toolbus serve", "toolbus run weather.py", "toolbus list", "toolbus call get_weather city=Paris"),
    """
    Commands find the bus by --bus, then TOOLBUS_ADDRESS, then 127.0.0.1:48930. GRPC_EXPERIMENTS is set, where it is
    not, to what makes calls fastest; TOOLBUS_GRPC_EXPERIMENTS=keep leaves it alone.
    """,
    "of every command: 0 done, 1 the tool or the bus said no, 2 wrong usage, 3 no bus there, 130 after Ctrl-C.",
)

app = typer.Typer(
    name="toolbus", help=_HELP, epilog=_MANUAL, no_args_is_help=True, rich_markup_mode="rich",
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from toolbus import __version__

        print(f"toolbus {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command(epilog=serve_command.MANUAL)(serve_command.serve)
app.command(epilog=run_command.MANUAL)(run_command.run)
app.command("list", epilog=catalog_commands.LIST_MANUAL)(catalog_commands.list_)
app.command(epilog=catalog_commands.WATCH_MANUAL)(catalog_commands.watch)
app.command(epilog=search_command.MANUAL)(search_command.search)
app.command(epilog=export_command.MANUAL)(export_command.export)
app.command(epilog=call_command.MANUAL)(call_command.call)
app.command(epilog=tasks_command.MANUAL)(tasks_command.tasks)
app.command(epilog=calls_command.MANUAL)(calls_command.calls)
app.command(epilog=health_command.MANUAL)(health_command.health)
app.command(epilog=permission_commands.MANUAL)(permission_commands.permissions)
app.command(epilog=permission_commands.PERMIT_MANUAL)(permission_commands.permit)
app.command(epilog=permission_commands.RIGHT_MANUAL)(permission_commands.grant)
app.command(epilog=permission_commands.RIGHT_MANUAL)(permission_commands.revoke)
app.command(epilog=drain_command.MANUAL)(drain_command.drain)
app.add_typer(tools_commands.app, name="tools")


def main() -> None:
    """Runs the command line; the entry point of the script."""
    if os.environ.get("TOOLBUS_GRPC_EXPERIMENTS") != "keep":
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)  # read when grpc is imported
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said by us, in a sentence
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(terminal.INTERRUPTED)
