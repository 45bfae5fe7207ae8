"""Implements ``toolbus mounts add`` and ``remove``: which MCP servers a bus offers the tools of.

Both change the file of mounts in the data directory, which a running bus follows; without one, `mount` starts the
server once itself, to show its tools.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, JsonOption
from toolbus.cli.data_directory import DataDirOption
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    (
        "toolbus mounts add files -- npx -y @modelcontextprotocol/server-filesystem ~/notes",
        "toolbus mounts add github --env GITHUB_TOKEN --deny 'delete_*' --pin block -- github-mcp-server stdio",
        "toolbus mounts add docs --url https://example.com/mcp --header 'Authorization: Bearer ${DOCS_TOKEN}'",
        "toolbus mounts add tracker --url https://example.com/mcp --login",
        "toolbus mounts add --import claude-desktop",
        "toolbus mounts add --import .vscode/mcp.json --yes",
    ),
    """
    Writes the server into mcp.json of the data directory, waits until it has started, and prints its tools with their
    hints and fingerprints. A bus with this data directory has its tools at once, as NAME:TOOL. Without a bus the server
    is started once, and ended. What the server declares now is trusted; `toolbus mounts` shows what changes later.

    A server gets HOME, PATH and the like, and what --env names: --env K=V writes the value into the file, --env K has
    the bus take K from its own environment. ${K} in a --header is taken from there too. A server that is named by a
    relative path starts in the current directory, others in the home directory; --dir sets another.

    --import takes over the servers of a file of an MCP client, or of those of a client: claude-desktop, claude-code,
    vscode, cursor. It shows them and asks first.
    """,
    "0 mounted, 1 the server does not start or the file cannot be written, 2 wrong usage, 130 after Ctrl-C.",
)
UNMOUNT_EPILOG = epilog(
    ("toolbus mounts remove files",),
    """
    Removes the server from mcp.json of the data directory. A bus with this data directory ends it within a second. Its
    trusted declarations stay stored, for the same command line.
    """,
    "0 done, 1 unknown mount, or the file cannot be written, 2 wrong usage.",
)


def mount(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The source of its tools, NAME:TOOL.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program of the server, and its arguments.")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A server over HTTP, in place of a command.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="'K: V'", help="A header of each request to --url; may be repeated.")
    ] = None,
    login: Annotated[bool, typer.Option("--login", help="Sign in to --url in a browser (OAuth).")] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K[=V]", help="A variable for the server; may be repeated.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where the server starts (default: see below).")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Offer only such tools; may be repeated.")
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Offer no such tools; may be repeated.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Start it with the bus, not with its first call.")] = False,
    era: Annotated[
        str | None,
        typer.Option(metavar="auto|legacy|modern", help="The era of the protocol: found out, or demanded."),
    ] = None,
    pin: Annotated[
        str | None,
        typer.Option(metavar="warn|block", help="Whether a changed tool is marked, or waits for an approval."),
    ] = None,
    trust_hints: Annotated[
        bool, typer.Option("--trust-hints", help="Believe its hints: read-only calls may run twice.")
    ] = False,
    import_: Annotated[
        str | None,
        typer.Option("--import", metavar="FILE|CLIENT", help="Take over the servers of an MCP client's file."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a mount of the same name.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before an import.")] = False,
    data_dir: DataDirOption = None,
    bus: BusOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mount an MCP server: its tools become tools of the bus."""
    target = BusTarget(bus)
    place = _data_directory(data_dir)
    if import_ is not None:
        if name or command or url:
            terminal.fail("--import goes with no NAME, COMMAND and --url: it brings its own", terminal.USAGE)
        _import(import_, place, yes=yes, as_json=as_json)
        return
    if not name:
        terminal.fail("NAME is missing: write `toolbus mount NAME -- COMMAND...`, or --import", terminal.USAGE)
    ours = {
        "allow": allow, "deny": deny, "eager": eager, "era": era, "pin": pin, "trust_hints": trust_hints,
        "login": login,
    }  # fmt: skip
    if url is not None:
        if command or env or directory:
            terminal.fail("--url goes with no COMMAND, --env and --dir: it is a server elsewhere", terminal.USAGE)
        entry: dict[str, Any] = {"type": "http", "url": url}
        if header:
            entry["headers"] = dict(_header(text) for text in header)
    else:
        entry = _of_command(command or [], env or [], directory)
        if header or login:
            terminal.fail("--header and --login go with --url, not with a command", terminal.USAGE)
    if chosen := {key: value for key, value in ours.items() if value}:
        entry["toolbus"] = chosen
    if not (login and url is not None and _is_mounted(name, url, place)) or replace:
        _add(name, entry, place, replace=replace)
    if login and url is not None:
        _login(name, url, place)
    from toolbus.parts.mcp.commands.mount_trial import show_mounted

    show_mounted(name, place, target, remote=url is not None, as_json=as_json)


