"""Tests of what is remembered of registrations at a main server, and of the file that keeps it over restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolbus.errors import SetupError
from toolbus.parts.moving.upstream.ownership import (
    FILE,
    KEEP_SECONDS,
    MAX_SERVERS,
    Ownership,
    OwnershipFile,
    Registration,
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


def test_the_file_holds_the_registrations_of_each_main_server(tmp_path: Path) -> None:
    OwnershipFile(tmp_path, SERVER).save([MINE, FOR_ONE])
    OwnershipFile(tmp_path, "http://127.0.0.1:2").save([MINE])
    assert OwnershipFile(tmp_path, SERVER).earlier == [MINE, FOR_ONE]
    OwnershipFile(tmp_path, SERVER).save([])
    assert list(json.loads((tmp_path / FILE).read_text())) == ["http://127.0.0.1:2"]
    for number in range(2 * MAX_SERVERS):
        OwnershipFile(tmp_path, f"http://127.0.0.1:{number + 10}").save([MINE])
    assert len(json.loads((tmp_path / FILE).read_text())) == MAX_SERVERS


@pytest.mark.parametrize(
    "text", ["", "[]", '{"URL": 1}', '{"URL": [["t", null, "s"]]}', '{"URL": [["t", null, "s", "http://a.example/"]]}']
)
def test_a_damaged_file_keeps_the_bus_from_starting_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    text = text.replace("URL", SERVER)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(SetupError, match="is damaged"):
        OwnershipFile(tmp_path, SERVER)
    assert (tmp_path / FILE).read_text() == text
