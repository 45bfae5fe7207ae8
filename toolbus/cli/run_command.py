"""Implements ``toolbus run``: runs plugins, or a folder of drop-in tools, as supervised processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget
from toolbus.cli.help_text import epilog
from toolbus.cli.steady_output import json_note, steady_output, text_note
from toolbus.common.text import COLOUR_END, drop_unsafe, keep_colours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from toolbus.processes.loader import OwnRun, Running
    from toolbus.processes.output_tail import OutputTails
    from toolbus.processes.plugin_program import PluginProgram
    from toolbus.processes.supervisor import Command, PluginReport, RestartPolicy


def find_plugins(paths: list[Path], options: Sequence[str]) -> tuple[list[Path], OwnRun | None]:
    """Returns the files and folders of plugins, or what a loader runs itself; ends the command if neither fits.

    Args:
        options: those that are given and are for plugins with a process each.
    """
    from toolbus.processes.loader import loaders, missing_loaders

    for path in paths:
        if not path.is_dir() and not path.is_file():
            terminal.fail(f"{path} does not exist: check the path", terminal.USAGE)
    known = loaders()
    plugins: list[Path] = []
    rest: list[Path] = []
    notes: list[str] = []
    with terminal.wrong_usage():
        for path in paths:
            if not path.is_dir():
                plugins.append(path)
            elif found := next(filter(None, (loader.find(path) for loader in known)), None):
                plugins += found.paths
                notes += found.notes
            else:
                rest.append(path)
        if (own := next(filter(None, (loader.take(paths, rest, options) for loader in known)), None)) is not None:
            return [], own
    if rest:
        terminal.fail(f"{rest[0]} holds no plugins: name a plugin's file{missing_loaders()}", terminal.USAGE)
    for note in notes:
        terminal.print_note(note)
    return plugins, None


# A plugin may colour its output. Every other escape sequence and control character is dropped, so that it can neither
# change the terminal nor print a line that looks like another plugin's.

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


EPILOG = epilog(
    (
        "toolbus run weather.py",
        "toolbus run plugins/*.py --bus unix:/run/user/1000/toolbus/bus.sock",
        "toolbus run weather.py --env WEATHER_URL --secrets secrets.toml",
        "toolbus run weather.py --replicas 4",
        "toolbus run weather.py --watch",
        "toolbus run plugins/weather/ --entries",
        "toolbus run tools/",
        "toolbus run dice.js",
        """toolbus run --exec weather="node weather.js" news.py""",
        "toolbus run -m my_package",
    ),
    """
    A plugin is a Python file, or a folder with a plugin.toml as N.E.K.O. has them; of a folder of such folders, each
    runs whose plugin.toml does not say enabled = false. Of a folder in which each file makes a Plugin, as `toolbus new`
    writes one, each runs; files whose names begin with _ or test_ are left out. Each plugin runs in its own process;
    its output is printed with its name. A plugin that dies is restarted after a backoff, which doubles from 0.25 s to
    30 s. One that dies 5 times within 30 s, or cannot start, is given up, and the others continue. A plugin that ends
    by itself with exit code 0 is not restarted.

    A plugin gets the variables that programs need (PATH, HOME, languages, proxies, Python's own and others) and those
    that --env names; a plugin that reads another one is reported. --secrets names a TOML file that only you can read,
    with a table for each plugin, by its file's name without .py or its folder's name: its keys become variables of that
    plugin alone. They are in no list of processes and in no /proc/PID/environ. For a folder of drop-in tools the file
    has no tables; each file of the folder gets those variables that _manifest.json grants it under "secrets".

    --exec runs a program in any language as a plugin, for as long as it stays in the foreground, in the directory of
    this command. The command is split into words like a shell's, and no shell runs it: write sh -c '…' for one. The
    program gets TOOLBUS_ADDRESS, a TOOLBUS_TOKEN of its own, and the variables of a plugin; NAME names it in output and
    its table of --secrets. One that ends with exit code 78 is given up at once. -m runs an installed package in the
    same way, as python -m does; its name is the package's.

    Any other folder contains drop-in tools: files with one function or a few, run in sandboxed processes. Adding,
    changing or removing a file takes effect at once; calls in flight finish on the old code. Without a grant in
    _manifest.json a file can write no file, start no process, and connect only to the bus's port for drop-in tools.
    Files in JavaScript (*.js) and folders with a spindle.json run in the same way, also if they are named alone; the
    helpers _*.js beside them are loaded too.

    SIGINT and SIGTERM shut all plugins down gracefully: each withdraws its tools and finishes its calls. After
    --stop-seconds those that still run get SIGTERM, with all processes that they started, and SIGKILL 5 s later. A
    second signal kills them at once. The bus may be started later; plugins attach as soon as it runs.
    """,
    "0 all plugins ended as requested, 1 a plugin was given up, 2 wrong usage.",
)

FilesArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...|DIR...",
        show_default=False,
        help="Python files and folders of plugins; or one folder of drop-in tools, or files *.js of one.",
    ),
]
ExecOption = Annotated[
    list[str] | None,
    typer.Option(
        "--exec",
        metavar="NAME=COMMAND",
        help="Run a program in any language as a plugin, without a shell; may be repeated, and goes with files.",
    ),
]
ModuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--module", "-m", metavar="MODULE", help="Run an installed package as a plugin; may be repeated, as --exec."
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="Hand a variable on to the plugins, with its value here or with this one; * stands for any letters; may "
        "be repeated.",
    ),
]
SecretsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML with a table of variables for each plugin; only you may read it."),
]
CredentialForPlugins = Annotated[
    Path | None,
    typer.Option(
        "--credential",
        metavar="FILE",
        help="Credential for a bus on another machine; handed on to every plugin file that has none in --secrets.",
    ),
]
ReplicasOption = Annotated[
    int, typer.Option(min=1, max=64, metavar="N", help="Run each plugin as so many processes, which share its calls.")
]
WatchOption = Annotated[bool, typer.Option("--watch", help="Replace a plugin whenever a file of it is saved.")]


def run(
    files: FilesArgument = None,
    programs: ExecOption = None,
    modules: ModuleOption = None,
    bus: BusOption = None,
    credential: CredentialForPlugins = None,
    require_manifest: Annotated[
        bool, typer.Option("--require-manifest", help="Load nothing from a folder without a _manifest.json.")
    ] = False,
    env: EnvOption = None,
    secrets: SecretsOption = None,
    entries: Annotated[
        bool, typer.Option("--entries", help="Offer methods with @plugin_entry of N.E.K.O. plugins as tools too.")
    ] = False,
    replicas: ReplicasOption = 1,
    watch: WatchOption = False,
    once: Annotated[bool, typer.Option("--once", help="Do not restart a plugin that died.")] = False,
    tail_bytes: Annotated[
        int,
        typer.Option(
            min=0, help="How much of each plugin's output `toolbus logs` can show; 0: none, and no connection for it."
        ),
    ] = 1 << 20,
    stop_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long plugins may take to finish their calls, in seconds.")
    ] = 12.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print output and events as JSON lines to standard output.")
    ] = False,
) -> None:
    """Run plugins, or a folder of drop-in tools; restart those that die."""
    if not files and not programs and not modules:
        terminal.fail("nothing to run: name a plugin file, a folder, -m MODULE or --exec NAME=COMMAND", terminal.USAGE)
    single = (
        ("--exec", programs),
        ("-m", modules),
        ("--env", env),
        ("--secrets", secrets),
        ("--replicas", replicas > 1),
        ("--watch", watch),
    )
    unfit = [name for name, given in single if given]
    plugin_paths, own = find_plugins(files or [], unfit)
    target = BusTarget(bus, credential)
    from toolbus.processes.loader import RunOptions
    from toolbus.processes.plugin_process import ENTRIES_VARIABLE
    from toolbus.processes.plugin_program import PluginProgram
    from toolbus.processes.supervisor import RestartPolicy

    output = RecordedOutput(print_json_report if as_json else PrefixedOutput(), tail_bytes, own)
    restarts = RestartPolicy(enabled=not once)
    plugins: Running
    if own is None:
        if credential is not None:
            target.read()  # for its checks: the plugins connect, and this process may not
        with terminal.wrong_usage():
            wanted = [*map(PluginProgram.parse, programs or ()), *map(PluginProgram.of_module, modules or ())]
        requests = [*(env or ()), *([f"{ENTRIES_VARIABLE}=1"] if entries else ())]
        commands = plugin_commands_of([*plugin_paths * replicas, *wanted], target, requests, secrets, output)
        plugins = _supervised(replicated(commands, replicas), output, restarts, stop_seconds, watch=watch)
    else:
        options = RunOptions(*target.read(), output, restarts, stop_seconds, require_manifest, secrets)
        with terminal.wrong_usage():
            plugins = own.start(options)

    note = json_note("text", plugin=OWN_NAME, event="output", stream="stderr") if as_json else text_note
    try:
        with steady_output(note):
            succeeded = asyncio.run(_run_until_stopped(plugins, target, output, connects=own is not None))
    except* BrokenPipeError:  # the reader of our output has ended; the plugins are ended too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter reports it at exit
        succeeded = False
    if not succeeded:
        raise typer.Exit(terminal.REFUSED)


def _supervised(
    commands: dict[str, Command],
    emit: Callable[[PluginReport], None],
    restarts: RestartPolicy,
    stop_seconds: float,
    *,
    watch: bool,
) -> Running:
    """Returns plugins that run as processes of their own; ends the command if nothing here can watch them."""
    from toolbus.common.part import load
    from toolbus.processes.supervisor import Supervisor

    if watch:
        with terminal.wrong_usage():
            watched: Running = load("toolbus.parts.development.reload:WatchedPlugins")(
                commands, emit, restarts, stop_seconds
            )
            return watched
    supervisor = Supervisor(emit, restarts=restarts, stop_seconds=stop_seconds)
    for name, command in commands.items():
        supervisor.add(name, command)
    return supervisor


async def _run_until_stopped(plugins: Running, target: BusTarget, output: RecordedOutput, *, connects: bool) -> bool:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, plugins.stop)
    async with offering_output(target, plugins, output, connects=connects):
        return await plugins.run()


def plugin_commands_of(
    plugins: Sequence[Path | PluginProgram],
    target: BusTarget,
    requests: Sequence[str],
    secrets: Path | None,
    emit: Callable[[PluginReport], None],
) -> dict[str, Command]:
    """Returns the command of each plugin, by name; ends this one if a variable or the file of secrets is refused."""
    from toolbus.processes.plugin_program import plugin_commands
    from toolbus.sdk.bus_address import written_address

    environment = dict(os.environ)
    with terminal.wrong_usage():
        if target.address:  # else a plugin's own credential says where the bus is
            environment["TOOLBUS_ADDRESS"] = written_address(target.address)
        return plugin_commands(plugins, environment, requests, secrets, emit, target.credential)


def replicated(commands: dict[str, Command], replicas: int) -> dict[str, Command]:
    """Returns commands with those of further processes of programs; files were named more often."""
    programs = {name: command for name, command in commands.items() if command.group_drains}
    return commands | {f"{name}#{n}": each for name, each in programs.items() for n in range(2, replicas + 1)}


OFFER_AFTER_SECONDS = 1.0  # plugins come first, and a command that ends at once needs no connection
OWN_NAME = "toolbus"  # of this command, in its own output


class RecordedOutput:
    """Prints reports of plugins, and stores the newest of each.

    Args:
        prints: prints a report.
        tail_bytes: stored of each plugin; 0 stores nothing.
        own: the loader's own run that they come from; None for plugins with a process each.

    Attributes:
        tails: the stored reports; None without.
    """

    def __init__(self, prints: Callable[[PluginReport], object], tail_bytes: int, own: OwnRun | None) -> None:
        from toolbus.processes.output_tail import OutputTails

        self.tails = OutputTails(tail_bytes) if tail_bytes else None
        self._prints = prints
        self._own = own

    def __call__(self, report: PluginReport) -> None:
        """Takes a report."""
        if self.tails is not None:
            self.tails(report if self._own is None else self._own.as_stored(report))
        self._prints(report)


@contextlib.asynccontextmanager
async def offering_output(
    bus: BusTarget, plugins: Running, output: RecordedOutput, *, connects: bool
) -> AsyncIterator[None]:
    """Offers the output of the plugins to operators, from a moment after the start on.

    Args:
        connects: whether this process connects to the bus for the plugins too, and logs that no bus is there.
    """
    if output.tails is None:
        yield
        return
    offering = asyncio.create_task(
        _offer_output(bus, plugins, output.tails, output, connects), name="output for operators"
    )
    try:
        yield
    finally:
        offering.cancel()
        await asyncio.gather(offering, return_exceptions=True)


async def _offer_output(
    bus: BusTarget, plugins: Running, tails: OutputTails, emit: Callable[[PluginReport], None], connects: bool
) -> None:
    from toolbus.errors import SetupError
    from toolbus.processes.supervisor import PluginReport, ReportKind
    from toolbus.sdk.bus_address import written_address
    from toolbus.sdk.connection_settings import find_credential

    await asyncio.sleep(OFFER_AFTER_SECONDS)

    def report(text: str) -> None:
        emit(PluginReport(OWN_NAME, ReportKind.OUTPUT, text, "stderr"))

    run_tools = await asyncio.to_thread(importlib.import_module, "toolbus.processes.run_tools")  # it takes a while
    if not connects:
        # Each plugin says for itself that no bus is there; the connection for operators need not.
        logging.getLogger("toolbus.sdk").setLevel(logging.CRITICAL)
    tools = run_tools.RunTools(tails, plugins.restart, plugins.stop_plugin)
    try:
        address = written_address(bus.address) if bus.address else ""
        await run_tools.offer(tools, address, find_credential(bus.credential), report)
    except SetupError as error:
        report(f"`toolbus logs` cannot show the output of these plugins: {error}")