def unmount(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The mount.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Unmount an MCP server: end it and withdraw its tools."""
    from toolbus.common.text import list_names
    from toolbus.errors import SetupError
    from toolbus.parts.mcp.client.authorization import remove_tokens
    from toolbus.parts.mcp.client.files import OwnMounts

    own = OwnMounts(_data_directory(data_dir))
    try:
        removed = own.remove(name)
        if removed:
            remove_tokens(own.path.parent, name)
        names = list(own.entries())
    except SetupError as error:
        terminal.fail(str(error))
    if not removed:
        terminal.fail(f"{own.path} has no mount {name}; it has {list_names(names)}")
    if as_json:
        terminal.print_json({"name": name, "file": str(own.path), "removed": True})
    else:
        terminal.print_lines(f"{name} is unmounted")


def _data_directory(given: Path | None) -> Path:
    """Returns the data directory of the bus: as `toolbus serve` finds it."""
    if given is not None:
        return given
    from toolbus.bus.serve_settings import settle
    from toolbus.errors import SetupError

    try:
        data_dir = settle({}, os.environ).config.data_dir
    except SetupError as error:
        terminal.fail(str(error), terminal.USAGE)
    if data_dir is None:
        terminal.fail(
            "the bus stores nothing here (ephemeral), so no mount can be added: give --data-dir", terminal.USAGE
        )
    return data_dir


def _of_command(words: Sequence[str], env: Sequence[str], directory: Path | None) -> dict[str, Any]:
    if not words:
        terminal.fail("no COMMAND is given: write it behind --, or give --url", terminal.USAGE)
    program, arguments = os.path.expanduser(words[0]), list(words[1:])
    if "/" in program:
        program = str(Path(program).absolute())
    if shutil.which(program) is None:
        terminal.fail(f"no program {words[0]!r} is found in PATH: install it, or give its path", terminal.USAGE)
    entry: dict[str, Any] = {"command": program, "args": arguments}
    if env:
        entry["env"] = dict(_variable(text) for text in env)
    if directory is None and any(_is_relative_file(word) for word in arguments):
        directory = Path.cwd()
    if directory is not None:
        if not directory.is_dir():
            terminal.fail(f"--dir {directory} is not a directory: create it or name another one", terminal.USAGE)
        entry["cwd"] = str(directory.absolute())
    return entry


def _is_relative_file(word: str) -> bool:
    return bool(word) and not word.startswith(("-", "/", "~")) and Path(word).exists()


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return name, value if equals else f"${{{name}}}"


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        terminal.fail(
            "--header is not 'NAME: VALUE': write for example 'Authorization: Bearer ${TOKEN}'", terminal.USAGE
        )
    return name.strip(), value.strip()


def _add(name: str, entry: Mapping[str, Any], place: Path, *, replace: bool) -> None:
    """Checks an entry and writes it; ends the command if it is refused."""
    from toolbus.common.reader import Reader
    from toolbus.errors import SetupError
    from toolbus.parts.mcp.client.entries import read_entry
    from toolbus.parts.mcp.client.files import OwnMounts
    from toolbus.parts.mcp.commands.mount_import import AnyVariable

    try:
        read_entry(Reader(entry, f"mount {name}"), name, AnyVariable(), [])
    except SetupError as error:
        terminal.fail(str(error), terminal.USAGE)
    try:
        OwnMounts(place).add({name: entry}, replace=replace)
    except SetupError as error:
        terminal.fail(str(error))


def _is_mounted(name: str, url: str, place: Path) -> bool:
    """Tells whether a server is mounted already, so that only its login is missing."""
    from toolbus.errors import SetupError
    from toolbus.parts.mcp.client.files import OwnMounts

    try:
        entry = OwnMounts(place).entries().get(name)
    except SetupError as error:
        terminal.fail(str(error))
    return isinstance(entry, Mapping) and entry.get("url") == url


def _login(name: str, url: str, place: Path) -> None:
    """Logs the user in; the bus sees the token by itself."""
    from toolbus.errors import SetupError
    from toolbus.parts.mcp.client.authorization import EXTRA, has_extra

    if not has_extra():
        terminal.fail(f"logging in needs the extra {EXTRA}: run `pip install 'toolbus[{EXTRA}]'`")
    from toolbus.parts.mcp.client.oauth import login  # which needs it

    try:
        if not login(place, name, url, show=lambda text: terminal.print_lines(text, stream=sys.stderr)):
            terminal.print_lines(f"{url} asks for no login", stream=sys.stderr)
    except SetupError as error:
        terminal.fail(str(error))


def _import(what: str, place: Path, *, yes: bool, as_json: bool) -> None:
    from toolbus.errors import SetupError
    from toolbus.parts.mcp.client.files import OwnMounts
    from toolbus.parts.mcp.commands.mount_import import files_to_import, find_servers

    own = OwnMounts(place)
    try:
        paths = files_to_import(what, os.environ, Path.home(), Path.cwd())
        servers = find_servers(paths, own.entries(), Path.cwd())
        rows = [(each.name, "skip" if each.why else "add", each.target, each.why) for each in servers]
        terminal.print_table(("MOUNT", "ACTION", "SERVER", "WHY"), rows, stream=sys.stderr if as_json else None)
        added = {each.name: each.entry for each in servers if not each.why}
        if added:
            if not yes:
                terminal.ask(
                    f"Add {len(added)} to {own.path}? Each is a program that runs as you, or a server elsewhere."
                )
            own.add(added)
    except SetupError as error:
        terminal.fail(str(error))
    if as_json:
        skipped = {each.name: each.why for each in servers if each.why}
        terminal.print_json({"file": str(own.path), "added": list(added), "skipped": skipped})
    elif added:
        terminal.print_note(f"{len(added)} mounts were added; `toolbus mounts` shows how they are")
