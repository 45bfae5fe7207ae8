"""The manifest of mounts: what survives a restart, a kill and damage."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from toolbus.bus.pins.pins import Pinned
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.offer import FILE, MAX_COMMANDS, MountManifest, StoredServer

SAID = StoredServer({"modern": True}, {"tools": [{"name": "read", "description": "\ud800 ü"}]})
KNOWN = {"tool:read": Pinned("{}", ""), "instructions": Pinned("", '"x"')}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / FILE


def test_what_is_saved_is_there_after_a_restart_for_that_command_line_only(path: Path) -> None:
    first = MountManifest(path)
    assert first.is_new("files", "c1")
    first.save("files", "c1", SAID)
    first.save_fingerprints("files", "c1", KNOWN)
    first.close()
    second = MountManifest(path)
    assert second.load("files", "c1") == SAID
    assert second.fingerprints("files", "c1") == KNOWN
    assert not second.is_new("files", "c1")
    assert (second.load("files", "c2"), second.fingerprints("files", "c2")) == (None, {})
    assert path.stat().st_mode & 0o777 == 0o600
    second.close()


def test_fingerprints_replace_what_was_there() -> None:
    manifest = MountManifest(None)
    manifest.save_fingerprints("files", "c", KNOWN)
    manifest.save_fingerprints("files", "c", {"tool:read": Pinned("{}", "{1}")})
    assert manifest.fingerprints("files", "c") == {"tool:read": Pinned("{}", "{1}")}
    manifest.close()


def test_only_the_newest_command_lines_of_a_mount_are_remembered(path: Path) -> None:
    manifest = MountManifest(path)
    for number in range(MAX_COMMANDS + 2):
        manifest.save_fingerprints("files", str(number), KNOWN)
        manifest.save("files", str(number), SAID)
    assert manifest.load("files", "1") is None
    assert manifest.fingerprints("files", "1") == {}
    assert manifest.load("files", "2") == SAID
    manifest.close()


def test_a_kill_loses_nothing_that_was_saved(path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path\n"
        "from toolbus.parts.mcp.client.offer import *; from toolbus.bus.pins.pins import Pinned\n"
        f"m = MountManifest(Path({str(path)!r})); m.save('files', 'c', StoredServer({{'modern': True}}, {{}}))\n"
        "m.save_fingerprints('files', 'c', {'tool:a': Pinned('{}', '')})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    manifest = MountManifest(path)
    assert manifest.load("files", "c") == StoredServer({"modern": True}, {})
    assert manifest.fingerprints("files", "c") == {"tool:a": Pinned("{}", "")}
    manifest.close()


def test_a_damaged_file_is_moved_aside_and_nothing_is_trusted_unseen(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MountManifest(path).close()
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"\xff" * (len(content) - 200))
    with caplog.at_level(logging.ERROR):
        manifest = MountManifest(path)
    assert "moved to" in caplog.text
    assert manifest.was_damaged
    assert not manifest.is_new("files", "c")
    manifest.save("files", "c", SAID)
    assert Path(f"{path}.damaged").exists()
    manifest.close()


def test_a_damaged_row_is_left_out_and_a_damaged_approval_counts_as_none(path: Path) -> None:
    manifest = MountManifest(path)
    manifest.save("files", "c", SAID)
    manifest.save("other", "c", SAID)
    manifest.save_fingerprints("files", "c", KNOWN)
    manifest.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE servers SET peer = '{}' WHERE mount = 'files'")
        connection.execute("UPDATE fingerprints SET approved = '{\"name\":\"evil\"}' WHERE subject = 'tool:read'")
    connection.close()
    manifest = MountManifest(path)
    assert manifest.load("files", "c") is None
    assert manifest.load("other", "c") == SAID
    assert manifest.fingerprints("files", "c")["tool:read"] == Pinned()
    manifest.close()


def test_a_file_of_another_program_is_refused_and_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SetupError, match="another program"):
        MountManifest(path)
    assert path.read_bytes() == before
