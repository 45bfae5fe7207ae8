"""While the database is away, cut off or deaf, a bus goes on with what it read last, and loses no change in silence."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import Proxy, Server, running_server
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, Stopwatch, until, until_sync, within
from toolbus import Host, Plugin
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.bus.storage.store import Kind, Store
from toolbus.errors import Code, NotKept, SetupError
from toolbus.parts.postgres.driver import NotShared, PostgresDriver
from toolbus.parts.postgres.shared_store import SharedStore
from toolbus.testing import running_bus

RULES = Kind("rules", needed=True, without="start without rules", synced=True, shared="settings")
BLOCKED_SECONDS = 4.0  # that a write may hold the bus's loop: 2 s, and a slow machine


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that the test may end."""
    with running_server() as server:
        yield server


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(postgres.socket) as proxy:
        yield proxy


def users(bus: Bus, tool: str = "mail") -> list[str] | None:
    return bus.dispatcher.view.permissions.as_tables()["tools"].get(tool)


def away(bus: Bus) -> bool:
    return not bus.core.rooms.serving("toolbus.settings")


async def explained(bus: Bus) -> str:
    steps = (await bus.call("toolbus:explain", {"tool": "toolbus:drain"})).output["steps"]
    return next(str(step["why"]) for step in steps if step["step"] == "shared settings")


async def test_a_killed_database_refuses_changes_and_nothing_else_and_all_hold_again_when_it_is_back(
    server: Server, tmp_path: Path
) -> None:
    url = server.database("shared")
    async with (
        running_bus(unix=True, storage=url, data_dir=tmp_path / "a") as here,
        running_bus(unix=True, storage=url, data_dir=tmp_path / "b") as there,
    ):
        here.permit("tools", "mail", ["ann"])
        await until(lambda: users(there) == ["ann"])
        server.end(signal.SIGKILL)
        await until(lambda: away(here) and away(there))
        for change in (
            lambda: here.permit("tools", "mail", ["eve"]),
            lambda: here.revoke("shop"),
            lambda: here.grant("shop", "generation"),
            lambda: here.add_role("chef"),
        ):
            with pytest.raises(NotKept, match=r"has been away for up to \d+ s .*do it again when it is back"):
                change()
        assert users(here) == ["ann"]
        assert here.registry.roles == ("default",)
        assert here.policy.may_offer("shop")
        assert not here.policy.may_generate("shop")
        assert "is away" in await explained(here)
        answer = await here.call("toolbus:role_add", {"role": "chef"})
        assert answer.error is not None
        assert "has been away" in answer.error.message
        assert answer.error.code is Code.UNAVAILABLE, "the tool is not at fault"
        async with Plugin("calc", address=there.grpc_addresses[0]) as plugin:
            plugin.add_tool(lambda: 7, name="seven", description="Returns 7.")
            await plugin.ready()
            async with Host(there.grpc_addresses[0]) as host:
                assert (await within(host.call("seven", {}))).output == 7, "calls do not need the database"
        server.start()
        await until(lambda: not away(here) and not away(there))
        here.permit("tools", "mail", ["eve"])
        await until(lambda: users(there) == ["eve"])


async def test_a_stalled_database_holds_the_loop_for_one_write_only(postgres: Server, proxy: Proxy) -> None:
    url = postgres.schema()
    async with (
        running_bus(unix=True, storage=proxy.url_of(url)) as here,
        running_bus(unix=True, storage=url) as there,
    ):
        here.permit("tools", "mail", ["ann"])
        await until(lambda: users(there) == ["ann"])
        proxy.stalls = True
        stopwatch = Stopwatch()
        with pytest.raises(NotKept, match="did not confirm it"):
            await asyncio.to_thread(here.permit, "tools", "mail", ["eve"])
        with pytest.raises(NotKept, match="has been away for"):
            here.permit("tools", "mail", ["eve"])
        assert stopwatch.seconds() < BLOCKED_SECONDS
        await until(lambda: users(here) == ["ann"])
        there.permit("tools", "mail", ["bob"])
        assert users(here) == ["ann"], "it goes on with what it read last"
        age = here.core.program.store.age
        proxy.stalls = False
        proxy.cut()
        await until(lambda: users(here) == ["bob"])
        assert age is not None


