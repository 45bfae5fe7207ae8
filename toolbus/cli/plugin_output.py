"""Prints what supervised plugins write and what happens to them, each line with the plugin's name.

A plugin may colour its output. Every other escape sequence and control character is dropped, so that it can neither
change the terminal nor print a line that looks like another plugin's.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from typing import TYPE_CHECKING

from toolbus.cli import terminal
from toolbus.text import drop_unsafe

if TYPE_CHECKING:
    from toolbus.processes.supervised_plugin import PluginReport

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI codes: cyan, yellow, green, magenta, blue, and bright
_RESET = "\x1b[0m"
# ECMA-48, 7-bit and 8-bit: colours (SGR), which stay; other control sequences; strings with their end (titles, links,
# clipboard); the other escapes. An incomplete one matches nothing and loses its control characters in `drop_unsafe`.
_COLOUR = r"\x1b\[[0-9;:]{0,64}m"
_ESCAPE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[0-OQ-WYZ\\`-~]"
)
_BREAK = re.compile(r"[\r\v\f\x85\u2028\u2029]+")  # within a line: progress bars return to its beginning


def keep_colours(line: str) -> str:
    """Returns a line of output with its colours, and without other escape sequences and control characters."""
    line = _BREAK.sub(" ", line.rstrip("\r").expandtabs())
    if "\x1b" not in line:
        return drop_unsafe(_ESCAPE.sub("", line))
    parts: list[str] = []
    begin, coloured = 0, False
    for match in _ESCAPE.finditer(line):
        parts.append(drop_unsafe(line[begin : match.start()]))
        begin = match.end()
        if match["colour"]:
            parts.append(match["colour"])
            coloured = True
    parts.append(drop_unsafe(line[begin:]))
    return "".join(parts) + (_RESET if coloured else "")  # the next line is somebody else's


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
            prefix = f"\x1b[{colour}m{prefix}{_RESET}"
        for line in report.text.split("\n"):
            print(prefix, keep_colours(line), file=stream, flush=True)


def print_json_report(report: PluginReport) -> None:
    """Prints a report as a JSON line."""
    event: dict[str, str] = {"plugin": report.plugin, "event": report.kind.value}
    if report.stream:
        event["stream"] = report.stream
    terminal.print_json({**event, "text": report.text}, line=True)
