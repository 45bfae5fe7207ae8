"""Finds out what the arguments of ``toolbus run`` name: plugins, programs, or a folder of drop-in tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolbus.cli import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toolbus.processes.plugin_program import PluginProgram


def read_programs(texts: Sequence[str]) -> list[PluginProgram]:
    """Returns the programs that ``--exec`` names; ends the command if one is refused."""
    from toolbus.errors import SetupError
    from toolbus.processes.plugin_program import PluginProgram

    try:
        return [PluginProgram.parse(text) for text in texts]
    except SetupError as error:
        terminal.fail(str(error), terminal.USAGE)


def find_plugins(paths: list[Path]) -> tuple[list[Path], Path | None, list[str] | None]:
    """Returns the files and folders of plugins; or the folder of drop-in tools, and which of its files."""
    from toolbus.neko.plugin_folder import plugin_folders, wanted_folders

    if (scripts := _scripts(paths)) is not None:
        return [], *scripts
    plugins: list[Path] = []
    tools: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.is_file():
                terminal.fail(f"{path} does not exist: check the path", terminal.USAGE)
            plugins.append(path)
        elif not (folders := plugin_folders(path)):
            tools.append(path)
        else:
            enabled = wanted_folders(path, folders)
            plugins += enabled
            for each in (each for each in folders if each not in enabled):
                terminal.print_note(f"{each} is not run, since its plugin.toml says enabled = false: name it to run it")
            if not enabled:
                terminal.fail(f"every plugin in {path} is disabled: name the folder of one", terminal.USAGE)
    if tools and len(paths) > 1:
        terminal.fail(
            f"{tools[0]} is a folder of drop-in tools, since neither it nor a folder in it has a plugin.toml: "
            "name it alone",
            terminal.USAGE,
        )
    return plugins, tools[0] if tools else None, None


def _scripts(paths: list[Path]) -> tuple[Path, list[str]] | None:
    """Returns the folder of drop-in tools and which of its files run; None if none in JavaScript is named."""
    from toolbus.dropin.file_grants import EXTENSION
    from toolbus.dropin.file_loader import extension_entry

    scripts: list[tuple[Path, str]] = []
    for path in paths:
        if (path / EXTENSION).is_file():
            folder = path.resolve()
            scripts.append((folder.parent, f"{folder.name}/{extension_entry(folder)}"))
        elif path.suffix == ".js" and path.is_file():
            scripts.append((path.parent, path.name))
    if not scripts:
        return None
    if len(scripts) < len(paths) or len({folder.resolve() for folder, _ in scripts}) > 1:
        terminal.fail(
            f"{scripts[0][1]} is JavaScript, which runs as a drop-in tool: name files *.js and extensions of one "
            "folder alone",
            terminal.USAGE,
        )
    return scripts[0][0], [file for _, file in scripts]
