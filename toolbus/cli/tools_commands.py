"""``toolbus tools``: the bus's own tools; and below it, drop-in tools that come along, to be put into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import catalog_commands, terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.dropin.bundled_tools import Bundled

ADD_MANUAL = manual(
    (
        "toolbus tools add this_host",
        "toolbus tools add relay_message --dir tools/",
        "toolbus tools add directory --force --json",
    ),
    """
    Copies the file with what it needs (_common.py, its data) and enters what it may reach into DIR/_manifest.json;
    what stands there stays. An allow list gets the file's name. A folder that is followed offers the tool at once.

    DIR is --dir, then TOOLBUS_TOOLS_DIR, then tools in the current directory; it is made where it is not there. A file
    there that differs from what comes along is never overwritten without --force, and then nothing is changed.
    """,
    "0 done (also where everything was there), 1 a file differs or cannot be written, 2 wrong usage.",
)
BUNDLED_MANUAL = manual(
    ("toolbus tools bundled", "toolbus tools bundled --json"),
    "",
    "0 done, 1 this installation has none, 2 wrong usage.",
)
_DIR = "tools"

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


@app.callback(epilog=catalog_commands.TOOLS_MANUAL)
def tools(context: typer.Context, bus: BusOption = None, as_json: JsonOption = False) -> None:
    """List the bus's own tools, which `list` leaves out; or add drop-in tools that come along to a folder."""
    if context.invoked_subcommand is None:
        catalog_commands.tools(bus, as_json)


@app.command(epilog=ADD_MANUAL)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which: see `toolbus tools bundled`.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="The folder of drop-in tools (default: tools).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a drop-in tool that comes along into a folder."""
    from toolbus.dropin import bundled_tools
    from toolbus.errors import SetupError

    found = {tool.name: tool for tool in _bundled()}
    if name not in found:
        terminal.fail(f"no tool {name!r} comes along: there are {', '.join(found)}", terminal.USAGE)
    tool, folder = found[name], folder or Path(os.environ.get("TOOLBUS_TOOLS_DIR") or _DIR)
    try:
        added = bundled_tools.add(tool, folder, force=force)
    except SetupError as error:
        terminal.fail(str(error))
    if as_json:
        files = [{"file": file, "state": state} for file, state in added.files]
        terminal.say_json(
            {"name": name, "dir": str(folder), "files": files, "grants": tool.grants, "granted": added.granted}
        )
        return
    for file, state in added.files:
        print(f"{state} {folder / file}")
    if tool.grants:
        print(f"{'granted' if added.granted else 'grants as before'}: {_grants(tool)}")
    print(f"offered by: toolbus serve --tools-dir {folder}, or toolbus run {folder}")


@app.command(epilog=BUNDLED_MANUAL)
def bundled(as_json: JsonOption = False) -> None:
    """List the drop-in tools that come along."""
    found = _bundled()
    if as_json:
        terminal.say_json([{"name": tool.name, "about": tool.about, "grants": tool.grants} for tool in found])
    else:
        terminal.table(("NAME", "GRANTS", "ABOUT"), [(tool.name, _grants(tool), tool.about) for tool in found])


def _bundled() -> list[Bundled]:
    from toolbus.dropin.bundled_tools import bundled
    from toolbus.errors import SetupError

    try:
        return bundled()
    except SetupError as error:
        terminal.fail(str(error))


def _grants(tool: Bundled) -> str:
    said = [f"{key} {', '.join(map(str, value))}" for key, value in tool.grants.items()]
    return "; ".join(said) or "nothing"
