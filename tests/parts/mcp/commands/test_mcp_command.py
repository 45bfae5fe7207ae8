"""`toolbus mcp config`: the snippets for MCP clients, and what becomes of the clients' files."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.support.processes import environment, toolbus
from tests.support.waiting import HANG_SECONDS, within
from toolbus.parts.mcp.commands.mcp_clients import McpClientName, NotWritten, client_files, merge
from toolbus.testing import running_bus

Json = dict[str, Any]
ENTRY: Json = {"command": "/bin/toolbus", "args": ["mcp"]}
PAGE = "docs/start/mcp-clients.md"


def start(entry: Json, lines: str) -> subprocess.CompletedProcess[str]:
    """Starts what a snippet says as a client does, without a shell and without variables of ours."""
    bare = {name: value for name, value in environment({}).items() if name in ("PATH", "HOME", "PYTHONPATH")}
    return subprocess.run(
        [entry["command"], *entry["args"]],
        input=lines, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env=bare, cwd="/",
    )  # fmt: skip


@pytest.mark.parametrize("client", McpClientName)
async def test_a_snippet_starts_a_bridge_that_reaches_the_bus(client: McpClientName, tmp_path: Path) -> None:
    printed = toolbus("mcp", "config", client, TOOLBUS_DATA_DIR=str(tmp_path))
    assert printed.returncode == 0, printed.stderr
    entry = json.loads(printed.stdout)[client_files(client).table]["toolbus"]
    assert Path(entry["command"]).is_absolute()
    assert ("type" in entry) == client_files(client).typed
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": client, "version": "1"}}
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    async with running_bus(data_dir=tmp_path):
        instructions = "no tools now"
        while "no tools now" in instructions:  # it answers within a second: before a busy machine has connected it
            ended = await within(asyncio.to_thread(start, entry, request + "\n"))
            answer = json.loads(ended.stdout)
            assert answer["result"]["protocolVersion"] == "2025-11-25"
            assert ended.returncode == 0
            instructions = answer["result"]["instructions"]


def test_a_snippet_passes_on_the_profile_and_the_address() -> None:
    printed = toolbus("mcp", "config", "cursor", "--profile", "desk", "--url=http://127.0.0.1:1/mcp")
    words = json.loads(printed.stdout)["mcpServers"]["toolbus"]["args"]
    assert words[words.index("mcp") :] == ["mcp", "--profile", "desk", "--url", "http://127.0.0.1:1/mcp"]


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (("--bus", "a:1"), {"TOOLBUS_DATA_DIR": "/d", "TOOLBUS_ADDRESS": "b:2"}, ["--bus", "a:1"]),
        (("--url", "http://u/mcp"), {"TOOLBUS_DATA_DIR": "/d"}, ["--url", "http://u/mcp"]),
        ((), {"TOOLBUS_DATA_DIR": "/d", "TOOLBUS_ADDRESS": "b:2"}, ["--data-dir", "/d"]),
        ((), {"TOOLBUS_DATA_DIR": "", "TOOLBUS_ADDRESS": "b:2"}, ["--bus", "b:2"]),
    ],
)
def test_a_snippet_names_the_bus_in_one_way(
    words: tuple[str, ...], variables: dict[str, str], expected: list[str]
) -> None:
    printed = toolbus("mcp", "config", "cursor", *words, **variables)
    args = json.loads(printed.stdout)["mcpServers"]["toolbus"]["args"]
    assert args[args.index("mcp") + 1 :] == expected


def test_a_bus_is_named_in_one_way() -> None:
    both = toolbus("mcp", "--bus", "127.0.0.1:1", "--url", "http://127.0.0.1:1/mcp")
    assert (both.returncode, "give one of them" in both.stderr) == (2, True)


def test_the_guide_shows_the_snippet_of_claude_desktop_and_cursor() -> None:
    (shown,) = (block.text for block in blocks(PAGE) if block.kind == "json")
    for client in ("claude-desktop", "cursor"):
        printed = json.loads(toolbus("mcp", "config", client).stdout)
        entry = printed["mcpServers"]["toolbus"]
        entry["command"], entry["args"] = "/home/ann/.venv/bin/toolbus", entry["args"][-1:]
        assert json.loads(shown) == printed


def test_writing_keeps_all_else_the_permissions_and_a_copy(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = home / ".cursor" / "mcp.json"
    file.parent.mkdir(parents=True)
    before: Json = {"mcpServers": {"other": {"command": "x", "env": {"KEY": "ü"}}}, "more": [1, 12345678901234567890]}
    file.write_text(json.dumps(before, indent="\t", ensure_ascii=False), encoding="utf-8")
    file.chmod(0o600)
    written = toolbus("mcp", "config", "cursor", "--write", HOME=str(home))
    assert written.returncode == 0, written.stderr
    after = json.loads(file.read_text(encoding="utf-8"))
    assert after["mcpServers"].pop("toolbus")["args"][-1] == "mcp"
    assert after == before
    assert '\n\t"mcpServers"' in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600
    copy = file.with_name("mcp.json.before-toolbus")
    assert json.loads(copy.read_text(encoding="utf-8")) == before
    assert copy.stat().st_mode & 0o777 == 0o600
    assert str(copy) in written.stdout


def test_a_new_file_is_its_owners_alone_and_writing_again_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "config.json"
    assert merge(file, "mcpServers", ENTRY) is None
    assert json.loads(file.read_text()) == {"mcpServers": {"toolbus": ENTRY}}
    assert file.stat().st_mode & 0o777 == 0o600
    assert merge(file, "mcpServers", ENTRY) is None
    assert [each.name for each in file.parent.iterdir()] == ["config.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "dotfiles.json", tmp_path / "config.json"
    target.write_text("{}")
    link.symlink_to(target)
    merge(link, "servers", ENTRY)
    assert link.is_symlink()
    assert json.loads(target.read_text())["servers"] == {"toolbus": ENTRY}


@pytest.mark.parametrize("text", ['{"servers": {} // mine\n}', "[]", '{"servers": []}'])
def test_a_file_that_is_not_understood_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(NotWritten, match="by hand"):
        merge(file, "servers", ENTRY)
    assert file.read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [(["config"], "claude-desktop"), (["config", "emacs"], "vscode"), (["--profile"], "needs a value"),
     (["--nothing"], "--nothing"), (["start"], "start")],
)  # fmt: skip
def test_wrong_usage_ends_with_2_and_says_what_is_right(words: list[str], why: str) -> None:
    ended = toolbus("mcp", *words)
    assert ended.returncode == 2
    assert why in ended.stderr
    assert ended.stdout == ""


def test_help_is_the_same_at_both_doors() -> None:
    shown = toolbus("mcp", "--help")
    assert shown.returncode == 0
    assert "toolbus mcp config" in shown.stdout
