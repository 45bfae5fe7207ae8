"""Tests of the stored permissions that operators changed at run time, applied over the configuration."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from toolbus.bus import Bus
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.operators.grants import PERMISSIONS, StoredGrants
from toolbus.bus.storage.store import Store
from toolbus.errors import InvalidRequest, NotKept, SetupError
from toolbus.testing import running_bus

CONFIGURED = AccessRules.read({"tools": {"mail": ["ann"], "pay": ["ann"]}, "sources": {"shop": ["bob"]}})


def tables(bus: Bus) -> dict[str, dict[str, list[str]]]:
    return bus.dispatcher.view.permissions.as_tables()


def stored(directory: Path) -> dict[str, Any]:
    with closing(Store.of(directory)) as store:
        store.open()
        return store.load(PERMISSIONS)


async def test_permissions_are_restored_after_a_restart_over_the_configuration(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED) as bus:
        bus.permit("tools", "mail", ["eve"])
        bus.permit("tools", "draw", ["*"])
        bus.permit("tools", "pay", None)
        bus.permit("roles", "Lanlan", [])
        before = tables(bus)
    assert before == {
        "tools": {"mail": ["eve"], "draw": ["*"]},
        "roles": {"Lanlan": []},
        "sources": {"shop": ["bob"]},
    }
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED) as bus:
        assert tables(bus) == before
        bus.permit("tools", "draw", None)
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED) as bus:
        assert tables(bus)["tools"] == {"mail": ["eve"]}


async def test_an_invalid_rule_changes_and_writes_nothing(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED) as bus:
        with pytest.raises(InvalidRequest, match="people"):
            bus.permit("people", "ann", ["*"])
        assert tables(bus) == CONFIGURED.as_tables()
    assert stored(tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"tools": ["a"]}', '{"tools": {"a": "ann"}}', '{"people": {"a": []}}', '{"tools": {"a": [1]}}']
)
async def test_a_file_that_cannot_be_read_keeps_the_bus_from_starting_and_stays_as_it_is(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "permissions.json").write_text(text)
    for _ in range(2):
        with pytest.raises(SetupError, match=r"permissions.json is damaged.* go back to the permissions"):
            async with running_bus(data_dir=tmp_path):
                pass
    assert (tmp_path / "permissions.json").read_text() == text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tools", []),
        ('["tools"]', []),
        ('["people", "a"]', []),
        ('["tools", "a"]', "ann"),
        ('["tools", "a"]', [1]),
        ('["silenced", "a"]', 1),
        ('["generation", "a"]', None),
    ],
)
async def test_a_damaged_permission_keeps_the_bus_from_starting(tmp_path: Path, key: str, value: object) -> None:
    with closing(Store.of(tmp_path)) as store:
        store.open()
        store.put(PERMISSIONS, key, value)
    with pytest.raises(SetupError, match=r"run `(.*)` to go back to the permissions of the configuration") as caught:
        async with running_bus(data_dir=tmp_path):
            pass
    assert f"sqlite3 {tmp_path / 'bus.db'} 'DELETE FROM permissions'" in str(caught.value)
    with closing(sqlite3.connect(tmp_path / "bus.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM permissions")
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED) as bus:
        assert tables(bus) == CONFIGURED.as_tables()


def test_a_rule_that_cannot_be_written_raises_and_the_next_is_written_without_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with closing(Store.of(data)) as store:
        store.open()
        grants = StoredGrants(store, CONFIGURED, frozenset())
        assert grants.rules == CONFIGURED
        data.rename(tmp_path / "away")
        with pytest.raises(NotKept, match="in force"):
            grants.save("tools", "mail", [])
        (tmp_path / "away").rename(data)
        grants.save("tools", "pay", ["eve"])
    assert stored(data) == {'["tools", "pay"]': ["eve"]}


async def test_what_is_taken_back_leaves_nothing_behind_where_the_configuration_says_the_same(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED, silenced=("mute",)) as bus:
        for number in range(20):
            bus.permit("tools", f"tool_{number}", ["ann"])
            bus.permit("tools", f"tool_{number}", None)
            bus.revoke(f"source-{number}")
            bus.grant(f"source-{number}")
        bus.grant("mute")
        bus.permit("tools", "pay", None)
    assert stored(tmp_path) == {'["tools", "pay"]': None, '["silenced", "mute"]': False}
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED, silenced=("mute",)) as bus:
        assert tables(bus)["tools"] == {"mail": ["ann"]}
        assert bus.policy.may_offer("mute")


def test_what_changes_nothing_is_not_written_again(tmp_path: Path) -> None:
    with closing(Store.of(tmp_path)) as store:
        store.open()
        grants = StoredGrants(store, AccessRules(), frozenset())
        grants.save("tools", "mail", ["ann"])
        before = (tmp_path / "bus.db-wal").read_bytes()
        grants.save("tools", "mail", ["ann"])
        grants.save("roles", "nobody", None)
        grants.save("silenced", "shop", False)
        assert (tmp_path / "bus.db-wal").read_bytes() == before