async def test_a_cut_connection_is_made_again_and_what_was_missed_is_read(postgres: Server, proxy: Proxy) -> None:
    url = postgres.schema()
    async with (
        running_bus(unix=True, storage=proxy.url_of(url)) as here,
        running_bus(unix=True, storage=url) as there,
    ):
        for expected in (["ann"], ["bob"], ["eve"], ["dan"]):
            proxy.cut()
            there.permit("tools", "mail", expected)
            await until(functools.partial(lambda names: users(here) == names, expected))


async def test_a_pooler_that_swallows_notifications_is_named_and_changes_come_all_the_same(
    postgres: Server, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgres.schema()
    proxy.deaf = True
    async with (
        running_bus(unix=True, storage=proxy.url_of(url)) as here,
        running_bus(unix=True, storage=url) as there,
    ):
        assert "takes LISTEN and delivers nothing, as poolers in transaction mode do" in caplog.text
        assert "without notifications" in await explained(here)
        there.permit("tools", "mail", ["ann"])
        await until(lambda: users(here) == ["ann"])


async def test_notifications_are_a_hint_a_lost_one_costs_a_poll(postgres: Server, proxy: Proxy) -> None:
    url = postgres.schema()
    here, there = PostgresDriver(proxy.url_of(url), poll_seconds=0.2), PostgresDriver(url)
    for driver in (here, there):
        await asyncio.to_thread(driver.open)
    try:
        assert here.hears
        proxy.deaf = True
        moment = here.changes(0)[0]
        await asyncio.to_thread(Store(there).put, RULES, "a", 1)
        await until(lambda: here.changes(moment)[1] == {"rules"})
    finally:
        for driver in (here, there):
            await asyncio.to_thread(driver.close)


def test_what_was_confirmed_is_there_after_kills_during_writes(server: Server) -> None:
    url = server.database("shared")
    driver = PostgresDriver(url)
    store = Store(driver)
    store.open()
    confirmed: list[int] = []
    unknown: set[int] = set()
    over = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            try:
                store.put(RULES, f"{number}", number)
                confirmed.append(number)
            except NotShared:
                unknown.add(number)
                time.sleep(0.01)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2):
            until_sync(functools.partial(lambda count: len(confirmed) >= count + 20, len(confirmed)), "writes")
            server.end(signal.SIGKILL)
            server.start()
    finally:
        over.set()
        thread.join()
    until_sync(lambda: not driver.away, "the database")
    fresh = PostgresDriver(url)
    fresh.open()
    rows = Store(fresh).load(RULES)
    assert set(map(str, confirmed)) <= set(rows)
    assert {int(key) for key in rows} <= set(confirmed) | unknown
    until_sync(lambda: store.load(RULES) == rows, "what was not confirmed and is there")
    fresh.close()
    store.close()


async def test_a_bus_that_starts_while_the_database_is_away_has_what_it_read_last(
    server: Server, tmp_path: Path
) -> None:
    url = server.database("shared")

    def store_of(name: str, start_seconds: float = 0.5) -> SharedStore:
        store = SharedStore.of(tmp_path / name)
        assert isinstance(store, SharedStore)
        store.share(PostgresDriver(url, start_seconds=start_seconds))
        return store

    first = store_of("a", WAIT_SECONDS)
    first.open()
    first.write(RULES, {"a": 1, "ä": [2]})
    first.close()
    server.end(signal.SIGKILL)
    again, fresh = store_of("a"), store_of("b")
    again.open()
    assert again.load(RULES) == {"a": 1, "ä": [2]}
    age = again.age
    assert age is not None
    assert 0 <= age < HANG_SECONDS
    with pytest.raises(NotShared, match="has been away for"):
        again.put(RULES, "a", 3)
    with pytest.raises(SetupError, match="cannot be used"):
        fresh.open()
    fresh.close()
    changed = asyncio.Event()
    again.on_change(RULES, changed.set)
    server.start()
    other = PostgresDriver(url)
    await asyncio.to_thread(other.open)
    await asyncio.to_thread(Store(other).put, RULES, "a", 4)
    await within(changed.wait())
    await until(lambda: again.load(RULES) == {"a": 4, "ä": [2]})
    await until(lambda: not again.database.away)
    again.put(RULES, "a", 5)
    await asyncio.to_thread(other.close)
    again.close()


