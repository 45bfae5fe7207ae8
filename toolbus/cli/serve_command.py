"""Implements ``toolbus serve``: runs one bus in this process, until a signal or an operator ends it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from toolbus.bus.serve_settings import ServeSettings, serve_settings, settle
from toolbus.cli import terminal
from toolbus.cli.help_text import epilog
from toolbus.cli.steady_output import json_note, steady_output, text_note
from toolbus.common.cancellation import wait_first
from toolbus.common.descriptors import raise_descriptor_limit
from toolbus.common.log_limit import LineBudget
from toolbus.common.setting import FLAG, Option, ValueKind
from toolbus.common.text import clean_line, clean_lines, escape_unsafe
from toolbus.errors import NotKept, SetupError

if TYPE_CHECKING:
    from toolbus.bus.config import Config


# What peers sent may be part of a record, so every text is cleaned: it can neither look like another line of the log
# nor change the terminal that shows it. Fields of a record follow its text as ``key=value``, in quotes where the
# value holds blanks, quotes or ``=``: a value cannot look like a field either.

_BARE = re.compile(r'[^\s"=\\]+')  # a value that needs no quotes
_RECORD_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


class _Lines(logging.Formatter):
    """Formats ``12:00:00 info toolbus: text key=value``; with the date if the log does not go to a terminal.

    A record is one line. A traceback follows it, indented.
    """

    def __init__(self, date: bool) -> None:
        super().__init__()
        self._date = "%Y-%m-%dT%H:%M:%S%z" if date else "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime(self._date, time.localtime(record.created))
        fields = "".join(f" {key}={_shown(value)}" for key, value in _extra_fields(record).items())
        text = f"{when} {record.levelname.lower()} {record.name}: {clean_line(f'{record.getMessage()}{fields}')}"
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n  ".join((text, *(clean_lines(part) for part in (trace, stack) if part)))


class _JsonLines(logging.Formatter):
    """Formats each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
            **({"exception": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return escape_unsafe(json.dumps(fields, ensure_ascii=False, default=str))


def _shown(value: object) -> str:
    """Returns the value of a field as a line of text has it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


def log_to_stderr(settings: ServeSettings) -> None:
    """Sends the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LineBudget(("toolbus.sessions", "toolbus.catalog", "toolbus.mounts")))
    handler.setFormatter(_JsonLines() if settings.log_json else _Lines(date=not sys.stderr.isatty()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the bus logs its own start and stop
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at info it has a line for each request to a sidecar
    logging.getLogger("asyncio").setLevel(logging.WARNING)  # at debug it logs which selector it uses


_KEYS = [
    name
    for each in serve_settings()
    if each.kind.of_text is not None
    for name in (each.name, *((each.switch.name,) if each.switch is not None else ()))
]
_TABLES = [  # a list of tables has two brackets
    f"[[{each.name}]]" if each.default == () else f"[{each.name}]"
    for each in serve_settings()
    if each.kind.of_text is None
]

EPILOG = epilog(
    (
        "toolbus serve",
        "toolbus serve --grpc 127.0.0.1:0 --grpc unix:/run/user/1000/toolbus/bus.sock --http off",
        "toolbus serve --grpc 127.0.0.1:48930 --grpc mtls:0.0.0.0:48931 --https 0.0.0.0:48912",
        "toolbus serve --role Lanlan --role Yui --config toolbus.toml",
        "toolbus serve --upstream http://127.0.0.1:48911",
        "toolbus serve --offer tasks --offer search --record-contents",
        "toolbus serve --tools-dir tools/",
        "toolbus serve --council council.toml",
        "toolbus serve --mcp-servers mcp.json",
    ),
    """
    Settings: a flag overrides the environment, which overrides the file, which overrides the default. Each setting has
    a variable TOOLBUS_NAME (TOOLBUS_GRPC, TOOLBUS_ROLES … with commas between items, TOOLBUS_NO_ROLES=1) and a key in
    the file: KEYS, and the tables TABLES. Without --http and TOOLBUS_HTTP
    the HTTP port is NEKO_MAIN_SERVER_PORT, else MAIN_SERVER_PORT, else that of the file, else 48911.

    The data directory stores tools that were registered with a callback URL, results of tasks, the rules of `toolbus
    permit`, roles that were added while the bus ran, and what --upstream has registered; they are restored after a
    restart. Only one bus may use a data directory: give each bus its own with --data-dir, or use --ephemeral. It also
    holds the audit, which `toolbus audit` reads: who attached, offered tools or administered the bus. audit = false
    writes none, audit_required = true refuses what cannot be written down, audit_calls = true adds calls.

    With --upstream the bus also registers its tools with a main server that implements the REST contract, which calls
    them back over HTTP. The main server uses the port 48911 then, so without --http and TOOLBUS_HTTP the HTTP port is
    NEKO_USER_PLUGIN_SERVER_PORT, else that of the file, else 48916; where the variable's port or 48916 is taken, it is
    the next free one, and a warning says so.

    The file sets which users may call what: [permissions.tools], [permissions.roles] and [permissions.sources], each
    with lines NAME = ["USER", ...]. `toolbus access permit` changes the rules while the bus runs, and overrides the
    file from then on.

    With --council (TOML or JSON) hosts run that council over HTTP; docs/start/councils.md describes the file. The API
    key of its sidecar model is read from TOOLBUS_SIDECAR_API_KEY only.

    With --mcp-servers the bus mounts the MCP servers of a file as MCP clients have it (mcpServers, or VS Code's
    servers), in addition to those of `toolbus mounts add`, and follows its changes; ${VAR} in it is taken from the
    environment of the bus.

    When the bus is ready, it prints one line to standard output: toolbus ready grpc=ADDR[,ADDR] http=ADDR|off, and
    https=ADDR where that is served. The log goes to standard error. SIGINT and SIGTERM drain the bus, a second signal
    ends it at once.
    """.replace("KEYS", ", ".join(_KEYS)).replace("TABLES", ", ".join(_TABLES)),
    "0 ended as requested, 1 it could not start (an address is in use, for example), 2 wrong usage.",
)


def _options() -> Iterator[inspect.Parameter]:
    """Yields a parameter of `serve` for each option that a setting declares, and for each switch."""
    for each in serve_settings():
        if each.option is not None:
            yield _parameter(each.name, each.kind, each.option)
        if each.switch is not None:
            yield _parameter(each.switch.name, FLAG, each.switch.option)


def _parameter(name: str, kind: ValueKind, option: Option) -> inspect.Parameter:
    value: Any = kind.of_word
    info = typer.Option(option.word(name), metavar=option.metavar or None, help=option.help)
    if kind.of_word is not bool:
        value = (list[value] if kind.repeats or option.only_once else value) | None
    default = False if kind.of_word is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, info])


def serve(
    context: typer.Context,
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Read settings from this TOML file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events (ready, draining, stopped) as JSON lines.")
    ] = False,
    **given: Any,
) -> None:
    """Run a bus."""
    gc.disable()  # until the bus is ready: what a start makes lives until the end, and passes over it took a seventh
    context.call_on_close(gc.enable)  # where it does not get ready
    settings = _read_settings(read_flags(given), config)
    note = json_note("message", level="warning", logger="toolbus") if settings.log_json else text_note
    with steady_output(note):
        log_to_stderr(settings)
        for warning in settings.ignored:
            logging.getLogger("toolbus").warning("%s", warning)
        try:
            _runner().run(_serve(settings.config, as_json))
        except KeyboardInterrupt:  # before the signal handlers were installed
            raise typer.Exit(terminal.INTERRUPTED) from None


