"""Tests how long `toolbus mounts add` waits for a server, and what it says of one that is down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.stage import free_ports
from tests.support.processes import toolbus
from toolbus.parts.mcp.commands import mount_command


@pytest.mark.parametrize("remote", [True, False])
async def test_a_server_elsewhere_is_not_waited_for_once_it_is_down_and_others_are(remote: bool) -> None:
    states = iter(("starting", "restarting", "restarting", "live"))
    mount: dict[str, Any] = {"declared": [], "reason": "cannot be reached", "last_error": ""}

    async def look() -> dict[str, Any]:
        state = next(states)
        mount.update(state=state, last_error="cannot be reached" if state == "restarting" else mount["last_error"])
        return {"mounts": [dict(mount)], "refused": {}}

    answer = await mount_command.settled(look, remote=remote, down_seconds=0.0)
    assert answer["mounts"][0]["state"] == ("restarting" if remote else "live")


def test_mount_says_that_a_url_is_down_and_keeps_the_entry(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    data = tmp_path / "data"
    result = toolbus("mount", "far", "--url", f"http://127.0.0.1:{port}/mcp", "--data-dir", data)
    assert result.returncode == 1
    assert "cannot be reached" in result.stderr
    assert "correct --url with --replace" in result.stderr
    assert "far" in json.loads((data / "mcp.json").read_text())["mcpServers"]
