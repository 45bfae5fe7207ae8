"""Prints what supervised plugins write and what happens to them, each line with the plugin's name.

A plugin may colour its output. Every other escape sequence and control character is dropped, so that it can neither
change the terminal nor print a line that looks like another plugin's.
"""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING

from toolbus.cli import terminal
from toolbus.text import COLOUR_END, drop_unsafe, keep_colours

if TYPE_CHECKING:
    from toolbus.processes.supervised_plugin import PluginReport

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI codes: cyan, yellow, green, magenta, blue, and bright


class PrefixedOutput:
    """Prints lines of output to their stream and events to standard error, each with the plugin's name."""

    def __init__(self) -> None:
        self._width = 0  # of the longest name so far

    def __call__(self, report: PluginReport) -> None:
        """Prints a report."""
        stream = sys.stdout if report.stream == "stdout" else sys.stderr
        name = drop_unsafe(report.plugin)
        self._width = max(self._width, len(name))
        separator = "|" if report.stream else "*"
        prefix = f"{name.ljust(self._width)} {separator}"
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]
            prefix = f"\x1b[{colour}m{prefix}{COLOUR_END}"
        for line in report.text.split("\n"):
            print(prefix, keep_colours(line), file=stream, flush=True)


def print_json_report(report: PluginReport) -> None:
    """Prints a report as a JSON line."""
    event: dict[str, str] = {"plugin": report.plugin, "event": report.kind.value}
    if report.stream:
        event["stream"] = report.stream
    terminal.print_json({**event, "text": report.text}, line=True)
