"""Implements the command line: ``toolbus serve`` runs a bus, the other commands connect to one."""

from toolbus.cli.command_line import main

__all__ = ["main"]
