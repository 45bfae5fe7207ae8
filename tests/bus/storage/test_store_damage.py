from __future__ import annotations

import os
import random
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.bus.storage.store_cases import fill, loaded, python, refusal
from tests.support.examples import TIMES
from toolbus.bus.storage import store as room
from toolbus.bus.storage.registration_store import RegistrationStore
from toolbus.bus.storage.store import APPLICATION_ID, FILE, LOCK, MIGRATIONS, Kind, Store
from toolbus.errors import SetupError


def test_a_start_that_was_killed_halfway_leaves_nothing_that_counts_as_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"{FILE}.new", f"{FILE}.new-journal", f"{FILE}-wal"):
        (tmp_path / name).write_bytes(b"" if name.endswith("-wal") else b"half")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        assert "No space left on device" in refusal(tmp_path)
    assert not (tmp_path / FILE).exists()
    fill(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, LOCK}


DAMAGES = ("flip", "zero a page", "zero some", "cut", "swap pages")


def damage(data: bytes, how: str, dice: random.Random) -> bytes:
    at, page = dice.randrange(len(data)), 4096 * dice.randrange(len(data) // 4096)
    if how == "flip":
        return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
    if how == "zero a page":
        return data[:page] + bytes(4096) + data[page + 4096 :]
    if how == "zero some":
        size = min(dice.randrange(1, 200), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]
    if how == "swap pages":
        return data[:page] + data[-4096:] + data[page + 4096 : -4096] + data[page : page + 4096]
    return data[:at]


def test_no_damage_to_the_file_ever_changes_or_loses_a_registration_in_silence(tmp_path: Path) -> None:
    rows = fill(tmp_path, 60)
    path = tmp_path / FILE
    sound = path.read_bytes()
    dice, refused = random.Random(20), 0
    for round_ in range(100):
        how = DAMAGES[round_ % len(DAMAGES)]
        path.write_bytes(damage(sound, how, dice))
        try:
            rows_now = loaded(tmp_path)
        except SetupError:
            refused += 1
        else:
            assert rows_now == rows, f"round {round_}: {how}"
            assert how != "cut", f"round {round_}"
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
    assert refused > 50


RESULTS = Kind("results", needed=False, without="start without results")


def test_damage_to_rows_that_are_not_needed_costs_only_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = fill(tmp_path, 60)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        store.write(RESULTS, {f"result {number}": "x" * 900 for number in range(60)})
    path = tmp_path / FILE
    whole = path.read_bytes()
    at = whole.rindex(b"x" * 900) // 4096 * 4096
    path.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
    damaged = path.read_bytes()
    with closing(Store.of(tmp_path)) as store:
        store.open()
        assert store.lost == {"results"}
        assert RegistrationStore(store).load() == rows
        assert len(store.load(RESULTS)) < 60
        store.put(RESULTS, "new", 1)
    assert Path(f"{path}.damaged").read_bytes() == damaged
    assert "Lost, in whole or in part: results" in caplog.text
    assert loaded(tmp_path) == rows
    with closing(Store.of(tmp_path)) as store:
        store.open()
        assert store.lost == set()
        assert store.load(RESULTS)["new"] == 1


def test_damage_to_needed_rows_is_refused_however_much_of_the_rest_is_whole(tmp_path: Path) -> None:
    fill(tmp_path, 60)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        store.write(RESULTS, {"result": 1})
    path = tmp_path / FILE
    whole = path.read_bytes()
    at = whole.index(b"x" * 40) // 4096 * 4096
    path.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
    assert "it is damaged" in refusal(tmp_path)
    assert not Path(f"{path}.damaged").exists()


# ── versions ──


def test_a_file_of_an_older_version_is_migrated_with_everything_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path)
    more = "ALTER TABLE kinds ADD COLUMN note TEXT; CREATE INDEX by_need ON kinds (needed)"
    monkeypatch.setattr(room, "MIGRATIONS", (*MIGRATIONS, more))
    assert loaded(tmp_path) == rows
    assert loaded(tmp_path) == rows
    fill(tmp_path / "new")
    with closing(sqlite3.connect(tmp_path / FILE)) as old, closing(sqlite3.connect(tmp_path / "new" / FILE)) as new:
        for question in ("PRAGMA user_version", "PRAGMA application_id", room._TABLES):
            assert sorted(old.execute(question)) == sorted(new.execute(question))
        assert old.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    monkeypatch.undo()
    versions = f"version {len(MIGRATIONS) + 1} of the file; this one knows {len(MIGRATIONS)}"
    assert f"newer toolbus ({versions})" in refusal(tmp_path)


def test_a_file_that_cannot_be_migrated_stays_as_it_was_and_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path)
    bad = "ALTER TABLE kinds ADD COLUMN note TEXT; INSERT INTO nowhere VALUES (1)"
    with monkeypatch.context() as patch:
        patch.setattr(room, "MIGRATIONS", (*MIGRATIONS, bad))
        text = refusal(tmp_path)
    version = len(MIGRATIONS)
    assert f"cannot be migrated from version {version} to {version + 1} (" in text
    assert f"nowhere) and stays at {version}" in text
    assert loaded(tmp_path) == rows


# ── kill -9 ──

LOOP = """
import itertools, os, sys
from pathlib import Path
from toolbus.bus.storage.registration_store import StoredRegistration, RegistrationStore
from toolbus.bus.storage.store import Store
from toolbus.protocol.tool import Tool
os.write(1, b"-1\\n")
opened = Store.of(Path(sys.argv[1]))
opened.open()
store = RegistrationStore(opened)
first = len(store.load())
for number in itertools.count(first):
    tool = Tool(f"t{number}")
    row = StoredRegistration(f"key-{number}", "s", tool, "http://127.0.0.1:1/", False, ((None, number),), 0.0)
    store.apply([row], ())
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.hypothesis  # so that `make thorough` makes more rounds of it
def test_a_kill_at_any_moment_loses_nothing_that_was_persisted(tmp_path: Path) -> None:
    dice, answered = random.Random(9), -1
    for round_ in range(6 * TIMES):
        with python(LOOP, tmp_path) as process:
            assert process.stdout is not None
            for _ in range(dice.choice((1, 2, 3, dice.randrange(4, 400)))):
                answered = max(answered, int(process.stdout.readline()))
            process.send_signal(signal.SIGKILL)
            # What it printed before the signal came has been answered too.
            answered = max([answered, *map(int, process.stdout.read().split())])
        keys = [row.key for row in loaded(tmp_path)]
        assert keys == [f"key-{number}" for number in range(len(keys))]
        assert len(keys) - 1 in (answered, answered + 1), f"round {round_}"  # one may be kept and not yet printed
        with closing(sqlite3.connect(tmp_path / FILE)) as connection:
            assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
