"""The store: what was answered ok is there after any kind of end, and a file that is not sound is never used."""

from __future__ import annotations

import dataclasses
import resource
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus.storage.store_cases import URL, fill, loaded, opened, stored
from tests.support.examples import examples
from toolbus.bus.storage import registration_store as room
from toolbus.bus.storage.registration_store import StoredRegistration
from toolbus.bus.storage.store import FILE, Store, WriteFailed
from toolbus.errors import SetupError
from toolbus.protocol.tool import Annotations, Tool

FULL = Tool(
    name="天気 weather/now",
    description='今日の天気 \N{SNOWMAN} \0 "quoted"\n',
    parameters_json='{"type": "object", "properties": {"場所": {"type": "string"}, "n": {"const": 987654321098765}}}',
    role="猫",
    timeout_seconds=12.5,
    idle_timeout_seconds=0.25,
    callback_url="http://user:***@127.0.0.1:9000/call",
    display_name="天気",
    annotations=Annotations(read_only=True, idempotent=False, open_world=True),
    validate=False,
    no_background=True,
    allow_repeat=True,
    council_eligible=True,
    inline_available=True,
    direct_reply=True,
    metadata_json='{"a":1}',
    min_level=50,
    no_repair=True,
    no_defaults=True,
    output_schema_json='{"type":"object"}',
    always_background=True,
    needs=("sampling",),
    validate_output=True,
)


# ── what is stored ──


def test_every_field_of_a_registration_comes_back_as_it_was(tmp_path: Path) -> None:
    offers = (("猫", 7), (None, 3), ("", 4))
    row = StoredRegistration("鍵", "", FULL, URL, True, offers, 1_700_000_000.123456, "boot:1:2", "s" * 16)
    with opened(tmp_path) as store:
        store.apply([row], ())
        assert store.load() == [row]
    (again,) = loaded(tmp_path)
    assert again == row
    assert again.tool.schema_hash == FULL.schema_hash
    fields = [item for item in dataclasses.fields(Tool) if item.name != "hints_trusted"]  # of mounts alone
    assert all(getattr(again.tool, item.name) != item.default for item in fields)
    with pytest.raises(SetupError):
        Store.of(tmp_path / FILE).open()  # closed stores leave no lock, but a file is no directory


def test_registrations_come_back_by_their_smallest_place_and_those_without_one_last(tmp_path: Path) -> None:
    rows = [
        stored(1, offers=()),
        stored(2, offers=(("a", 9), ("b", 2))),
        stored(3, offers=((None, 5),)),
        stored(4, offers=(("a", 0),)),
        stored(5, offers=((None, 7), ("a", -1))),
    ]
    with opened(tmp_path) as store:
        store.apply(rows, ())
    assert [row.key for row in loaded(tmp_path)] == ["key-4", "key-2", "key-3", "key-5", "key-1"]


def test_a_registration_of_the_same_key_replaces_the_older_one_with_all_its_offers(tmp_path: Path) -> None:
    newer = stored(1, tool=FULL, offers=(("猫", 1),), checked=True, source="b")
    with opened(tmp_path) as store:
        store.apply([stored(1)], ())
        store.apply([stored(1, tool=Tool("other")), newer], ())
    assert loaded(tmp_path) == [newer]


def test_what_is_gone_takes_its_offers_along_and_unknown_keys_may_go(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as store:
        store.apply((), ["key-1", "never"])
        store.apply([stored(5)], ["key-0", "key-5"])  # removed first, then changed
        store.apply((), ())
    assert loaded(tmp_path) == [stored(2), stored(5)]


def test_the_time_of_an_answer_is_noted_for_each_key_and_nothing_else_changes(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as store:
        store.apply([stored(number, answered_at=1_800_000_000.5) for number in (0, 2)], ())
    assert loaded(tmp_path) == [
        stored(0, answered_at=1_800_000_000.5),
        stored(1),
        stored(2, answered_at=1_800_000_000.5),
    ]


def test_a_field_of_a_newer_minor_version_is_passed_over_and_a_missing_one_takes_its_default() -> None:
    read = room._tool({"name": "a", "colour": "red", "annotations": {"read_only": True, "loud": True}})
    assert read == Tool("a", annotations=Annotations(read_only=True))
    assert room._tool({"name": "a"}) == Tool("a")


def test_a_change_that_cannot_be_written_changes_nothing_and_the_store_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.apply([stored(1)], ())
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.apply([stored(2), stored(3, answered_at=float("nan"))], ["key-1"])
        assert store.load() == [stored(1)]
        store.apply([stored(2)], ())
    assert loaded(tmp_path) == [stored(1), stored(2)]


def test_a_full_disk_is_an_error_and_the_store_goes_on_once_there_is_room(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as store:
        store.apply([stored(1)], ())
        big = [stored(number, source="s" * 4000) for number in range(2, 100)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(WriteFailed):
                store.apply(big, ["key-1"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.load() == [stored(1)]
        store.apply(big, ())
    assert loaded(tmp_path) == [stored(1), *big]


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.builds(
                    StoredRegistration,
                    key=st.sampled_from(["a", "b", "鍵", ""]),
                    source=st.text(max_size=5),
                    tool=st.builds(Tool, name=st.text(min_size=1, max_size=5), description=st.text(max_size=5)),
                    callback_url=st.text(max_size=5),
                    checked=st.booleans(),
                    offers=st.lists(
                        st.tuples(st.none() | st.text(max_size=3), st.integers(0, (1 << 63) - 1)), max_size=3
                    ).map(tuple),
                    answered_at=st.floats(allow_nan=False, allow_infinity=False),
                ),
                max_size=4,
            ),
            st.lists(st.sampled_from(["a", "b", "鍵", "", "never"]), max_size=2),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_any_sequence_of_changes_leaves_what_a_dict_would_hold(
    steps: list[tuple[list[StoredRegistration], list[str], bool]],
) -> None:
    model: dict[str, StoredRegistration] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        store = stack.enter_context(opened(Path(name)))
        for changed, removed, restart in steps:
            store.apply(changed, removed)
            for key in removed:
                model.pop(key, None)
            model.update({row.key: row for row in changed})
            if restart:
                stack.close()
                store = stack.enter_context(opened(Path(name)))
            assert {row.key: row for row in store.load()} == model
