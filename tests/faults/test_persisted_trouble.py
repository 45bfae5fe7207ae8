"""Tests what is kept where something goes wrong: nobody answers for weeks, the disk is full, the bus ends in the
middle."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.bus.storage.store_cases import opened
from tests.faults.callbacks import CallbackPlugin, Legacy, Start, callback_tool, names, no_text_has, starting
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until
from toolbus.bus import Bus, Config
from toolbus.bus.storage.registration_store import RegistrationStore
from toolbus.bus.storage.store import WriteFailed
from toolbus.errors import SetupError
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

DAY = 86_400.0


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a bus on this test's data directory."""
    return starting(tmp_path / "data")


# -- what has not answered for long ----------------------------------------------------------------------------------


def set_back(folder: Path, days: float, *names: str) -> None:
    """Makes it so many days since somebody answered for tools of these names."""
    with opened(folder) as store:
        silent = [kept for kept in store.load() if kept.tool.name in names]
        store.apply([dataclasses.replace(kept, answered_at=time.time() - days * DAY) for kept in silent], ())


def days_silent(folder: Path) -> dict[str, float]:
    with opened(folder) as store:
        return {kept.tool.name: (time.time() - kept.answered_at) / DAY for kept in store.load()}


async def test_a_tool_that_has_not_answered_for_thirty_days_expires_with_a_log_line(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CallbackPlugin() as old, CallbackPlugin() as recent, CallbackPlugin().come() as back:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="old", callback_url=old.url(user="me:secret@"), source="plugin:old")
            await legacy.ask("register", name="old-b", callback_url=old.url(), source="plugin:old", role="B")
            await legacy.ask("register", name="recent", callback_url=recent.url(), source="plugin:recent")
            await legacy.ask("register", name="back", callback_url=back.url(), source="plugin:back")
        set_back(tmp_path / "data", 30.1, "old", "old-b", "back")
        set_back(tmp_path / "data", 29.9, "recent")
        caplog.set_level(logging.INFO, "toolbus")
        async with start("A") as bus:
            await until(lambda: names(bus) == ["recent", "back"], "the old ones to be dropped")
        dropped = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dropped")]
        assert len(dropped) == 1
        assert "'plugin:old'" in dropped[0]
        assert f"127.0.0.1:{old.port}" in dropped[0]
        assert "tools=2" in dropped[0]
        assert "30 days" in dropped[0]
        no_text_has("secret", caplog.messages)
        old.come()
        async with start() as bus:
            assert names(bus) == ["recent", "back"]
        silent = days_silent(tmp_path / "data")
        assert silent["recent"] > 29.8, "nobody answered"
        assert silent["back"] < 0.1


@pytest.mark.parametrize("days", [400, -400, 9000], ids=str)
@pytest.mark.parametrize("when", ["at a start", "while running"])
async def test_a_wrong_clock_lets_no_tool_expire(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, when: str
) -> None:
    right = time.time
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        plugin.leave()
        if when == "at a start":
            monkeypatch.setattr(time, "time", lambda: right() + days * DAY)
        async with start(timings=Timings(note_seconds=0.01)) as bus:
            monkeypatch.setattr(time, "time", lambda: right() + days * DAY)
            await asyncio.sleep(0.1)  # for the housekeeping
            assert names(bus) == ["x"]
        monkeypatch.setattr(time, "time", right)
        async with start(timings=Timings(note_seconds=0.01)) as bus:
            await asyncio.sleep(0.1)
            assert names(bus) == ["x"]
            plugin.come()
            await until(lambda: names(bus) == ["x"], "it to be there")


@pytest.mark.parametrize("how", ["called", "registered", "there"])
async def test_an_answer_is_persisted(start: Start, tmp_path: Path, how: str) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
            await legacy.ask("register", name="y", callback_url=plugin.url())
        set_back(tmp_path / "data", 20, "x", "y")
        if how == "registered":
            plugin.leave()
        async with start() as bus, Legacy.of(bus) as legacy:
            if how == "called":
                assert not (await bus.call("x")).is_error
                plugin.leave()  # away when the bus ends, but it did answer
            elif how == "registered":
                assert names(bus, away=False) == []
                await legacy.ask("register", name="x", callback_url=plugin.url())
                await legacy.ask("register", name="y", callback_url=plugin.url())
        assert all(days < 0.1 for days in days_silent(tmp_path / "data").values())


async def test_a_tool_that_is_there_and_never_called_counts_as_answering(start: Start, tmp_path: Path) -> None:
    with CallbackPlugin().come() as plugin:
        async with start(timings=Timings(note_seconds=0.05)) as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
            connected = plugin.connections
            await until(lambda: plugin.connections > connected, "somebody to look whether it is there")
        assert plugin.bytes == 0


