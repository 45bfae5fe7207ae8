"""Implements ``toolbus mcp``: the bridge for MCP clients that start their servers, and the snippets that name it.

It reads its arguments itself and imports the standard library alone: clients start it, and wait for its first answer.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

USAGE = """\
Usage: toolbus mcp [--profile NAME] [--bus ADDR] [--url URL] [--data-dir DIR]
       toolbus mcp config claude-desktop|claude-code|vscode|cursor [--write]
                          [--profile NAME] [--bus ADDR] [--url URL]

Connects an MCP client on standard input and output with the bus, over the
socket mcp.sock in the data directory of the bus, else over HTTP at the default
address. Clients start it themselves: `toolbus mcp config CLIENT` prints what
their configuration needs.

Options:
  --profile NAME  the profile of [mcp.profiles] that the client sees
                  (default: the profile default)
  --bus ADDR      the bus, or several, as the other commands name them
                  (default: TOOLBUS_ADDRESS); the one that answers is taken
  --url URL       the endpoint of the bus, such as http://127.0.0.1:48911/mcp
  --data-dir DIR  the data directory of the bus (default: TOOLBUS_DATA_DIR,
                  else as for toolbus serve)
  --write         merges the snippet into the client's own file, after a copy
                  of it was made
  -h, --help      shows this text

Examples:
  toolbus mcp config claude-desktop
  toolbus mcp config vscode --write --profile desk
  toolbus mcp --url http://127.0.0.1:48911/mcp
  toolbus mcp --bus 127.0.0.1:48930,127.0.0.1:48940

Exit codes: 0 the client has ended it, 1 the file cannot be changed,
2 wrong usage.
"""
_VALUES = ("--profile", "--bus", "--url", "--data-dir")


def main(arguments: list[str]) -> None:
    words, options, write = _read(arguments)
    if words[:1] == ["config"]:
        from toolbus.parts.mcp.commands.mcp_clients import McpClientName, configure

        if len(words) != 2 or words[1] not in tuple(McpClientName):
            _wrong(f"config takes one of {', '.join(McpClientName)}")
        sys.exit(configure(McpClientName(words[1]), options, write=write))
    if words or write:
        _wrong(f"unexpected {' '.join(words) or '--write'}")
    from toolbus.parts.mcp.bridge import program

    url, bus, data_dir = (options.get(name, "") for name in ("--url", "--bus", "--data-dir"))
    if bool(url) + bool(bus) + bool(data_dir) > 1:
        _wrong("--bus, --url and --data-dir each say where the bus is: give one of them")
    if not (url or bus or data_dir):
        data_dir, bus = (os.environ.get(name, "") for name in ("TOOLBUS_DATA_DIR", "TOOLBUS_ADDRESS"))
    program.run(options.get("--profile", ""), url, data_dir, "" if data_dir else bus)


def _read(arguments: list[str]) -> tuple[list[str], dict[str, str], bool]:
    words: list[str] = []
    options: dict[str, str] = {}
    write = False
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            _print_usage()
            sys.exit(0)
        elif name in _VALUES:
            text = value if equals else next(rest, None)
            if not text:
                _wrong(f"{name} needs a value")
            options[name] = text
        elif word == "--write":
            write = True
        elif word.startswith("-"):
            _wrong(f"unknown option {word}")
        else:
            words.append(word)
    return words, options, write


def _print_usage() -> None:
    try:
        print(USAGE, end="", flush=True)
    except OSError as error:
        from toolbus.cli import terminal

        terminal.end_unwritten(error)


def _wrong(why: str) -> NoReturn:
    sys.stderr.write(f"{USAGE.split(os.linesep + os.linesep)[0]}\n\ntoolbus mcp: {why}\n")
    sys.exit(2)