@pytest.mark.thorough  # a bus waits 15 s for its database
async def test_a_bus_that_starts_without_its_database_runs_and_has_its_tasks_again_when_that_is_back(
    server: Server, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/bus.sock"
    config = Config(grpc=(address,), http="off", storage=server.database("tasks"), data_dir=tmp_path / "data")

    async def report() -> str:
        """Writes a report."""
        return "written"

    async with Bus(config) as bus, Host(address, source="host") as host:
        bus.tool(report, always_background=True)
        before = (await within(host.call("report", {}, background_after=30))).output["task_id"]
        await until_ended(host, before)
    server.end(signal.SIGKILL)
    async with Bus(config) as bus, Host(address, source="host") as host:
        bus.tool(report, always_background=True)
        unknown = await within(host.call("toolbus:check_task", {"task_id": before}))
        assert unknown.error is not None
        assert (unknown.error.code, unknown.error.retry_safe) == (Code.UNAVAILABLE, True)
        meanwhile = (await within(host.call("report", {}, background_after=30))).output["task_id"]
        await until_ended(host, meanwhile)
        server.start()
        await until_ended(host, before)
    async with Bus(config), Host(address, source="host") as host:
        for task_id in (before, meanwhile):
            ended = await within(host.call("toolbus:check_task", {"task_id": task_id}))
            assert ended.output["result"] == "written"


async def until_ended(host: Host, task_id: str) -> None:
    async def ended() -> bool:
        task = await host.call("toolbus:check_task", {"task_id": task_id})
        return not task.is_error and task.output["status"] == "completed"

    while not await within(ended()):
        await asyncio.sleep(0.05)


def test_an_error_of_the_database_itself_refuses_the_change_and_keeps_the_connection(postgres: Server) -> None:
    driver = PostgresDriver(postgres.schema())
    driver.open()
    with pytest.raises(NotShared, match="refused it"):
        driver.write(RULES, [("a", "1", 1 << 80)], [])
    driver.write(RULES, [("a", "1", 1)], [])
    assert list(driver.load(RULES)) == [("a", "1", 1)]
    driver.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://toolbus:hunter2@/nothing?host=/nowhere", "No such file or directory"),
        ("postgresql://toolbus:hunter2@127.0.0.1:1/nothing", "refused"),
    ],
)
def test_a_driver_without_its_database_says_why_and_tells_no_password(url: str, why: str) -> None:
    with pytest.raises(SetupError, match="cannot be used") as caught:
        PostgresDriver(url, start_seconds=0.2).open()
    assert "hunter2" not in str(caught.value)
    assert why in str(caught.value)


async def test_a_bus_whose_user_may_make_no_tables_does_not_start_and_names_the_reason(postgres: Server) -> None:
    url = postgres.schema()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE guest LOGIN")
        connection.execute("DO $$ BEGIN EXECUTE 'GRANT USAGE ON SCHEMA ' || current_schema() || ' TO guest'; END $$")
    with pytest.raises(SetupError, match="permission denied"):
        async with running_bus(unix=True, storage=url.replace("toolbus@", "guest@")):
            pass


async def test_a_database_that_ends_takes_no_thread_or_connection_with_it(
    postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        driver = PostgresDriver(postgres.schema())
        await asyncio.to_thread(driver.open)
        await asyncio.to_thread(driver.close)
        with contextlib.suppress(NotShared):
            driver.write(RULES, [("a", "1", 1)], [])
    assert [each for each in threading.enumerate() if each.name == "toolbus-postgres"] == []
    assert caplog.text == ""
