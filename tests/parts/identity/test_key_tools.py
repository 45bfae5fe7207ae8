"""Tests `toolbus:keys` and `toolbus:key_revoke`: what they show, what they end, and what they never tell."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from toolbus.bus.access.identity import Identity, Scopes
from toolbus.bus.catalog.policy import VERBS_OF_TOOLS
from toolbus.errors import NotPermitted
from toolbus.testing import running_bus


@pytest.fixture
def keys(tmp_path: Path) -> KeysDirectory:
    return KeysDirectory(tmp_path)


async def test_the_list_names_identities_and_keys_and_no_secret(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    async with running_bus(data_dir=keys.folder) as bus:
        answer = (await bus.call("toolbus:keys", {})).output
    assert answer["identities"]["chat"]["call"] == ["*"]
    assert [each["id"] for each in answer["keys"]] == [f"{made['id']}-token", f"{made['id']}-cert"]
    text = json.dumps(answer)
    assert made["token"] not in text
    assert "sha256" not in text


async def test_the_list_says_when_the_certificates_of_the_bus_expire(keys: KeysDirectory) -> None:
    keys.add("chat")
    async with running_bus(data_dir=keys.folder) as bus:
        ends = (await bus.call("toolbus:keys", {})).output["certificates"]
        (keys.path / "server.pem").unlink()
        assert (await bus.call("toolbus:keys", {})).output["certificates"] == {}
    assert 0 < ends["server"] - time.time() < ends["root"] - time.time()


async def test_a_revoked_credential_is_no_longer_in_force(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    async with running_bus(data_dir=keys.folder) as bus:
        answer = (await bus.call("toolbus:key_revoke", {"name": made["id"]})).output
        unknown = await bus.call("toolbus:key_revoke", {"name": "nobody"})
    assert answer == {"revoked": [f"{made['id']}-token", f"{made['id']}-cert"]}
    assert unknown.is_error
    assert "unknown identity or key 'nobody'" in unknown.text
    assert ring.reload().keys == set(answer["revoked"])


async def test_the_keys_are_those_of_the_directory_that_the_configuration_names(
    keys: KeysDirectory, tmp_path: Path
) -> None:
    keys.add("chat")
    async with running_bus(data_dir=tmp_path / "data", keys=keys.path) as bus:
        assert set((await bus.call("toolbus:keys", {})).output["identities"]) == {"chat"}


async def test_without_keys_the_lists_are_empty_and_it_says_how_to_make_some(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path) as bus:
        made_none = (await bus.call("toolbus:keys", {})).output
    assert "make keys with `toolbus keys init" in made_none["note"]
    async with running_bus() as bus:
        stores_nothing = (await bus.call("toolbus:keys", {})).output
        assert (await bus.call("toolbus:key_revoke", {"name": "chat"})).is_error
    assert "start it with a data directory" in stores_nothing["note"]
    assert made_none["keys"] == stores_nothing["keys"] == []
    assert made_none["identities"] == stores_nothing["identities"] == {}


async def test_keys_that_cannot_be_read_are_an_error_and_no_empty_list(keys: KeysDirectory) -> None:
    keys.add("chat")
    async with running_bus(data_dir=keys.folder) as bus:
        (keys.path / "keys.toml").write_text("nonsense")
        answer = await bus.call("toolbus:keys", {})
    assert answer.is_error


@pytest.mark.parametrize("tool", ["keys", "key_revoke"])
def test_they_need_the_verb_keys(tool: str) -> None:
    verb = VERBS_OF_TOOLS[tool]
    assert verb == "keys"
    Identity("ann", Scopes(administer=frozenset({"keys"}))).check_verb(verb, tool)
    with pytest.raises(NotPermitted):
        Identity("bob", Scopes(administer=frozenset({"drain"}))).check_verb(verb, tool)
