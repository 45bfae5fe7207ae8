"""Tests of the file with permissions that operators changed at run time, applied over the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolbus.bus import Bus
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.operators.grants import FILE, GrantsFile
from toolbus.errors import InvalidRequest, NotKept, SetupError
from toolbus.testing import running_bus

CONFIGURED = AccessRules.read({"tools": {"mail": ["ann"], "pay": ["ann"]}, "sources": {"shop": ["bob"]}})


def tables(bus: Bus) -> dict[str, dict[str, list[str]]]:
    return bus.dispatcher.view.permissions.as_tables()


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
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"tools": ["a"]}', '{"tools": {"a": "ann"}}', '{"people": {"a": []}}', '{"tools": {"a": [1]}}']
)
async def test_a_file_that_cannot_be_read_keeps_the_bus_from_starting_and_stays_as_it_is(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(SetupError, match="is damaged"):
        async with running_bus(data_dir=tmp_path):
            pass
    assert (tmp_path / FILE).read_text() == text


def test_a_rule_that_cannot_be_written_raises_and_the_next_is_written_without_it(tmp_path: Path) -> None:
    grants_file = GrantsFile(tmp_path / "data")
    assert grants_file.apply(CONFIGURED) == CONFIGURED
    with pytest.raises(NotKept, match="in force"):
        grants_file.save_rule("tools", "mail", [])
    (tmp_path / "data").mkdir()
    grants_file.save_rule("tools", "pay", ["eve"])
    assert GrantsFile(tmp_path / "data").apply(AccessRules()).as_tables()["tools"] == {"pay": ["eve"]}
    assert (tmp_path / "data" / FILE).stat().st_mode & 0o777 == 0o600
    assert [each.name for each in (tmp_path / "data").iterdir()] == [FILE]


async def test_what_is_taken_back_leaves_nothing_behind_where_the_configuration_says_the_same(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED, silenced=("mute",)) as bus:
        for number in range(20):
            bus.permit("tools", f"tool_{number}", ["ann"])
            bus.permit("tools", f"tool_{number}", None)
            bus.revoke(f"source-{number}")
            bus.grant(f"source-{number}")
        bus.grant("mute")
        bus.permit("tools", "pay", None)
    assert json.loads((tmp_path / FILE).read_text()) == {"tools": {"pay": None}, "silenced": {"mute": False}}
    async with running_bus(data_dir=tmp_path, permissions=CONFIGURED, silenced=("mute",)) as bus:
        assert tables(bus)["tools"] == {"mail": ["ann"]}
        assert bus.policy.may_offer("mute")


def test_what_changes_nothing_is_not_written_again(tmp_path: Path) -> None:
    grants_file = GrantsFile(tmp_path)
    grants_file.save_rule("tools", "mail", ["ann"])
    written = (tmp_path / FILE).stat().st_ino
    grants_file.save_rule("tools", "mail", ["ann"])
    grants_file.save_rule("roles", "nobody", None)
    grants_file.save_source("shop", False)
    assert (tmp_path / FILE).stat().st_ino == written
