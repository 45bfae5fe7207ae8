"""The command line: ``toolbus serve`` runs a bus, everything else asks one. One file a group of commands."""

from toolbus.cli.command_line import main

__all__ = ["main"]
