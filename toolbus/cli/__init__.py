"""Implements the command line: ``toolbus serve`` runs a bus, the other commands connect to one."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; the entry point of the script."""
    if sys.argv[1:2] == ["mcp"]:  # its process stays small: nothing of the other commands is loaded
        from toolbus.parts.mcp.commands import mcp_command

        mcp_command.main(sys.argv[2:])
        return
    from toolbus.cli import command_line

    command_line.main()


__all__ = ["main"]
