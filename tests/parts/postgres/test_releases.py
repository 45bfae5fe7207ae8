"""Releases side by side: migrations under a lock, and rows that each of them reads."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.support.postgres import Server
from tests.support.waiting import until_sync
from toolbus.bus.storage.store import Kind, Store
from toolbus.errors import SetupError
from toolbus.parts.postgres.driver import MIGRATIONS, PostgresDriver

RULES = Kind("rules", needed=True, without="start without rules", synced=True, shared="settings")
NEWER = (*MIGRATIONS, "ALTER TABLE toolbus_rows ADD COLUMN author text NOT NULL DEFAULT ''")


def opened(driver: PostgresDriver) -> Store:
    store = Store(driver)
    store.open()
    return store


def versions(url: str) -> list[tuple[int, int]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT version, oldest FROM toolbus_schema").fetchall()


def test_many_buses_may_make_the_tables_at_once(postgres: Server) -> None:
    url = postgres.schema()
    drivers = [PostgresDriver(url) for _ in range(6)]
    failed: list[BaseException] = []

    def work(driver: PostgresDriver) -> None:
        try:
            opened(driver).load(RULES)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for driver in drivers:
        driver.close()
    assert failed == []
    assert versions(url) == [(len(MIGRATIONS), 1)]


def test_a_migration_from_the_first_schema_keeps_the_rows_and_the_release_before_goes_on(postgres: Server) -> None:
    url = postgres.schema()
    old = opened(PostgresDriver(url, migrations=MIGRATIONS[:1]))
    old.write(RULES, {"a": 1, "b": {"c": "天気"}})
    new = opened(PostgresDriver(url, migrations=NEWER))
    assert versions(url) == [(len(NEWER), 1)]
    assert new.load(RULES) == {"a": 1, "b": {"c": "天気"}}
    new.put(RULES, "new", 2)
    until_sync(lambda: old.load(RULES).get("new") == 2)
    old.put(RULES, "old", 3)
    until_sync(lambda: new.load(RULES).get("old") == 3)
    old.close()
    again = opened(PostgresDriver(url, migrations=MIGRATIONS[:1]))  # it comes back beside the newer one
    assert again.load(RULES) == new.load(RULES)
    for store in (again, new):
        store.close()


def test_a_release_that_cannot_read_the_tables_does_not_start_and_changes_nothing(postgres: Server) -> None:
    url = postgres.schema()
    new = opened(PostgresDriver(url, migrations=NEWER, oldest=len(NEWER)))
    new.put(RULES, "a", 1)
    with pytest.raises(SetupError, match=r"a newer toolbus wrote its tables .* use that toolbus"):
        opened(PostgresDriver(url, migrations=MIGRATIONS[:1]))
    assert new.load(RULES) == {"a": 1}
    new.close()


def test_a_failed_migration_leaves_the_tables_as_they_were(postgres: Server) -> None:
    url = postgres.schema()
    old = opened(PostgresDriver(url))
    old.put(RULES, "a", 1)
    broken = (*MIGRATIONS, "ALTER TABLE toolbus_rows ADD COLUMN author text; SELECT 1 / 0")
    with pytest.raises(SetupError, match="division by zero"):
        opened(PostgresDriver(url, migrations=broken))
    assert versions(url) == [(len(MIGRATIONS), 1)]
    assert opened(PostgresDriver(url)).load(RULES) == {"a": 1}
    old.close()
