"""Finds the data directory of a bus, for commands that work on its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolbus.cli import terminal

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        envvar="TOOLBUS_DATA_DIR",
        show_default=False,
        help="The data directory of the bus (default: the platform's data folder).",
    ),
]


def data_directory(option: Path | None) -> Path:
    """Returns the directory that the option names, else the platform's; ends the command where that is unknown."""
    if option is not None:
        return option.expanduser()
    try:
        import platformdirs
    except ModuleNotFoundError:
        terminal.fail("the platform's data folder is unknown without `toolbus[server]`: name it with --data-dir")
    return platformdirs.user_data_path("toolbus")
