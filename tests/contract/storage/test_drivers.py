"""What every driver of the store must do: the same rows come back, whole batches or nothing, damage by its kind's rule.

A new driver gets a name in `DRIVERS`, and a line in `makers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.waiting import HANG_SECONDS
from toolbus.bus.storage.store import Driver, Kind, MemoryDriver, Row, SqliteDriver, Store
from toolbus.errors import SetupError

NEEDED = Kind("rules", needed=True, without="start without rules", shared="settings")
EXTRA = Kind("results", needed=False, without="start without results", shared="results")
BLANK = Kind("approvals", needed=False, without="trust nothing", blank={"approved": ""}, shared="settings")
SYNCED = Kind("grants", needed=True, without="go back to the configuration", synced=True, shared="settings")

Make = Callable[[], Driver]  # of drivers of one database

DRIVERS = ("memory", "sqlite", "postgres")
SHARED = ("postgres",)  # whose databases several buses may have at once


def makers(name: str, request: pytest.FixtureRequest, directory: Path) -> Make:
    """Returns what makes the drivers of a new database."""
    if name == "memory":
        return MemoryDriver
    if name == "sqlite":
        return lambda: SqliteDriver(directory / "bus.db", lock=directory / "toolbus.lock")
    from toolbus.parts.postgres.driver import PostgresDriver

    url = request.getfixturevalue("postgres").schema()
    return lambda: PostgresDriver(url)


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes drivers of the same database."""
    return makers(request.param, request, tmp_path)


def opened(driver: Driver) -> Store:
    store = Store(driver)
    store.open()
    return store


@pytest.fixture
def store(make: Make) -> Any:
    store = opened(make())
    yield store
    store.close()


VALUES: list[Any] = [None, True, 0, -1.5, "", "天気 \0 \N{SNOWMAN} 'quoted'", "half \ud800", [1, [2]], {"a": {"b": []}}]


def test_values_come_back_as_they_were_in_the_order_in_which_their_keys_came(store: Store) -> None:
    rows = dict(zip(["鍵", "b", "a", "", "\0", "é'\"", "x/y", "9", "10"], VALUES, strict=True))
    for key, value in rows.items():
        store.put(NEEDED, key, value)
    store.put(NEEDED, "a", "replaced in its place")
    rows["a"] = "replaced in its place"
    assert list(store.load(NEEDED).items()) == list(rows.items())


def test_kinds_are_apart(store: Store) -> None:
    for kind in (NEEDED, EXTRA, BLANK, SYNCED):
        store.put(kind, "key", kind.name)
    store.delete(EXTRA, "key")
    assert [store.load(kind) for kind in (NEEDED, EXTRA)] == [{"key": "rules"}, {}]
    assert [store.load(kind) for kind in (BLANK, SYNCED)] == [{"key": "approvals"}, {"key": "grants"}]


def test_a_batch_deletes_first_and_then_puts_and_a_key_that_comes_again_is_the_last(store: Store) -> None:
    store.write(NEEDED, {"a": 1, "b": 2, "c": 3})
    store.write(NEEDED, {"a": 4, "d": 5}, ["a", "c", "never"])
    store.write(NEEDED, {}, [])
    assert list(store.load(NEEDED).items()) == [("b", 2), ("a", 4), ("d", 5)]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), object(), {"a": {1, 2}}], ids=["nan", "inf", "object", "set"]
)
def test_a_value_that_json_cannot_hold_changes_nothing(store: Store, value: object) -> None:
    store.put(NEEDED, "a", 1)
    with pytest.raises((TypeError, ValueError)):
        store.write(NEEDED, {"b": 2, "c": value}, ["a"])
    assert store.load(NEEDED) == {"a": 1}


def test_rows_outlive_the_process_where_the_driver_says_so(make: Make) -> None:
    first = opened(make())
    first.write(SYNCED, {"a": 1, "b": 2})
    first.close()
    first.close()
    second = opened(make())
    assert second.load(SYNCED) == ({"a": 1, "b": 2} if second.persistent else {})
    second.put(SYNCED, "a", 3)
    assert list(second.load(SYNCED)) == (["a", "b"] if second.persistent else ["a"])
    second.close()


def test_one_value_is_found_by_its_key(store: Store) -> None:
    store.write(EXTRA, {"a": 1, "": [2], "b'": {"c": 3}})
    assert [store.get(EXTRA, key) for key in ("a", "", "b'", "c", "A")] == [1, [2], {"c": 3}, None, None]
    assert store.get(NEEDED, "a") is None


def test_the_database_says_the_time(store: Store) -> None:
    first = store.now()
    assert abs(first - time.time()) < HANG_SECONDS, "both are on this machine"
    assert first <= store.now()


