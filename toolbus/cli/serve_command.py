"""``toolbus serve``: one bus in this process, until a signal or an operator ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from toolbus.cli import terminal
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.bus import Bus
    from toolbus.bus.config import Config
    from toolbus.bus.serve_settings import ServeSettings
    from toolbus.processes.supervised_plugin import PluginReport

MANUAL = manual(
    (
        "toolbus serve",
        "toolbus serve --grpc 127.0.0.1:0 --grpc unix:/run/user/1000/toolbus/bus.sock --http off",
        "toolbus serve --role Lanlan --role Yui --config toolbus.toml",
        "toolbus serve --upstream http://127.0.0.1:48911",
        "toolbus serve --offer tasks --offer search --record-contents",
        "toolbus serve --tools-dir tools/",
        "toolbus serve --council council.toml",
    ),
    """
    ServeSettings: flag over environment over file over default. Each has a variable TOOLBUS_NAME (TOOLBUS_GRPC,
    TOOLBUS_ROLES … with commas between items, TOOLBUS_NO_ROLES=1) and a key in the file: grpc, http, roles, no_roles,
    data_dir, ephemeral, upstream, grace_seconds, drain_seconds, silenced, guarded, tripwire, offered, council,
    tools_dir, require_manifest, record_contents, background_after_seconds, grpc_reflection, log_level, log_json, and
    the tables [limits], [permissions] and [tripwire_allow]. Without --http and TOOLBUS_HTTP the HTTP port is that of
    NEKO_MAIN_SERVER_PORT, then MAIN_SERVER_PORT, then the file's, then 48911.

    Tools that were registered with a callback URL, results of tasks, and what `toolbus permit` said are kept in the
    data directory and are there again after a restart. A second bus on the same directory is refused: give each one its
    own with --data-dir, or --ephemeral.

    With --upstream the bus also registers its tools with a main server that speaks the REST contract, which calls them
    back over HTTP. The main server has the port 48911 then, so without --http and TOOLBUS_HTTP the bus takes that of
    NEKO_USER_PLUGIN_SERVER_PORT, then the file's, then 48916.

    Which users may call what stands in the file: [permissions.tools], [permissions.roles] and [permissions.sources],
    each with lines NAME = ["USER", ...]. `toolbus permit` changes the rules while the bus runs, and counts more than
    the file from then on.

    With --council (TOML or JSON) hosts run that council over HTTP; docs/start/councils.md says what the file holds. The
    API key of its sidecar model is read from TOOLBUS_SIDECAR_API_KEY only.

    When it is ready it prints one line to standard output: toolbus ready grpc=ADDR[,ADDR] http=ADDR|off. The log goes
    to standard error. SIGINT and SIGTERM drain the bus, a second one ends it at once.
    """,
    "0 ended as asked, 1 it could not start (an address is taken, say), 2 wrong usage.",
)


def serve(
    grpc: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT|unix:PATH", help="Listen here; may be repeated. Port 0 picks a free one."),
    ] = None,
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT|off", help="Serve HTTP here, or not at all.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A role that tools can be for; may be repeated.")
    ] = None,
    no_roles: Annotated[bool, typer.Option("--no-roles", help="Start without any role.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep tools with a callback URL here over restarts; for one bus at a time (default: the platform's).",
        ),
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Keep nothing: tools with a callback URL end with the bus.")
    ] = False,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="Offer the tools to the main server at http://HOST:PORT, too.")
    ] = None,
    offer: Annotated[
        list[str] | None,
        typer.Option(metavar="tasks|search", help="Offer models the bus's own tools of this group; may be repeated."),
    ] = None,
    council: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run the council of this file for hosts that ask over HTTP.")
    ] = None,
    tools_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run the drop-in tools of this folder, too, and follow it.")
    ] = None,
    require_manifest: Annotated[
        bool, typer.Option("--require-manifest", help="Load nothing from that folder without a _manifest.json.")
    ] = False,
    record_contents: Annotated[
        bool, typer.Option("--record-contents", help="Keep arguments and outputs with the newest calls, cut.")
    ] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Read settings from this TOML file.")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error (default: info).")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines of JSON to standard error.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events (ready, draining, stopped) as JSON lines.")
    ] = False,
) -> None:
    """Run a bus."""
    if role and no_roles:
        terminal.fail("--role and --no-roles contradict each other: drop one", terminal.USAGE)
    if data_dir and ephemeral:
        terminal.fail("--data-dir and --ephemeral contradict each other: drop one", terminal.USAGE)
    flags = _given(
        grpc=tuple(grpc or ()),
        http=http,
        upstream=upstream,
        offered=tuple(offer or ()),
        council=council,
        tools_dir=tools_dir,
        require_manifest=require_manifest,
        record_contents=record_contents,
        log_level=log_level,
        log_json=log_json,
    )
    if role or no_roles:
        flags["roles"] = tuple(role or ())
    if data_dir or ephemeral:
        flags["data_dir"] = data_dir
    settings = _settled(flags, config)
    _log_to_stderr(settings)
    try:
        _runner().run(_serve(settings.config, as_json))
    except KeyboardInterrupt:  # before the signals were ours
        raise typer.Exit(terminal.INTERRUPTED) from None


def _given(**flags: Any) -> dict[str, Any]:
    """Returns the flags that were given."""
    return {name: value for name, value in flags.items() if value not in (None, (), False)}


def _settled(flags: dict[str, Any], file: Path | None) -> ServeSettings:
    try:
        from toolbus.bus.serve_settings import settle
        from toolbus.errors import SetupError

        return settle(flags, os.environ, file)
    except ModuleNotFoundError as missing:
        _needs_server(missing)
    except SetupError as error:
        terminal.fail(str(error), terminal.USAGE)


def _needs_server(missing: ModuleNotFoundError) -> NoReturn:
    if (missing.name or "").partition(".")[0] == "toolbus":
        raise missing
    terminal.fail(f"serve needs {missing.name}, which is not installed: pip install 'toolbus[server]'")


def _runner() -> Any:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(config: Config, as_json: bool) -> None:
    try:
        from toolbus.bus import Bus
    except ModuleNotFoundError as missing:
        _needs_server(missing)
    from toolbus.errors import SetupError

    told, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if told.is_set() else told).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    try:
        async with Bus(config) as bus:
            _ready(bus, as_json)
            # What starting made stays until the end: no later pass of the garbage collector need look at it, which
            # would hold every call up for as long (28 ms in all of it, 1 ms in the rest).
            gc.collect()
            gc.freeze()
            async with _tools(config, bus, at_once):
                await _first(told.wait(), bus.wait_stopped())
                told.set()  # whoever asked, the next signal means at once
                if as_json:
                    terminal.say_json({"event": "draining"}, line=True)
                await _first(bus.drain(), at_once.wait())
    except SetupError as error:
        terminal.fail(str(error))
    if as_json:
        terminal.say_json({"event": "stopped"}, line=True)


@contextlib.asynccontextmanager
async def _tools(config: Config, bus: Bus, at_once: asyncio.Event) -> AsyncIterator[None]:
    """Runs the drop-in tools, where there is a folder of them, for as long as the bus.

    Args:
        at_once: ends them at the end without time for their calls.
    """
    if config.tools_dir is None:
        yield
        return
    from toolbus.dropin.tool_folder import ToolFolder

    address = await bus.dropin_address()
    folder = ToolFolder(config.tools_dir, address, _log_report, require_manifest=config.require_manifest)
    running = asyncio.create_task(folder.run())
    running.add_done_callback(_log_fault)
    try:
        yield
    finally:
        folder.stop()
        await _first(asyncio.wait([running]), at_once.wait())
        folder.stop()
        await asyncio.wait([running])


def _log_fault(tools: asyncio.Task[bool]) -> None:
    if not tools.cancelled() and (fault := tools.exception()) is not None:
        logging.getLogger("toolbus.dropin").error("drop-in tools are no longer run: restart the bus", exc_info=fault)


def _log_report(report: PluginReport) -> None:
    """Logs what a process says, a line of its own log at the level that it has there."""
    from toolbus.processes.supervised_plugin import ReportKind

    bad = report.stream == "stderr" or report.kind in (ReportKind.DIED, ReportKind.GIVEN_UP)
    level, text = logging.WARNING if bad else logging.INFO, report.text
    named, _, rest = text.partition(" ")
    if report.stream == "stderr" and rest and named in _LEVELS:
        level, text = _LEVELS[named], rest
    logging.getLogger("toolbus.dropin").log(level, "%s: %s", report.plugin, text)


_LEVELS = {logging.getLevelName(level): level for level in range(logging.DEBUG, logging.CRITICAL + 1, 10)}


async def _first(*ways: Any) -> None:
    """Waits for the first of several; ends the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ready(bus: Any, as_json: bool) -> None:
    if as_json:
        addresses = {"grpc": list(bus.grpc_addresses), "http": bus.http_address}
        terminal.say_json({"event": "ready", **addresses}, line=True)
    else:
        print(f"toolbus ready grpc={','.join(bus.grpc_addresses)} http={bus.http_address or 'off'}", flush=True)


# -- the log -------------------------------------------------------------------------------------------------------

_OWN_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


class _Lines(logging.Formatter):
    """``12:00:00 info toolbus: text key=value`` for people; with the date where nobody watches."""

    def __init__(self, date: bool) -> None:
        super().__init__()
        self._date = "%Y-%m-%dT%H:%M:%S%z" if date else "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime(self._date, time.localtime(record.created))
        more = "".join(f" {key}={value}" for key, value in _extra(record).items())
        text = f"{when} {record.levelname.lower()} {record.name}: {record.getMessage()}{more}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
            **({"exception": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return json.dumps(fields, ensure_ascii=False, default=str)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}


def _log_to_stderr(settings: ServeSettings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if settings.log_json else _Lines(date=not sys.stderr.isatty()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # that it starts and stops is said by us
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at info it has a line for each question to a sidecar
    logging.getLogger("asyncio").setLevel(logging.WARNING)  # at debug it tells which selector it uses
