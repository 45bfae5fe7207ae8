"""Implements ``toolbus new``: writes the first files of a plugin, which run as they are."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

import toolbus
from toolbus.cli import terminal
from toolbus.cli.help_text import epilog
from toolbus.parts.development.templates import TEMPLATES, Template

EPILOG = epilog(
    ("toolbus new weather", "toolbus new weather --in plugins", "toolbus new weather --language rust"),
    """
    Writes a folder with a plugin that runs, and a README.md with the commands to run it; in Python also its test. What
    is there already is not changed. The packages of other languages are used from a checkout of toolbus.
    """,
    "0 done, 1 a file cannot be written, 2 wrong usage.",
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
_CLIENTS = Path(toolbus.__file__).resolve().parents[1] / "clients"  # of the checkout that this program is of, if it is


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Small letters, digits and _; names its source too.")],
    folder: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="Where the folder is made (default: here).")
    ] = Path(),
    language: Annotated[str, typer.Option(metavar="LANGUAGE", help=f"One of {', '.join(TEMPLATES)}.")] = "python",
    clients: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder clients of a checkout, for languages other than Python.")
    ] = _CLIENTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the first files of a plugin."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name == "toolbus":
        terminal.fail(
            f"{name!r} cannot name a plugin's file: use small letters, digits and _, beginning with a letter, as in "
            "my_weather",
            terminal.USAGE,
        )
    template = _template(language, clients)
    from importlib.metadata import packages_distributions  # here, since it takes its time

    if language == "python" and name in {*sys.stdlib_module_names, *packages_distributions()}:
        terminal.fail(
            f"{name!r} is a module that Python has, which the plugin's file would hide: choose another name, as in "
            f"my_{name}",
            terminal.USAGE,
        )
    home = folder / name
    files = template.written(name, str(clients.resolve()))
    if present := [each for each in files if (home / each).exists()]:
        terminal.fail(f"{home / present[0]} is there already: choose another name, or remove it", terminal.USAGE)
    try:
        for file, text in files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(text, "utf-8")
    except OSError as error:
        terminal.fail(f"{home} cannot be written: {error.strerror}: let this user write there, or use --in")
    start = template.command(str(clients.resolve())).replace("@name@", name)
    written = f"wrote {home}: {', '.join(files)}\nnext: cd {home} && {start}"
    terminal.print_outcome(written, {"folder": str(home), "files": list(files), "start": start}, as_json)


def _template(language: str, clients: Path) -> Template:
    if language not in TEMPLATES:
        terminal.fail(f"there is no language {language!r}: use one of {', '.join(TEMPLATES)}", terminal.USAGE)
    template = TEMPLATES[language]
    if template.package and not (clients / template.package).is_dir():
        terminal.fail(
            f"{clients / template.package} is not there: pass --clients DIR, that folder of a checkout of toolbus",
            terminal.USAGE,
        )
    return template