async def test_a_start_that_is_cancelled_while_it_asks_who_is_there_leaves_nothing_running(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
    asked, left = asyncio.Event(), asyncio.Event()

    async def hangs(address: tuple[str, str, int], may_serve: object) -> bool:
        asked.set()
        try:
            return bool(await asyncio.Future())
        finally:
            left.set()

    monkeypatch.setattr("toolbus.bus.gateway.callback.accepts_connections", hangs)
    config = Config(grpc=("127.0.0.1:0",), http="off", data_dir=tmp_path / "data")
    starts = asyncio.ensure_future(Bus(config, timings=Timings(reachable_seconds=60.0)).start())
    async with asyncio.timeout(WAIT_SECONDS):
        await asked.wait()
        starts.cancel()
        await asyncio.wait([starts])
        await left.wait()
    assert starts.cancelled()


# -- a shelf that takes nothing --------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the disk is full."""
    apply = RegistrationStore.apply
    full = False

    def failing(store: RegistrationStore, changed: Any, gone: Any) -> None:
        if full:
            raise WriteFailed("database or disk is full")
        apply(store, changed, gone)

    def set_full(now: bool) -> None:
        nonlocal full
        full = now

    monkeypatch.setattr(RegistrationStore, "apply", failing)
    return set_full


def taken(complaints: list[str]) -> list[str]:
    """Takes what was logged as an error."""
    found, complaints[:] = list(complaints), []
    return found


async def test_a_registration_that_cannot_be_persisted_is_refused_stays_in_force_and_is_persisted_later(
    start: Start, full_disk: Callable[[bool], None], complaints: list[str]
) -> None:
    with CallbackPlugin().come() as plugin:
        url = plugin.url(user="me:secret@")
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="before", callback_url=url)
            full_disk(True)
            answer = await legacy.post("register", name="x", callback_url=url)
            assert answer.status_code == 503
            assert "database or disk is full" in answer.json()["detail"]
            assert "the change could not be written down" in answer.json()["detail"]
            assert "until the bus stops" in answer.json()["detail"]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await legacy.register("s", callback_tool("y", plugin))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "disk is full" in (refused.value.details() or "")
            assert (await legacy.post("unregister", name="before")).status_code == 503
            assert names(bus) == ["x", "y"]
            assert (await bus.call("x", {"a": 1})).output == {"a": 1}
            full_disk(False)
            await legacy.ask("register", name="after", callback_url=url)
        assert any("disk is full" in text for text in complaints)
        no_text_has("secret", [answer.text, *taken(complaints)])
        async with start() as bus:
            assert names(bus) == ["x", "y", "after"]


async def test_changes_that_concern_no_callback_do_not_wait_for_a_disk_that_is_full(
    start: Start, full_disk: Callable[[bool], None], complaints: list[str]
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            full_disk(True)
            assert (await legacy.post("register", name="x", callback_url=plugin.url())).status_code == 503
            assert taken(complaints)
            for number in range(10):
                bus.tool(lambda: None, name=f"local{number}")
            assert taken(complaints) == []
            full_disk(False)
        async with start() as bus:
            assert names(bus) == ["x"]


async def test_a_withdrawal_over_grpc_while_the_disk_was_full_is_persisted_later(
    start: Start, full_disk: Callable[[bool], None], complaints: list[str]
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("one", "two", "three"):
                await legacy.ask("register", name=name, callback_url=plugin.url(), source=f"plugin:{name}")
            full_disk(True)
            await legacy.stub.Unregister(wire.UnregisterRequest(name="one"))
            await legacy.stub.Clear(wire.ClearRequest(source="plugin:two"))
            assert names(bus) == ["three"]
            assert any("disk is full" in text for text in taken(complaints))
            full_disk(False)
            # nothing changes any more: the end of the bus is the last chance to write
        async with start() as bus:
            assert names(bus) == ["three"]


async def test_a_disk_that_stays_full_loses_the_refused_changes_and_nothing_else(
    start: Start, full_disk: Callable[[bool], None], complaints: list[str]
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="before", callback_url=plugin.url())
            full_disk(True)
            assert (await legacy.post("register", name="x", callback_url=plugin.url())).status_code == 503
        full_disk(False)
        async with start() as bus:
            assert names(bus) == ["before"]
        assert taken(complaints)


# -- the end of a bus ------------------------------------------------------------------------------------------------


async def test_a_bus_without_http_restores_persisted_tools_too(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start(http="off") as bus, Legacy.of(bus) as legacy:
            await legacy.register("s", callback_tool("x", plugin))
        for _ in range(2):
            async with start(http="off") as bus:
                assert names(bus, away=False) == ["x"]
                assert (await bus.call("x", {"a": 1})).output == {"a": 1}


async def test_a_bus_whose_origins_are_away_stops_at_once_and_leaves_no_task(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for number in range(50):
                await legacy.ask("register", name=f"t{number}", callback_url=plugin.url(), source=f"plugin:{number}")
        before = asyncio.all_tasks()
        async with start(http="off") as bus:
            assert len(names(bus)) == 50
            stopwatch = Stopwatch()
        assert stopwatch.seconds() < 1.0
        left = asyncio.all_tasks() - before
        assert not [task for task in left if "toolbus" in repr(task)]


async def test_a_bus_that_cannot_bind_leaves_no_task_and_its_data_directory_free(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url())
        before = asyncio.all_tasks()
        taken_port = plugin.come().port
        with pytest.raises(SetupError, match=str(taken_port)):
            async with start(grpc=(f"127.0.0.1:{taken_port}",), http="off"):
                pass
        assert asyncio.all_tasks() == before
        async with start() as bus:
            assert names(bus) == ["x"]


async def test_a_restored_tool_that_no_longer_fits_into_its_role_is_named_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with CallbackPlugin() as plugin:
        async with start("A") as bus, Legacy.of(bus) as legacy:
            for name in ("one", "two", "three"):
                await legacy.ask("register", name=name, callback_url=plugin.url())
        caplog.set_level(logging.WARNING, "toolbus")
        async with start("A", limits=Limits(tools_per_role=2)) as bus:
            assert names(bus) == ["one", "two"]
        said = [text for text in caplog.messages if "tools_per_role" in text]
        assert said
        assert all("'three'" in text for text in said)


async def test_an_origin_whose_connections_hang_holds_up_neither_start_nor_stop(start: Start) -> None:
    with CallbackPlugin() as plugin, CallbackPlugin().come() as other:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="hangs", callback_url=plugin.url())
            await legacy.ask("register", name="other", callback_url=other.url())
        with plugin.hanging():
            stopwatch = Stopwatch()
            async with start(http="off") as bus:
                assert names(bus, away=False) == ["other"]
                assert not (await bus.call("other")).is_error
            assert stopwatch.seconds() < 1.0