# Typer reads the options from here: those of the settings, and the command's own.
_own = inspect.signature(serve, eval_str=True)
serve.__signature__ = _own.replace(  # type: ignore[attr-defined]  # functions have it where it is set
    parameters=[
        *(each for each in _own.parameters.values() if each.name == "context"),
        *_options(),
        *(each for each in _own.parameters.values() if each.name in ("config", "as_json")),
    ]
)


def read_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the command line sets, by name."""
    flags: dict[str, Any] = {}
    for each in serve_settings():
        if each.option is None:
            continue
        value, word = given[each.name], each.option.word(each.name)
        is_set = not (value is None or value is False or value in ([], ()))
        if each.switch is not None and given[each.switch.name]:
            if is_set:
                switch = each.switch.option.word(each.switch.name)
                terminal.fail(f"{word} and {switch} contradict each other: remove one", terminal.USAGE)
            flags[each.name] = each.switch.empty
        elif is_set and each.option.only_once:
            if len(value) > 1:
                terminal.fail(
                    f"{word} is given {len(value)} times, a bus has one: {each.option.only_once}", terminal.USAGE
                )
            flags[each.name] = value[0]
        elif is_set:
            flags[each.name] = tuple(value) if each.kind.repeats else value
            if each.kind is FLAG:
                flags[each.name] = not word.startswith("--no-")
    return flags


def _read_settings(flags: dict[str, Any], file: Path | None) -> ServeSettings:
    try:
        with terminal.wrong_usage():
            return settle(flags, os.environ, file)
    except ModuleNotFoundError as missing:
        _fail_without_extra(missing)


def _fail_without_extra(missing: ModuleNotFoundError) -> NoReturn:
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
    raise_descriptor_limit()
    try:
        from toolbus.bus import Bus
    except ModuleNotFoundError as missing:
        _fail_without_extra(missing)

    stopping, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (at_once if stopping.is_set() else stopping).set())
    try:
        async with Bus(config) as bus:
            _print_ready(bus, as_json)
            # Objects from the start live until the end: the garbage collector skips them from now on, since a pass over
            # all of them delays every call by 28 ms, a pass over the rest by 1 ms.
            gc.collect()
            gc.freeze()
            gc.enable()
            await wait_first(stopping.wait(), bus.wait_stopped())
            stopping.set()  # also after a drain by an operator the next signal ends the bus at once
            if as_json:
                terminal.print_json({"event": "draining"}, line=True)
            await wait_first(bus.drain(), at_once.wait())
    except SetupError as error:
        terminal.fail(str(error))
    except NotKept as error:  # the disk was full before the bus was ready
        terminal.fail(f"the data directory cannot be written ({error}): make room there, or use another --data-dir")
    if as_json:
        terminal.print_json({"event": "stopped"}, line=True)


def _print_ready(bus: Any, as_json: bool) -> None:
    addresses = {"grpc": list(bus.grpc_addresses), "http": bus.http_address, "https": bus.https_address}
    https = f" https={bus.https_address}" if bus.https_address else ""
    text = f"toolbus ready grpc={','.join(bus.grpc_addresses)} http={bus.http_address or 'off'}{https}"
    terminal.print_outcome(text, {"event": "ready", **addresses}, as_json, line=True)
