"""The commands put together, and what holds for all of them.

Modules of commands import nothing heavy before a command runs, so that help and completion cost what typer costs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from toolbus.cli import admin, call, calls, catalog, models, output, permissions, run, serve, tasks, tools
from toolbus.cli.manual import manual

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


app.command(epilog=serve.MANUAL)(serve.serve)
app.command(epilog=run.MANUAL)(run.run)
app.command("list", epilog=catalog.LIST_MANUAL)(catalog.list_)
app.command(epilog=catalog.WATCH_MANUAL)(catalog.watch)
app.command(epilog=models.SEARCH_MANUAL)(models.search)
app.command(epilog=models.EXPORT_MANUAL)(models.export)
app.command(epilog=call.MANUAL)(call.call)
app.command(epilog=tasks.MANUAL)(tasks.tasks)
app.command(epilog=calls.MANUAL)(calls.calls)
app.command(epilog=admin.HEALTH_MANUAL)(admin.health)
app.command(epilog=permissions.MANUAL)(permissions.permissions)
app.command(epilog=permissions.PERMIT_MANUAL)(permissions.permit)
app.command(epilog=permissions.RIGHT_MANUAL)(permissions.grant)
app.command(epilog=permissions.RIGHT_MANUAL)(permissions.revoke)
app.command(epilog=admin.DRAIN_MANUAL)(admin.drain)
app.add_typer(tools.app, name="tools")


def main() -> None:
    """Runs the command line; the entry point of the script."""
    if os.environ.get("TOOLBUS_GRPC_EXPERIMENTS") != "keep":
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)  # read when grpc is imported
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said by us, in a sentence
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(output.INTERRUPTED)
