"""The bundled folder on a real bus, each group in its sandbox."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from tests.examples.dropin.conftest import FOLDER
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.bus import Bus
from toolbus.parts.dropin.tool_folder import ToolFolder
from toolbus.processes.supervisor import PluginReport
from toolbus.sdk import CallContext
from toolbus.testing import running_bus

TOOLS = {"archive_search", "directory", "my_messages", "relay_message", "this_host"}


async def _wait_until_offered(bus: Bus, lines: list[str]) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not {each.entry.tool.name for each in bus.list()} >= TOOLS:
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError("\n".join(lines)) from None


async def test_every_tool_does_its_work_in_a_sandbox_with_what_the_manifest_grants(tmp_path: Path) -> None:
    folder = tmp_path / "dropin"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("queue.db*", "__pycache__"))
    lines: list[str] = []

    def emit(report: PluginReport) -> None:
        lines.append(f"{report.plugin} {report.kind.value} {report.text}")

    async with running_bus() as bus:

        async def ask(tool: str, user: str, **args: Any) -> Any:
            context = CallContext(user_id=user, attributes={"users": "ann, bob"})
            return (await bus.call(tool, args, context=context)).output

        tools = ToolFolder(folder, await bus.dropin_address(), emit, require_manifest=True)
        running = asyncio.create_task(tools.run())
        try:
            await _wait_until_offered(bus, lines)
            assert (await ask("archive_search", "ann", query="parse json"))["results"][0]["title"] == "json"
            service = await ask("directory", "ann", name="ssh", probe=True)
            assert (service["service"]["port"], service["live"]["state"]) == (22, "not permitted")
            assert (await ask("relay_message", "ann", recipient="Bob", text="hi"))["queued"] == 1
            assert (await ask("my_messages", "ann"))["count"] == 0
            (message,) = (await ask("my_messages", "bob"))["messages"]
            assert (message["from"], message["text"]) == ("ann", "hi")
            seen = await ask("this_host", "ann")
            assert {each["name"] for each in seen["tools"]} >= TOOLS
            assert (await ask("this_host", "ann", kind="stats"))["your_recent_calls"]["OK"] >= 4
            calls = await ask("this_host", "bob", kind="recent_calls")
            assert {each["tool"] for each in calls["recent_calls"]} == {"my_messages"}, "bob's alone"
            plugins = await ask("this_host", "", kind="plugins")
            assert {each["state"] for each in plugins["plugins"]} == {"live"}
        finally:
            tools.stop()
            await within(running)
    written = {path.name for path in folder.iterdir()} - {path.name for path in FOLDER.iterdir()}
    assert written <= {"queue.db", "queue.db-journal"}, "there is more than what it may write"
