"""Writes what the configuration of MCP clients needs to start the bridge: prints it, or merges it into their file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolbus.cli import terminal
from toolbus.common.whole_file import replace_file


class McpClientName(StrEnum):
    """A client whose files are known."""

    CLAUDE_DESKTOP = "claude-desktop"
    CLAUDE_CODE = "claude-code"
    VSCODE = "vscode"
    CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """The files of one client.

    Attributes:
        title: the name of the client, for people.
        user: its file for all projects.
        project: its file for one project; None where the client has none.
        table: the key of the servers in both.
        typed: whether an entry says that it is a command (`"type": "stdio"`).
    """

    title: str
    user: Path
    project: Path | None = None
    table: str = "mcpServers"
    typed: bool = False


def client_files(
    client: McpClientName,
    *,
    platform: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
    home: Path | None = None,
    project: Path | None = None,
) -> ClientFiles:
    """Returns where a client stores its servers.

    Args:
        home: None means that of the user.
        project: the directory of a project; None means the current one.
    """
    home, project = home or Path.home(), project or Path.cwd()
    settings = _settings_directory(platform, environment, home)
    match client:
        case McpClientName.CLAUDE_DESKTOP:
            return ClientFiles("Claude Desktop", settings / "Claude" / "claude_desktop_config.json")
        case McpClientName.CLAUDE_CODE:
            return ClientFiles("Claude Code", home / ".claude.json", project / ".mcp.json", typed=True)
        case McpClientName.VSCODE:
            user = settings / "Code" / "User" / "mcp.json"
            return ClientFiles("VS Code", user, project / ".vscode" / "mcp.json", "servers", typed=True)
        case McpClientName.CURSOR:
            return ClientFiles("Cursor", home / ".cursor" / "mcp.json", project / ".cursor" / "mcp.json")


def _settings_directory(platform: str, environment: Mapping[str, str], home: Path) -> Path:
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(environment.get("APPDATA") or home / "AppData" / "Roaming")
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")


NAME = "toolbus"  # of the server, in every client


class NotWritten(Exception):
    """A file is left as it is; the text says why, and what to do."""


def configure(name: McpClientName, options: Mapping[str, str], *, write: bool) -> int:
    """Prints the snippet of a client, or merges it into its file. Returns the exit code.

    Args:
        options: of `toolbus mcp`, which the client is to pass on.
    """
    client = client_files(name)
    # VS Code has the servers of a folder beside its other settings; the other clients have those of the user.
    path = client.project if name is McpClientName.VSCODE and client.project is not None else client.user
    entry = entry_of(client, options)
    if not write:
        terminal.print_json({client.table: {NAME: entry}})
        sys.stderr.write(f"{client.title} reads it in {path}; --write puts it there.\n")
        return 0
    try:
        copy = merge(path, client.table, entry)
    except (NotWritten, OSError) as error:
        sys.stderr.write(f"toolbus mcp config: {error}\n")
        return 1
    copied = f"; the previous content is in {copy}" if copy is not None else ""
    terminal.print_lines(f"{path} starts toolbus now{copied}. Restart {client.title}.")
    return 0


def entry_of(client: ClientFiles, options: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a client needs to start the bridge: absolute paths, since desktop programs have no shell's PATH."""
    options = dict(options)
    variables = (("--data-dir", "TOOLBUS_DATA_DIR"), ("--bus", "TOOLBUS_ADDRESS"))
    for option, variable in variables:  # which the client's processes do not have
        if not options.keys() & {"--bus", "--url", "--data-dir"} and (value := os.environ.get(variable)):
            options[option] = value
    if "--data-dir" in options:
        options["--data-dir"] = str(Path(options["--data-dir"]).absolute())
    script = Path(sys.executable).with_name("toolbus.exe" if sys.platform == "win32" else "toolbus")
    command, *before = [str(script)] if script.exists() else [sys.executable, "-P", "-m", "toolbus.cli"]
    words = [word for option in options.items() for word in option]
    kind = {"type": "stdio"} if client.typed else {}
    return {**kind, "command": command, "args": [*before, "mcp", *words]}


def merge(path: Path, key: str, entry: Mapping[str, Any]) -> Path | None:
    """Adds an entry to a client's file, or replaces ours in it. All else there stays.

    Returns:
        The copy of what was there; None where there was nothing, or the same.

    Raises:
        NotWritten: the file is not JSON, or not as the client has it.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        content = json.loads(old) if old.strip() else {}
    except ValueError as error:
        raise NotWritten(
            f"{path} is not plain JSON ({error}), perhaps because it has comments: add the snippet by hand; "
            "without --write it is printed"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get(key, {}), dict):
        raise NotWritten(f"{path} has no object {key!r}: repair the file, or add the snippet by hand")
    servers = content.setdefault(key, {})
    if servers.get(NAME) == entry:
        return None
    servers[NAME] = dict(entry)
    copy = None
    if old:
        copy = path.with_name(f"{path.name}.before-toolbus")
        replace_file(copy, old.encode(), path.stat().st_mode & 0o777)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    text = json.dumps(content, indent=_indent(old), ensure_ascii=False) + "\n"
    replace_file(path, text.encode(), mode)
    return copy


def _indent(text: str) -> str | int:
    """Returns what a file is indented with."""
    lines = text.splitlines()
    second = next((line for line in lines[1:] if line.strip()), "")
    return second[: len(second) - len(second.lstrip())] or 2
