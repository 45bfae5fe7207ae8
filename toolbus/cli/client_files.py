"""Knows where MCP clients keep the servers that they use: Claude Desktop, Claude Code, VS Code, Cursor."""

from __future__ import annotations

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
        user: of all projects.
        project: of the project in a directory; None where the client has none.
        table: the key that it writes.
    """

    user: Path
    project: Path | None = None
    table: str = "mcpServers"


def client_files(
    client: McpClientName, platform: str, environment: Mapping[str, str], home: Path, project: Path
) -> ClientFiles:
    """Returns where a client keeps its servers.

    Args:
        platform: as `sys.platform` names it.
        project: the directory of a project, usually the current one.
    """
    settings = _settings_directory(platform, environment, home)
    match client:
        case McpClientName.CLAUDE_DESKTOP:
            return ClientFiles(settings / "Claude" / "claude_desktop_config.json")
        case McpClientName.CLAUDE_CODE:
            return ClientFiles(home / ".claude.json", project / ".mcp.json")
        case McpClientName.VSCODE:
            return ClientFiles(settings / "Code" / "User" / "mcp.json", project / ".vscode" / "mcp.json", "servers")
        case McpClientName.CURSOR:
            return ClientFiles(home / ".cursor" / "mcp.json", project / ".cursor" / "mcp.json")


def _settings_directory(platform: str, environment: Mapping[str, str], home: Path) -> Path:
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(environment.get("APPDATA") or home / "AppData" / "Roaming")
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
