"""`toolbus mount`, `mounts` and `unmount` with a running bus and a real server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.waiting import until_sync
from toolbus.cli.command_line import app

SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


def test_a_server_is_mounted_changed_approved_and_unmounted(tmp_path: Path) -> None:
    data, tools = tmp_path / "data", tmp_path / "tools.json"

    def declare(*names: str) -> None:
        tools.write_text(json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))

    declare("read")
    with bus_on_thread(data_dir=data) as bus:

        def run(*words: str, place: bool = False) -> Result:
            where = ["--data-dir", str(data)] if place else []
            to_bus = [] if words[0] == "unmount" else ["--bus", bus.grpc_addresses[0]]
            command = words.index("--") if "--" in words else len(words)
            return CliRunner().invoke(app, [*words[:command], *where, *to_bus, *words[command:]])

        def shown() -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(run("mounts", "files", "--json").stdout)
            return answer["mounts"][0] if answer["mounts"] else {}

        mounted = run(
            "mount", "files", "--pin", "block", "--", sys.executable, str(SERVER), f"file={tools}", place=True
        )
        assert mounted.exit_code == 0, mounted.output
        assert "files: live" in mounted.output
        assert "read" in mounted.output
        declare("read", "send")
        assert run("mounts", "restart", "files").exit_code == 0
        until_sync(lambda: shown()["state"] == "degraded")
        assert "approve files send" in run("mounts", "files").output
        refused = run("approve", "files")
        assert (refused.exit_code, "--yes" in refused.output) == (2, True)  # without a terminal
        approved = run("approve", "files", "send", "--yes")
        assert (approved.exit_code, "approved: tool:send" in approved.output) == (0, True)
        assert '+ "name": "send"' in approved.output
        assert [each["name"] for each in shown()["declared"]] == ["read", "send"]
        assert "nothing of source files waits" in run("approve", "files").output
        assert run("mounts", "logs", "files", "--json").exit_code == 0
        assert run("mounts", "logs", "files").output == "started\n"
        assert run("mounts", "logs", "nope").exit_code == 1
        assert "there is no mount" in run("mounts", "nope").output
        broken = run("mount", "broken", "--env", "NOT_SET_ANYWHERE", "--", sys.executable, "x", place=True)
        assert (broken.exit_code, "needs the variable NOT_SET_ANYWHERE" in broken.output) == (1, True)
        (row,) = [line for line in run("mounts").output.splitlines() if line.startswith("files")]
        assert row.split()[1:4] == ["live", "legacy", "2"]
        assert run("unmount", "files", place=True).exit_code == 0
