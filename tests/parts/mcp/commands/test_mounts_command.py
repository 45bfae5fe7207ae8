"""`toolbus mounts add`, `mounts` and `unmount` with a running bus and a real server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.processes import toolbus
from tests.support.waiting import until_sync

SERVER = Path(__file__).parents[3] / "support" / "mcp_server.py"


def test_a_server_is_mounted_changed_approved_and_unmounted(tmp_path: Path) -> None:
    data, tools = tmp_path / "data", tmp_path / "tools.json"

    def declare(*names: str) -> None:
        tools.write_text(json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))

    declare("read")
    with bus_on_thread(data_dir=data) as bus:

        def run(*words: str, place: bool = False) -> CompletedProcess[str]:
            where = ["--data-dir", str(data)] if place else []
            to_bus = ["--bus", bus.grpc_addresses[0]]
            command = words.index("--") if "--" in words else len(words)
            return toolbus(*words[:command], *where, *to_bus, *words[command:])

        def shown() -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(run("mounts", "files", "--json").stdout)
            return answer["mounts"][0] if answer["mounts"] else {}

        mounted = run(
            "mount", "files", "--pin", "block", "--", sys.executable, str(SERVER), f"file={tools}", place=True
        )
        assert mounted.returncode == 0, mounted.stderr
        assert "files: live" in mounted.stdout
        assert "read" in mounted.stdout
        declare("read", "send")
        assert run("mounts", "restart", "files").returncode == 0
        until_sync(lambda: shown()["state"] == "degraded")
        assert "approve files send" in run("mounts", "files").stdout
        refused = run("approve", "files")
        assert (refused.returncode, "--yes" in refused.stderr) == (2, True)  # without a terminal
        approved = run("approve", "files", "send", "--yes")
        assert (approved.returncode, "approved: tool:send" in approved.stdout) == (0, True)
        assert '+ "name": "send"' in approved.stdout
        assert [each["name"] for each in shown()["declared"]] == ["read", "send"]
        assert "nothing of source files waits" in run("approve", "files").stderr
        assert run("mounts", "logs", "files", "--json").returncode == 0
        assert run("mounts", "logs", "files").stdout == "started\n"
        assert run("mounts", "logs", "nope").returncode == 1
        assert "there is no mount" in run("mounts", "nope").stderr
        broken = run("mount", "broken", "--env", "NOT_SET_ANYWHERE", "--", sys.executable, "x", place=True)
        assert (broken.returncode, "needs the variable NOT_SET_ANYWHERE" in broken.stderr) == (1, True)
        (row,) = [line for line in run("mounts").stdout.splitlines() if line.startswith("files")]
        assert row.split()[1:4] == ["live", "legacy", "2"]
        assert run("unmount", "files").returncode == 0  # from the file of the named bus, not of the default directory
        assert "files" not in json.loads((data / "mcp.json").read_text())["mcpServers"]


def test_a_mount_is_written_where_the_named_bus_reads_it_and_a_replacement_waits_for_its_own_server(
    tmp_path: Path,
) -> None:
    data, tools = tmp_path / "data", tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "read", "inputSchema": {"type": "object"}}]))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "my-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    program.chmod(0o755)
    with bus_on_thread(data_dir=data) as bus:
        to_bus = ("--bus", bus.grpc_addresses[0])
        # Neither the shell's PATH nor the default data directory is the bus's.
        shell = {"PATH": f"{program.parent}:{os.environ['PATH']}", "TOOLBUS_DATA_DIR": str(tmp_path / "elsewhere")}
        broken = toolbus("mount", "files", *to_bus, "--", "my-server", f"file={tmp_path / 'none'}", **shell)
        assert broken.returncode == 1, broken.stderr
        assert "is written, but" in broken.stderr, broken.stderr
        entry = json.loads((data / "mcp.json").read_text())["mcpServers"]["files"]
        assert entry["command"] == str(program)
        refused = toolbus("call", "files:read", *to_bus)
        assert "the mount files is " in refused.stderr + refused.stdout
        for _ in range(2):  # another entry, and then the same once more
            good = toolbus("mount", "files", "--replace", *to_bus, "--", "my-server", f"file={tools}", **shell)
            assert (good.returncode, "files: live" in good.stdout) == (0, True), good.stderr
            assert "none" not in good.stderr
        assert toolbus("unmount", "files", *to_bus).returncode == 0
        words = ("--dir", str(tmp_path), "--env", "A=b", "--", "my-server", f"file={tools}")
        again = toolbus("mount", "files", *to_bus, *words, **shell)
        assert (again.returncode, "files: live" in again.stdout) == (0, True), again.stderr
        entry = json.loads((data / "mcp.json").read_text())["mcpServers"]["files"]
        assert (entry["cwd"], entry["env"]) == (str(tmp_path), {"A": "b"})
        other = toolbus("mount", "more", *to_bus, "--data-dir", str(tmp_path), "--", "my-server", **shell)
        assert (other.returncode, f"has the data directory {data}" in other.stderr) == (1, True)


def test_logins_of_users_are_listed_and_ended(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with bus_on_thread(data_dir=data) as bus:
        to_bus = ("--bus", bus.grpc_addresses[0])
        words = ("--", sys.executable, "-I", "-S", str(SERVER), "--", "${user:dir}")
        mounted = toolbus("mount", "diary", "--user-login", "--data-dir", str(data), *to_bus, *words)
        assert mounted.returncode == 0, mounted.stderr
        for user in ("ann", "bob"):
            called = toolbus("call", "diary:pid", "--user", user, *to_bus)
            assert called.returncode == 0, called.stderr
        rows = json.loads(toolbus("mounts", "logins", "--json", *to_bus).stdout)["logins"]
        assert [(row["mount"], row["user"], row["token"]) for row in rows] == [
            ("diary", each, False) for each in ("ann", "bob")
        ]
        assert "2" not in toolbus("mounts", "logins", "diary", "--user", "eve", *to_bus).stdout
        refused = toolbus("mounts", "logins", "--end", *to_bus)
        assert (refused.returncode, "name a mount, an account or a user" in refused.stderr) == (1, True)
        ended = toolbus("mounts", "logins", "diary", "--user", "ann", "--end", *to_bus)
        assert (ended.returncode, "1 logins were ended" in ended.stderr) == (0, True), ended.stderr
        assert len(list((data / "mcp-users" / "diary").glob("*.json"))) == 1
        assert toolbus("unmount", "diary", "--data-dir", str(data)).returncode == 0
        assert not (data / "mcp-users" / "diary").exists()
