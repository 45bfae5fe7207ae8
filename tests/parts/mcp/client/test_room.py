"""The operators' tools for mounts, on a bus with a real server, and that no request adds a mount."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.audit.chains import entries
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.errors import InvalidRequest
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.parts.audit.room import AuditRoom
from toolbus.parts.mcp.client.room import McpClientRoom
from toolbus.parts.observability.logs_room import LogsRoom
from toolbus.parts.pins.room import PinsRoom

SERVER = Path(__file__).parents[3] / "support" / "mcp_server.py"
FIRST = [{"name": "read", "description": "Reads.", "inputSchema": {"type": "object"}}]
CHANGED = [{**FIRST[0], "description": "Reads and sends."}]


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(FIRST))
    mounts = {
        "files": {"command": sys.executable, "args": [str(SERVER), f"file={tools}"], "toolbus": {"pin": "block"}},
        "bad": {"type": "sse", "url": "https://a.example"},
        "off": {"command": "true", "disabled": True},
    }
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "mcp.json").write_text(json.dumps({"mcpServers": mounts}))
    rooms = (AuditRoom, PinsRoom, LogsRoom, McpClientRoom)
    async with Bus(Config(http="off", data_dir=tmp_path / "data"), rooms=rooms) as bus:
        yield bus


async def ask(bus: Bus, own: str, /, **arguments: Any) -> Any:
    result = await bus.call(f"toolbus:{own}", arguments)
    if result.is_error:
        raise InvalidRequest(result.text)
    return result.output


async def state(bus: Bus, *wanted: str) -> dict[str, Any]:
    """Returns the mount as soon as it is in a state."""
    async with asyncio.timeout(60):
        while True:
            [mount] = (await ask(bus, "mounts", name="files"))["mounts"]
            if mount["state"] in wanted:
                return dict(mount)
            await asyncio.sleep(0.02)


async def test_a_changed_tool_is_withdrawn_shown_approved_and_offered_again(bus: Bus, tmp_path: Path) -> None:
    first = await state(bus, "live")
    assert [each["name"] for each in first["declared"]] == ["read"]
    everything = await ask(bus, "mounts")
    assert "sse" in everything["refused"]["bad"]
    assert everything["disabled"] == ["off"]
    assert everything["file"] == str(tmp_path / "data" / "mcp.json")
    (tmp_path / "tools.json").write_text(json.dumps(CHANGED))
    assert (await ask(bus, "mount_restart", name="files"))["restarted"]
    changed = await state(bus, "degraded")
    assert changed["declared"] == []
    [change] = (await ask(bus, "approvals", source="files"))["changes"]
    assert "Reads and sends." in change["difference"]
    unseen = await ask(bus, "approve", source="files", expected=["0" * 64])
    assert (unseen["approved"], unseen["waiting"]) == ([], ["tool:read"])
    done = await ask(bus, "approve", source="files", tool="read", expected=[change["fingerprint"]])
    assert done["approved"] == ["tool:read"]
    again = await state(bus, "live")
    assert [each["description"] for each in again["declared"]] == ["Reads and sends."]
    async with asyncio.timeout(WAIT_SECONDS):
        while not _audited(tmp_path / "data" / FOLDER, "approve", "tool:read"):
            await asyncio.sleep(0.02)
    assert _audited(tmp_path / "data" / FOLDER, "change", "tool:read")
    assert isinstance((await ask(bus, "mount_logs", name="files"))["lines"], list)
    [row] = (await ask(bus, "plugin_logs"))["plugins"]
    assert (row["source"], row["plugin"], row["state"]) == ("toolbus.mounts", "files", "live")
    written = (await ask(bus, "plugin_logs", plugin="files", wait_seconds=30, since=1))["lines"]
    assert [(line["stream"], line["text"]) for line in written] == [("stderr", "started")]  # by the second process


def _audited(folder: Path, act: str, why: str) -> bool:
    return any((line["act"], line["target"], line["why"]) == (act, "files", why) for line in entries(folder))


async def test_what_is_not_there_is_refused_with_the_reason(bus: Bus) -> None:
    for name, says in (("nope", "there is no mount 'nope'"), ("bad", "sse"), ("off", "disabled")):
        with pytest.raises(InvalidRequest, match=says):
            await ask(bus, "mount_restart", name=name)
    with pytest.raises(InvalidRequest, match="nothing of 'x' waits"):
        await ask(bus, "approve", source="files", tool="x")


async def test_no_tool_of_the_bus_takes_a_command(bus: Bus) -> None:
    own = [
        listing.tool
        for listing in bus.core.catalog.view.listings(None)
        if listing.tool.name.startswith("toolbus:mount")
    ]
    accepted = {name for tool in own for name in tool.parameters.get("properties", {})}
    assert accepted <= {"name", "tool", "expected"}
