"""Knows where MCP clients store the servers that they use: Claude Desktop, Claude Code, VS Code, Cursor."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


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
