from __future__ import annotations

import os
import signal
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.bus.storage.store_cases import PASSWORD, URL, cut, edit, fill, loaded, opened, python, refusal, stored
from toolbus.bus.storage.database import Database
from toolbus.bus.storage.registration_store import REGISTRATIONS, RegistrationStore
from toolbus.bus.storage.store import FILE, LOCK, MIGRATIONS, Store
from toolbus.errors import InvalidRequest, SetupError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# ── who may read it, who may use it ──


def test_a_password_stands_in_no_repr_and_a_text_that_cannot_be_written_is_refused_without_it(tmp_path: Path) -> None:
    row = stored(callback_url=URL)
    with opened(tmp_path) as store:
        store.apply([row], ())
        assert PASSWORD not in repr(row) + repr(store) + repr(store.load())
    with pytest.raises(InvalidRequest, match="callback_url holds half of a surrogate pair") as caught:
        stored(callback_url=URL + "\ud800")
    assert PASSWORD not in repr(caught.value)
    with pytest.raises(InvalidRequest, match="source holds half"):
        stored(source="\udfff")


@pytest.mark.parametrize("existing", [False, True])
def test_every_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path, existing: bool) -> None:
    directory = tmp_path / "new" / "data"
    with umask(0):
        if existing:
            fill(directory)
            (directory / FILE).chmod(0o666)
        with opened(directory) as store:
            store.apply([stored(1, callback_url=URL)], ())
            names = {path.name: mode(path) for path in directory.iterdir()}
    assert names == dict.fromkeys((FILE, f"{FILE}-wal", f"{FILE}-shm", LOCK), 0o600)
    assert mode(directory) == 0o700


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    fill(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_file_is_its_owners_alone_before_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    connect = Database.connect

    def watched(file: Database, how: str) -> sqlite3.Connection:
        seen.append((file.path.name, mode(file.path)))
        return connect(file, how)

    monkeypatch.setattr(Database, "connect", watched)
    with umask(0):
        fill(tmp_path)
    assert seen == [(f"{FILE}.new", 0o600), (FILE, 0o600), (FILE, 0o600)]


HOLD = """
import sys, time
from pathlib import Path
from toolbus.bus.storage.store import Store
store = Store.of(Path(sys.argv[1]))
store.open()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_bus_is_refused_with_the_process_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    with python(HOLD, tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        text = refusal(tmp_path)
        assert f"in use by another toolbus, process {first.pid}" in text
        assert "--ephemeral" in text
        first.send_signal(signal.SIGKILL)
        first.wait(20)
        assert loaded(tmp_path) == []


def test_a_second_store_in_the_same_process_is_refused_and_close_frees_it(tmp_path: Path) -> None:
    store = Store.of(tmp_path)
    store.open()
    rows = RegistrationStore(store)
    assert f"process {os.getpid()}" in refusal(tmp_path)
    thread = threading.Thread(target=store.close)
    thread.start()
    thread.join(20)
    store.close()
    assert loaded(tmp_path) == []
    for use in (rows.load, lambda: rows.apply([stored()], ())):
        with pytest.raises(sqlite3.ProgrammingError):
            use()


def test_an_unusable_directory_is_an_error_with_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "it is a file" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "below")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert "Permission denied" in refusal(tmp_path / "new")
        tmp_path.chmod(0o700)


# ── files that are not sound ──


def write(data: bytes) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / FILE).write_bytes(data)

    return make


def other_database(directory: Path) -> None:
    edit(directory, "CREATE TABLE notes (text)", "INSERT INTO notes VALUES ('mine')")


def filled_then(*statements: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        fill(directory)
        edit(directory, *statements)

    return make


def damaged_type_name(directory: Path) -> None:
    fill(directory)
    path = directory / FILE
    path.write_bytes(path.read_bytes().replace(b"checksum INTEGER", b"checksum \xf4NTEGER"))


def no_regular_file(directory: Path) -> None:
    (directory / FILE).mkdir()


def fifo(directory: Path) -> None:
    os.mkfifo(directory / FILE)


def dangling_link(directory: Path) -> None:
    (directory / FILE).symlink_to(directory / "nowhere")


def nothing_but_a_log(directory: Path) -> None:
    (directory / f"{FILE}-wal").write_bytes(b"registrations")


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (write(b""), "it is empty (0 bytes)"),
    "text": (write(b"hello\n" * 1000), "it is not an SQLite file"),
    "header only": (cut(lambda size: 50), "it is cut off after 50 bytes"),
    "half": (cut(lambda size: size // 2), "it is damaged"),
    "one page short": (cut(lambda size: size - 4096), "it is damaged"),
    "one byte short": (cut(lambda size: size - 1), "it is damaged"),
    "another program's": (other_database, "SQLite file of another program (application_id 0x0)"),
    "another id": (filled_then("PRAGMA application_id = 77"), "another program (application_id 0x4d)"),
    "newer": (
        filled_then("PRAGMA user_version = 99"),
        f"newer toolbus (version 99 of the file; this one knows {len(MIGRATIONS)})",
    ),
    "version 0": (filled_then("PRAGMA user_version = 0"), "not those of version 0"),
    "another table": (filled_then("CREATE TABLE notes (text)"), f"not those of version {len(MIGRATIONS)}"),
    "a trigger": (
        filled_then("CREATE TRIGGER t AFTER INSERT ON kinds BEGIN DELETE FROM registrations; END"),
        f"not those of version {len(MIGRATIONS)}",
    ),
    "a table less": (filled_then("DROP TABLE registrations"), f"not those of version {len(MIGRATIONS)}"),
    "another column": (
        filled_then("ALTER TABLE registrations ADD COLUMN x TEXT"),
        f"not those of version {len(MIGRATIONS)}",
    ),
    "an edited row": (
        filled_then("UPDATE registrations SET value = '{}' WHERE number = 1"),
        "row 1 of registrations fails its checksum",
    ),
    "an edited key": (filled_then("UPDATE registrations SET key = 'x' WHERE number = 3"), "row 3 of"),
    "no UTF-8": (
        filled_then(f"UPDATE registrations SET value = CAST(x'ff' || '{PASSWORD}' AS TEXT)"),
        "fails its checksum",
    ),
    "no UTF-8 in the schema": (damaged_type_name, "it is damaged: its schema is not UTF-8"),
    "a directory": (no_regular_file, "it is not a regular file"),
    "a pipe": (fifo, "it is not a regular file"),
    "a dangling link": (dangling_link, "it is not a regular file"),
    "a log without its file": (nothing_but_a_log, "is missing, but bus.db-wal exists"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_or_foreign_file_is_refused_with_how_to_fix_it_and_not_changed(tmp_path: Path, case: str) -> None:
    make, expected = BAD_FILES[case]
    make(tmp_path)
    text = refusal(tmp_path)
    assert expected in text
    assert "Nothing was changed." in text
    assert refusal(tmp_path) == text  # the lock was released, and nothing has healed by itself


@pytest.mark.parametrize("tool", [[], {}, {"name": 5}, {"name": ""}, {"name": "a", "annotations": 5}], ids=repr)
def test_a_row_with_a_right_checksum_whose_tool_cannot_be_read_is_refused(tmp_path: Path, tool: object) -> None:
    fill(tmp_path, 1)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        (fields,) = store.load(REGISTRATIONS).values()
        store.put(REGISTRATIONS, "key-0", {**fields, "tool": tool})
    assert "a row of registrations cannot be read" in refusal(tmp_path)


def test_the_log_of_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    with closing(sqlite3.connect(elsewhere, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE notes (text)")
        for ending in ("", "-wal"):
            (tmp_path / (FILE + ending)).write_bytes(Path(f"{elsewhere}{ending}").read_bytes())
    log = (tmp_path / f"{FILE}-wal").read_bytes()
    assert log
    refusal(tmp_path)
    assert (tmp_path / f"{FILE}-wal").read_bytes() == log


def test_a_file_that_another_program_writes_to_is_refused_until_that_is_done(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        assert "Close the other program that uses it" in refusal_without_reading(tmp_path)
    assert loaded(tmp_path) == rows


def refusal_without_reading(directory: Path) -> str:
    """As ``refusal``; closing the file in this process would release the locks that SQLite holds on it."""
    with pytest.raises(SetupError) as caught:
        Store.of(directory).open()
    return str(caught.value)
