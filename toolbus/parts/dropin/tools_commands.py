"""Implements ``toolbus plugins tools``: lists the bus's own tools, and copies bundled drop-in tools into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import catalog_commands, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.parts.dropin.bundled_tools import Bundled

ADD_EPILOG = epilog(
    (
        "toolbus plugins tools add this_host",
        "toolbus plugins tools add relay_message --dir tools/",
        "toolbus plugins tools add directory --force --json",
    ),
    """
    Copies the tool file with the files that it needs (_common.py, its data), and adds its grants to DIR/_manifest.json;
    existing grants stay. If the manifest has an allow list, the file is added to it. A running `toolbus serve
    --tools-dir DIR` or `toolbus run DIR` offers the tool at once.

    DIR is --dir, else TOOLBUS_TOOLS_DIR, else the folder tools; it is created if it does not exist. If a file there has
    other content, nothing is changed without --force.
    """,
    "0 done (also if nothing had to be changed), 1 a file differs or cannot be written, 2 wrong usage.",
)
BUNDLED_EPILOG = epilog(
    ("toolbus plugins tools bundled", "toolbus plugins tools bundled --json"),
    "",
    "0 done, 1 this installation has no bundled tools, 2 wrong usage.",
)
_DIR = "tools"

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", add_completion=False)


@app.callback(epilog=catalog_commands.TOOLS_EPILOG)
def tools(
    context: typer.Context, bus: BusOption = None, credential: CredentialOption = None, as_json: JsonOption = False
) -> None:
    """List the bus's own tools, or add bundled drop-in tools to a folder."""
    if context.invoked_subcommand is None:
        catalog_commands.tools(BusTarget(bus, credential), as_json)


@app.command(epilog=ADD_EPILOG)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, as in `toolbus plugins tools bundled`.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder of drop-in tools (default: tools).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that have other content.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a bundled drop-in tool into a folder."""
    from toolbus.errors import SetupError
    from toolbus.parts.dropin import bundled_tools

    tools = {tool.name: tool for tool in _bundled()}
    if name not in tools:
        terminal.fail(f"unknown bundled tool {name!r}: use one of {', '.join(tools)}", terminal.USAGE)
    tool, folder = tools[name], folder or Path(os.environ.get("TOOLBUS_TOOLS_DIR") or _DIR)
    try:
        added = bundled_tools.add(tool, folder, force=force)
    except SetupError as error:
        terminal.fail(str(error))
    if as_json:
        files = [{"file": file, "state": state} for file, state in added.files]
        terminal.print_json(
            {"name": name, "dir": str(folder), "files": files, "grants": tool.grants, "granted": added.granted}
        )
        return
    for file, state in added.files:
        terminal.print_lines(f"{state} {folder / file}")
    if tool.grants:
        terminal.print_lines(f"{'granted' if added.granted else 'granted before'}: {_grants(tool)}")
    terminal.print_lines(f"run it with: toolbus serve --tools-dir {folder}, or toolbus run {folder}")


@app.command(epilog=BUNDLED_EPILOG)
def bundled(as_json: JsonOption = False) -> None:
    """List the bundled drop-in tools."""
    tools = _bundled()
    if as_json:
        terminal.print_json([{"name": tool.name, "about": tool.about, "grants": tool.grants} for tool in tools])
    else:
        terminal.print_table(("NAME", "GRANTS", "ABOUT"), [(tool.name, _grants(tool), tool.about) for tool in tools])


def _bundled() -> list[Bundled]:
    from toolbus.errors import SetupError
    from toolbus.parts.dropin.bundled_tools import bundled

    try:
        return bundled()
    except SetupError as error:
        terminal.fail(str(error))


def _grants(tool: Bundled) -> str:
    grants = [f"{key} {', '.join(map(str, value))}" for key, value in tool.grants.items()]
    return "; ".join(grants) or "nothing"
