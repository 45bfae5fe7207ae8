"""`toolbus mounts add --import`: where clients keep their servers, and what is taken over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import toolbus
from toolbus.parts.mcp.client.files import OwnMounts
from toolbus.parts.mcp.commands.mcp_clients import McpClientName, client_files
from toolbus.parts.mcp.commands.mount_command import files_to_import, find_servers

HOME, PROJECT = Path("/home/ada"), Path("/src/app")


@pytest.mark.parametrize(
    ("client", "platform", "user", "project"),
    [
        ("claude-desktop", "darwin", "Library/Application Support/Claude/claude_desktop_config.json", None),
        ("claude-desktop", "linux", ".config/Claude/claude_desktop_config.json", None),
        ("claude-desktop", "win32", "AppData/Roaming/Claude/claude_desktop_config.json", None),
        ("claude-code", "linux", ".claude.json", ".mcp.json"),
        ("vscode", "linux", ".config/Code/User/mcp.json", ".vscode/mcp.json"),
        ("vscode", "darwin", "Library/Application Support/Code/User/mcp.json", ".vscode/mcp.json"),
        ("cursor", "win32", ".cursor/mcp.json", ".cursor/mcp.json"),
    ],
)
def test_the_files_of_clients_are_known(client: str, platform: str, user: str, project: str | None) -> None:
    files = client_files(McpClientName(client), platform=platform, environment={}, home=HOME, project=PROJECT)
    assert files.user == HOME / user
    assert files.project == (PROJECT / project if project else None)


def test_settings_elsewhere_are_found_by_their_variables() -> None:
    files = client_files(McpClientName.VSCODE, platform="linux", environment={"XDG_CONFIG_HOME": "/cfg"})
    assert (files.user, files.table) == (Path("/cfg/Code/User/mcp.json"), "servers")
    files = client_files(McpClientName.VSCODE, platform="win32", environment={"APPDATA": "/data"})
    assert files.user.parts[1] == "data"


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_what_cannot_be_taken_over_is_skipped_with_the_reason(tmp_path: Path) -> None:
    servers = {
        "files": {"command": "npx", "args": ["x"], "env": {"KEY": "${KEY}"}, "autoApprove": ["y"]},
        "old": {"type": "sse", "url": "https://a.example/sse"},
        "asks": {"command": "x", "args": ["${input:key}"]},
        "there": {"command": "x"},
        "bus": {"command": "/opt/bin/toolbus", "args": ["mcp"]},
        "My Web": {"url": "https://a.example/mcp?key=s3cret"},
    }
    path = write(tmp_path / "mcp.json", {"servers": servers, "theme": "dark"})
    found = {each.name: each for each in find_servers([path], {"there": {}}, tmp_path)}
    assert {name for name, each in found.items() if not each.why} == {"files", "My-Web"}
    assert found["files"].entry == {"command": "npx", "args": ["x"], "env": {"KEY": "${KEY}"}}
    assert found["My-Web"].target == "https://a.example/mcp"
    assert "sse" in found["old"].why
    assert "${NAME}" in found["asks"].why
    assert "already" in found["there"].why
    assert "this bus itself" in found["bus"].why


def test_restrictions_are_taken_over_and_what_a_file_switches_off_is_skipped(tmp_path: Path) -> None:
    servers = {
        "off": {"command": "x", "enabled": False},
        "some": {"command": "x", "includeTools": ["a"], "disabledTools": ["b"]},
        "odd": {"command": "x", "readOnly": True},
        "out": {"command": "x"},
        "here": {"command": "x"},
    }
    project = {str(tmp_path): {"disabledMcpServers": ["here"]}}
    document = {"mcpServers": servers, "mcp": {"excluded": ["out"]}, "projects": project}
    path = write(tmp_path / "settings.json", document)
    found = {each.name: each for each in find_servers([path], {}, tmp_path)}
    assert {name: each.entry for name, each in found.items() if not each.why} == {
        "off": servers["off"],
        "some": servers["some"],
    }
    assert "readOnly" in found["odd"].why
    assert "mcp.excluded" in found["out"].why
    assert "disabledMcpServers" in found["here"].why


def test_claude_codes_servers_of_this_project_are_taken_over_too(tmp_path: Path) -> None:
    document = {
        "mcpServers": {"mine": {"command": "x"}},
        "projects": {
            str(tmp_path): {"mcpServers": {"here": {"command": "x"}}},
            "/elsewhere": {"mcpServers": {"no": {"command": "x"}}},
        },
    }
    write(tmp_path / ".claude.json", document)
    [path] = files_to_import("claude-code", {}, tmp_path, tmp_path / "none")
    assert [each.name for each in find_servers([path], {}, tmp_path)] == ["mine", "here"]


def test_an_import_shows_what_it_does_asks_and_writes_once(tmp_path: Path) -> None:
    path = write(tmp_path / "client.json", {"mcpServers": {"a": {"command": "x"}, "b": {"type": "sse", "url": "u"}}})
    arguments = ["mount", "--import", str(path), "--data-dir", str(tmp_path / "data")]
    refused = toolbus(*arguments)
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert OwnMounts(tmp_path / "data").entries() == {}
    done = toolbus(*arguments, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert OwnMounts(tmp_path / "data").entries() == {"a": {"command": "x"}}
    again = toolbus(*arguments, "--yes")
    assert (again.returncode, "already" in again.stdout + again.stderr) == (0, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a"], "no COMMAND is given"),
        (["a", "--", "no-such-program-here"], "found in PATH"),
        (["a", "--url", "ftp://x"], "url is not http://"),
        (["a", "--url", "https://x", "--env", "A"], "goes with no COMMAND, --env"),
        (["a", "--login", "--", "true"], "go with --url"),
        (["a", "--pin", "maybe", "--", "true"], "warn, block"),
        (["a", "--header", "x", "--url", "https://x"], "NAME: VALUE"),
        (["toolbus", "--", "true"], "cannot be used"),
        ([], "NAME is missing"),
        (["--import", "x", "a"], "it brings its own"),
        (["--import", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_a_wrong_command_says_what_to_write_and_writes_nothing(tmp_path: Path, words: list[str], says: str) -> None:
    result = toolbus("mount", "--data-dir", tmp_path, *words)
    assert result.returncode in (1, 2)
    assert says in " ".join(result.stderr.split())
    assert not (tmp_path / "mcp.json").exists()


def test_an_unmount_of_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    OwnMounts(tmp_path).add({"files": {"command": "x"}})
    refused = toolbus("unmount", "file", "--data-dir", tmp_path)
    assert (refused.returncode, "it has files" in refused.stderr) == (1, True)
    done = toolbus("unmount", "files", "--data-dir", tmp_path)
    assert (done.returncode, OwnMounts(tmp_path).entries()) == (0, {})
