"""Implements ``toolbus new``: writes the first files of a plugin, with a test that runs."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    ("toolbus new weather", "toolbus new weather --in plugins"),
    """
    Writes a folder with the plugin NAME.py, its test test_NAME.py, and a README.md with the commands to run both. What
    is there already is not changed.
    """,
    "0 done, 1 a file cannot be written, 2 wrong usage.",
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")

_PLUGIN = '''"""The tools of the plugin {name}."""

from typing import Annotated

from toolbus import Plugin

plugin = Plugin("{name}")


@plugin.tool
def {name}_hello(who: Annotated[str, "Whom to greet."]) -> str:
    """Greets someone: replace this by what your tool does, in words that a model understands."""
    return f"Hello, {{who}}!"


if __name__ == "__main__":
    plugin.run()
'''
_TEST = '''"""Runs the plugin on a bus of its own: python -m pytest (needs toolbus[server] and pytest)."""

import asyncio

from toolbus.testing import running_bus

from {name} import plugin


def test_it_greets():
    async def scenario():
        async with running_bus(plugin) as host:
            return (await host.call("{name}_hello", {{"who": "World"}})).unwrap()

    assert asyncio.run(scenario()) == "Hello, World!"
'''
_README = """# {name}

```
toolbus dev {name}.py                      # a bus and the plugin, which reloads on save
toolbus call {name}_hello who=World        # in another terminal
python -m pytest                           # its test
```

`toolbus run {name}.py` runs the plugin for a bus that runs already (`toolbus serve`).
"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Small letters, digits and _; names its source too.")],
    folder: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="Where the folder is made (default: here).")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the first files of a plugin."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name == "toolbus":
        terminal.fail(
            f"{name!r} cannot name a plugin's file: use small letters, digits and _, beginning with a letter, as in "
            "my_weather",
            terminal.USAGE,
        )
    home = folder / name
    files = {f"{name}.py": _PLUGIN, f"test_{name}.py": _TEST, "README.md": _README}
    if present := [each for each in files if (home / each).exists()]:
        terminal.fail(f"{home / present[0]} is there already: choose another name, or remove it", terminal.USAGE)
    try:
        home.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (home / file).write_text(text.format(name=name), "utf-8")
    except OSError as error:
        terminal.fail(f"{home} cannot be written: {error.strerror}: let this user write there, or use --in")
    if as_json:
        terminal.print_json({"folder": str(home), "files": list(files)})
        return
    terminal.print_lines(f"wrote {home}: {', '.join(files)}\nnext: cd {home} && toolbus dev {name}.py")
