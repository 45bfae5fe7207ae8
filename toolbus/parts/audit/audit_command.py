"""Implements ``toolbus audit``: prints who did what to a bus, from the files of its data directory, and checks them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.data_directory import DataDirOption, data_directory
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    (
        "toolbus audit",
        "toolbus audit --limit 1000 --json",
        "toolbus audit --follow",
        "toolbus audit verify",
        "toolbus audit verify --head 7d1a...",
    ),
    """
    Reads the files themselves, so it needs no bus, but permission to read its data directory: --data-dir, else
    TOOLBUS_DATA_DIR, else the platform's data folder. The oldest of the lines is printed first. WHO is the identity, or
    the source of a peer without one; SOURCE is the source that acted, where it is not WHO; TARGET is what it acted on.
    A terminal gets what fits its window; --json has everything.
    """,
    "0 done, 1 no audit was found, or it cannot be read, 2 wrong usage, 130 after Ctrl-C.",
)
VERIFY_EPILOG = epilog(
    ("toolbus audit verify", "toolbus audit verify --head 7d1a... --data-dir /var/lib/toolbus"),
    """
    Each line holds the SHA-256 of the line before it. The first line that was changed, cut or moved is named. A user
    who can write the files can also write the whole chain anew, or cut its end. Only a head, the hash of a line,
    that is stored elsewhere shows that. The bus logs its head every hour, and the tool toolbus:audit_head returns it.
    --head checks that the chain still has that line.
    """,
    "0 the chain is whole, 1 it is not, or no audit was found, 2 wrong usage.",
)

FOLLOW_SECONDS = 0.5  # between two looks at the files
_COLUMNS = (
    ("TIME", 19), ("ACT", 9), ("OUTCOME", 7), ("WHO", 12), ("SOURCE", 12), ("TARGET", 16), ("HOW", 5), ("DETAIL", 0),
)  # fmt: skip

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", add_completion=False)


@app.callback(epilog=EPILOG)
def audit(
    context: typer.Context,
    data_dir: DataDirOption = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Print at most this many lines; with --follow, to begin with.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", help="Continue, and print each line as it is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are, JSON lines.")] = False,
) -> None:
    """Show who did what to a bus, or check that these records were not changed."""
    if context.invoked_subcommand is not None:
        return
    directory = _audit_directory(data_dir)
    heads, widths = zip(*_COLUMNS, strict=True)
    lines = _read(directory, limit, follow=follow)
    if not as_json and not follow:
        terminal.print_table(heads, [_row(line) for line in lines])
        return
    if not as_json:
        terminal.print_row(heads, widths)
    for line in lines:
        if as_json:
            entry = _entry(line) or {"damaged": line.decode("utf-8", "replace")}
            terminal.print_json(entry, line=True)
        else:
            terminal.print_row(_row(line), widths)


@app.command(epilog=VERIFY_EPILOG)
def verify(
    data_dir: DataDirOption = None,
    head: Annotated[
        str, typer.Option(metavar="HASH", help="Also check that the chain still has the line with this hash.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check that no line of the audit was changed, cut or moved."""
    from toolbus.parts.audit import audit_log

    head = head.lower()
    if head and (len(head) != 64 or set(head) - set("0123456789abcdef")):
        terminal.fail(f"--head is {head!r}, it must be the 64 hexadecimal digits of a SHA-256", terminal.USAGE)
    directory = _audit_directory(data_dir)
    try:
        verdict = audit_log.verify(directory, head)
    except OSError as error:
        _fail_unreadable(directory, error)
    if as_json:
        result = {"ok": not verdict.fault, "lines": verdict.lines, "head": verdict.head, "fault": verdict.fault}
        terminal.print_json(result)
        if verdict.fault:
            raise typer.Exit(terminal.REFUSED)
    elif verdict.fault:
        terminal.fail(f"{verdict.fault} ({verdict.lines} lines before that are whole)")
    else:
        terminal.print_lines(f"{verdict.lines} lines in {directory} are whole, head {verdict.head}")


def _audit_directory(option: Path | None) -> Path:
    try:
        from toolbus.parts.audit.audit_log import FOLDER, files_of
    except ModuleNotFoundError as missing:
        terminal.fail(f"audit needs {missing.name}, which is not installed: pip install 'toolbus[server]'")
    data_dir = data_directory(option)
    directory = data_dir / FOLDER
    try:
        has_audit = directory.is_dir() and bool(files_of(directory))
    except OSError as error:
        _fail_unreadable(directory, error)
    if not has_audit:
        terminal.fail(
            f"no audit was found in {data_dir}: name the data directory of a bus with --data-dir. A bus without "
            "one, or with audit = false, writes none"
        )
    return directory


def _fail_unreadable(directory: Path, error: OSError) -> Any:
    terminal.fail(f"cannot read {directory}: {error.strerror}: run this as the user of the bus")


def _read(directory: Path, limit: int, *, follow: bool) -> Iterator[bytes]:
    try:
        yield from _lines(directory, limit, follow=follow)
    except OSError as error:
        _fail_unreadable(directory, error)


def _lines(directory: Path, limit: int, *, follow: bool) -> Iterator[bytes]:
    """Yields whole lines: the newest ones, oldest first, then those that follow."""
    from toolbus.parts.audit.audit_log import files_of

    files = files_of(directory)
    at, size = files[-1], 0
    newest: deque[bytes] = deque(maxlen=limit)
    for path in reversed(files):
        lines = _whole_lines(path.read_bytes())
        if path is at:
            size = sum(len(line) + 1 for line in lines)
        newest.extendleft(reversed(lines[-(limit - len(newest)) :]))
        if len(newest) == limit:
            break
    yield from newest
    while follow:
        with open(at, "rb") as file:
            file.seek(size)
            further = _whole_lines(file.read())
        size += sum(len(line) + 1 for line in further)
        yield from further
        if further:
            continue
        later = [path for path in files_of(directory) if path.name > at.name]
        if later:
            at, size = later[0], 0
        else:
            time.sleep(FOLLOW_SECONDS)


def _whole_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def _entry(line: bytes) -> dict[str, Any] | None:
    from toolbus.parts.audit.audit_log import read_line

    return read_line(line)


def _row(line: bytes) -> list[str]:
    entry = _entry(line) or {}
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry["time"])))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):  # not a line that a bus has written
        return ["-", "damaged", *["-"] * 5, line.decode("utf-8", "replace")]
    cells = {name: str(entry.get(name, "")) for name in ("act", "outcome", "who", "source", "target", "how", "why")}
    if cells["source"] == cells["who"]:
        cells["source"] = ""
    if entry.get("act") == "calls":
        cells["target"] = f"{entry.get('count')} calls"
    if entry.get("act") == "lost":
        cells["target"] = f"{entry.get('lines')} lines"
    return [when, *(cell or "-" for cell in cells.values())]
