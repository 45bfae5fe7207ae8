"""Implements the command line: ``toolbus serve`` runs a bus, the other commands connect to one."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; the entry point of the script."""
    words = sys.argv[1:]
    if words[:1] == ["mcp"]:  # its process stays small: nothing of the other commands is loaded
        from toolbus.common.part import load, parts
        from toolbus.errors import SetupError

        home = next(each.home for part in parts() for each in part.commands if each.name == "mcp")
        try:
            command = load(home)
        except SetupError as missing:
            sys.stderr.write(f"toolbus: {missing}\n")
            sys.exit(2)
        command(words[1:])
        return
    from toolbus.cli import terminal

    with terminal.ending():
        if words == ["--version"]:  # without typer, which takes longer than all else
            from toolbus.common.version import VERSION

            terminal.print_lines(f"toolbus {VERSION}")
            return
        from toolbus.cli import command_line

        command_line.main()


__all__ = ["main"]