def test_own_writes_are_no_changes_of_others(make: Make) -> None:
    driver = make()
    store = opened(driver)
    moment, _ = driver.changes(0)
    store.put(NEEDED, "a", 1)
    assert driver.changes(moment)[1] == frozenset()
    store.close()


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Two stores of one database, as two buses have them, and their drivers."""
    make = makers(SHARED[0], request, tmp_path)
    drivers = make(), make()
    stores = [opened(driver) for driver in drivers]
    yield (*stores, *drivers)
    for store in stores:
        store.close()


def test_a_change_is_told_to_other_buses_once_and_read_there(two: tuple[Store, Store, Driver, Driver]) -> None:
    here, there, _, driver = two
    assert there.load(NEEDED) == here.load(NEEDED) == {}
    moment = driver.changes(0)[0]
    here.write(NEEDED, {"a": 1, "b": 2})
    here.put(BLANK, "x", {})
    wait_for(lambda: driver.changes(moment)[1] == {"rules", "approvals"})
    moment, _ = driver.changes(moment)
    assert there.load(NEEDED) == {"a": 1, "b": 2}
    assert driver.changes(moment) == (moment, frozenset())
    here.delete(NEEDED, "a")
    wait_for(lambda: driver.changes(moment)[1] == {"rules"})
    assert there.load(NEEDED) == {"b": 2}


def test_buses_that_write_at_the_same_time_end_with_the_same_rows(two: tuple[Store, Store, Driver, Driver]) -> None:
    here, there, *_ = two

    def work(store: Store, name: str) -> None:
        for number in range(30):
            store.write(NEEDED, {f"{name}{number}": number, "shared": name}, [f"{name}{number - 1}"])

    threads = [threading.Thread(target=work, args=(store, name)) for store, name in ((here, "h"), (there, "t"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: here.load(NEEDED) == there.load(NEEDED))
    assert sorted(here.load(NEEDED)) == ["h29", "shared", "t29"]


def test_a_result_that_another_bus_wrote_is_read_by_its_key(two: tuple[Store, Store, Driver, Driver]) -> None:
    here, there, *_ = two
    here.put(EXTRA, "task", {"text": "天気"})
    assert there.get(EXTRA, "task") == {"text": "天気"}
    there.delete(EXTRA, "task")
    assert here.get(EXTRA, "task") is None


def test_a_kind_that_two_buses_declare_has_the_first_rows_of_one(two: tuple[Store, Store, Driver, Driver]) -> None:
    *_, driver, other = two
    driver.declare(NEEDED, [("a", "1", 1)], imported=False)
    other.declare(NEEDED, [("b", "2", 2)], imported=False)
    assert list(other.load(NEEDED)) == [("a", "1", 1)], "at once: what it decides by them, all others decide too"


def wait_for(holds: Callable[[], bool]) -> None:
    """Waits until a condition holds, on threads of others."""
    end = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_large_value_and_many_rows_come_back(store: Store) -> None:
    rows = {f"key {number}": "x" * 3000 for number in range(500)} | {"large": "y" * (5 << 20)}
    store.write(EXTRA, rows)
    assert store.load(EXTRA) == rows


def flipped(driver: Driver) -> Driver:
    """Has a driver give one row back with another value."""
    load = driver.load

    def flip(kind: Kind, key: str | None = None) -> list[Row]:
        return [(key, text.replace("8", "9"), checksum) for key, text, checksum in load(kind, key)]

    driver.load = flip  # type: ignore[method-assign]
    return driver


def test_a_damaged_row_that_is_needed_is_an_error_that_repeats_no_value(make: Make) -> None:
    store = opened(flipped(make()))
    store.write(NEEDED, {"a": 1, "secret": "hunter8"})
    with pytest.raises(SetupError, match="row 2 of rules fails its checksum") as caught:
        store.load(NEEDED)
    assert "hunter" not in str(caught.value)
    store.close()


def test_a_damaged_row_that_is_not_needed_is_left_out_with_an_error_in_the_log_or_blank(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(flipped(make()))
    for kind in (EXTRA, BLANK):
        store.write(kind, {"a": 1, "b": 8, "c": 3})
    assert store.lost == set()
    assert store.load(EXTRA) == {"a": 1, "c": 3}
    assert store.load(BLANK) == {"a": 1, "b": BLANK.blank, "c": 3}
    assert store.lost == {"results", "approvals"}
    assert [text.partition(" of ")[0] for text in caplog.messages] == ["row 2", "row 2"]
    assert "of results fails its checksum" in caplog.messages[0]
    assert list(store.load(EXTRA)) == ["a", "c"]
    assert len(caplog.messages) == 2, "it was deleted"
    store.close()


def test_threads_may_all_write_at_once(store: Store) -> None:
    def work(letter: str) -> None:
        for number in range(50):
            store.write(EXTRA, {f"{letter}{number}": letter, "shared": letter}, [f"{letter}{number - 1}"])

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.load(EXTRA)) == ["a49", "b49", "c49", "d49", "shared"]


KEYS = st.sampled_from(["a", "b", "c", "ä\0"])
BATCHES = st.tuples(st.dictionaries(KEYS, st.integers()), st.lists(KEYS, max_size=3), st.booleans())


@pytest.mark.parametrize("name", DRIVERS)
@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(BATCHES, max_size=6))
def test_any_history_leaves_what_a_dict_would_hold(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[dict[str, int], list[str], bool]],
    name: str,
) -> None:
    make = makers(name, request, tmp_path_factory.mktemp("data"))
    model: dict[str, int] = {}
    store = opened(make())
    for rows, deleted, restart in history:
        store.write(NEEDED, rows, deleted)
        for key in deleted:
            model.pop(key, None)
        model.update(rows)
        if restart and store.persistent:
            store.close()
            store = opened(make())
    assert list(store.load(NEEDED).items()) == list(model.items())
    store.close()
