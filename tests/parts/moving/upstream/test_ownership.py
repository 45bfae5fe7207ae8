"""Tests of what is remembered of registrations at a main server, and of the file that keeps it over restarts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from toolbus.bus.storage.store import Store
from toolbus.errors import SetupError
from toolbus.parts.moving.upstream.ownership import (
    KEEP_SECONDS,
    MAX_SERVERS,
    UPSTREAM,
    Ownership,
    Registration,
    StoredOwnership,
)
from toolbus.parts.moving.upstream.upstream_responses import UpstreamListing, UpstreamTool

SERVER = "http://127.0.0.1:48911"
MINE = Registration("t", None, "plugin:a", "http://127.0.0.1:48916/api/llm-tools/callback/a/t")
FOR_ONE = Registration("u", "r1", "plugin:a", "http://127.0.0.1:48916/api/llm-tools/callback/a/u?role=r1")


def held(registration: Registration) -> UpstreamTool:
    return UpstreamTool(registration.source, registration.callback_url, "")


def test_ours_is_what_was_registered_under_this_name_role_source_and_url() -> None:
    ownership = Ownership([MINE, FOR_ONE])
    assert ownership.owns("t", "any", held(MINE))
    assert ownership.owns("u", "r1", held(FOR_ONE))
    assert not ownership.owns("u", "r2", held(FOR_ONE))
    assert not ownership.owns("v", "r1", held(MINE))
    assert not ownership.owns("t", "r1", held(MINE._replace(source="plugin:b")))
    assert not ownership.owns("t", "r1", held(MINE._replace(callback_url="http://127.0.0.1:1/t")))


def test_a_registration_that_is_neither_planned_nor_listed_is_forgotten_after_a_while() -> None:
    ownership = Ownership()
    ownership.add(MINE, 0.0)
    listed = UpstreamListing(("r1",), {"t": {"r1": held(MINE)}})
    ownership.forget(listed, lambda each: False, 100.0)
    ownership.forget(UpstreamListing(), lambda each: True, 200.0)
    ownership.forget(UpstreamListing(), lambda each: False, 200.0 + KEEP_SECONDS)
    assert ownership.registrations == [MINE]
    ownership.forget(UpstreamListing(), lambda each: False, 201.0 + KEEP_SECONDS)
    assert ownership.registrations == []


def test_the_store_holds_the_registrations_of_each_main_server(tmp_path: Path) -> None:
    store = Store.of(None)
    StoredOwnership(store, SERVER).save([MINE, FOR_ONE])
    StoredOwnership(store, "http://127.0.0.1:2").save([MINE])
    assert StoredOwnership(store, SERVER).earlier == [MINE, FOR_ONE]
    StoredOwnership(store, SERVER).save([])
    assert list(store.load(UPSTREAM)) == ["http://127.0.0.1:2"]
    for number in range(2 * MAX_SERVERS):
        StoredOwnership(store, f"http://127.0.0.1:{number + 10}").save([MINE])
    newest = [f"http://127.0.0.1:{number + 10}" for number in range(MAX_SERVERS, 2 * MAX_SERVERS)]
    assert list(store.load(UPSTREAM)) == newest


@pytest.mark.parametrize("rows", [1, [["t", None, "s"]], [["t", None, "s", "http://a.example/"]]], ids=str)
def test_a_damaged_row_keeps_the_bus_from_starting(rows: object) -> None:
    store = Store.of(None)
    store.put(UPSTREAM, SERVER, rows)
    with pytest.raises(SetupError, match="a row of upstream cannot be read"):
        StoredOwnership(store, SERVER)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"URL": 1}', '{"URL": [["t", null, "s"]]}', '{"URL": [["t", null, "s", "http://a.example/"]]}']
)
def test_a_damaged_file_keeps_the_bus_from_starting_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    text = text.replace("URL", SERVER)
    (tmp_path / "upstream.json").write_text(text)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        with pytest.raises(SetupError, match=r"upstream.json is damaged"):
            StoredOwnership(store, SERVER)
    assert (tmp_path / "upstream.json").read_text() == text
