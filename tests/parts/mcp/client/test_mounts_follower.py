"""Following files of mounts: a change is seen, and a file that broke stops nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.files import ConfiguredMounts, MountsFollower
from toolbus.parts.mcp.client.room import McpClientRoom


def write(path: Path, **mounts: Any) -> None:
    """Replaces a file, as editors do."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"mcpServers": {name: {"command": command} for name, command in mounts.items()}}))
    os.replace(beside, path)


def commands(configured: ConfiguredMounts) -> dict[str, str]:
    return {name: entry.command for name, entry in configured.entries.items()}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "mcp.json", tmp_path / "named.json"


def test_both_files_count_and_of_one_name_the_bus_own_entry_is_used(files: tuple[Path, Path]) -> None:
    own, named = files
    write(own, a="own")
    write(named, a="named", b="named")
    configured = MountsFollower(own, named, {}).read_first()
    assert commands(configured) == {"a": "own", "b": "named"}
    assert "is ignored" in configured.notices[0]


def test_a_missing_or_broken_own_file_does_not_keep_a_bus_from_starting(files: tuple[Path, Path]) -> None:
    own, named = files
    write(named, b="named")
    assert MountsFollower(own, named, {}).read_first().errors == {}
    own.write_text("{")
    configured = MountsFollower(own, named, {}).read_first()
    assert (commands(configured), list(configured.errors)) == ({"b": "named"}, [str(own)])


def test_a_named_file_that_cannot_be_read_is_an_error_of_the_start(files: tuple[Path, Path]) -> None:
    with pytest.raises(SetupError, match=r"named\.json"):
        MountsFollower(files[0], files[1], {}).read_first()


async def test_a_file_is_followed_also_where_it_comes_breaks_and_goes(files: tuple[Path, Path]) -> None:
    own, _ = files
    follower = MountsFollower(own, None, {})
    assert commands(follower.read_first()) == {}
    changes = follower.follow(0.01)
    async with asyncio.timeout(WAIT_SECONDS):
        write(own, a="one")
        assert commands(await anext(changes)) == {"a": "one"}
        own.write_text("{")
        broken = await anext(changes)
        assert commands(broken) == {"a": "one"}  # it goes on
        assert "not JSON" in broken.errors[str(own)]
        write(own, b="two")
        assert commands(await anext(changes)) == {"b": "two"}
        own.unlink()
        assert await anext(changes) == ConfiguredMounts()
    await changes.aclose()


async def test_a_bus_takes_variables_of_mounts_from_its_file_of_secrets(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.toml"
    secrets.write_text('TOKEN = "from the file"')
    secrets.chmod(0o600)
    entry = {"url": "http://127.0.0.1:1/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}, "disabled": True}
    files[1].write_text(json.dumps({"mcpServers": {"far": entry}}))
    files[1].chmod(0o600)
    config = Config(grpc=("127.0.0.1:0",), http="off", data_dir=None, mcp_servers=files[1], mcp_secrets=secrets)
    async with Bus(config, rooms=(McpClientRoom,)) as bus:
        room = bus.core.rooms.find(McpClientRoom)
        assert room is not None
        assert room.configured is not None
        assert room.configured.entries["far"].headers == {"Authorization": "Bearer from the file"}
