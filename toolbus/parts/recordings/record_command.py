"""Implements ``toolbus record``: writes calls with their contents into a file, until Ctrl-C."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption
from toolbus.cli.call_command import show
from toolbus.cli.help_text import epilog
from toolbus.common.version import VERSION as RELEASE
from toolbus.parts.recordings.comparison import FORMAT, VERSION

if TYPE_CHECKING:
    from toolbus.sdk import Host

EPILOG = epilog(
    (
        "toolbus record calls.jsonl",
        "toolbus record weather.jsonl --source weather --for 600",
        "toolbus record - --tool get_weather --count 10",
    ),
    """
    Each call that ends with a result of its tool becomes a line of JSON: what the tool got, what it answered, how long
    it took. Values of fields that are named like secrets are hidden. Of arguments and outputs above 16,384 characters
    only the length and a hash are kept. Calls that end without a result, such as at a deadline, are not recorded.

    Play them with `toolbus replay FILE`. The file is readable by its owner only; a present one is not replaced.
    FILE - is standard output. Keys need the scope administer = ["*"].
    """,
    "0 done, also after Ctrl-C, 1 the bus refused or the file cannot be written, 2 wrong usage, 3 no bus found.",
)
READ_SECONDS = 10.0
MAX_MB = 1024


def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the calls go; - is standard output.")],
    bus: BusOption = None,
    credential: CredentialOption = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only calls of these tools, NAME or SOURCE:NAME; may be repeated."),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only tools of these sources; may be repeated.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0.1, metavar="SECONDS", help="End after so long (default: at Ctrl-C).")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many calls.")] = None,
    max_mb: Annotated[int, typer.Option(min=1, max=MAX_MB, help="End when the file has so many MB.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was recorded as one JSON document.")] = False,
) -> None:
    """Record calls with their contents into a file."""
    to_stdout = str(file) == "-"
    if to_stdout and as_json:
        terminal.fail("--json prints a document, and FILE - the calls: choose one of them", terminal.USAGE)
    work = _Recording(seconds, count, max_mb * 1_000_000, {"tools": tool or [], "sources": source or []})
    try:
        if to_stdout:
            work.run(BusTarget(bus, credential), None)
        else:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
                try:
                    work.run(BusTarget(bus, credential), opened)
                finally:
                    if not opened.tell():  # no bus was found: the next attempt may use the name
                        file.unlink()
    except FileExistsError:
        terminal.fail(f"{file} is there already: choose another name, or remove it", terminal.USAGE)
    except OSError as error:
        terminal.fail(f"{file} cannot be written: {error.strerror}")
    if as_json:
        terminal.print_json({"file": str(file), "calls": work.calls, "lost": work.lost})
    else:
        lost = f"; {work.lost} calls lost: they came faster than they could be read" if work.lost else ""
        terminal.print_note(f"{work.calls} calls recorded{lost}")


class _Recording:
    """One run of the command."""

    def __init__(self, seconds: float | None, count: int | None, max_bytes: int, chosen: dict[str, Any]) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._count = count
        self._bytes_left = max_bytes
        self._chosen = chosen
        self._file: TextIO | None = None
        self.calls = self.lost = 0

    def run(self, target: BusTarget, file: TextIO | None) -> None:
        """Records until an end is reached, or Ctrl-C."""
        self._file = file
        try:
            bus_client.with_host(target, self._record)
        except typer.Exit as end:
            if end.exit_code != terminal.INTERRUPTED:
                raise

    async def _record(self, host: Host) -> None:
        answer = await self._read(host, self._chosen)
        self._write({"format": FORMAT, "version": VERSION, "toolbus": RELEASE, "began": round(time.time(), 3)})
        terminal.print_note("recording; Ctrl-C ends it")
        lost_before = 0
        while not self._ended():
            left = READ_SECONDS if self._until is None else max(self._until - time.monotonic(), 0.0)
            wait = {"recording": answer["recording"], "wait_seconds": min(left, READ_SECONDS)}
            try:
                answer = await self._read(host, wait)
            except LookupError:  # the bus was restarted: go on with a new recording
                lost_before = self.lost
                answer = await self._read(host, self._chosen)
                continue
            self.lost = lost_before + answer["lost"]
            for call in answer["calls"]:
                if not self._ended(of_time=False):
                    self._write(call)
                    self.calls += 1

    def _ended(self, *, of_time: bool = True) -> bool:
        if of_time and self._until is not None and time.monotonic() >= self._until:
            return True
        return self._bytes_left <= 0 or self.calls == self._count

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            terminal.print_json(line, line=True)
            return
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        self._bytes_left -= len(text.encode(errors="replace")) + 1
        self._file.write(f"{text}\n")
        self._file.flush()

    async def _read(self, host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
        """Reads, and waits for a bus that is restarted.

        Raises:
            LookupError: the bus knows no such recording.
        """
        from toolbus.errors import Code

        while True:
            timeout = READ_SECONDS + bus_client.REPLY_SECONDS
            result = await host.call("toolbus:record_calls", arguments, timeout=timeout)
            if result.error is None:
                answer: dict[str, Any] = result.output
                return answer
            if result.error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                if "recording" in arguments and "there is no recording" in result.error.message:
                    raise LookupError
                show(result, as_json=False, of_bus=True)
