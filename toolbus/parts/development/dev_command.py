"""Implements ``toolbus dev``: a bus and plugins that reload on save, in one terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusTarget
from toolbus.cli.help_text import epilog
from toolbus.cli.run_command import PrefixedOutput, find_plugins, plugin_commands_of, print_json_report
from toolbus.errors import SetupError

if TYPE_CHECKING:
    from toolbus.bus import Bus
    from toolbus.processes.loader import OwnRun, Running
    from toolbus.processes.supervisor import Command, PluginReport

GRPC, HTTP = "127.0.0.1:48930", "127.0.0.1:48911"
FREE = "127.0.0.1:0"

EPILOG = epilog(
    ("toolbus dev weather.py", "toolbus dev run plugins/*.py --env WEATHER_URL", "toolbus dev run tools/"),
    """
    Runs a bus in this process, and the plugins as `toolbus run` does: a Python file, a folder of a plugin, or a folder
    of drop-in tools. Saving a file, or a module beside it, replaces its plugin: the old process answers until the new
    one has offered its tools. A file that cannot be loaded changes nothing, and its line is printed.

    `toolbus dev PATH` is short for `toolbus dev run PATH`; with --json, events are JSON lines.

    The bus stores nothing. It listens where the other commands look for one, 127.0.0.1:48930 with the console at
    127.0.0.1:48911, or at free ports where another program has those.
    """,
    "0 ended as requested, 1 it could not start, 2 wrong usage.",
)


def dev(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders of plugins or tools.")],
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Hand a variable on to the plugins; may be repeated."),
    ] = None,
    secrets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with a table of variables for each plugin.")
    ] = None,
    grpc: Annotated[
        str | None, typer.Option("--grpc", metavar="ADDR", help=f"Where the bus listens (default: {GRPC}).")
    ] = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="ADDR|off", help=f"Where its console is (default: {HTTP}).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Run a bus and plugins that reload on save."""
    unfit = [name for name, given in (("--env", env), ("--secrets", secrets)) if given]
    files, own = find_plugins(paths, unfit)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="bus | %(levelname)s %(message)s")
    given = (grpc or (FREE if http else GRPC), http or (FREE if grpc else HTTP))
    addresses = [given] if grpc or http else [given, (FREE, FREE)]
    asyncio.run(_dev(files, own, env or [], secrets, addresses, as_json=as_json))


async def _dev(
    files: list[Path],
    own: OwnRun | None,
    env: list[str],
    secrets: Path | None,
    addresses: list[tuple[str, str]],
    *,
    as_json: bool,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with terminal.refusing():
            bus = await started_bus(addresses)
        stack.push_async_callback(bus.stop)
        address = bus.grpc_addresses[0]
        console = f", console http://{bus.http_address}/console" if bus.http_address else ""
        ready = {"event": "ready", "grpc": list(bus.grpc_addresses), "http": bus.http_address}
        terminal.print_outcome(f"toolbus dev: bus {address}{console}", ready, as_json, line=True)
        output = print_json_report if as_json else PrefixedOutput()
        plugins: Running
        if own is None:
            commands = plugin_commands_of(files, BusTarget(address), env, secrets, output)
            plugins = _watched(commands, bus, output, suggests=not as_json)
        else:
            plugins = _tool_folder(own, address, output)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, plugins.stop)
        if not await plugins.run():
            raise typer.Exit(terminal.REFUSED)


async def started_bus(addresses: list[tuple[str, str]]) -> Bus:
    """Starts a bus at the first addresses, or at the next where another program has one of those.

    Raises:
        SetupError: it cannot start at any.
    """
    from toolbus.bus import Bus, Config

    (grpc, http), *others = addresses
    bus = Bus(Config(grpc=(grpc,), http=http))
    try:
        await bus.start()
    except SetupError as error:
        await bus.stop()
        if not others:
            raise
        terminal.print_note(f"{error}; it uses free ports instead")
        return await started_bus(others)
    return bus


def _watched(
    commands: dict[str, Command], bus: Bus, output: Callable[[PluginReport], None], *, suggests: bool
) -> Running:
    from toolbus.parts.development.reload import WatchedPlugins
    from toolbus.processes.supervisor import RestartPolicy

    shown = set[str]()

    def on_offered(name: str, tools: list[str]) -> None:
        for tool in tools[:1] if suggests and name not in shown else ():
            shown.add(name)
            terminal.print_lines(f"try it: {example_call(bus, tool)}")

    return WatchedPlugins(commands, output, RestartPolicy(), 12.0, on_offered)


def _tool_folder(own: OwnRun, address: str, output: Callable[[PluginReport], None]) -> Running:
    from toolbus.processes.loader import RunOptions
    from toolbus.processes.supervisor import RestartPolicy
    from toolbus.sdk.bus_address import BusAddress

    with terminal.wrong_usage():
        return own.start(RunOptions(BusAddress.parse(address), None, output, RestartPolicy(), 12.0, False))


def example_call(bus: Bus, name: str) -> str:
    """Returns a command that calls a tool, with a value for each argument that it requires."""
    entry = bus.core.catalog.registry.find(name)
    schema: dict[str, Any] = json.loads(entry.tool.parameters_json or "{}") if entry is not None else {}
    properties = schema.get("properties", {})
    words = [f"{each}={_example(properties.get(each, {}))}" for each in schema.get("required", ())]
    address = bus.grpc_addresses[0]
    where = [] if address == GRPC and "TOOLBUS_ADDRESS" not in os.environ else ["--bus", address]
    return shlex.join(["toolbus", "call", name, *words, *where])


def _example(schema: Any) -> str:
    """Returns a value of a schema as a word of the command line."""
    if not isinstance(schema, dict):  # `true`: any value
        return "TEXT"
    for value in (schema.get("default"), *schema.get("examples", ()), *schema.get("enum", ())):
        if value is not None:
            return value if isinstance(value, str) else json.dumps(value)
    values = {"integer": "1", "number": "1.5", "boolean": "true", "array": "[]", "object": "{}"}
    return values.get(str(schema.get("type")), "TEXT")
