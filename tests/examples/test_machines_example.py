"""The example for several machines, as its page has it: keys, a bus with TLS, a plugin and a host with credentials."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.processes import ROOT, Running, script, toolbus
from tests.support.waiting import until_sync

MACHINES = ROOT / "examples" / "machines"


def overview(credential: Path) -> subprocess.CompletedProcess[str]:
    return script(MACHINES / "overview.py", str(credential))


def test_machines_report_over_the_network_until_their_key_is_revoked(tmp_path: Path) -> None:
    keys = ("--data-dir", tmp_path / "data")
    machines, host = tmp_path / "machines.toolbus", tmp_path / "overview.toolbus"
    assert toolbus("keys", "init", "--name", "bus.example", *keys).returncode == 0
    options = ("--grpc", "127.0.0.1:0", "--grpc", "mtls:127.0.0.1:0", "--http", "off", *keys)
    with Running(tmp_path, "serve", *options) as serving:
        serving.says("toolbus ready")
        (address,) = re.findall(r"mtls:[^ ,]+", serving.out)
        add = ("keys", "add", *keys, "--address", address)
        assert toolbus(*add, "machines", "--plugin", "machine:*", "-o", machines).returncode == 0
        assert toolbus(*add, "overview", "--host", "-o", host).returncode == 0
        with Running(tmp_path, "run", MACHINES / "report.py", "--credential", machines) as run:
            until_sync(lambda: ":report: {" in overview(host).stdout, "the report of this machine")
            printed = overview(host).stdout
            assert re.match(r"attached as overview, good until 20\d\d-\d\d-\d\d\n", printed)
            assert re.search(r"^machine:\S+:report: .*\"disk_used_percent\": ?\d+", printed, re.MULTILINE), printed
            assert toolbus("keys", "revoke", "machines", *keys).returncode == 0
            run.says("was revoked on")
        assert toolbus("keys", "revoke", "overview", *keys).returncode == 0
        until_sync(lambda: overview(host).returncode == 1, "the key to be revoked")
        refused = overview(host)
    assert "Unauthenticated: " in refused.stderr
    assert str(host) in refused.stderr


def test_the_page_shows_the_commands_that_there_are() -> None:
    page = (MACHINES / "README.md").read_text("utf-8")
    for command in re.findall(r"^toolbus ((?:keys )?\w+)", page, re.MULTILINE):
        assert toolbus(*command.split(), "--help").returncode == 0
