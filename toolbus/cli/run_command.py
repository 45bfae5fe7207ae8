"""Implements ``toolbus run``: runs plugins, or a folder of drop-in tools, as supervised processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget
from toolbus.cli.help_text import epilog
from toolbus.cli.steady_output import json_note, steady_output, text_note
from toolbus.common.text import COLOUR_END, drop_unsafe, keep_colours
from toolbus.parts.dropin.offered_output import OWN_NAME, RecordedOutput, offering_output

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from toolbus.parts.dropin.tool_folder import ToolFolder
    from toolbus.processes.plugin_program import PluginProgram
    from toolbus.processes.supervisor import Command, PluginReport, Supervisor


# Finds out what the arguments of ``toolbus run`` name: plugins, programs, or a folder of drop-in tools.


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
    from toolbus.parts.moving.neko.plugin_folder import plugin_folders, wanted_folders

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
    from toolbus.parts.dropin.file_loader import extension_entry
    from toolbus.parts.dropin.manifest import EXTENSION

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


# Prints what supervised plugins write and what happens to them, each line with the plugin's name.
#
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
        "toolbus run plugins/weather/ --entries",
        "toolbus run tools/",
        "toolbus run dice.js",
        """toolbus run --exec weather="node weather.js" news.py""",
    ),
    """
    A plugin is a Python file, or a folder with a plugin.toml as N.E.K.O. has them; of a folder of such folders, each
    runs whose plugin.toml does not say enabled = false. Each plugin runs in its own process; its output is printed with
    its name. A plugin that dies is restarted after a backoff, which doubles from 0.25 s to 30 s. One that dies 5 times
    within 30 s, or cannot start, is given up, and the others continue. A plugin that ends by itself with exit code 0 is
    not restarted.

    A plugin gets the variables that programs need (PATH, HOME, languages, proxies, Python's own and others) and those
    that --env names; a plugin that reads another one is reported. --secrets names a TOML file that only you can read,
    with a table for each plugin, by its file's name without .py or its folder's name: its keys become variables of that
    plugin alone. They are in no list of processes and in no /proc/PID/environ.

    --exec runs a program in any language as a plugin, for as long as it stays in the foreground, in the directory of
    this command. The command is split into words like a shell's, and no shell runs it: write sh -c '…' for one. The
    program gets TOOLBUS_ADDRESS, a TOOLBUS_TOKEN of its own, and the variables of a plugin; NAME names it in output and
    its table of --secrets. One that ends with exit code 78 is given up at once.

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

REPEAT_SECONDS = 2.0  # in which the connections for tools and for operators report the same problem

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
        help="Run a program in any language as a plugin, without a shell; may be repeated, and beside files.",
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


def run(
    files: FilesArgument = None,
    programs: ExecOption = None,
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
    if not files and not programs:
        terminal.fail("nothing to run: name a plugin file, a folder, or --exec NAME=COMMAND", terminal.USAGE)
    plugin_paths, folder, only = find_plugins(files or [])
    if folder is not None:
        _check_folder(folder, programs, env, secrets)
    target = BusTarget(bus, credential)
    _check_target(target, folder)
    from toolbus.parts.dropin.tool_folder import ToolFolder
    from toolbus.processes.supervisor import RestartPolicy, Supervisor

    emit = RecordedOutput(print_json_report if as_json else PrefixedOutput(), tail_bytes, in_groups=folder is not None)
    options: dict[str, Any] = {"restarts": RestartPolicy(enabled=not once), "stop_seconds": stop_seconds}
    plugins: Supervisor | ToolFolder
    if folder is None:
        plugins = Supervisor(emit, **options)
        for name, command in _commands(
            [*plugin_paths, *read_programs(programs or ())], target, _requests(env, entries), secrets, emit
        ).items():
            plugins.add(name, command)
    else:
        plugins = ToolFolder(folder, "", emit, require_manifest=require_manifest, only=only, **options)

    note = json_note("text", plugin=OWN_NAME, event="output", stream="stderr") if as_json else text_note
    try:
        with steady_output(note):
            succeeded = asyncio.run(_run_until_stopped(plugins, target, emit))
    except* BrokenPipeError:  # the reader of our output has ended; the plugins are ended too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter reports it at exit
        succeeded = False
    if not succeeded:
        raise typer.Exit(terminal.REFUSED)


async def _run_until_stopped(plugins: Supervisor | ToolFolder, target: BusTarget, emit: RecordedOutput) -> bool:
    from toolbus.processes.supervisor import Supervisor

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, plugins.stop)
    async with contextlib.AsyncExitStack() as around:
        if not isinstance(plugins, Supervisor):
            await around.enter_async_context(_following_address(target, plugins, emit))
        await around.enter_async_context(offering_output(target, plugins, emit))
        return await plugins.run()


def _check_folder(folder: Path, programs: list[str] | None, env: list[str] | None, secrets: Path | None) -> None:
    """Ends the command if an option does not go with a folder of drop-in tools."""
    if programs:
        terminal.fail(
            f"{folder} holds drop-in tools, and --exec runs a plugin: run them by two commands", terminal.USAGE
        )
    if env or secrets:
        terminal.fail(
            f"{'--env' if env else '--secrets'} is for plugin files: name the variables of a tool in the folder's "
            '_manifest.json ({"files": {"FILE.py": {"secrets": ["NAME"]}}})',
            terminal.USAGE,
        )


def _requests(env: list[str] | None, entries: bool) -> list[str]:
    """Returns the variables that every plugin gets besides the usual ones."""
    from toolbus.processes.plugin_process import ENTRIES_VARIABLE

    return [*(env or ()), *([f"{ENTRIES_VARIABLE}=1"] if entries else ())]


def _check_target(target: BusTarget, folder: Path | None) -> None:
    """Ends the command if the bus cannot be used as the options say."""
    if folder is None and target.credential is None:
        return  # the plugins connect, and this process does not
    address, _ = target.read()
    if folder is not None and address.tls and not address.is_local:
        terminal.fail(
            f"{folder} holds drop-in tools, which attach at a port that the bus opens on its own machine, and "
            f"{address} is another one: run them there",
            terminal.USAGE,
        )


def _commands(
    plugins: Sequence[Path | PluginProgram],
    target: BusTarget,
    requests: Sequence[str],
    secrets: Path | None,
    emit: Callable[[PluginReport], None],
) -> dict[str, Command]:
    """Returns the command of each plugin, by name; ends this one if a variable or the file of secrets is refused."""
    from toolbus.errors import SetupError
    from toolbus.processes.plugin_program import plugin_commands
    from toolbus.sdk.bus_address import BusAddress

    environment = dict(os.environ)
    try:
        if target.address:  # else a plugin's own credential says where the bus is
            environment["TOOLBUS_ADDRESS"] = BusAddress.parse(target.address).text
        return plugin_commands(plugins, environment, requests, secrets, emit, target.credential)
    except SetupError as error:
        terminal.fail(str(error), terminal.USAGE)


@contextlib.asynccontextmanager
async def _following_address(
    bus: BusTarget, folder: ToolFolder, emit: Callable[[PluginReport], None]
) -> AsyncIterator[None]:
    """Gives a folder the bus's address for drop-in tools, whenever it changes, and reports connection problems."""
    from toolbus.parts.dropin.dropin_address import follow_dropin_address
    from toolbus.parts.dropin.group_supervisor import FOLDER_NAME
    from toolbus.processes.supervisor import PluginReport, ReportKind

    address, credential = bus.read()
    loop = asyncio.get_running_loop()

    def report(text: str) -> None:
        emit(PluginReport(FOLDER_NAME, ReportKind.OUTPUT, text, "stderr"))

    class ReportHandler(logging.Handler):
        latest = ("", 0.0)  # a text, and when it was reported

        def emit(self, record: logging.LogRecord) -> None:
            text, when = f"{record.levelname} {record.name}: {record.getMessage()}", record.created
            if text != self.latest[0] or when - self.latest[1] >= REPEAT_SECONDS:
                self.latest = text, when
                loop.call_soon_threadsafe(report, text)

    handler = ReportHandler(logging.WARNING)
    logging.getLogger("toolbus").addHandler(handler)  # the connection logs that no bus is there
    following = asyncio.create_task(follow_dropin_address(address.text, folder.move, report, credential=credential))
    following.add_done_callback(lambda task: folder.stop())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        logging.getLogger("toolbus").removeHandler(handler)
        if not following.cancelled():
            following.result()
