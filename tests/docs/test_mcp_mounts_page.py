"""Holds the page on mounts to the code: its tables, its file, and its own server from the first command to a call."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from tests.docs.pages import TEXTS, blocks, listed
from tests.support.processes import toolbus
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.bus.storage.store import Store
from toolbus.parts.mcp.client.entries import ENTRY_KEYS, OWN_KEYS, MountEntry
from toolbus.parts.mcp.client.files import read_document
from toolbus.parts.mcp.client.mount import MountState
from toolbus.parts.mcp.client.room import McpClientRoom

PAGE = "docs/start/mcp-mounts.md"


def test_the_tables_have_every_key_with_its_default() -> None:
    keys = {name for row in listed(TEXTS[PAGE], "DOCS_TOKEN") for name in re.findall(r"`(\w+)`", row[0])}
    assert keys == set(ENTRY_KEYS)
    defaults = {each.name: each.default for each in fields(MountEntry) if each.default is not MISSING}
    rows = {
        row[0].strip("`"): row[1].split(", ")[-1].strip("`") for row in listed(TEXTS[PAGE], "The keys below `toolbus`")
    }
    assert rows.keys() == OWN_KEYS.keys()
    for name, shown in rows.items():
        default = defaults[name]
        value = None if shown == "none" else json.loads(shown)
        assert value == (list(default) if isinstance(default, tuple) else default), name


def test_the_table_of_states_has_every_state() -> None:
    assert [row[0].strip("`") for row in listed(TEXTS[PAGE], "## How the mounts are")] == [
        state.value
        for state in (
            MountState.STARTING,
            MountState.LIVE,
            MountState.DEGRADED,
            MountState.RESTARTING,
            MountState.STOPPED,
            MountState.NEEDS_LOGIN,
            MountState.OFFLINE,
            MountState.FAILED,
        )
    ]
    assert len(listed(TEXTS[PAGE], "## How the mounts are")) == len(MountState)


def test_the_file_of_the_page_is_read_without_a_word() -> None:
    [shown] = [block for block in blocks(PAGE) if block.kind == "json"]
    reading = read_document(json.loads(shown.text), "mcp.json", {"DOCS_TOKEN": "x"})
    assert (list(reading.entries), reading.refused, reading.notices) == (["files", "docs"], {}, ())


async def test_the_server_of_the_page_is_mounted_without_a_bus_and_offered_at_once_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = [block for block in blocks(PAGE) if block.file == "notes.py"]
    (tmp_path / "notes.py").write_text(server.text, "utf-8")
    [line] = [line for block in blocks(PAGE) for line in block.text.splitlines() if "python notes.py" in line]
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    data = tmp_path / "data"
    options = ["--data-dir", str(data), "--json"]
    monkeypatch.chdir(tmp_path)
    done = await asyncio.to_thread(toolbus, *words[1:3], *options, *words[3:])
    assert done.returncode == 0, done.stderr
    [shown] = json.loads(done.stdout)["mounts"]
    assert [each["name"] for each in shown["declared"]] == ["add_note"]
    with closing(Store.of(data)) as store:
        store.open()  # nobody holds its lock: it was not taken for a bus
    async with Bus(Config(http="off", data_dir=data), rooms=(McpClientRoom,)) as bus:
        assert bus.core.catalog.view.listings(None)[0].tool.name == "notes:add_note"  # known before its process runs
        (data / "mcp.json").write_text('{"mcpServers": {}}')
        await until(lambda: not bus.core.catalog.registry.offered_by("notes"))
