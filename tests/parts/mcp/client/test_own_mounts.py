"""The file that `toolbus mount` writes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from toolbus.errors import SetupError
from toolbus.parts.mcp.client.files import OwnMounts, read_mounts


def test_entries_are_added_and_removed_in_a_file_that_only_the_owner_reads(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path / "data")
    own.add({"files": {"command": "x"}, "web": {"url": "https://a.example/mcp"}})
    assert own.path.stat().st_mode & 0o777 == 0o600
    assert list(read_mounts(own.path, {}).entries) == ["files", "web"]
    assert own.remove("files")
    assert not own.remove("files")
    assert list(own.entries()) == ["web"]


def test_an_entry_is_replaced_only_on_request(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path)
    own.add({"files": {"command": "x"}})
    with pytest.raises(SetupError, match="--replace"):
        own.add({"more": {"command": "y"}, "files": {"command": "y"}})
    assert own.entries() == {"files": {"command": "x"}}
    own.add({"files": {"command": "y"}}, replace=True)
    assert own.entries() == {"files": {"command": "y"}}


def test_what_a_person_wrote_beside_stays(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path)
    own.path.write_text('{"$schema": "x", "servers": {"a": {"command": "x"}}} // mine')
    own.add({"b": {"command": "y"}})
    assert list(own.entries()) == ["a", "b"]
    assert '"$schema": "x"' in own.path.read_text()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=OwnMounts(tmp_path).add, args=({f"m{number}": {"command": "x"}},))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(OwnMounts(tmp_path).entries()) == 8
